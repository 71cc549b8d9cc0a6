//! Python's arithmetic, slices and subscripts.

use std::rc::Rc;

use super::ast::Binary;
use super::budget::Budget;
use super::error::Error;
use super::percent;
use super::printed::str_of;
use super::text::{Text, concat};
use super::value::{Number, Range, Value};

/// `a operator b`.
pub(super) fn binary(budget: &Budget, operator: Binary, a: &Value, b: &Value) -> Result<Value, Error> {
    if let (Some(a), Some(b)) = (a.number(), b.number()) {
        return arithmetic(operator, a, b);
    }
    match (operator, a, b) {
        (Binary::Mod, Value::Str(format), arguments) => percent::format(budget, format, arguments).map(Value::Str),
        (_, Value::Undefined(sentence), _) | (_, _, Value::Undefined(sentence)) => Err(Error::new(&**sentence)),
        (Binary::Add, Value::Str(a), Value::Str(b)) => add_texts(budget, a, b).map(Value::Str),
        (Binary::Add, Value::List(a), Value::List(b)) => joined(budget, a, b).map(Value::list),
        (Binary::Add, Value::Tuple(a), Value::Tuple(b)) => {
            joined(budget, a, b).map(|items| Value::Tuple(Rc::new(items)))
        }
        (Binary::Mul, Value::Str(text), Value::Int(times)) | (Binary::Mul, Value::Int(times), Value::Str(text)) => {
            repeated(budget, text, *times).map(Value::Str)
        }
        (Binary::Mul, Value::List(items), Value::Int(times)) | (Binary::Mul, Value::Int(times), Value::List(items)) => {
            let times = usize::try_from(*times).unwrap_or(0);
            budget.items(items.len().saturating_mul(times))?;
            Ok(Value::list(items.iter().cycle().take(items.len() * times).cloned().collect()))
        }
        _ => Err(Error::new(format!(
            "unsupported operand types for {}: '{}' and '{}'",
            operator.sign(),
            a.kind(),
            b.kind()
        ))),
    }
}

/// `+` of texts; one that `safe` marked escapes the other.
fn add_texts(budget: &Budget, a: &Text, b: &Text) -> Result<Text, Error> {
    match (a.is_markup(), b.is_markup()) {
        (false, false) => concat(budget, &[a.clone(), b.clone()]),
        (true, true) => Ok(concat(budget, &[a.clone(), b.clone()])?.with_markup(true)),
        (true, false) => Ok(concat(budget, &[a.clone(), escaped(budget, b)?])?.with_markup(true)),
        (false, true) => Ok(concat(budget, &[escaped(budget, a)?, b.clone()])?.with_markup(true)),
    }
}

/// The text with HTML's entities, as MarkupSafe writes them.
pub(super) fn escaped(budget: &Budget, text: &Text) -> Result<Text, Error> {
    text.map_chars(budget, |_, c| match c {
        '&' => "&amp;".chars().collect::<Vec<_>>(),
        '<' => "&lt;".chars().collect(),
        '>' => "&gt;".chars().collect(),
        '\'' => "&#39;".chars().collect(),
        '"' => "&#34;".chars().collect(),
        _ => vec![c],
    })
}

fn joined(budget: &Budget, a: &[Value], b: &[Value]) -> Result<Vec<Value>, Error> {
    budget.items(a.len() + b.len())?;
    Ok(a.iter().chain(b).cloned().collect())
}

fn repeated(budget: &Budget, text: &Text, times: i128) -> Result<Text, Error> {
    let times = usize::try_from(times).unwrap_or(0);
    // The texts themselves are counted before the list of them is made.
    budget.text(text.as_str().len().saturating_mul(times))?;
    budget.items(if text.as_str().is_empty() { 0 } else { times })?;
    match text.as_str().is_empty() {
        true => Ok(Text::new("")),
        false => concat(budget, &vec![text.clone(); times]),
    }
}

fn arithmetic(operator: Binary, a: Number, b: Number) -> Result<Value, Error> {
    let by_zero = || Error::new("division by zero");
    let (Number::Int(x), Number::Int(y)) = (a, b) else {
        return float_arithmetic(operator, a.float(), b.float()).ok_or_else(by_zero).map(Value::Float);
    };
    let result = match operator {
        Binary::Div if y == 0 => return Err(by_zero()),
        Binary::Div => return Ok(Value::Float(x as f64 / y as f64)),
        Binary::FloorDiv | Binary::Mod if y == 0 => return Err(by_zero()),
        Binary::Pow if y < 0 => {
            return float_arithmetic(operator, x as f64, y as f64).ok_or_else(by_zero).map(Value::Float);
        }
        Binary::Add => x.checked_add(y),
        Binary::Sub => x.checked_sub(y),
        Binary::Mul => x.checked_mul(y),
        Binary::FloorDiv => x.checked_div_euclid(y).map(|quotient| {
            // Euclid's quotient is Python's for a positive divisor.
            if y < 0 && x.rem_euclid(y) != 0 { quotient - 1 } else { quotient }
        }),
        Binary::Mod => x.checked_rem(y).map(|rest| if rest != 0 && (rest < 0) != (y < 0) { rest + y } else { rest }),
        Binary::Pow => u32::try_from(y).ok().and_then(|y| x.checked_pow(y)),
    };
    result.map(Value::Int).ok_or_else(|| Error::new("an integer beyond 128 bits"))
}

