//! The filters of Jinja2. Source: `jinja2/filters.py`, with the `tojson` of transformers.
//!
//! Deliberately absent: `random`, because ranks and runs would see different texts, and what only web pages use (`pprint`,
//! `urlize`, `wordwrap`, `xmlattr`).

mod sequences;

use std::rc::Rc;

use super::arguments::Args;
use super::budget::Budget;
use super::error::Error;
use super::filter_names::{ABSENT, NAMES};
use super::interpreter::Interpreter;
use super::json::tojson;
use super::operators::{escaped, slice};
use super::percent;
use super::printed::str_of;

use super::str_methods::{cased, is_blank, justified, lines, replace, stripped};
use super::text::{Text, concat};
use super::value::{Number, Value, compare};

/// `value | name(args)`.
pub(super) fn apply(interpreter: &Interpreter, name: &str, value: &Value, args: &Args) -> Result<Value, Error> {
    let budget = &interpreter.budget;
    budget.step(1)?;
    match name {
        "tojson" => tojson(budget, value, args),
        "default" | "d" => {
            let bound = args.bind(name, ["default_value", "boolean"])?;
            let is_missing = value.is_undefined() || bound.flag(1) && !value.is_true();
            let default = || bound.get(0).cloned().unwrap_or_else(|| Value::text(""));
            Ok(if is_missing { default() } else { value.clone() })
        }
        "abs" | "float" | "int" | "round" | "filesizeformat" => of_number(budget, name, value, args),
        "length" | "count" => {
            args.bind::<0>(name, [])?;
            let len =
                value.len().ok_or_else(|| Error::new(format!("a value of type {} has no length", value.kind())))?;
            Ok(Value::Int(len as i128))
        }
        "attr" | "batch" | "dictsort" | "first" | "groupby" | "items" | "last" | "list" | "map" | "max" | "min"
        | "reject" | "rejectattr" | "select" | "selectattr" | "slice" | "sort" | "sum" | "unique" => {
            sequences::apply(interpreter, name, value, args)
        }
        "join" => join(interpreter, value, args),
        "reverse" => reverse(budget, value, args),
        "format" => format(budget, value, args),
        _ if NAMES.contains(&name) => of_text(budget, name, value, args),
        _ if ABSENT.contains(&name) => {
            Err(Error::new(format!("the filter {name:?} is not supported in chat templates")))
        }
        _ => Err(Error::new(format!("the filter {name:?} is not known to chat templates"))),
    }
}

fn of_text(budget: &Budget, name: &str, value: &Value, args: &Args) -> Result<Value, Error> {
    let text = str_of(budget, value)?;
    match name {
        "string" => {
            args.bind::<0>(name, [])?;
            Ok(Value::Str(text))
        }
        "safe" => Ok(Value::Str(text.with_markup(true))),
        "e" | "escape" | "forceescape" => {
            let is_safe = text.is_markup() && name != "forceescape";
            let text = if is_safe { text } else { escaped(budget, &text)? };
            Ok(Value::Str(text.with_markup(true)))
        }
        "lower" | "upper" | "capitalize" => cased(budget, &text, name).map(Value::Str),
        "title" => title(budget, &text).map(Value::Str),
        "trim" => stripped(&text, "strip", args.bind(name, ["chars"])?.text(0)?),
        "center" => justified(budget, &text, name, args.bind(name, ["width"])?.count(0, 80)?, " ").map(Value::Str),
        "replace" => {
            let bound = args.bind(name, ["old", "new", "count"])?;
            let (old, new) = (str_of(budget, bound.required(0)?)?, str_of(budget, bound.required(1)?)?);
            replace(budget, &text, &old, &new, bound.int(2, -1)?).map(Value::Str)
        }
        "indent" => {
            if !matches!(value, Value::Str(_)) {
                return Err(Error::new(format!("indent needs a text, not a {}", value.kind())));
            }
            indent(budget, &text, args)
        }
        "truncate" => truncate(budget, &text, args),
        "wordcount" => {
            let words = text.as_str().split(|c: char| !(c.is_alphanumeric() || c == '_'));
            Ok(Value::Int(words.filter(|word| !word.is_empty()).count() as i128))
        }
        "striptags" => striptags(&text).map(Value::Str),
        _ => urlencode(budget, value, &text),
    }
}

