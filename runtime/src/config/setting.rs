//! Conversion between values of the file and typed values.

use std::path::PathBuf;

use phalanx_storage::home;
use serde_yaml_ng::Value;

use super::at::At;
use super::error::{ConfigError, Errors};
use super::yaml_1_1::{number, only_truth, truth, whole};

/// A type that a key of the configuration may have.
pub(crate) trait Setting: Sized {
    /// The accepted values, for messages and help: "a number", "one of a, b".
    fn fits() -> String;
    /// Reads a value; `at` is its position in the file.
    fn read(value: &Value, at: &At<'_>) -> Result<Self, ConfigError>;
    /// Writes the value so that [`Setting::read`] returns it.
    fn write(&self) -> Value;
    /// The value as a number, for range checks; `None` if it is not one.
    fn number(&self) -> Option<f64> {
        None
    }
    /// Whether an empty text is no way to ask for the default: a path is empty where a variable of a shell was not set.
    const HAS_TEXT: bool = false;
    /// The meaning of an empty value, if it is not the key's default.
    fn empty() -> Option<Self> {
        None
    }
}

/// A range that a number must lie in.
pub(crate) struct Range {
    /// The range in words.
    pub(crate) fits: &'static str,
    /// Whether a number is in the range.
    pub(crate) holds: fn(f64) -> bool,
}

/// Counts that cannot be zero.
pub(crate) const AT_LEAST_ONE: Range = Range { fits: "a whole number of at least 1", holds: |x| x >= 1.0 };
/// Ranks along an axis, machines, and ranks of a machine: more than any cluster has, and few enough for 32 bits.
pub(crate) const RANKS: Range =
    Range { fits: "a whole number from 1 to 1048576", holds: |x| (1.0..=1048576.0).contains(&x) };
/// Ranks of a machine that need not exist.
pub(crate) const SPARES: Range =
    Range { fits: "a whole number from 0 to 65536", holds: |x| (0.0..=65536.0).contains(&x) };
/// Sequences of a microbatch, microbatches of a step, tokens of a sample: their products stay far below 64 bits.
pub(crate) const COUNT: Range =
    Range { fits: "a whole number from 1 to 1048576", holds: |x| (1.0..=1048576.0).contains(&x) };
/// Tokens of a sequence.
pub(crate) const TOKENS: Range =
    Range { fits: "a whole number from 1 to 16777216", holds: |x| (1.0..=16777216.0).contains(&x) };
/// Compute threads of a rank.
pub(crate) const THREADS: Range =
    Range { fits: "a whole number from 1 to 1024", holds: |x| (1.0..=1024.0).contains(&x) };
/// Mebibytes of a buffer: up to a tebibyte.
pub(crate) const MEBIBYTES: Range = COUNT;
/// Seconds of a detection time: above an hour, nothing is detected.
pub(crate) const SECONDS_OF_DETECTION: Range =
    Range { fits: "a number above 0 and at most 3600", holds: |x| x > 0.0 && x <= 3600.0 };
/// Seconds that a job may wait: up to a year.
pub(crate) const SECONDS: Range =
    Range { fits: "a number of at least 0 and at most 31536000", holds: |x| (0.0..=31536000.0).contains(&x) };
/// Seconds of a limit that cannot be 0: up to a year.
pub(crate) const SECONDS_OF_LIMIT: Range =
    Range { fits: "a number above 0 and at most 31536000", holds: |x| x > 0.0 && x <= 31536000.0 };
/// Strictly positive numbers.
pub(crate) const POSITIVE: Range = Range { fits: "a number above 0", holds: |x| x > 0.0 && x.is_finite() };
/// Visits of a sample in an epoch: more than anyone wants, and few enough for numbers of rows.
pub(crate) const VISITS: Range =
    Range { fits: "a number above 0 and at most 10000", holds: |x| x > 0.0 && x <= 10000.0 };
/// Numbers from zero up.
pub(crate) const NOT_NEGATIVE: Range = Range { fits: "a number of at least 0", holds: |x| x >= 0.0 && x.is_finite() };
/// Numbers from zero down.
pub(crate) const NOT_POSITIVE: Range = Range { fits: "a number of at most 0", holds: |x| x <= 0.0 && x.is_finite() };
/// Shares of a whole.
pub(crate) const SHARE: Range = Range { fits: "a number between 0 and 1", holds: |x| (0.0..=1.0).contains(&x) };
/// Decay rates of moving averages; at 1 the average would never change.
pub(crate) const BELOW_ONE: Range =
    Range { fits: "a number of at least 0 and below 1", holds: |x| (0.0..1.0).contains(&x) };

impl Setting for bool {
    fn fits() -> String {
        "true or false".into()
    }
    fn read(value: &Value, at: &At<'_>) -> Result<Self, ConfigError> {
        only_truth(value).ok_or_else(|| at.mismatch(value, Self::fits()))
    }
    fn write(&self) -> Value {
        Value::Bool(*self)
    }
}

impl Setting for u64 {
    fn fits() -> String {
        "a whole number of at least 0".into()
    }
    fn read(value: &Value, at: &At<'_>) -> Result<Self, ConfigError> {
        whole(value).ok_or_else(|| at.mismatch(value, Self::fits()))
    }
    fn write(&self) -> Value {
        Value::Number((*self).into())
    }
    fn number(&self) -> Option<f64> {
        Some(*self as f64)
    }
}

impl Setting for usize {
    fn fits() -> String {
        u64::fits()
    }
    fn read(value: &Value, at: &At<'_>) -> Result<Self, ConfigError> {
        usize::try_from(u64::read(value, at)?).map_err(|_| at.mismatch(value, Self::fits()))
    }
    fn write(&self) -> Value {
        Value::Number((*self).into())
    }
    fn number(&self) -> Option<f64> {
        Some(*self as f64)
    }
}

impl Setting for f64 {
    fn fits() -> String {
        "a number".into()
    }
    fn read(value: &Value, at: &At<'_>) -> Result<Self, ConfigError> {
        number(value).ok_or_else(|| at.mismatch(value, Self::fits()))
    }
    fn write(&self) -> Value {
        Value::Number((*self).into())
    }
    fn number(&self) -> Option<f64> {
        Some(*self)
    }
}

impl Setting for String {
    fn fits() -> String {
        "a string".into()
    }
    fn read(value: &Value, at: &At<'_>) -> Result<Self, ConfigError> {
        match value {
            Value::String(text) if !text.is_empty() => Ok(text.clone()),
            _ => Err(at.mismatch(value, Self::fits())),
        }
    }
    fn write(&self) -> Value {
        Value::String(self.clone())
    }
}

impl Setting for PathBuf {
    const HAS_TEXT: bool = true;
    fn fits() -> String {
        "a path".into()
    }
    // A folder may be called 2024, so a whole number is accepted as a path.
    fn read(value: &Value, at: &At<'_>) -> Result<Self, ConfigError> {
        match value {
            Value::String(text) if !text.is_empty() => Ok(home::expanded(text)),
            Value::Number(number) if number.is_u64() => Ok(PathBuf::from(number.to_string())),
            _ => Err(at.mismatch(value, Self::fits())),
        }
    }
    fn write(&self) -> Value {
        Value::String(self.to_string_lossy().into_owned())
    }
}

/// The word `none` disables a setting. An absent key takes its default, which may be enabled.
impl<T: Setting> Setting for Option<T> {
    fn fits() -> String {
        format!("{}, or none", T::fits())
    }
    fn read(value: &Value, at: &At<'_>) -> Result<Self, ConfigError> {
        match value {
            Value::String(word) if word == "none" => Ok(None),
            Value::Bool(false) if T::fits() != bool::fits() => Ok(None),
            // A text may be such a word.
            Value::String(_) if ![bool::fits(), String::fits()].contains(&T::fits()) && truth(value) == Some(false) => {
                Ok(None)
            }
            _ => T::read(value, at).map(Some),
        }
    }
    fn write(&self) -> Value {
        self.as_ref().map_or_else(|| Value::String("none".into()), T::write)
    }
    fn number(&self) -> Option<f64> {
        self.as_ref().and_then(T::number)
    }
}

impl Setting for Vec<String> {
    fn fits() -> String {
        "a list of strings".into()
    }
    fn read(value: &Value, at: &At<'_>) -> Result<Self, ConfigError> {
        read_items(value, at, Self::fits(), String::read)
    }
    fn write(&self) -> Value {
        Value::Sequence(self.iter().map(Setting::write).collect())
    }
}

/// Reads every item of a list, so that an error names all invalid ones.
pub(crate) fn read_items<T>(
    value: &Value,
    at: &At<'_>,
    fits: String,
    read: impl Fn(&Value, &At<'_>) -> Result<T, ConfigError>,
) -> Result<Vec<T>, ConfigError> {
    let items = value.as_sequence().ok_or_else(|| at.mismatch(value, fits))?;
    let mut errors = Errors::default();
    let read = items.iter().enumerate().filter_map(|(i, item)| errors.keep(read(item, &at.item(i)))).collect();
    errors.end(read)
}
