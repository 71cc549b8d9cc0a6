//! Items of sequences by position.

use crate::data::jinja::value::Value;

/// Item `idx` of something that counts its items; `None` if there is none.
pub(super) fn item_at(value: &Value, idx: i128) -> Option<Value> {
    let len = value.len()? as i128;
    let at = usize::try_from(if idx < 0 { idx + len } else { idx }).ok().filter(|at| (*at as i128) < len)?;
    match value {
        Value::List(items) | Value::Tuple(items) => Some(items[at].clone()),
        Value::Range(range) => Some(range.get(at)),
        Value::Str(text) => {
            let (start, c) = text.as_str().char_indices().nth(at)?;
            Some(Value::Str(text.slice(start..start + c.len_utf8())))
        }
        _ => None,
    }
}