/// Each word begins with a capital; words begin after blanks, hyphens and opening brackets.
fn title(budget: &Budget, text: &Text) -> Result<Text, Error> {
    let (mut pieces, mut rest) = (Vec::new(), text.as_str());
    let is_separator = |c: char| is_blank(c) || "-({[<".contains(c);
    while !rest.is_empty() {
        let end = rest.find(is_separator).unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        let gap = after.find(|c| !is_separator(c)).unwrap_or(after.len());
        let first = word.chars().next().map_or(0, char::len_utf8);
        pieces.push(cased(budget, &text.part(&word[..first]), "upper")?);
        pieces.push(cased(budget, &text.part(&word[first..]), "lower")?);
        pieces.push(text.part(&after[..gap]));
        rest = &after[gap..];
    }
    concat(budget, &pieces)
}

fn indent(budget: &Budget, text: &Text, args: &Args) -> Result<Value, Error> {
    let bound = args.bind("indent", ["width", "first", "blank"])?;
    let indention = match bound.given(0) {
        Some(Value::Str(text)) => text.clone(),
        _ => {
            let width = bound.count(0, 4)?;
            budget.text(width)?;
            Text::new(" ".repeat(width))
        }
    };
    let (first, blank) = (bound.flag(1), bound.flag(2));
    let all = text.as_str();
    let mut ends: Vec<_> = lines(all).map(|(line, _)| line).collect();
    // Jinja2 appends a line break before it splits, so a text that ends with one has an empty line more.
    if all.is_empty() || lines(all).last().is_some_and(|(line, end)| line.end != end) {
        ends.push(all.len()..all.len());
    }
    budget.text(all.len() + ends.len().saturating_mul(indention.as_str().len() + 1))?;
    let mut pieces = Vec::new();
    for (idx, line) in ends.into_iter().enumerate() {
        if idx > 0 {
            pieces.push(Text::new("\n"));
        }
        let is_indented = if idx == 0 { first } else { blank || !line.is_empty() };
        if is_indented {
            pieces.push(indention.clone());
        }
        pieces.push(text.slice(line));
    }
    concat(budget, &pieces).map(Value::Str)
}

fn truncate(budget: &Budget, text: &Text, args: &Args) -> Result<Value, Error> {
    let bound = args.bind("truncate", ["length", "killwords", "end", "leeway"])?;
    let (length, leeway) = (bound.count(0, 255)?, bound.count(3, 5)?);
    let end = bound.text(2)?.cloned().unwrap_or_else(|| Text::new("..."));
    let n_end = end.as_str().chars().count();
    if length < n_end {
        return Err(Error::new(format!("the length of truncate must be at least {n_end}")));
    }
    let all = text.as_str();
    if all.chars().count() <= length + leeway {
        return Ok(Value::Str(text.clone()));
    }
    let cut = all.char_indices().nth(length - n_end).map_or(all.len(), |(at, _)| at);
    let cut = if bound.flag(1) { cut } else { all[..cut].rfind(' ').unwrap_or(cut) };
    concat(budget, &[text.slice(0..cut), end]).map(Value::Str)
}

/// Without tags and comments of HTML, blanks as single spaces, and without the entities that `escape` writes.
fn striptags(text: &Text) -> Result<Text, Error> {
    let mut plain = String::new();
    let mut rest = text.as_str();
    while let Some(at) = rest.find('<') {
        plain += &rest[..at];
        let tag = &rest[at..];
        let end = match tag.strip_prefix("<!--") {
            Some(comment) => comment.find("-->").map(|end| end + 7),
            None => tag.find('>').map(|end| end + 1),
        };
        let Some(end) = end else {
            rest = tag;
            break;
        };
        rest = &tag[end..];
    }
    plain += rest;
    let words: Vec<&str> = plain.split(is_blank).filter(|word| !word.is_empty()).collect();
    let plain =
        words.join(" ").replace("&lt;", "<").replace("&gt;", ">").replace("&#34;", "\"").replace("&quot;", "\"");
    let plain = plain.replace("&#39;", "'").replace("&amp;", "&");
    Ok(text.all_from(&plain))
}

