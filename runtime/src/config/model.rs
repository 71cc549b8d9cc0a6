//! The model to train: an existing one from a Hugging Face directory, or a new one described by the configuration.

use std::path::{Path, PathBuf};

use serde_yaml_ng::{Mapping, Value};

use super::at::At;
use super::error::{ConfigError, Errors};
use super::section::section;
use super::setting::Setting;
use super::special_tokens::{SpecialTokens, TokenTexts};
use super::yaml_1_1::{is_beyond_64_bits, resolved};

section! {
    /// The model and its tokenizer.
    pub struct ModelSection {
        /// Hugging Face directory (config.json, safetensors, tokenizer) to start from, or the name of a model that is in the
        /// Hub's cache of this machine; set this or `model`.
        pub base_model: Option<PathBuf> = None;
        /// Branch, tag or commit of a `base_model` that is named as on the Hub; if not set, main.
        pub revision_of_model ["model_revision"]: Option<String> = None;
        /// Begin with random weights in the shape of `base_model` instead of its own.
        pub reinit_weights: bool = false;
        /// Keys of a Hugging Face config.json (model_type, hidden_size, …), to train a new model from random weights.
        pub model: Option<ModelDescription> = None;
        /// Tokenizer: `bytes` (every byte is a token), or a directory or file; if not set, the tokenizer of
        /// `base_model`.
        pub tokenizer ["tokenizer_config"]: Option<Tokenizer> = None;
        /// Tokens with a role, such as {eos_token: <|im_end|>}; those that the vocabulary does not have are added.
        pub special_tokens: SpecialTokens = SpecialTokens::default();
        /// Tokens to add to the vocabulary.
        pub tokens: Vec<String> = Vec::new();
        /// Other texts for reserved tokens, by token id.
        pub added_tokens_overrides: TokenTexts = TokenTexts::default();
        /// Round the size of a vocabulary that is too small for the tokenizer up to a multiple of 32.
        pub resize_token_embeddings_to_32x: bool = false;
        /// Begin the embeddings of added tokens with the mean of all others; else draw them.
        pub mean_resizing_embeddings: bool = true;
    }
}

/// The description of a new model: keys of a Hugging Face `config.json`. Their names are checked here; the model families
/// check their values.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelDescription(pub serde_json::Map<String, serde_json::Value>);

/// The source of the tokenizer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tokenizer {
    /// Every byte is a token; no file is needed.
    Bytes,
    /// A directory with `tokenizer.json`, or that file.
    Path(PathBuf),
}

/// The source of the initial weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ModelSource<'a> {
    /// Weights and shape of this Hugging Face directory.
    Pretrained(&'a Path),
    /// Random weights in this shape.
    Scratch(&'a ModelDescription),
}

impl ModelSection {
    /// The source of the initial weights.
    ///
    /// # Panics
    /// Never on a loaded configuration, which has exactly one of `base_model` and `model`.
    pub fn source(&self) -> ModelSource<'_> {
        match (&self.base_model, &self.model) {
            (Some(path), None) => ModelSource::Pretrained(path),
            (None, Some(description)) => ModelSource::Scratch(description),
            _ => unreachable!("loading refuses a configuration without exactly one of `base_model` and `model`"),
        }
    }

    /// Whether the run begins with the weights of `base_model`, which holds those that it does not train.
    pub(crate) fn begins_with_base(&self) -> bool {
        self.base_model.is_some() && !self.reinit_weights
    }

    /// The configured tokenizer, or that of the base model.
    ///
    /// # Panics
    /// Never on a loaded configuration, which has a `tokenizer` if it has a `model`.
    pub fn tokenizer_source(&self) -> Tokenizer {
        match (&self.tokenizer, &self.base_model) {
            (Some(tokenizer), _) => tokenizer.clone(),
            (None, Some(path)) => Tokenizer::Path(path.clone()),
            (None, None) => unreachable!("loading refuses `model` without `tokenizer`"),
        }
    }

    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        match (&self.base_model, &self.model) {
            (Some(_), Some(_)) => Err(ConfigError::Conflict {
                first: "base_model".into(),
                second: "model".into(),
                why: "the first starts from existing weights, the second from random ones; keep one".into(),
            }),
            (None, None) => Err(ConfigError::Missing {
                key: "base_model".into(),
                why: "set a Hugging Face directory, or describe a new model under `model`".into(),
            }),
            (None, Some(_)) if self.reinit_weights => Err(ConfigError::Conflict {
                first: "reinit_weights".into(),
                second: "model".into(),
                why: "a new model has random weights anyway; remove the first".into(),
            }),
            (None, Some(_)) if self.tokenizer.is_none() => Err(ConfigError::Missing {
                key: "tokenizer".into(),
                why: "a new `model` has none; set `tokenizer: bytes` or a directory with tokenizer.json".into(),
            }),
            _ => Ok(()),
        }
    }
}

