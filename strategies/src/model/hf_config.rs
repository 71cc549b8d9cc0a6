//! Hugging Face `config.json` as keys and values, from which each family reads its own.

use super::ModelError;
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};
use std::collections::BTreeMap;
use std::fmt;

/// A `config.json`: its keys and values. A key whose value is `null` counts as absent.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(transparent)]
pub struct HfConfig(BTreeMap<String, Json>);

impl HfConfig {
    /// A whole number.
    ///
    /// # Errors
    /// When the key has another value.
    pub fn size(&self, key: &'static str) -> Result<Option<usize>, ModelError> {
        self.read(key, "expected a whole number", |value| match value {
            Json::Whole(n) => usize::try_from(*n).ok(),
            _ => None,
        })
    }

    /// A number.
    ///
    /// # Errors
    /// When the key has another value.
    pub fn number(&self, key: &'static str) -> Result<Option<f64>, ModelError> {
        self.read(key, "expected a number", |value| match value {
            Json::Whole(n) => Some(*n as f64),
            Json::Number(x) => Some(*x),
            _ => None,
        })
    }

    /// A number that f32 can hold.
    ///
    /// # Errors
    /// When the key has another value.
    pub fn float(&self, key: &'static str) -> Result<Option<f32>, ModelError> {
        let Some(wide) = self.number(key)? else { return Ok(None) };
        let narrow = wide as f32;
        if narrow.is_finite() { Ok(Some(narrow)) } else { Err(ModelError::value(key, wide, "expected a number")) }
    }

    /// `true` or `false`.
    ///
    /// # Errors
    /// When the key has another value.
    pub fn flag(&self, key: &'static str) -> Result<Option<bool>, ModelError> {
        self.read(key, "expected true or false", |value| match value {
            Json::Flag(x) => Some(*x),
            _ => None,
        })
    }

    /// A text.
    ///
    /// # Errors
    /// When the key has another value.
    pub fn text(&self, key: &'static str) -> Result<Option<&str>, ModelError> {
        self.read(key, "expected a string", Json::text)
    }

    /// A list of texts.
    ///
    /// # Errors
    /// When the key has another value.
    pub fn texts(&self, key: &'static str) -> Result<Option<Vec<&str>>, ModelError> {
        self.read(key, "expected a list of strings", |value| match value {
            Json::List(items) => items.iter().map(Json::text).collect(),
            _ => None,
        })
    }

    /// A nested section.
    ///
    /// # Errors
    /// When the key has another value.
    pub fn section(&self, key: &'static str) -> Result<Option<&HfConfig>, ModelError> {
        self.read(key, "expected a section", |value| match value {
            Json::Section(keys) => Some(keys),
            _ => None,
        })
    }

    /// The number of keys of a nested section.
    ///
    /// # Errors
    /// When the key has another value.
    pub(super) fn len(&self, key: &'static str) -> Result<Option<usize>, ModelError> {
        Ok(self.section(key)?.map(|section| section.0.len()))
    }

    /// The same keys, and a whole number for one that is absent; a key with `null` is not absent here.
    pub(super) fn with_default(&self, key: &str, value: u64) -> HfConfig {
        let mut keys = self.0.clone();
        keys.entry(key.to_owned()).or_insert(Json::Whole(value));
        HfConfig(keys)
    }

    /// Whether there are no keys, as in a section that only exists.
    pub(super) fn is_empty(&self) -> bool {
        self.0.values().all(|value| *value == Json::Null)
    }

    fn read<'a, T>(
        &'a self,
        key: &'static str,
        expected: &str,
        of: impl Fn(&'a Json) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        match self.0.get(key) {
            None | Some(Json::Null) => Ok(None),
            Some(value) => of(value).map(Some).ok_or_else(|| ModelError::value(key, value, expected)),
        }
    }
}