fn urlencode(budget: &Budget, value: &Value, text: &Text) -> Result<Value, Error> {
    let quoted = |text: &Text, in_query: bool| {
        let mut encoded = String::new();
        for b in text.as_str().bytes() {
            match b {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'.' | b'-' | b'~' => encoded.push(b as char),
                b'/' if !in_query => encoded.push('/'),
                b' ' if in_query => encoded.push('+'),
                _ => encoded += &format!("%{b:02X}"),
            }
        }
        text.all_from(&encoded)
    };
    let pairs: Vec<Value> = match value {
        Value::Dict(dict) => {
            dict.entries().iter().map(|(key, value)| Value::Tuple(Rc::new(vec![key.clone(), value.clone()]))).collect()
        }
        Value::List(_) | Value::Tuple(_) | Value::View(..) => value.items(budget)?.to_vec(),
        _ => {
            budget.text(text.as_str().len() * 3)?;
            return Ok(Value::Str(quoted(text, false)));
        }
    };
    let mut pieces = Vec::new();
    for pair in pairs {
        let pair = pair.items(budget)?;
        let [key, value] = pair.as_slice() else { return Err(Error::new("urlencode needs pairs")) };
        if !pieces.is_empty() {
            pieces.push(Text::new("&"));
        }
        pieces.push(quoted(&str_of(budget, key)?, true));
        pieces.push(Text::new("="));
        pieces.push(quoted(&str_of(budget, value)?, true));
    }
    concat(budget, &pieces).map(Value::Str)
}

fn join(interpreter: &Interpreter, value: &Value, args: &Args) -> Result<Value, Error> {
    let budget = &interpreter.budget;
    let bound = args.bind("join", ["d", "attribute"])?;
    let separator = bound.get(0).map(|separator| str_of(budget, separator)).transpose()?;
    let mut pieces = Vec::new();
    for (idx, item) in value.items(budget)?.iter().enumerate() {
        if let Some(separator) = separator.as_ref().filter(|_| idx > 0) {
            pieces.push(separator.clone());
        }
        let item = match bound.given(1) {
            Some(attribute) => sequences::attribute_of(interpreter, item, attribute, None)?,
            None => item.clone(),
        };
        pieces.push(str_of(budget, &item)?);
    }
    concat(budget, &pieces).map(Value::Str)
}

fn reverse(budget: &Budget, value: &Value, args: &Args) -> Result<Value, Error> {
    args.bind::<0>("reverse", [])?;
    if matches!(value, Value::Str(_)) {
        return slice(budget, value, [None, None, Some(-1)]);
    }
    let mut items = value.items(budget)?.to_vec();
    items.reverse();
    Ok(Value::generator(items))
}

fn format(budget: &Budget, value: &Value, args: &Args) -> Result<Value, Error> {
    let text = str_of(budget, value)?;
    let arguments = match (args.positional.is_empty(), args.named.is_empty()) {
        (false, false) => return Err(Error::new("format takes arguments by position or by name, not both")),
        (true, false) => interpreter_dict(&args.named)?,
        _ => Value::Tuple(Rc::new(args.positional.clone())),
    };
    percent::format(budget, &text, &arguments).map(Value::Str)
}

pub(super) fn interpreter_dict(named: &[(String, Value)]) -> Result<Value, Error> {
    let mut dict = super::value::Dict::default();
    for (name, value) in named {
        dict.insert(Value::text(name), value.clone())?;
    }
    Ok(Value::Dict(Rc::new(dict)))
}

fn of_number(budget: &Budget, name: &str, value: &Value, args: &Args) -> Result<Value, Error> {
    match name {
        "abs" => match value.number() {
            Some(Number::Int(number)) => Ok(Value::Int(number.saturating_abs())),
            Some(Number::Float(number)) => Ok(Value::Float(number.abs())),
            None => Err(Error::new(format!("abs needs a number, not a {}", value.kind()))),
        },
        "int" => {
            let bound = args.bind(name, ["default", "base"])?;
            let base = bound.int(1, 10)?;
            Ok(integer(value, base).unwrap_or_else(|| bound.get(0).cloned().unwrap_or(Value::Int(0))))
        }
        "float" => {
            let bound = args.bind(name, ["default"])?;
            let found = match value {
                Value::Str(text) => parsed_float(text.as_str()),
                _ => value.number().map(Number::float),
            };
            Ok(found.map(Value::Float).unwrap_or_else(|| bound.get(0).cloned().unwrap_or(Value::Float(0.0))))
        }
        "round" => {
            let bound = args.bind(name, ["precision", "method"])?;
            let method = bound.text(1)?.map_or("common", |method| method.as_str());
            round(value, bound.int(0, 0)?, method)
        }
        _ => file_size(budget, value, args.bind(name, ["binary"])?.flag(0)),
    }
}

