//! Two macros that declare sections and choices. One declaration generates the struct, its defaults, its reader and the
//! entries of the key reference, so that they cannot diverge.

use serde_yaml_ng::{Mapping, Value};

use super::at::At;
use super::described::is_empty;
use super::error::ConfigError;
use super::key_doc::KeyDoc;
use super::setting::{Range, Setting};

/// A group of keys that one part of the program reads.
pub(crate) trait Section: Sized {
    /// Every key of the section, in the order of the struct.
    fn keys() -> Vec<KeyDoc>;
    /// Reads the section from the mapping at `at`; absent keys take their defaults, and so do empty ones unless their type has a
    /// value of its own for them. All keys are read, so that an error names every invalid one.
    fn read_section(keys: &Mapping, at: &At<'_>) -> Result<Self, ConfigError>;
    /// Adds every key with its value.
    fn write_section(&self, keys: &mut Mapping);
}

/// The accepted values of a key: those of its range if it has one, else those of its type.
pub(crate) fn fits_of<T: Setting>(range: Option<&Range>) -> String {
    match range {
        Some(range) if T::fits().ends_with(", or none") => format!("{}, or none", range.fits),
        Some(range) => range.fits.to_owned(),
        None => T::fits(),
    }
}

/// The value of a key of a section, or `None` if the key keeps its default.
pub(crate) fn read_key<T: Setting>(
    keys: &Mapping,
    key: &str,
    at: &At<'_>,
    range: Option<&Range>,
) -> Result<Option<T>, ConfigError> {
    let Some(value) = keys.get(key) else { return Ok(None) };
    let at = at.key(key);
    if is_empty(value) {
        return if T::HAS_TEXT && value.is_string() { Err(at.mismatch(value, T::fits())) } else { Ok(T::empty()) };
    }
    let read = T::read(value, &at).map_err(|error| match error {
        // The range says more than the type; an error of an item of a list has another key.
        ConfigError::Mismatch { key, location, found, .. } if range.is_some() && key == at.to_string() => {
            ConfigError::Mismatch { key, location, found, fits: fits_of::<T>(range) }
        }
        other => other,
    })?;
    if range.zip(read.number()).is_some_and(|(range, number)| !(range.holds)(number)) {
        return Err(at.mismatch(value, fits_of::<T>(range)));
    }
    Ok(Some(read))
}

/// Formats a default as in a file. The default of a required path is the empty string.
pub(crate) fn show(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Sequence(items) => format!("[{}]", items.iter().map(show).collect::<Vec<_>>().join(", ")),
        Value::Mapping(keys) => {
            let entries = keys.iter().map(|(key, value)| format!("{}: {}", show(key), show(value)));
            format!("{{{}}}", entries.collect::<Vec<_>>().join(", "))
        }
        // The shortest form that reads back equal; the emitter would write 1e-8 as 0.00000001.
        Value::Number(number) if number.is_f64() => {
            let x = number.as_f64().unwrap_or_default();
            if x != 0.0 && x.abs() < 1e-3 { format!("{x:e}") } else { format!("{x}") }
        }
        other => serde_yaml_ng::to_string(other).map(|text| text.trim_end().to_owned()).unwrap_or_default(),
    }
}

/// Declares a section: documented fields, each with its default, other spellings in brackets and a range after `=>`.
macro_rules! section {
    (
        $(#[doc = $section_doc:literal])+
        pub struct $name:ident {
            $(
                $(#[doc = $doc:literal])+
                pub $field:ident $([$($alias:literal),+])? : $ty:ty = $default:expr $(=> $range:expr)?;
            )+
        }
    ) => {
        $(#[doc = $section_doc])+
        #[derive(Clone, Debug, PartialEq)]
        pub struct $name {
            $( $(#[doc = $doc])+ pub $field: $ty, )+
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $( $field: $default, )+ }
            }
        }

        impl $crate::config::section::Section for $name {
            fn keys() -> Vec<$crate::config::key_doc::KeyDoc> {
                let default = Self::default();
                vec![ $(
                    $crate::config::key_doc::KeyDoc {
                        key: stringify!($field).trim_start_matches("r#"),
                        aliases: &[$($($alias),+)?],
                        doc: [$($doc.trim()),+].join(" "),
                        default: $crate::config::section::show(
                            &$crate::config::setting::Setting::write(&default.$field),
                        ),
                        fits: $crate::config::section::fits_of::<$ty>($crate::config::section::range!($($range)?)),
                    },
                )+ ]
            }

            fn read_section(
                keys: &serde_yaml_ng::Mapping,
                at: &$crate::config::at::At<'_>,
            ) -> Result<Self, $crate::config::error::ConfigError> {
                let mut section = Self::default();
                let mut errors = $crate::config::error::Errors::default();
                $(
                    let key = stringify!($field).trim_start_matches("r#");
                    let range = $crate::config::section::range!($($range)?);
                    if let Some(Some(read)) = errors.keep($crate::config::section::read_key(keys, key, at, range)) {
                        section.$field = read;
                    }
                )+
                errors.end(section)
            }

            fn write_section(&self, keys: &mut serde_yaml_ng::Mapping) {
                $(
                    let key = stringify!($field).trim_start_matches("r#");
                    keys.insert(key.into(), $crate::config::setting::Setting::write(&self.$field));
                )+
            }
        }
    };
}

/// `Some(range)` if a range was written, else `None`.
macro_rules! range {
    () => {
        None
    };
    ($range:expr) => {
        Some(&$range)
    };
}

/// Declares an enum whose variants are words of the file. A variant is written as the first of its words.
macro_rules! choices {
    (
        $(#[doc = $enum_doc:literal])+
        pub enum $name:ident {
            $( $(#[doc = $doc:literal])+ $variant:ident = $word:literal $(| $alias:literal)*; )+
        }
    ) => {
        $(#[doc = $enum_doc])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name {
            $( $(#[doc = $doc])+ $variant, )+
        }

        impl $name {
            /// The word for this variant in the file.
            pub fn word(self) -> &'static str {
                match self { $( Self::$variant => $word, )+ }
            }
        }

        impl $crate::config::setting::Setting for $name {
            fn fits() -> String {
                match [$($word $(, $alias)*),+].as_slice() {
                    [only] => (*only).to_owned(),
                    words => format!("one of {}", words.join(", ")),
                }
            }
            // YAML parses the bare words true and false as booleans; here they are words like the others, also in the
            // spelling of YAML 1.1.
            fn read(
                value: &serde_yaml_ng::Value,
                at: &$crate::config::at::At<'_>,
            ) -> Result<Self, $crate::config::error::ConfigError> {
                let of_word = |word: &str| match word {
                    $( $word $(| $alias)* => Some(Self::$variant), )+
                    _ => None,
                };
                let of_truth = || of_word(&$crate::config::yaml_1_1::truth(value)?.to_string());
                let found = value.as_str().and_then(of_word).or_else(of_truth);
                found.ok_or_else(|| at.mismatch(value, Self::fits()))
            }
            fn write(&self) -> serde_yaml_ng::Value {
                match self.word() {
                    "true" => serde_yaml_ng::Value::Bool(true),
                    "false" => serde_yaml_ng::Value::Bool(false),
                    word => serde_yaml_ng::Value::String(word.into()),
                }
            }
        }
    };
}

pub(crate) use {choices, range, section};
