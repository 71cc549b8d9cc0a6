//! The tokens that a job adds to its tokenizer, and what that means for its model.

use super::data_plan::{conversations, template_config};
use super::grown_rows::Grown;
use crate::config::JobConfig;
use crate::config::chat_template::ChatTemplateChoice;
use crate::config::datasets::DatasetConfig;
use crate::data::exact_json;
use crate::data::template_sources::{TemplateSources, read_template, template_sources};
use crate::data::token_changes::TokenChanges;
use crate::data::tokenizer::Tokenizer;
use crate::error::JobError;
use serde_json::{Value, json};
use std::collections::BTreeSet;

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
        before_templates: String::new(),
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

/// The tokens that a job adds and that the model has to learn: all but padding.
pub(super) fn new_tokens(config: &JobConfig, tokenizer: &Tokenizer) -> Vec<String> {
    let pad = config.model.special_tokens.roles.get(PAD);
    tokenizer.new_tokens().iter().filter(|token| Some(*token) != pad).cloned().collect()
}

/// What the user may not expect of the tokens.
pub(crate) fn notes(config: &JobConfig, tokenizer: &Tokenizer) -> Vec<String> {
    let more = [
        note_of_padding(config, tokenizer),
        note_of_texts(config),
        note_of_ends(config, tokenizer),
        note_of_date(config, tokenizer),
        note_of_templates(config, tokenizer),
    ];
    let more = more.into_iter().flatten();
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

/// Templates whose texts would depend on the day.
fn note_of_date(config: &JobConfig, tokenizer: &Tokenizer) -> Option<String> {
    let has_date = |template: &String| template.contains("strftime_now");
    templates(config, tokenizer).iter().any(|found| has_date(&found.plain) || found.with_tools.iter().any(has_date)).then(|| {
        "the chat template prints today's date: training takes one fixed date for it (26 Jul 2024), so that every run has the same \
         tokens; `chat` and `serve` print today's"
            .into()
    })
}

/// The chat templates of the job's conversations.
fn templates(config: &JobConfig, tokenizer: &Tokenizer) -> BTreeSet<TemplateSources> {
    let source =
        |entry: &DatasetConfig| template_sources(&template_config(entry, &config.data), tokenizer, &entry.path).ok();
    conversations(config).into_iter().filter_map(source).collect()
}

/// A sentence if the data sets have several chat templates: an exported model has one.
fn note_of_templates(config: &JobConfig, tokenizer: &Tokenizer) -> Option<String> {
    (templates(config, tokenizer).len() > 1).then(|| {
        "the data sets have several chat templates; the exported model has the one of the job or of its tokenizer, in which `chat` and \
         `serve` ask"
            .into()
    })
}

/// The tokenizer that goes with the trained model: it has the templates of all conversations, with the values of the job's variables
/// where whoever asks the model gives no others.
pub(super) fn exported(config: &JobConfig, tokenizer: &Tokenizer) -> Result<Tokenizer, JobError> {
    let is_name = |name: &str| name.chars().all(|c| c == '_' || c.is_ascii_alphanumeric());
    let variables = config.data.chat_template_kwargs.0.iter().filter(|(name, _)| is_name(name));
    let before_templates: String = variables
        .map(|(name, value)| {
            let value = if value.is_null() { "none".to_owned() } else { exact_json::shown(value) };
            format!("{{%- if {name} is not defined %}}{{%- set {name} = {value} %}}{{%- endif %}}")
        })
        .collect();
    let is_own = |trained: &TemplateSources| {
        tokenizer.chat_template() == Some(&trained.plain) && tokenizer.tool_template() == trained.with_tools.as_deref()
    };
    let trained = templates(config, tokenizer);
    let one = trained.first().filter(|one| trained.len() == 1 && !is_own(one));
    let chat_template = one.map(|one| one.plain.clone());
    Ok(tokenizer.changed(&TokenChanges { chat_template, before_templates, ..TokenChanges::default() })?)
}

/// Reserved tokens that mean something from now on, but not to the model.
fn note_of_texts(config: &JobConfig) -> Option<String> {
    let is_frozen = config.adapter.adapter.is_some() && !trains_embedding(config);
    (is_frozen && !config.model.added_tokens_overrides.0.is_empty()).then(|| {
        "adapters leave the rows of the tokens of `added_tokens_overrides` as they are; for a model that learns these tokens, set \
         lora_modules_to_save to [embed_tokens, lm_head], or train without `adapter` if its head is its embedding"
            .into()
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
pub(super) fn adjust(config: &JobConfig, hf_config: &mut Value, tokenizer: &Tokenizer) -> Option<Grown> {
    let m = &config.model;
    set_ids(config, hf_config, tokenizer);
    let asks = !(m.tokens.is_empty() && m.special_tokens.roles.is_empty() && m.special_tokens.additional.is_empty());
    let from = hf_config["vocab_size"].as_u64()? as usize;
    let n_tokens = tokenizer.vocab_size();
    let to = if m.resize_token_embeddings_to_32x { n_tokens.next_multiple_of(ROUND) } else { n_tokens };
    if to <= from || !(asks || m.resize_token_embeddings_to_32x) {
        return None;
    }
    hf_config["vocab_size"] = json!(to);
    Some(Grown { from, to, mean: m.mean_resizing_embeddings })
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
