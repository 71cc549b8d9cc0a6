//! Texts with values in them: the operator `%` of texts, `str.format`, and how both write numbers.

use super::budget::Budget;
use super::error::Error;
use super::items::item_at;
use super::printed::{float, repr_of, str_of};
use super::text::{Text, concat};
use super::value::{Number, Value};

/// Wider and more exact than any template's.
const WIDTH_MAX: usize = 1 << 16;

/// How a value is written.
#[derive(Debug, Clone)]
struct Spec {
    fill: char,
    /// `<`, `>`, `^` or `=`: the sign left of the filling.
    align: Option<char>,
    sign: char,
    is_alternate: bool,
    width: usize,
    grouping: Option<char>,
    precision: Option<usize>,
    kind: char,
}

impl Default for Spec {
    fn default() -> Self {
        Self {
            fill: ' ',
            align: None,
            sign: '-',
            is_alternate: false,
            width: 0,
            grouping: None,
            precision: None,
            kind: '\0',
        }
    }
}

/// `format % arguments`.
pub(super) fn format(budget: &Budget, format: &Text, arguments: &Value) -> Result<Text, Error> {
    let mut arguments = Arguments { all: arguments, next: 0 };
    let (mut pieces, mut rest) = (Vec::new(), format.as_str());
    while let Some(at) = rest.find('%') {
        pieces.push(format.part(&rest[..at]));
        rest = &rest[at + 1..];
        let name = match rest.strip_prefix('(') {
            None => None,
            Some(named) => {
                let end = named.find(')').ok_or_else(|| Error::new("a format key has no end"))?;
                rest = &named[end + 1..];
                Some(&named[..end])
            }
        };
        let spec = percent_spec(&mut rest, &mut arguments)?;
        if spec.kind == '%' {
            pieces.push(Text::new("%"));
            continue;
        }
        let value = match name {
            None => arguments.next()?,
            Some(name) => arguments.named(name)?,
        };
        pieces.push(percent_value(budget, spec, &value)?);
    }
    pieces.push(format.part(rest));
    arguments.check_all_used()?;
    concat(budget, &pieces)
}

struct Arguments<'v> {
    all: &'v Value,
    next: usize,
}

impl Arguments<'_> {
    fn next(&mut self) -> Result<Value, Error> {
        self.next += 1;
        match self.all {
            Value::Tuple(items) => items.get(self.next - 1).cloned(),
            single => (self.next == 1).then(|| single.clone()),
        }
        .ok_or_else(|| Error::new("not enough arguments for the format"))
    }

    fn named(&mut self, name: &str) -> Result<Value, Error> {
        self.next = usize::MAX;
        match self.all {
            Value::Dict(dict) => {
                dict.get_text(name).cloned().ok_or_else(|| Error::new(format!("no value {name:?} for the format")))
            }
            _ => Err(Error::new("the format needs an object")),
        }
    }

    fn check_all_used(&self) -> Result<(), Error> {
        let all = match self.all {
            Value::Tuple(items) => items.len(),
            Value::Dict(_) | Value::List(_) => 0,
            _ => 1,
        };
        match self.next >= all {
            true => Ok(()),
            false => Err(Error::new("not all arguments are used by the format")),
        }
    }
}

/// Flags, width, precision and letter after `%`.
fn percent_spec(rest: &mut &str, arguments: &mut Arguments<'_>) -> Result<Spec, Error> {
    let mut spec = Spec { align: Some('>'), ..Spec::default() };
    while let Some(flag) = rest.chars().next().filter(|c| "-+ 0#".contains(*c)) {
        match flag {
            '-' => spec.align = Some('<'),
            '0' if spec.align != Some('<') => (spec.fill, spec.align) = ('0', Some('=')),
            '0' => {}
            '#' => spec.is_alternate = true,
            _ => spec.sign = flag,
        }
        *rest = &rest[1..];
    }
    if spec.align == Some('<') {
        spec.fill = ' ';
    }
    spec.width = match starred(rest, arguments)? {
        Some(width) if width < 0 => {
            (spec.align, spec.fill) = (Some('<'), ' ');
            bounded(width.unsigned_abs() as usize)?
        }
        Some(width) => bounded(width as usize)?,
        None => digits(rest)?.unwrap_or(0),
    };
    if let Some(after) = rest.strip_prefix('.') {
        *rest = after;
        spec.precision = match starred(rest, arguments)? {
            Some(precision) => Some(bounded(precision.max(0) as usize)?),
            None => Some(digits(rest)?.unwrap_or(0)),
        };
    }
    let skipped = rest.chars().next().filter(|c| "hlL".contains(*c));
    *rest = &rest[skipped.map_or(0, char::len_utf8)..];
    spec.kind = rest.chars().next().ok_or_else(|| Error::new("a format is incomplete"))?;
    *rest = &rest[spec.kind.len_utf8()..];
    Ok(spec)
}