impl Setting for ModelDescription {
    fn fits() -> String {
        "a section with the keys of a Hugging Face config.json".into()
    }
    fn read(value: &Value, at: &At<'_>) -> Result<Self, ConfigError> {
        let keys = value.as_mapping().ok_or_else(|| at.mismatch(value, Self::fits()))?;
        let mut errors = Errors::default();
        errors.keep(at.refuse_unknown(keys, &phalanx_strategies::model::keys()));
        if keys.get("model_type").and_then(Value::as_str).is_none() {
            let why = "it selects the model family, for example `model_type: llama`";
            errors.keep::<()>(Err(ConfigError::Missing { key: format!("{at}.model_type").into(), why: why.into() }));
        }
        let mut description = serde_json::Map::new();
        for (key, value) in keys {
            let name = key.as_str().unwrap_or_default();
            let json = as_json(value).ok_or_else(|| {
                at.key(name)
                    .mismatch(value, "a value that JSON can represent, whole numbers with at most 64 bits".into())
            });
            errors.keep(json).map(|json| description.insert(name.to_owned(), json));
        }
        errors.end(Self(description))
    }
    fn write(&self) -> Value {
        serde_yaml_ng::to_value(&self.0).unwrap_or_else(|_| Value::Mapping(Mapping::new()))
    }
}

/// The value as JSON, with the numbers and truth values of YAML 1.1; `None` for tags, keys that are not strings, numbers that JSON cannot represent, and whole
/// numbers beyond 64 bits.
pub(super) fn as_json(value: &Value) -> Option<serde_json::Value> {
    Some(match value {
        Value::Null => serde_json::Value::Null,
        Value::Bool(x) => (*x).into(),
        Value::Number(x) if x.is_u64() => x.as_u64()?.into(),
        Value::Number(x) if x.is_i64() => x.as_i64()?.into(),
        // The parser rounds whole numbers beyond 64 bits to floats; other parsers keep them.
        Value::Number(x) if x.as_f64().is_some_and(is_beyond_64_bits) => return None,
        Value::Number(x) => serde_json::Number::from_f64(x.as_f64()?)?.into(),
        Value::String(x) => match resolved(value) {
            Value::String(_) => x.clone().into(),
            plain => as_json(&plain)?,
        },
        Value::Sequence(items) => items.iter().map(as_json).collect::<Option<Vec<_>>>()?.into(),
        Value::Mapping(keys) => {
            let pairs = keys.iter().map(|(key, value)| Some((key.as_str()?.to_owned(), as_json(value)?)));
            pairs.collect::<Option<serde_json::Map<_, _>>>()?.into()
        }
        Value::Tagged(_) => return None,
    })
}

impl Setting for Tokenizer {
    fn fits() -> String {
        "`bytes` or a path".into()
    }
    fn read(value: &Value, at: &At<'_>) -> Result<Self, ConfigError> {
        match value {
            Value::String(word) if word == "bytes" => Ok(Self::Bytes),
            Value::String(path) if !path.is_empty() => PathBuf::read(value, at).map(Self::Path),
            other => Err(at.mismatch(other, Self::fits())),
        }
    }
    fn write(&self) -> Value {
        match self {
            Self::Bytes => Value::String("bytes".into()),
            Self::Path(path) => path.write(),
        }
    }
}
