//! Python's `str` and `repr` of values.

use super::budget::{Budget, TEXT_BYTES_MAX};
use super::error::Error;
use super::text::{Builder, Text};
use super::value::{Callable, Dict, Value};

/// Python's `str(value)`.
pub(super) fn str_of(budget: &Budget, value: &Value) -> Result<Text, Error> {
    match value {
        Value::Str(text) => Ok(text.clone()),
        Value::Undefined(_) => Ok(Text::new("")),
        Value::List(items) if is_content(items) => {
            Err(Error::new("it prints a list of texts; it expects a text there"))
        }
        _ => repr_of(budget, value),
    }
}

/// The parts of a message's content: a template that prints their list was written for texts.
fn is_content(items: &[Value]) -> bool {
    let is_part = |item: &Value| matches!(item, Value::Dict(part) if part.get_text("type").is_some() && part.get_text("text").is_some());
    !items.is_empty() && items.iter().all(is_part)
}

/// Python's `repr(value)`.
pub(super) fn repr_of(budget: &Budget, value: &Value) -> Result<Text, Error> {
    let mut out = Builder::default();
    write_repr(budget, value, &mut out)?;
    Ok(out.finish())
}

fn write_repr(budget: &Budget, value: &Value, out: &mut Builder) -> Result<(), Error> {
    budget.step(1)?;
    if out.len() > TEXT_BYTES_MAX {
        return Err(Error::new(format!("it prints a value of more than {} MiB", TEXT_BYTES_MAX >> 20)));
    }
    budget.nested(|| write_nested(budget, value, out))
}

fn write_nested(budget: &Budget, value: &Value, out: &mut Builder) -> Result<(), Error> {
    match value {
        Value::Undefined(_) => out.push_str("Undefined"),
        Value::None => out.push_str("None"),
        Value::Bool(flag) => out.push_str(if *flag { "True" } else { "False" }),
        Value::Int(number) => out.push_str(&number.to_string()),
        Value::LongInt(number) => out.push_str(number),
        Value::Float(number) => out.push_str(&float(*number)),
        Value::Str(text) => quote(budget, text, out)?,
        Value::List(items) => write_items(budget, "[", items, "]", out)?,
        Value::Tuple(items) => write_items(budget, "(", items, if items.len() == 1 { ",)" } else { ")" }, out)?,
        Value::Dict(dict) => write_dict(budget, dict, out)?,
        Value::View(name, items) => {
            out.push_str(name);
            write_items(budget, "([", items, "])", out)?;
        }
        Value::Range(range) => {
            let end = range.start + range.step * range.len as i128;
            let step = if range.step == 1 { String::new() } else { format!(", {}", range.step) };
            out.push_str(&format!("range({}, {end}{step})", range.start));
        }
        Value::Namespace(fields) => {
            out.push_str("<Namespace ");
            write_dict(budget, &fields.borrow(), out)?;
            out.push_str(">");
        }
        Value::Callable(callable) => match &**callable {
            Callable::Loop(own) => {
                out.push_str(&format!("<LoopContext {}/{}>", own.index.get() + 1, own.items.len()));
            }
            _ => return Err(Error::new("it prints a function; it expects a text there")),
        },
        Value::Generator(_) => return Err(Error::new("it prints a generator; it expects a text there")),
    }
    Ok(())
}

fn write_items(budget: &Budget, open: &str, items: &[Value], close: &str, out: &mut Builder) -> Result<(), Error> {
    out.push_str(open);
    for (idx, item) in items.iter().enumerate() {
        if idx > 0 {
            out.push_str(", ");
        }
        write_repr(budget, item, out)?;
    }
    out.push_str(close);
    Ok(())
}

fn write_dict(budget: &Budget, dict: &Dict, out: &mut Builder) -> Result<(), Error> {
    out.push_str("{");
    for (idx, (key, value)) in dict.entries().iter().enumerate() {
        if idx > 0 {
            out.push_str(", ");
        }
        write_repr(budget, key, out)?;
        out.push_str(": ");
        write_repr(budget, value, out)?;
    }
    out.push_str("}");
    Ok(())
}

/// A text in quotes, with the escapes of Python.
fn quote(budget: &Budget, text: &Text, out: &mut Builder) -> Result<(), Error> {
    let quote = if text.as_str().contains('\'') && !text.as_str().contains('"') { "\"" } else { "'" };
    out.push_str(quote);
    let escaped = text.map_chars(budget, |_, c| match c {
        '\\' => "\\\\".chars().collect::<Vec<_>>(),
        '\n' => "\\n".chars().collect(),
        '\r' => "\\r".chars().collect(),
        '\t' => "\\t".chars().collect(),
        '\'' if quote == "'" => "\\'".chars().collect(),
        _ if is_printable(c) => vec![c],
        _ => match c as u32 {
            code @ ..=0xff => format!("\\x{code:02x}").chars().collect(),
            code @ ..=0xffff => format!("\\u{code:04x}").chars().collect(),
            code => format!("\\U{code:08x}").chars().collect(),
        },
    })?;
    out.push(&escaped);
    out.push_str(quote);
    Ok(())
}

/// `str.isprintable` of one letter. Rust escapes the same letters in its own debugging texts, but for marks that combine with
/// the letter before them.
pub(super) fn is_printable(c: char) -> bool {
    match c {
        ' '..='~' => true,
        _ if c.is_control() || c.is_whitespace() => false,
        _ => !matches!(c.escape_debug().nth(1), Some('u')) || is_combining(c),
    }
}

fn is_combining(c: char) -> bool {
    matches!(c as u32, 0x300..=0x36f | 0x483..=0x489 | 0x591..=0x5bd | 0x610..=0x61a | 0x64b..=0x65f | 0x900..=0x903 | 0x93a..=0x94f | 0xe31..=0xe4e | 0x1ab0..=0x1aff | 0x1dc0..=0x1dff | 0x200d | 0x20d0..=0x20ff | 0x302a..=0x302f | 0x3099..=0x309a | 0xfe00..=0xfe0f | 0xfe20..=0xfe2f | 0xe0100..=0xe01ef)
        && c as u32 != 0x200d
}

/// Python's `repr` of a float: the shortest digits that give it, with an exponent below 1e-4 and from 1e16 on.
pub(super) fn float(number: f64) -> String {
    if number.is_nan() {
        return "nan".to_owned();
    }
    if number.is_infinite() {
        return if number > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    match exponent.parse::<i32>().unwrap_or_default() {
        -4..=15 => format!("{number:?}"),
        exponent => format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs()),
    }
}