/// A number from the arguments, where the format has `*`.
fn starred(rest: &mut &str, arguments: &mut Arguments<'_>) -> Result<Option<i64>, Error> {
    let Some(after) = rest.strip_prefix('*') else { return Ok(None) };
    *rest = after;
    match arguments.next()? {
        Value::Int(number) => Ok(Some(number.clamp(-(1 << 32), 1 << 32) as i64)),
        _ => Err(Error::new("the width of a format must be a number")),
    }
}

fn digits(rest: &mut &str) -> Result<Option<usize>, Error> {
    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    let (number, after) = rest.split_at(end);
    *rest = after;
    if number.is_empty() {
        return Ok(None);
    }
    bounded(number.parse().unwrap_or(usize::MAX)).map(Some)
}

fn bounded(width: usize) -> Result<usize, Error> {
    match width > WIDTH_MAX {
        true => Err(Error::new(format!("a format wider than {WIDTH_MAX}"))),
        false => Ok(width),
    }
}

fn percent_value(budget: &Budget, mut spec: Spec, value: &Value) -> Result<Text, Error> {
    let text = match spec.kind {
        's' => str_of(budget, value)?,
        'r' => repr_of(budget, value)?,
        'a' => repr_of(budget, value)?,
        'c' => match value {
            Value::Str(text) if text.as_str().chars().count() == 1 => text.clone(),
            Value::Int(code) => letter(*code)?,
            _ => return Err(Error::new("the format %c needs a letter or its number")),
        },
        'd' | 'i' | 'u' | 'x' | 'X' | 'o' => {
            let whole = match (value.number(), spec.kind) {
                (Some(Number::Float(number)), 'd' | 'i' | 'u') => Some(number as i128),
                (Some(Number::Int(number)), _) => Some(number),
                _ => None,
            };
            let whole = whole.ok_or_else(|| {
                Error::new(format!("the format %{} needs a number, not a {}", spec.kind, value.kind()))
            })?;
            if matches!(spec.kind, 'i' | 'u') {
                spec.kind = 'd';
            }
            return number(&spec, Number::Int(whole)).map(Text::new);
        }
        'e' | 'E' | 'f' | 'F' | 'g' | 'G' => {
            let found = value.number();
            let found = found.ok_or_else(|| {
                Error::new(format!("the format %{} needs a number, not a {}", spec.kind, value.kind()))
            })?;
            return number(&spec, Number::Float(found.float())).map(Text::new);
        }
        other => return Err(Error::new(format!("the format %{other} is not known"))),
    };
    if spec.fill == '0' {
        (spec.fill, spec.align) = (' ', Some('>'));
    }
    padded(budget, &spec, text, '>')
}

fn letter(code: i128) -> Result<Text, Error> {
    let letter = u32::try_from(code).ok().and_then(char::from_u32);
    letter.map(|c| Text::new(c.to_string())).ok_or_else(|| Error::new(format!("there is no letter {code}")))
}

