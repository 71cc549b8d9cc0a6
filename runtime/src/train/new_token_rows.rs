//! Whether a job trains the rows of the tokens that it adds.
//!
//! A row that was there as padding, or that begins as the mean of the others, tells the model nothing about its token, and a frozen
//! head never writes it. Axolotl asks for both modules beside adapters, and so do the documents of PEFT.

use super::architecture::{Architecture, smallest};
use super::grown_rows::Grown;
use crate::error::JobError;
use crate::error::plan::PlanError;
use phalanx_strategies::passes::lora::LoraSpec;
use std::collections::BTreeSet;

/// Ends of the names of parameters with a row for each token.
const OF_TOKENS: [&str; 3] = ["embed_tokens.weight", "wte.weight", "lm_head.weight"];

/// Refuses new tokens whose rows stay as they are, and other new rows of a frozen embedding. `trained` is the tensors that are
/// trained without adapters, unless all are.
///
/// # Errors
/// When such a row is frozen.
pub(super) fn check(
    (tokens, grown): (&[String], Option<Grown>),
    model: &Architecture,
    lora: Option<&LoraSpec>,
    trained: Option<&BTreeSet<String>>,
) -> Result<(), JobError> {
    if (tokens.is_empty() && grown.is_none()) || (lora.is_none() && trained.is_none()) {
        return Ok(());
    }
    let is_frozen = |name: &str| match (lora, trained) {
        (Some(lora), _) => {
            let path = module(name);
            let is_named = |end: &String| path == end || path.ends_with(&format!(".{end}"));
            !lora.modules_to_save.iter().chain(&lora.target_modules).any(is_named)
        }
        (None, Some(trained)) => !trained.contains(name),
        (None, None) => false,
    };
    let params = smallest(model)?.params;
    let names = params.iter().flat_map(|param| &param.parts).map(|part| part.name.as_str());
    let of_tokens: Vec<&str> = names.filter(|name| OF_TOKENS.iter().any(|end| name.ends_with(end))).collect();
    let frozen: Vec<&str> = of_tokens.iter().copied().filter(|name| is_frozen(name)).map(module).collect();
    let embedding_is_frozen = frozen.iter().any(|name| !name.ends_with(HEAD));
    if frozen.is_empty() || (tokens.is_empty() && !(embedding_is_frozen && lora.is_some())) {
        return Ok(());
    }
    let way_out = match lora {
        Some(_) if of_tokens.iter().any(|name| module(name).ends_with(HEAD)) => {
            let modules: Vec<&str> = of_tokens.iter().filter_map(|name| module(name).rsplit('.').next()).collect();
            format!("set lora_modules_to_save to [{}]", modules.join(", "))
        }
        Some(_) => {
            "train without `adapter`, since the embedding of this model is also its head, which adapters leave as it is"
                .into()
        }
        None => "add them to trained_parameters".into(),
    };
    match grown.filter(|_| tokens.is_empty()) {
        Some(grown) => Err(PlanError::FrozenEmbedding { n_new: grown.to - grown.from, way_out }.into()),
        None => {
            let (tokens, modules) = (tokens.join(", "), frozen.join(" and "));
            Err(PlanError::UntrainedTokens { tokens, modules, way_out }.into())
        }
    }
}

const HEAD: &str = "lm_head";

fn module(parameter: &str) -> &str {
    parameter.trim_end_matches(".weight")
}