fn integer(value: &Value, base: i128) -> Option<Value> {
    let Value::Str(text) = value else {
        return match (value, value.number()?) {
            (_, Number::Int(number)) => Some(Value::Int(number)),
            (_, Number::Float(number)) => number.is_finite().then_some(Value::Int(number as i128)),
        };
    };
    let plain = text.as_str().trim_matches(is_blank);
    let (sign, digits) = match plain.strip_prefix('-') {
        Some(digits) => (-1, digits),
        None => (1, plain.strip_prefix('+').unwrap_or(plain)),
    };
    let is_grouped = !digits.starts_with('_') && !digits.ends_with('_') && !digits.contains("__");
    let lower = digits.to_lowercase();
    let (radix, digits) = match (base, lower.get(..2)) {
        (16 | 0, Some("0x")) => (16, &lower[2..]),
        (8 | 0, Some("0o")) => (8, &lower[2..]),
        (2 | 0, Some("0b")) => (2, &lower[2..]),
        (0, _) => (10, lower.as_str()),
        _ => (u32::try_from(base).ok().filter(|radix| (2..=36).contains(radix))?, lower.as_str()),
    };
    let number = i128::from_str_radix(&digits.replace('_', ""), radix)
        .ok()
        .filter(|_| is_grouped && !digits.starts_with(['+', '-']));
    match number {
        Some(number) => Some(Value::Int(sign * number)),
        None => parsed_float(plain).filter(|number| number.is_finite()).map(|number| Value::Int(number as i128)),
    }
}

/// Python's `float(text)`.
fn parsed_float(text: &str) -> Option<f64> {
    let text = text.trim_matches(is_blank);
    let is_grouped = !text.starts_with('_') && !text.ends_with('_') && !text.contains("__");
    text.replace('_', "").parse().ok().filter(|_| is_grouped)
}

fn round(value: &Value, precision: i128, method: &str) -> Result<Value, Error> {
    let number = value.number().ok_or_else(|| Error::new(format!("round needs a number, not a {}", value.kind())))?;
    let precision = i32::try_from(precision.clamp(-400, 400)).unwrap_or_default();
    let scale = 10f64.powi(precision);
    match (method, number) {
        ("common", Number::Int(number)) if precision >= 0 => Ok(Value::Int(number)),
        ("common", Number::Int(number)) => {
            let unit = 10i128.checked_pow(precision.unsigned_abs()).unwrap_or(i128::MAX);
            let (whole, rest) = (number.div_euclid(unit), number.rem_euclid(unit));
            let up = rest > unit - rest || rest == unit - rest && whole % 2 != 0;
            Ok(Value::Int((whole + i128::from(up)) * unit))
        }
        ("common", Number::Float(number)) if precision >= 0 && number.is_finite() => {
            let text = format!("{number:.*}", precision as usize);
            Ok(Value::Float(text.parse().unwrap_or(number)))
        }
        ("common", Number::Float(number)) => Ok(Value::Float((number * scale).round_ties_even() / scale)),
        ("ceil", number) => Ok(Value::Float((number.float() * scale).ceil() / scale)),
        ("floor", number) => Ok(Value::Float((number.float() * scale).floor() / scale)),
        _ => Err(Error::new(format!("the method of round must be common, ceil or floor, not {method:?}"))),
    }
}

fn file_size(budget: &Budget, value: &Value, is_binary: bool) -> Result<Value, Error> {
    let bytes = match value {
        Value::Str(text) => parsed_float(text.as_str()),
        _ => value.number().map(Number::float),
    };
    let bytes = bytes.ok_or_else(|| Error::new(format!("filesizeformat needs a number, not a {}", value.kind())))?;
    budget.step(1)?;
    let base: f64 = if is_binary { 1024.0 } else { 1000.0 };
    let infix = if is_binary { "iB" } else { "B" };
    if bytes == 1.0 {
        return Ok(Value::text("1 Byte"));
    }
    if bytes < base {
        return Ok(Value::text(&format!("{} Bytes", bytes as i128)));
    }
    let prefixes = [if is_binary { 'K' } else { 'k' }, 'M', 'G', 'T', 'P', 'E', 'Z', 'Y'];
    let mut scaled = bytes;
    for (idx, prefix) in prefixes.iter().enumerate() {
        scaled /= base;
        if scaled < base || idx + 1 == prefixes.len() {
            return Ok(Value::text(&format!("{scaled:.1} {prefix}{infix}")));
        }
    }
    Ok(Value::text(""))
}

/// Sorts by keys that may have no order.
pub(super) fn sort_by_keys(budget: &Budget, items: &mut [(Value, Value)], reverse: bool) -> Result<(), Error> {
    let mut failed = None;
    items.sort_by(|(a, _), (b, _)| {
        let (a, b) = if reverse { (b, a) } else { (a, b) };
        compare(budget, a, b).map(|order| order.unwrap_or(std::cmp::Ordering::Equal)).unwrap_or_else(|error| {
            failed.get_or_insert(error);
            std::cmp::Ordering::Equal
        })
    });
    failed.map_or(Ok(()), Err)
}