/// Cuts and fills a text.
fn padded(budget: &Budget, spec: &Spec, text: Text, default: char) -> Result<Text, Error> {
    let cut = spec.precision.and_then(|n| text.as_str().char_indices().nth(n)).map(|(at, _)| text.slice(0..at));
    let text = cut.unwrap_or(text);
    let missing = spec.width.saturating_sub(text.as_str().chars().count());
    let before = match spec.align.unwrap_or(default) {
        '<' => 0,
        '^' => missing / 2,
        _ => missing,
    };
    let fill = |n: usize| Text::new(spec.fill.to_string().repeat(n));
    concat(budget, &[fill(before), text, fill(missing - before)])
}

/// A number with sign, grouping and filling.
fn number(spec: &Spec, number: Number) -> Result<String, Error> {
    let (is_negative, prefix, digits) = match (spec.kind, number) {
        ('\0' | 'd' | 'n', Number::Int(whole)) => (whole < 0, "", whole.unsigned_abs().to_string()),
        ('x', Number::Int(whole)) => (whole < 0, "0x", format!("{:x}", whole.unsigned_abs())),
        ('X', Number::Int(whole)) => (whole < 0, "0X", format!("{:X}", whole.unsigned_abs())),
        ('o', Number::Int(whole)) => (whole < 0, "0o", format!("{:o}", whole.unsigned_abs())),
        ('b', Number::Int(whole)) => (whole < 0, "0b", format!("{:b}", whole.unsigned_abs())),
        ('e' | 'E' | 'f' | 'F' | 'g' | 'G' | '%' | '\0', number) => {
            let number = number.float();
            (number.is_sign_negative() && !number.is_nan(), "", float_digits(spec, number.abs()))
        }
        (kind, Number::Int(_)) => return Err(Error::new(format!("the format code {kind:?} is not for integers"))),
        (kind, Number::Float(_)) => return Err(Error::new(format!("the format code {kind:?} is not for floats"))),
    };
    let sign = match (is_negative, spec.sign) {
        (true, _) => "-",
        (false, '+') => "+",
        (false, ' ') => " ",
        (false, _) => "",
    };
    let head = format!("{sign}{}", if spec.is_alternate { prefix } else { "" });
    let align = spec.align.unwrap_or('>');
    let zeros = if align == '=' && spec.fill == '0' { spec.width.saturating_sub(head.len()) } else { 0 };
    let digits = match spec.grouping {
        Some(mark) => grouped(&digits, mark, if matches!(spec.kind, 'x' | 'X' | 'o' | 'b') { 4 } else { 3 }, zeros),
        None => digits,
    };
    let missing = spec.width.saturating_sub(head.len() + digits.len());
    let fill = |n: usize| spec.fill.to_string().repeat(n);
    Ok(match align {
        '=' => format!("{head}{}{digits}", fill(missing)),
        '<' => format!("{head}{digits}{}", fill(missing)),
        '^' => format!("{}{head}{digits}{}", fill(missing / 2), fill(missing - missing / 2)),
        _ => format!("{}{head}{digits}", fill(missing)),
    })
}

/// The digits of a number without a sign.
fn float_digits(spec: &Spec, number: f64) -> String {
    if !number.is_finite() {
        let name = if number.is_nan() { "nan" } else { "inf" };
        return if spec.kind.is_ascii_uppercase() { name.to_uppercase() } else { name.to_owned() };
    }
    let precision = spec.precision.unwrap_or(6);
    match spec.kind {
        'f' | 'F' => format!("{number:.precision$}"),
        '%' => format!("{:.precision$}%", number * 100.0),
        'e' => exponential(number, precision, 'e'),
        'E' => exponential(number, precision, 'E'),
        'g' => general(number, precision.max(1), spec.is_alternate, 'e'),
        'G' => general(number, precision.max(1), spec.is_alternate, 'E'),
        _ => match spec.precision {
            None => float(number),
            Some(precision) => {
                let text = general(number, precision.max(1), false, 'e');
                let whole = !text.contains(['.', 'e']) && text.len() < precision.max(1);
                if whole { text + ".0" } else { text }
            }
        },
    }
}