/// `None` if divided by zero.
fn float_arithmetic(operator: Binary, a: f64, b: f64) -> Option<f64> {
    let rest = || {
        let rest = a % b;
        if rest != 0.0 && (rest < 0.0) != (b < 0.0) { rest + b } else { rest }
    };
    match operator {
        Binary::Add => Some(a + b),
        Binary::Sub => Some(a - b),
        Binary::Mul => Some(a * b),
        Binary::Pow if a == 0.0 && b < 0.0 => None,
        Binary::Pow => Some(a.powf(b)),
        _ if b == 0.0 => None,
        Binary::Div => Some(a / b),
        Binary::FloorDiv => Some((a / b).floor()),
        Binary::Mod => Some(rest()),
    }
}

/// `-a`, or `+a`.
pub(super) fn signed(value: &Value, is_negative: bool) -> Result<Value, Error> {
    match value.number() {
        Some(Number::Int(number)) => number
            .checked_mul(if is_negative { -1 } else { 1 })
            .map(Value::Int)
            .ok_or_else(|| Error::new("an integer beyond 128 bits")),
        Some(Number::Float(number)) => Ok(Value::Float(if is_negative { -number } else { number })),
        None => Err(Error::new(format!("a value of type {} has no sign", value.kind()))),
    }
}

/// `~`: the texts of the values one after another.
pub(super) fn tilde(budget: &Budget, values: &[Value]) -> Result<Value, Error> {
    let texts = values.iter().map(|value| str_of(budget, value)).collect::<Result<Vec<_>, _>>()?;
    concat(budget, &texts).map(Value::Str)
}

/// `value[start:stop:step]`.
pub(super) fn slice(budget: &Budget, value: &Value, bounds: [Option<i128>; 3]) -> Result<Value, Error> {
    let Some(len) = value.len().filter(|_| !matches!(value, Value::Dict(_) | Value::View(..) | Value::Callable(_)))
    else {
        return Ok(Value::undefined(format!("a value of type {} has no slices", value.kind())));
    };
    let step = bounds[2].unwrap_or(1);
    if step == 0 {
        return Err(Error::new("a slice with step 0"));
    }
    let len = len as i128;
    let clamp = |bound: i128| {
        let bound = if bound < 0 { bound.saturating_add(len) } else { bound };
        if step > 0 { bound.clamp(0, len) } else { bound.clamp(-1, len - 1) }
    };
    let start = bounds[0].map_or(if step > 0 { 0 } else { len - 1 }, clamp);
    let stop = bounds[1].map_or(if step > 0 { len } else { -1 }, clamp);
    let span = if step > 0 { stop - start } else { start - stop };
    let n = if span <= 0 { 0 } else { ((span - 1) / step.abs() + 1) as usize };
    let taken = Range { start, step, len: n };
    budget.items(n)?;
    let positions = (0..n).map(|idx| (start + step * idx as i128) as usize);
    match value {
        Value::Str(text) => slice_of_text(budget, text, taken).map(Value::Str),
        Value::List(items) => Ok(Value::list(positions.map(|at| items[at].clone()).collect())),
        Value::Tuple(items) => Ok(Value::Tuple(Rc::new(positions.map(|at| items[at].clone()).collect()))),
        Value::Range(range) => {
            let start = range.start + range.step * start;
            Ok(Value::Range(Range { start, step: range.step * step, len: n }))
        }
        Value::Undefined(sentence) => Ok(Value::Undefined(Rc::clone(sentence))),
        _ => Ok(Value::undefined(format!("a value of type {} has no slices", value.kind()))),
    }
}

fn slice_of_text(budget: &Budget, text: &Text, taken: Range) -> Result<Text, Error> {
    let bytes: Vec<usize> = text.as_str().char_indices().map(|(at, _)| at).chain([text.as_str().len()]).collect();
    let at = |idx: usize| (taken.start + taken.step * idx as i128) as usize;
    if taken.len == 0 {
        return Ok(Text::new(""));
    }
    if taken.step == 1 {
        return Ok(text.slice(bytes[at(0)]..bytes[at(taken.len - 1) + 1]));
    }
    let letters: Vec<Text> = (0..taken.len).map(|idx| text.slice(bytes[at(idx)]..bytes[at(idx) + 1])).collect();
    concat(budget, &letters)
}
