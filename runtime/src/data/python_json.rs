//! The text that Python's `json.dumps` makes of a value, and the text of its numbers.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};

/// Wider than any template's indent, and no way to exhaust the memory.
const INDENT_MAX: usize = 64;

/// Nested lists and objects; deeper ones would exhaust the stack.
const DEPTH_MAX: usize = 128;

/// The options of `json.dumps` that transformers offers to templates.
pub(super) struct Dumps {
    ensure_ascii: bool,
    indent: Option<usize>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
}

impl Dumps {
    /// The options that a template passes; the defaults are those of transformers.
    pub(super) fn of(options: &Kwargs) -> Result<Self, Error> {
        let indent: Option<usize> = options.get("indent")?;
        if indent.is_some_and(|width| width > INDENT_MAX) {
            return Err(refusal(format!("tojson with an indent above {INDENT_MAX}")));
        }
        let separators: Option<Vec<String>> = options.get("separators")?;
        let (item_separator, key_separator) = match separators.as_deref() {
            Some([item, key]) => (item.clone(), key.clone()),
            Some(other) => return Err(refusal(format!("tojson with {} separators instead of 2", other.len()))),
            None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
        };
        let flag = |name: &str| options.get::<Option<bool>>(name).map(|flag| flag.unwrap_or(false));
        let dumps = Self {
            ensure_ascii: flag("ensure_ascii")?,
            indent,
            item_separator,
            key_separator,
            sort_keys: flag("sort_keys")?,
        };
        options.assert_all_used()?;
        Ok(dumps)
    }

    /// The JSON text of a value.
    pub(super) fn text(&self, value: &Value) -> Result<String, Error> {
        let mut out = String::new();
        self.write(value, 0, &mut out)?;
        Ok(out)
    }

    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        if depth > DEPTH_MAX {
            return Err(refusal("tojson of a value that is nested too deeply"));
        }
        match value.kind() {
            ValueKind::Undefined => return Err(refusal("tojson of an undefined value")),
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&number(value, ["NaN", "Infinity", "-Infinity"])),
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?.map(|item| Ok((None, item)));
                self.write_all(['[', ']'], items, depth, out)?;
            }
            ValueKind::Map => {
                let mut fields = Vec::new();
                for key in value.try_iter()? {
                    fields.push((key_text(&key)?, value.get_item(&key)?));
                }
                if self.sort_keys {
                    fields.sort_by(|a, b| a.0.cmp(&b.0));
                }
                let fields = fields.into_iter().map(|(key, field)| Ok((Some(key), field)));
                self.write_all(['{', '}'], fields, depth, out)?;
            }
            ValueKind::Invalid => return Err(refusal(value.to_string())),
            _ => self.write_text(&value.to_string(), out),
        }
        Ok(())
    }

    fn write_all(
        &self,
        brackets: [char; 2],
        items: impl Iterator<Item = Result<(Option<String>, Value), Error>>,
        depth: usize,
        out: &mut String,
    ) -> Result<(), Error> {
        out.push(brackets[0]);
        let mut is_empty = true;
        for item in items {
            let (key, value) = item?;
            if !is_empty {
                out.push_str(&self.item_separator);
            }
            is_empty = false;
            self.write_line_break(depth + 1, out);
            if let Some(key) = key {
                self.write_text(&key, out);
                out.push_str(&self.key_separator);
            }
            self.write(&value, depth + 1, out)?;
        }
        if !is_empty {
            self.write_line_break(depth, out);
        }
        out.push(brackets[1]);
        Ok(())
    }

    fn write_line_break(&self, depth: usize, out: &mut String) {
        if let Some(width) = self.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', width * depth));
        }
    }

    fn write_text(&self, text: &str, out: &mut String) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if c < ' ' || self.ensure_ascii && !(' '..='~').contains(&c) => {
                    let units =
                        c.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")).collect::<String>();
                    out.push_str(&units);
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

/// A key of an object as text.
fn key_text(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::None => Ok("null".to_owned()),
        ValueKind::Bool => Ok(if key.is_true() { "true" } else { "false" }.to_owned()),
        ValueKind::Number => Ok(number(key, ["NaN", "Infinity", "-Infinity"])),
        ValueKind::String => Ok(key.to_string()),
        kind => Err(refusal(format!("tojson of an object with a key of type {kind}"))),
    }
}

/// The text of a number as Python prints it.
pub(super) fn printed_number(value: &Value) -> String {
    number(value, ["nan", "inf", "-inf"])
}

fn number(value: &Value, [nan, infinity, minus_infinity]: [&str; 3]) -> String {
    match f64::try_from(value.clone()) {
        Ok(x) if !value.is_integer() => match x {
            _ if x.is_nan() => nan.to_owned(),
            f64::INFINITY => infinity.to_owned(),
            f64::NEG_INFINITY => minus_infinity.to_owned(),
            x => float(x),
        },
        _ => value.to_string(),
    }
}

/// Python's `repr` of a finite float: an exponent of at least two digits where the number is below 1e-4 or from 1e16 up.
fn float(x: f64) -> String {
    let scientific = format!("{x:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    let plain = x.to_string();
    if plain.contains('.') { plain } else { plain + ".0" }
}

fn refusal(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Each text is what Python 3.11 prints for the number.
    #[test]
    fn floats_are_printed_as_python_prints_them() {
        let cases = [
            (1e-7, "1e-07"),
            (1.5e-10, "1.5e-10"),
            (1e-4, "0.0001"),
            (1e-5, "1e-05"),
            (1e16, "1e+16"),
            (123456789012345680.0, "1.2345678901234568e+17"),
            (1e15, "1000000000000000.0"),
            (1e100, "1e+100"),
            (-0.0, "-0.0"),
            (2.5, "2.5"),
            (1e22, "1e+22"),
            (9007199254740993.0, "9007199254740992.0"),
        ];
        for (x, text) in cases {
            assert_eq!(printed_number(&Value::from(x)), text);
        }
        assert_eq!(printed_number(&Value::from(f64::NAN)), "nan");
        assert_eq!(printed_number(&Value::from(10_i128.pow(21) + 1)), "1000000000000000000001");
    }
}