fn exponential(number: f64, precision: usize, mark: char) -> String {
    let text = format!("{number:.precision$e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let exponent: i32 = exponent.parse().unwrap_or_default();
    format!("{digits}{mark}{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
}

/// `%g`: as many digits as asked for, without zeros at the end.
fn general(number: f64, precision: usize, keeps_zeros: bool, mark: char) -> String {
    let scientific = format!("{number:.*e}", precision - 1);
    let exponent: i32 = scientific.split_once('e').and_then(|(_, exponent)| exponent.parse().ok()).unwrap_or_default();
    let is_fixed = (-4..precision as i32).contains(&exponent);
    let text = match is_fixed {
        true => format!("{number:.*}", (precision as i32 - 1 - exponent).max(0) as usize),
        false => exponential(number, precision - 1, mark),
    };
    if keeps_zeros {
        return text;
    }
    let (digits, exponent) = match text.find(mark).filter(|_| !is_fixed) {
        Some(at) => text.split_at(at),
        None => (text.as_str(), ""),
    };
    let digits = if digits.contains('.') { digits.trim_end_matches('0').trim_end_matches('.') } else { digits };
    format!("{digits}{exponent}")
}

/// Marks between groups of digits, with zeros in front up to `width`.
fn grouped(digits: &str, mark: char, group: usize, width: usize) -> String {
    let whole_end = digits.find(|c: char| !c.is_ascii_hexdigit()).unwrap_or(digits.len());
    let (whole, rest) = digits.split_at(whole_end);
    let mut text: Vec<char> = Vec::new();
    let mut count = 0;
    let mut source = whole.chars().rev();
    loop {
        let digit = match source.next() {
            Some(digit) => digit,
            None if text.len() + rest.len() < width => '0',
            None => break,
        };
        if count > 0 && count % group == 0 {
            text.push(mark);
        }
        text.push(digit);
        count += 1;
    }
    text.iter().rev().collect::<String>() + rest
}

/// `format.format(*positional, **named)`.
pub(super) fn str_format(
    budget: &Budget,
    format: &Text,
    positional: &[Value],
    named: &[(String, Value)],
    get: &dyn Fn(&Value, &str, bool) -> Result<Value, Error>,
) -> Result<Text, Error> {
    let fields = Fields { budget, positional, named, get };
    fields.write(format, &mut 0, 2)
}

struct Fields<'a> {
    budget: &'a Budget,
    positional: &'a [Value],
    named: &'a [(String, Value)],
    /// An attribute (`true`) or item of a value.
    get: &'a dyn Fn(&Value, &str, bool) -> Result<Value, Error>,
}

impl Fields<'_> {
    /// `automatic` counts the fields without a name.
    fn write(&self, format: &Text, automatic: &mut usize, depth: usize) -> Result<Text, Error> {
        let (mut pieces, mut rest) = (Vec::new(), format.as_str());
        while let Some(at) = rest.find(['{', '}']) {
            pieces.push(format.part(&rest[..at]));
            let brace = &rest[at..=at];
            rest = &rest[at + 1..];
            if rest.starts_with(brace) {
                pieces.push(Text::new(brace));
                rest = &rest[1..];
                continue;
            }
            if brace == "}" {
                return Err(Error::new("a format has a single }"));
            }
            let end = closing_brace(rest).ok_or_else(|| Error::new("a format has a single {"))?;
            pieces.push(self.field(&rest[..end], automatic, depth)?);
            rest = &rest[end + 1..];
        }
        pieces.push(format.part(rest));
        concat(self.budget, &pieces)
    }

    fn field(&self, field: &str, automatic: &mut usize, depth: usize) -> Result<Text, Error> {
        if depth == 0 {
            return Err(Error::new("the fields of a format are nested too deeply"));
        }
        let (field, spec) = field.split_once(':').unwrap_or((field, ""));
        let (name, conversion) = field.split_once('!').unwrap_or((field, ""));
        let mut value = self.value(name, automatic)?;
        value = match conversion {
            "" => value,
            "s" => Value::Str(str_of(self.budget, &value)?),
            "r" | "a" => Value::Str(repr_of(self.budget, &value)?),
            other => return Err(Error::new(format!("the conversion !{other} of a format is not known"))),
        };
        let spec = self.write(&Text::new(spec), automatic, depth - 1)?;
        formatted(self.budget, &value, spec.as_str())
    }

    fn value(&self, name: &str, automatic: &mut usize) -> Result<Value, Error> {
        let end = name.find(['.', '[']).unwrap_or(name.len());
        let (first, mut rest) = name.split_at(end);
        let position = match first.is_empty() {
            true => {
                *automatic += 1;
                Some(*automatic - 1)
            }
            false => first.parse().ok(),
        };
        let found = match position {
            Some(position) => self.positional.get(position),
            None => self.named.iter().find(|(known, _)| known == first).map(|(_, value)| value),
        };
        let mut value = found.cloned().ok_or_else(|| Error::new(format!("no value {first:?} for the format")))?;
        while !rest.is_empty() {
            let is_attribute = rest.starts_with('.');
            let key = &rest[1..];
            let end = if is_attribute {
                key.find(['.', '[']).unwrap_or(key.len())
            } else {
                key.find(']').unwrap_or(key.len())
            };
            value = (self.get)(&value, &key[..end], is_attribute)?;
            rest = key[end..].strip_prefix(']').unwrap_or(&key[end..]);
        }
        Ok(value)
    }
}

