//! The filter `tojson` as transformers defines it: Python's `json.dumps` with letters beyond ASCII as they are.

use super::arguments::Args;
use super::budget::{Budget, TEXT_BYTES_MAX};
use super::error::Error;
use super::printed::float;
use super::text::{Builder, Text};
use super::value::{Dict, Value};

/// Wider than any template's, and no way to exhaust the memory.
const INDENT_MAX: usize = 64;

/// How JSON is written.
struct Writer<'b> {
    budget: &'b Budget,
    is_ascii: bool,
    indent: Option<String>,
    item_end: Text,
    key_end: Text,
    sorts: bool,
    out: Builder,
}

pub(super) fn tojson(budget: &Budget, value: &Value, args: &Args) -> Result<Value, Error> {
    let bound = args.bind("tojson", ["ensure_ascii", "indent", "separators", "sort_keys"])?;
    let indent = match bound.given(1) {
        None => None,
        Some(Value::Str(text)) => Some(text.as_str().to_owned()),
        Some(_) => Some(" ".repeat(bound.count(1, 0)?.min(INDENT_MAX + 1))),
    };
    if indent.as_ref().is_some_and(|indent| indent.len() > INDENT_MAX) {
        return Err(Error::new(format!("tojson with an indent above {INDENT_MAX}")));
    }
    let separators = bound.given(2).map(|pair| pair.items(budget)).transpose()?;
    let (item_end, key_end) = match separators.as_deref().map(Vec::as_slice) {
        Some([Value::Str(item_end), Value::Str(key_end)]) => (item_end.clone(), key_end.clone()),
        Some(_) => return Err(Error::new("separators of tojson must be two texts")),
        None => (Text::new(if indent.is_some() { "," } else { ", " }), Text::new(": ")),
    };
    let (is_ascii, sorts) = (bound.flag(0), bound.flag(3));
    let mut writer = Writer { budget, is_ascii, indent, item_end, key_end, sorts, out: Builder::default() };
    writer.value(value, 1)?;
    let text = writer.out.finish();
    budget.text(text.as_str().len())?;
    Ok(Value::Str(text))
}

impl Writer<'_> {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        self.budget.step(1)?;
        if self.out.len() > TEXT_BYTES_MAX {
            return Err(Error::new(format!("tojson of more than {} MiB", TEXT_BYTES_MAX >> 20)));
        }
        match value {
            Value::None => self.out.push_str("null"),
            Value::Bool(flag) => self.out.push_str(if *flag { "true" } else { "false" }),
            Value::Int(number) => self.out.push_str(&number.to_string()),
            Value::LongInt(number) => self.out.push_str(number),
            Value::Float(number) => self.out.push_str(&json_float(*number)),
            Value::Str(text) => self.text(text)?,
            Value::List(items) | Value::Tuple(items) => {
                self.budget.nested(|| Ok(()))?;
                self.list(items, depth)?;
            }
            Value::Dict(dict) => self.object(dict, depth)?,
            Value::Undefined(sentence) => {
                return Err(Error::new(format!("tojson of a value that is not there: {sentence}")));
            }
            other => return Err(Error::new(format!("tojson cannot write a {}", other.kind()))),
        }
        Ok(())
    }

    fn nested(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > 200 {
            return Err(Error::new("tojson of a value nested more than 200 levels deep"));
        }
        self.value(value, depth + 1)
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.out.push_str("\n");
            for _ in 0..depth {
                self.out.push_str(indent);
            }
        }
    }

    fn list(&mut self, items: &[Value], depth: usize) -> Result<(), Error> {
        self.out.push_str("[");
        for (idx, item) in items.iter().enumerate() {
            if idx > 0 {
                let end = self.item_end.clone();
                self.out.push(&end);
            }
            self.new_line(depth);
            self.nested(item, depth)?;
        }
        if !items.is_empty() {
            self.new_line(depth - 1);
        }
        self.out.push_str("]");
        Ok(())
    }

    fn object(&mut self, dict: &Dict, depth: usize) -> Result<(), Error> {
        let mut entries = Vec::with_capacity(dict.entries().len());
        for (key, value) in dict.entries() {
            entries.push((key_text(key)?, value));
        }
        if self.sorts {
            if dict.entries().iter().any(|(key, _)| !matches!(key, Value::Str(_))) {
                return Err(Error::new("tojson sorts only keys that are texts"));
            }
            entries.sort_by(|(a, _), (b, _)| a.as_str().cmp(b.as_str()));
        }
        self.out.push_str("{");
        for (idx, (key, value)) in entries.iter().enumerate() {
            if idx > 0 {
                let end = self.item_end.clone();
                self.out.push(&end);
            }
            self.new_line(depth);
            self.text(key)?;
            let end = self.key_end.clone();
            self.out.push(&end);
            self.nested(value, depth)?;
        }
        if !entries.is_empty() {
            self.new_line(depth - 1);
        }
        self.out.push_str("}");
        Ok(())
    }

    fn text(&mut self, text: &Text) -> Result<(), Error> {
        let is_ascii = self.is_ascii;
        let escaped = text.map_chars(self.budget, |_, c| match c {
            '"' => "\\\"".chars().collect::<Vec<_>>(),
            '\\' => "\\\\".chars().collect(),
            '\n' => "\\n".chars().collect(),
            '\r' => "\\r".chars().collect(),
            '\t' => "\\t".chars().collect(),
            '\u{8}' => "\\b".chars().collect(),
            '\u{c}' => "\\f".chars().collect(),
            _ if c < ' ' || is_ascii && !c.is_ascii() => {
                let mut units = [0; 2];
                c.encode_utf16(&mut units)
                    .iter()
                    .flat_map(|unit| format!("\\u{unit:04x}").chars().collect::<Vec<_>>())
                    .collect()
            }
            _ => vec![c],
        })?;
        self.out.push_str("\"");
        self.out.push(&escaped);
        self.out.push_str("\"");
        Ok(())
    }
}

fn key_text(key: &Value) -> Result<Text, Error> {
    Ok(match key {
        Value::Str(text) => text.clone(),
        Value::None => Text::new("null"),
        Value::Bool(flag) => Text::new(if *flag { "true" } else { "false" }),
        Value::Int(number) => Text::new(number.to_string()),
        Value::Float(number) => Text::new(json_float(*number)),
        other => return Err(Error::new(format!("tojson cannot write a key of type {}", other.kind()))),
    })
}

fn json_float(number: f64) -> String {
    match () {
        () if number.is_nan() => "NaN".to_owned(),
        () if number.is_infinite() => if number > 0.0 { "Infinity" } else { "-Infinity" }.to_owned(),
        () => float(number),
    }
}
