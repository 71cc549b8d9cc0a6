//! The documentation of a key of the configuration.

/// One key of the file, for the reference, the starter file and the search for the nearest key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyDoc {
    /// The key as it is written.
    pub key: &'static str,
    /// Other spellings that are accepted.
    pub aliases: &'static [&'static str],
    /// The effect of the key, in one sentence.
    pub doc: String,
    /// The default, as YAML; empty if the key is required.
    pub default: String,
    /// The accepted values, in words.
    pub fits: String,
}
