//! The tokens that a job adds to its tokenizer, and what that means for its model.

use super::grown_rows::Grown;
use crate::config::JobConfig;
use crate::config::chat_template::ChatTemplateChoice;
use crate::data::prepare::read_template;
use crate::data::token_changes::TokenChanges;
use crate::data::tokenizer::Tokenizer;
use crate::error::JobError;
use crate::error::plan::PlanError;
use serde_json::{Value, json};

/// A vocabulary of such a size suits the matrix units of GPUs.
const ROUND: usize = 32;

/// The tokenizer of a job: that of its model, with the tokens, roles and chat template of the configuration.
pub(super) fn changed(config: &JobConfig, base: &Tokenizer) -> Result<Tokenizer, JobError> {
    Ok(base.changed(&changes(config, base)?)?)
}

fn changes(config: &JobConfig, base: &Tokenizer) -> Result<TokenChanges, JobError> {
    let m = &config.model;
    let mut roles = m.special_tokens.roles.clone();
    if roles.get(PAD).is_some_and(|pad| !may_grow(config) && base.token_id(pad).is_none()) {
        roles.remove(PAD);
    }
    let chat_template = match (config.data.chat_template, &config.data.chat_template_jinja) {
        (ChatTemplateChoice::Named(template), None) => Some(template.source().to_owned()),
        (ChatTemplateChoice::Fallback(template), None) if base.chat_template().is_none() => {
            Some(template.source().to_owned())
        }
        (ChatTemplateChoice::Jinja | ChatTemplateChoice::TokenizerDefault, Some(template)) => {
            Some(read_template(template)?)
        }
        // `prepare` refuses what contradicts itself.
        _ => None,
    };
    Ok(TokenChanges {
        roles,
        additional: m.special_tokens.additional.clone(),
        tokens: m.tokens.clone(),
        texts: m.added_tokens_overrides.0.clone(),
        chat_template: chat_template.filter(|template| base.chat_template() != Some(template)),
    })
}

const PAD: &str = "pad_token";

/// Adapters do not change the embedding, unless it is trained whole beside them.
fn may_grow(config: &JobConfig) -> bool {
    config.adapter.adapter.is_none() || trains_embedding(config)
}

fn trains_embedding(config: &JobConfig) -> bool {
    let is_embedding = |name: &String| name.ends_with("embed_tokens") || name.ends_with("wte");
    config.adapter.lora_modules_to_save.iter().any(is_embedding)
}

/// What the user may not expect of the tokens.
pub(crate) fn notes(config: &JobConfig, tokenizer: &Tokenizer) -> Vec<String> {
    let more = note_of_padding(config, tokenizer).into_iter().chain(note_of_ends(config, tokenizer));
    tokenizer.notes().iter().cloned().chain(more).collect()
}

/// Ends of turns that no token spells: models write them in pieces, and whoever generates cannot stop at one.
fn note_of_ends(config: &JobConfig, tokenizer: &Tokenizer) -> Option<String> {
    let is_none = |text: &&String| tokenizer.token_id(text).is_none();
    let texts: Vec<&str> = config.data.eot_tokens.iter().filter(is_none).map(String::as_str).collect();
    (!texts.is_empty()).then(|| {
        format!(
            "eot_tokens has {}, which the vocabulary has no token for; add it under `tokens`, or correct it",
            texts.join(", ")
        )
    })
}

fn note_of_padding(config: &JobConfig, tokenizer: &Tokenizer) -> Option<String> {
    let pad = config.model.special_tokens.roles.get(PAD)?;
    tokenizer.token_id(pad).is_none().then(|| {
        format!(
            "the vocabulary has no {pad}, and adapters do not change it: another token pads batches, which is neither \
             attended to nor predicted"
        )
    })
}

/// Writes the vocabulary of the job into the model's `config.json`: its size, if the job adds tokens that have no row yet, and the
/// ids of the roles that the job sets.
///
/// # Errors
/// When adapters leave the embedding as it is, but the tokens need new rows.
pub(super) fn adjust(
    config: &JobConfig,
    hf_config: &mut Value,
    tokenizer: &Tokenizer,
) -> Result<Option<Grown>, JobError> {
    let m = &config.model;
    set_ids(config, hf_config, tokenizer);
    let asks = !(m.tokens.is_empty() && m.special_tokens.roles.is_empty() && m.special_tokens.additional.is_empty());
    let Some(from) = hf_config["vocab_size"].as_u64().map(|size| size as usize) else { return Ok(None) };
    let n_tokens = tokenizer.vocab_size();
    let to = if m.resize_token_embeddings_to_32x { n_tokens.next_multiple_of(ROUND) } else { n_tokens };
    if to <= from || !(asks || m.resize_token_embeddings_to_32x) {
        return Ok(None);
    }
    if !may_grow(config) {
        return Err(PlanError::FrozenEmbedding { n_new: to - from }.into());
    }
    hf_config["vocab_size"] = json!(to);
    Ok(Some(Grown { from, to, mean: m.mean_resizing_embeddings }))
}

/// Sets the ids of the roles that the job sets in a `config.json` or `generation_config.json`.
pub(super) fn set_ids(config: &JobConfig, json: &mut Value, tokenizer: &Tokenizer) {
    let ids = [("bos_token", tokenizer.bos_id()), ("eos_token", tokenizer.eos_id()), (PAD, tokenizer.pad_id())];
    for (role, id) in ids {
        if let (true, Some(id)) = (config.model.special_tokens.roles.contains_key(role), id) {
            json[format!("{role}_id")] = json!(id);
        }
    }
}

#[cfg(test)]
#[path = "vocabulary_tests.rs"]
mod tests;