/// The brace that closes a field, which may have fields in its specification.
fn closing_brace(field: &str) -> Option<usize> {
    let mut open = 0;
    field.char_indices().find_map(|(at, c)| match c {
        '}' if open == 0 => Some(at),
        '}' => {
            open -= 1;
            None
        }
        '{' => {
            open += 1;
            None
        }
        _ => None,
    })
}

/// `format(value, spec)`.
fn formatted(budget: &Budget, value: &Value, spec: &str) -> Result<Text, Error> {
    if spec.is_empty() {
        return str_of(budget, value);
    }
    let parsed = format_spec(spec).ok_or_else(|| Error::new(format!("the format {spec:?} is not known")))?;
    match (value, value.number()) {
        (_, Some(Number::Int(code))) if parsed.kind == 'c' => padded(budget, &parsed, letter(code)?, '<'),
        (_, Some(found)) => number(&parsed, found).map(Text::new),
        (Value::Str(text), _) if matches!(parsed.kind, '\0' | 's') && parsed.align != Some('=') => {
            padded(budget, &parsed, text.clone(), '<')
        }
        _ => Err(Error::new(format!("the format {spec:?} is not for a value of type {}", value.kind()))),
    }
}

fn format_spec(text: &str) -> Option<Spec> {
    let mut spec = Spec::default();
    let mut rest = text;
    let mut letters = text.chars();
    let (first, second) = (letters.next()?, letters.next());
    let is_align = |c: char| "<>=^".contains(c);
    if second.is_some_and(is_align) {
        (spec.fill, spec.align) = (first, second);
        rest = letters.as_str();
    } else if is_align(first) {
        spec.align = Some(first);
        rest = &text[1..];
    }
    if let Some(sign) = rest.chars().next().filter(|c| "+- ".contains(*c)) {
        spec.sign = sign;
        rest = &rest[1..];
    }
    if let Some(after) = rest.strip_prefix('#') {
        (spec.is_alternate, rest) = (true, after);
    }
    if rest.starts_with('0') && spec.align.is_none() {
        (spec.fill, spec.align) = ('0', Some('='));
    }
    spec.width = digits(&mut rest).ok()?.unwrap_or(0);
    if let Some(mark) = rest.chars().next().filter(|c| ",_".contains(*c)) {
        spec.grouping = Some(mark);
        rest = &rest[1..];
    }
    if let Some(after) = rest.strip_prefix('.') {
        rest = after;
        spec.precision = Some(digits(&mut rest).ok()??);
    }
    let mut kind = rest.chars();
    spec.kind = kind.next().unwrap_or('\0');
    kind.as_str().is_empty().then_some(spec)
}

/// What an attribute or item of a value in a format is, without the attributes of Python's types.
pub(super) fn item_of_field(value: &Value, key: &str) -> Option<Value> {
    match value {
        Value::Dict(dict) => dict.get_text(key).cloned(),
        _ => item_at(value, key.parse().ok()?),
    }
}
