//! Models that give scores: their `config.json`, as transformers writes that of a classifier of sequences with one label.

use super::architecture::parse_model;
use crate::config::JobConfig;
use crate::data::tokenizer::Tokenizer;
use crate::error::JobError;
use crate::error::plan::PlanError;
use phalanx_storage::hf::source::TensorSource;
use phalanx_strategies::model::{ModelConfig, Output, SCORE};
use phalanx_strategies::objective::Objective;
use serde_json::{Value, json};
use std::path::Path;

/// The head of such a model, which is always trained whole.
pub(super) const MODULE: &str = "score";

/// Makes the description of a model that of one that gives scores, if the job trains one.
///
/// # Errors
/// When the model gives scores and the job is about texts, or its files lack the head that their description promises.
pub(super) fn adjust(
    config: &JobConfig,
    hf_config: &mut Value,
    weights: Option<&Path>,
    tokenizer: &Tokenizer,
    origin: &str,
) -> Result<(), JobError> {
    let base = parse_model(hf_config, origin)?;
    let objective = config.objective();
    if !objective.has_scores() {
        return check(&objective, &base, origin);
    }
    if let (Output::Score, Some(dir)) = (base.output, weights) {
        TensorSource::open(dir)?.check_shape(SCORE, &[1, base.hidden_size])?;
    }
    set(hf_config, &base);
    let pad = tokenizer.padding(base.vocab_size);
    hf_config["pad_token_id"] = json!(pad.unwrap_or(0));
    Ok(())
}

/// Makes the description of a model that of one that gives scores.
pub(super) fn set(hf_config: &mut Value, model: &ModelConfig) {
    hf_config["architectures"] = json!([model.family.classifier()]);
    hf_config["id2label"] = json!({ "0": "LABEL_0" });
    hf_config["label2id"] = json!({ "LABEL_0": 0 });
    if let Some(keys) = hf_config.as_object_mut() {
        keys.remove("num_labels");
    }
}

/// Checks that a model gives what an objective needs; `path` names it.
///
/// # Errors
/// When it does not.
pub(crate) fn check(objective: &Objective, model: &ModelConfig, path: &str) -> Result<(), JobError> {
    match (objective.has_scores(), model.output) {
        (true, Output::Logits) => Err(PlanError::NoScores { path: path.into() }.into()),
        (false, Output::Score) => Err(PlanError::OnlyScores { path: path.into() }.into()),
        _ => Ok(()),
    }
}
