//! The computation of a model: one of the supported families, or the user's own operation.

use super::quantised::check_unquantised;
use crate::error::JobError;
use crate::error::plan::PlanError;
use crate::frontend::user_model::{MODEL_TYPE, UserModel, UserTable};
use phalanx_device::{OpaqueModel, ThreadError};
use phalanx_strategies::model::{BatchShape, Head, HfConfig, ModelConfig, ModelError};
use phalanx_strategies::objective::Objective;
use phalanx_strategies::program::Program;
use serde_json::Value;
use std::sync::Arc;

/// The computation of a model.
#[derive(Clone, Debug)]
pub enum Architecture {
    /// A model of a known family.
    Known(ModelConfig),
    /// A model that the user wrote; its table is all that a program needs.
    User(User),
}

/// A user-defined model.
#[derive(Clone, Debug)]
pub struct User {
    pub(crate) table: UserTable,
    /// The model itself, in a program that contains it.
    pub(crate) model: Option<Arc<UserModel>>,
}

impl Architecture {
    /// Parses the `config.json` of a checkpoint; errors name `origin`.
    pub(crate) fn parse(config: &Value, origin: &str) -> Result<Architecture, JobError> {
        if is_user_defined(config) {
            let table = serde_json::from_value(config.clone());
            let table: UserTable = table.map_err(|source| PlanError::Description { origin: origin.into(), source })?;
            if table.vocab_size == 0 {
                return Err(PlanError::NoTokens { origin: origin.into() }.into());
            }
            return Ok(Architecture::User(User { table, model: None }));
        }
        Ok(Architecture::Known(parse_model(config, origin)?))
    }

    /// The forward program of one microbatch; a user-defined model always ends at its loss, regardless of `head`.
    pub(crate) fn forward(&self, batch: BatchShape, head: Head) -> Result<Program, ModelError> {
        match self {
            Architecture::Known(model) => model.forward(batch, head),
            Architecture::User(user) => Ok(user.table.forward(batch)),
        }
    }

    /// One microbatch up to the loss of an objective. A user-defined model has its own.
    pub(crate) fn minimised(&self, objective: &Objective, batch: BatchShape) -> Result<Program, ModelError> {
        match self {
            Architecture::Known(model) => objective.program(model, batch),
            Architecture::User(user) => Ok(user.table.forward(batch)),
        }
    }

    pub(crate) const fn vocab_size(&self) -> usize {
        match self {
            Architecture::Known(model) => model.vocab_size,
            Architecture::User(user) => user.table.vocab_size,
        }
    }

    /// The model's configuration, if it is of a known family.
    pub(crate) const fn known(&self) -> Option<&ModelConfig> {
        match self {
            Architecture::Known(model) => Some(model),
            Architecture::User(_) => None,
        }
    }

    /// The user-defined model, if it is one and this program contains it.
    pub(crate) fn user(&self) -> Option<&UserModel> {
        match self {
            Architecture::Known(_) => None,
            Architecture::User(user) => user.model.as_deref(),
        }
    }

    /// The opaque operations of a rank's programs, to be created on its device thread.
    ///
    /// # Errors
    /// When the system cannot start a thread for an operation.
    pub(crate) fn operations(&self, batch: BatchShape) -> Result<Vec<Box<dyn OpaqueModel>>, ThreadError> {
        self.user().into_iter().map(|user| user.start(batch)).collect()
    }
}

/// Whether a description is of a user-defined model.
pub(crate) fn is_user_defined(description: &Value) -> bool {
    description.get("model_type").and_then(Value::as_str) == Some(MODEL_TYPE)
}

/// Parses a model configuration.
///
/// # Errors
/// When the model is not supported; the error names `origin`.
pub fn parse_model(hf_config: &Value, origin: &str) -> Result<ModelConfig, JobError> {
    check_unquantised(hf_config, origin)?;
    let parsed: HfConfig = serde_json::from_value(hf_config.clone())
        .map_err(|source| PlanError::Description { origin: origin.into(), source })?;
    ModelConfig::try_from(&parsed).map_err(|source| JobError::Model { path: origin.into(), source })
}

/// The model on the smallest batch, for what does not depend on the batch.
pub(super) fn smallest(model: &Architecture) -> Result<Program, JobError> {
    let forward = model.forward(BatchShape { n_rows: 1, seq_len: 2 }, Head::Loss);
    forward.map_err(|source| JobError::Model { path: "model".into(), source })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// transformers assumes 8 for Mistral and 32 for Qwen.
    #[test]
    fn described_model_is_exported_with_its_number_of_key_value_heads() {
        for (family, expected) in
            [("mistral", json!(4)), ("qwen2", json!(4)), ("qwen3", json!(4)), ("gpt2", Value::Null)]
        {
            let keys = match family {
                "gpt2" => "n_embd: 32, n_layer: 1, n_head: 4",
                _ => "hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 4",
            };
            let text = format!(
                "model: {{model_type: {family}, {keys}}}\ntokenizer: bytes\ndatasets: [{{path: a, type: completion}}]\nmax_steps: 1\n"
            );
            let job = crate::config::JobConfig::from_yaml_str(&text, &[]).unwrap();
            let tokenizer = crate::train::plan::tokenizer(&job).unwrap();
            let plan =
                crate::train::plan::model_plan_on(&job, &tokenizer, || Ok((crate::devices::host(), None))).unwrap();

            assert_eq!(plan.hf_config["num_key_value_heads"], expected, "{family}");
        }
    }

    #[test]
    fn user_defined_model_without_a_vocabulary_is_refused() {
        let table = |n: usize| json!({"model_type": MODEL_TYPE, "vocab_size": n, "tensors": []});

        let refused = Architecture::parse(&table(0), "config.json").unwrap_err();

        assert_eq!(refused.to_string(), "config.json: vocab_size is 0; a model has at least one token");
        assert_eq!(Architecture::parse(&table(7), "config.json").unwrap().vocab_size(), 7);
    }
}
