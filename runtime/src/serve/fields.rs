//! The fields of a request's JSON object, read one by one; whatever nothing has read is refused by name.

use super::refusal::Refusal;
use crate::data::exact_json;
use serde_json::{Map, Value};
use std::ops::RangeInclusive;

/// Fields that are not read yet. A null is an absent field.
#[derive(Debug)]
pub(super) struct Fields(Map<String, Value>);

impl Fields {
    /// The fields of a body.
    pub(super) fn of(body: &[u8]) -> Result<Fields, Refusal> {
        match exact_json::from_slice(body) {
            Ok(body) if exact_json::number(&body).is_some() => {
                Err(Refusal::of_body(400, "the body must be a JSON object"))
            }
            Ok(Value::Object(fields)) => Ok(Fields(fields)),
            Ok(_) => Err(Refusal::of_body(400, "the body must be a JSON object")),
            Err(error) => Err(Refusal::of_body(400, format!("the body is no JSON: {error}"))),
        }
    }

    /// The value of a field.
    pub(super) fn take(&mut self, name: &str) -> Option<Value> {
        self.0.remove(name).filter(|value| !value.is_null())
    }

    /// A finite number.
    pub(super) fn number(&mut self, name: &str) -> Result<Option<f32>, Refusal> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let number = exact_json::as_f64(&value).map(|x| x as f32).filter(|x| x.is_finite());
        number.map(Some).ok_or_else(|| mismatch(name, &value, "a number"))
    }

    /// A whole number in a range.
    pub(super) fn whole(&mut self, name: &str, range: RangeInclusive<u64>) -> Result<Option<u64>, Refusal> {
        let Some(value) = self.take(name) else { return Ok(None) };
        // Some clients write 1.0.
        let number = value.as_u64().or_else(|| {
            exact_json::as_f64(&value).filter(|x| x.fract() == 0.0 && (0.0..=9e15).contains(x)).map(|x| x as u64)
        });
        let wanted = match range.end() {
            &u64::MAX => format!("a whole number of at least {}", range.start()),
            end => format!("a whole number from {} to {end}", range.start()),
        };
        number.filter(|x| range.contains(x)).map(Some).ok_or_else(|| mismatch(name, &value, &wanted))
    }

    /// True or false; false if absent.
    pub(super) fn flag(&mut self, name: &str) -> Result<bool, Refusal> {
        let Some(value) = self.take(name) else { return Ok(false) };
        value.as_bool().ok_or_else(|| mismatch(name, &value, "true or false"))
    }

    /// A text.
    pub(super) fn text(&mut self, name: &str) -> Result<Option<String>, Refusal> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(mismatch(name, &other, "a string")),
        }
    }

    /// A JSON object.
    pub(super) fn object(&mut self, name: &str) -> Result<Option<Map<String, Value>>, Refusal> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match (exact_json::number(&value).is_some(), value) {
            (false, Value::Object(fields)) => Ok(Some(fields)),
            (_, other) => Err(mismatch(name, &other, "an object")),
        }
    }

    /// Refuses a field that asks for something that the server does not do. Values that ask for nothing are accepted.
    pub(super) fn refuse(&mut self, name: &str, why: &str) -> Result<(), Refusal> {
        let asks = |value: &Value| match value {
            Value::Bool(is_on) => *is_on,
            number if exact_json::as_f64(number).is_some() => exact_json::as_f64(number) != Some(0.0),
            Value::String(text) => !text.is_empty() && text != "none",
            Value::Array(items) => !items.is_empty(),
            Value::Object(fields) => !fields.is_empty(),
            Value::Number(_) | Value::Null => false,
        };
        match self.take(name).filter(asks) {
            Some(_) => Err(Refusal::of_field(name, format!("`{name}` is not supported: {why}"))),
            None => Ok(()),
        }
    }

    /// Refuses a request to another model than that of this name.
    pub(super) fn check_model(&mut self, name: &str) -> Result<(), Refusal> {
        match self.text("model")?.filter(|model| model != name) {
            Some(model) => Err(Refusal::unknown_model(&model, name)),
            None => Ok(()),
        }
    }

    /// Leaves out fields that change nothing in the answer of any server of one model.
    pub(super) fn ignore(&mut self, names: &[&str]) {
        names.iter().for_each(|name| drop(self.0.remove(*name)));
    }

    /// Refuses the fields that nothing has read.
    pub(super) fn finish(self) -> Result<(), Refusal> {
        match self.0.keys().next() {
            Some(name) => {
                let name: String = name.chars().take(80).collect();
                Err(Refusal::of_field(&name, format!("unknown field `{name}`")))
            }
            None => Ok(()),
        }
    }
}

/// A value that does not fit its field.
pub(super) fn mismatch(field: &str, found: &Value, wanted: &str) -> Refusal {
    let mut shown = exact_json::shown(found);
    if shown.chars().count() > 60 {
        shown = shown.chars().take(60).chain(['…']).collect();
    }
    Refusal::of_field(field, format!("`{field}` is {shown}, but must be {wanted}"))
}