/// The one value of several keys.
///
/// # Errors
/// When two of them have different values.
pub(super) fn agreed<K: ToString, T: Copy + PartialEq + ToString>(
    keys: impl IntoIterator<Item = (K, Option<T>)>,
) -> Result<Option<T>, ModelError> {
    let mut given = keys.into_iter().filter_map(|(key, value)| Some((key, value?)));
    let Some((first, value)) = given.next() else { return Ok(None) };
    let said = |key: &K, value: T| format!("{}: {}", key.to_string(), value.to_string());
    match given.find(|(_, other)| *other != value) {
        None => Ok(Some(value)),
        Some((second, other)) => Err(ModelError::Conflict { first: said(&first, value), second: said(&second, other) }),
    }
}

/// A value of a `config.json`.
#[derive(Clone, Debug, PartialEq)]
enum Json {
    Null,
    Flag(bool),
    Whole(u64),
    /// Negative or with a fraction.
    Number(f64),
    Text(String),
    List(Vec<Json>),
    Section(HfConfig),
}

impl Json {
    fn text(&self) -> Option<&str> {
        match self {
            Json::Text(text) => Some(text),
            _ => None,
        }
    }
}

impl fmt::Display for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Json::Null => f.write_str("null"),
            Json::Flag(x) => x.fmt(f),
            Json::Whole(n) => n.fmt(f),
            Json::Number(x) => x.fmt(f),
            Json::Text(text) => write!(f, "{text:?}"),
            Json::List(items) => write!(f, "a list of {}", items.len()),
            Json::Section(keys) => write!(f, "a section of {} keys", keys.0.len()),
        }
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Json, D::Error> {
        deserializer.deserialize_any(AnyJson)
    }
}

struct AnyJson;

impl<'de> Visitor<'de> for AnyJson {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E>(self, x: bool) -> Result<Json, E> {
        Ok(Json::Flag(x))
    }

    fn visit_u64<E>(self, n: u64) -> Result<Json, E> {
        Ok(Json::Whole(n))
    }

    fn visit_i64<E>(self, n: i64) -> Result<Json, E> {
        Ok(u64::try_from(n).map_or(Json::Number(n as f64), Json::Whole))
    }

    fn visit_f64<E>(self, x: f64) -> Result<Json, E> {
        Ok(Json::Number(x))
    }

    fn visit_str<E>(self, text: &str) -> Result<Json, E> {
        Ok(Json::Text(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Json, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element()? {
            items.push(item);
        }
        Ok(Json::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Json, A::Error> {
        let mut keys = BTreeMap::new();
        while let Some((key, value)) = map.next_entry()? {
            keys.insert(key, value);
        }
        Ok(Json::Section(HfConfig(keys)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn null_counts_as_absent_and_a_whole_number_is_a_number_too() {
        let json = r#"{"a": null, "b": 3, "c": -1.5, "d": [{"e": true}], "f": {"g": "h"}, "i": ["j", "k"]}"#;

        let hf: HfConfig = serde_json::from_str(json).unwrap();

        assert_eq!((hf.size("a"), hf.size("b"), hf.number("b")), (Ok(None), Ok(Some(3)), Ok(Some(3.0))));
        assert_eq!((hf.float("c"), hf.number("absent")), (Ok(Some(-1.5)), Ok(None)));
        assert_eq!(hf.section("f").unwrap().unwrap().text("g"), Ok(Some("h")));
        assert_eq!(hf.texts("i"), Ok(Some(vec!["j", "k"])));
    }

    #[test]
    fn error_for_a_value_of_another_type_names_the_key() {
        let hf: HfConfig = serde_json::from_str(r#"{"a": "x", "b": 1e300, "c": [1], "d": -4}"#).unwrap();
        let text = |error: ModelError| error.to_string();

        assert_eq!(text(hf.size("a").unwrap_err()), "`a: \"x\"` is not supported; expected a whole number");
        assert_eq!(text(hf.size("d").unwrap_err()), "`d: -4` is not supported; expected a whole number");
        assert!(text(hf.float("b").unwrap_err()).ends_with("expected a number"));
        assert_eq!(text(hf.texts("c").unwrap_err()), "`c: a list of 1` is not supported; expected a list of strings");
        assert_eq!(text(hf.flag("c").unwrap_err()), "`c: a list of 1` is not supported; expected true or false");
    }
}
