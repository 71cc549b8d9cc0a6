//! The definition of a model family. Each family is a file of this folder and an entry of [`FAMILIES`].

use super::{FAMILIES, ForwardBuilder, HfConfig, Hidden, ModelConfig, ModelError};
use std::fmt;

/// A model family, as far as the rest of the system needs it.
///
/// The names, shapes and parts of the model file's tensors are in the parameter table of the forward program.
pub struct Family {
    /// Its `model_type` in `config.json`.
    pub model_type: &'static str,
    /// Its class name in `architectures`.
    pub architecture: &'static str,
    /// Prefix that `transformers` adds to all tensor names except the head's. Files written from the bare model omit it.
    pub prefix: &'static str,
    /// Keys of `config.json` that the family reads, or that describe a model without changing how it trains.
    pub keys: &'static [&'static [&'static str]],
    /// The linear layers of a block, by the names that adapters use.
    pub linears: &'static [&'static str],
    /// Reads its `config.json`.
    pub(super) parse: fn(&HfConfig) -> Result<ModelConfig, ModelError>,
    /// Appends its forward pass up to the last norm; the head is no part of a family.
    pub(super) hidden: fn(&ModelConfig, &mut ForwardBuilder) -> Hidden,
}

impl Family {
    /// The family with this `model_type` or class name.
    ///
    /// # Errors
    /// When no family has this name.
    pub fn named(name: &str) -> Result<&'static Family, ModelError> {
        let of_class = |f: &Family| f.architecture == name || f.classifier() == name;
        let family = FAMILIES.iter().find(|f| f.model_type == name || of_class(f));
        family.copied().ok_or_else(|| ModelError::Unsupported { found: name.into(), supported: supported() })
    }

    /// The family that a `config.json` names.
    ///
    /// # Errors
    /// When it names no family or an unsupported one.
    pub fn of(hf: &HfConfig) -> Result<&'static Family, ModelError> {
        let of_class = || Ok::<_, ModelError>(hf.texts("architectures")?.and_then(|names| names.first().copied()));
        let name = hf.text("model_type")?.map_or_else(of_class, |name| Ok(Some(name)))?;
        Family::named(name.ok_or(ModelError::Missing { field: "model_type", family: "model" })?)
    }
}

/// The value of a key that `family` requires.
pub(super) fn need<T>(field: &'static str, family: &Family, value: Option<T>) -> Result<T, ModelError> {
    value.ok_or(ModelError::Missing { field, family: family.model_type })
}

/// Keys that describe a model of any family.
const DESCRIPTION: &[&str] = &[
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "id2label",
    "label2id",
    "model_type",
    "num_labels",
    "pad_token_id",
    "problem_type",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "vocab_size",
];

/// Every key of `config.json` that some family reads or that describes a model, sorted.
pub fn keys() -> Vec<&'static str> {
    let of_families = FAMILIES.iter().flat_map(|f| f.keys).copied();
    let mut keys: Vec<&str> = of_families.chain([DESCRIPTION]).flatten().copied().collect();
    keys.sort_unstable();
    keys.dedup();
    keys
}

/// The names of all families, for error messages.
fn supported() -> String {
    FAMILIES.iter().map(|f| f.model_type).collect::<Vec<_>>().join(", ")
}

impl PartialEq for Family {
    fn eq(&self, other: &Family) -> bool {
        self.model_type == other.model_type
    }
}

impl fmt::Debug for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.model_type)
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.model_type)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsupported_architecture_is_refused_with_a_list_of_supported_ones() {
        let hf: HfConfig = serde_json::from_str(r#"{"model_type": "mamba"}"#).unwrap();

        let error = ModelConfig::try_from(&hf).unwrap_err().to_string();

        assert!(error.starts_with("architecture `mamba` is not supported; supported are llama, mistral, "), "{error}");
    }

    #[test]
    fn family_is_found_by_its_class_where_the_type_is_absent() {
        let hf: HfConfig = serde_json::from_str(r#"{"architectures": ["Qwen2ForCausalLM"]}"#).unwrap();

        assert_eq!(Family::of(&hf).unwrap().model_type, "qwen2");
    }

    #[test]
    fn names_of_families_and_their_classes_are_unique() {
        for (i, family) in FAMILIES.iter().enumerate() {
            let taken = |other: &&&Family| other == &family || other.architecture == family.architecture;
            assert_eq!(FAMILIES.iter().position(|f| taken(&f)), Some(i), "{family}");
        }
    }
}
