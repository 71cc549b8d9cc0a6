//! Whether a job trains the rows of the tokens that it adds.
//!
//! A row that was there as padding, or that begins as the mean of the others, tells the model nothing about its token, and a frozen
//! head never writes it. Axolotl asks for both modules beside adapters, and so do the documents of PEFT.

use super::architecture::Architecture;
use super::plan::smallest;
use crate::error::JobError;
use crate::error::plan::PlanError;
use phalanx_strategies::passes::lora::LoraSpec;
use std::collections::BTreeSet;

/// Ends of the names of parameters with a row for each token.
const OF_TOKENS: [&str; 3] = ["embed_tokens.weight", "wte.weight", "lm_head.weight"];

/// Refuses tokens whose rows stay as they are. `trained` is the tensors that are trained without adapters, unless all are.
///
/// # Errors
/// When a row of such a token is frozen.
pub(super) fn check(
    tokens: &[String],
    model: &Architecture,
    lora: Option<&LoraSpec>,
    trained: Option<&BTreeSet<String>>,
) -> Result<(), JobError> {
    if tokens.is_empty() || (lora.is_none() && trained.is_none()) {
        return Ok(());
    }
    let is_frozen = |name: &str| match (lora, trained) {
        (Some(lora), _) => {
            let module = name.trim_end_matches(".weight");
            let is_named = |end: &String| module == end || module.ends_with(&format!(".{end}"));
            !lora.modules_to_save.iter().chain(&lora.target_modules).any(is_named)
        }
        (None, Some(trained)) => !trained.contains(name),
        (None, None) => false,
    };
    let params = smallest(model)?.params;
    let names = params.iter().flat_map(|param| &param.parts).map(|part| part.name.as_str());
    let frozen: Vec<String> = names
        .filter(|name| OF_TOKENS.iter().any(|end| name.ends_with(end)) && is_frozen(name))
        .map(|name| name.trim_end_matches(".weight").to_owned())
        .collect();
    if frozen.is_empty() {
        return Ok(());
    }
    let way_out = match lora {
        Some(_) => "set lora_modules_to_save to [embed_tokens, lm_head]",
        None => "add them to trained_parameters",
    };
    let (tokens, modules) = (tokens.join(", "), frozen.join(" and "));
    Err(PlanError::UntrainedTokens { tokens, modules, way_out }.into())
}
