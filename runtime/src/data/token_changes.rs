//! Changes of a tokenizer that a job asks for: new tokens, tokens with a role, other texts for reserved tokens, a chat template.
//!
//! The changes are made in the tokenizer's files, so that what is exported is what was trained with. A tokenizer whose changes
//! ask for what it has already keeps its files byte for byte.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};
use tokenizers::AddedToken;

use super::side_tokens;
use super::tokenizer_error::TokenizerError;
use super::tokenizer_files::{CONFIG, SPECIAL, TEMPLATE, TOKENIZER, TokenizerFiles, invalid};

/// What to change.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TokenChanges {
    /// The token of each role: `bos_token`, `eos_token`, `pad_token`, …
    pub roles: BTreeMap<&'static str, String>,
    /// Special tokens without a role.
    pub additional: Vec<String>,
    /// Tokens that are not special.
    pub tokens: Vec<String>,
    /// Other texts for tokens that were added to the vocabulary, by id.
    pub texts: BTreeMap<u32, String>,
    /// The chat template, in place of all that the tokenizer has.
    pub chat_template: Option<String>,
    /// Statements in front of each chat template.
    pub before_templates: String,
}

impl TokenChanges {
    /// Whether nothing is asked for.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The texts of all tokens that are asked for.
    pub(super) fn texts_of_tokens(&self) -> impl Iterator<Item = &String> {
        self.roles.values().chain(&self.additional).chain(&self.tokens)
    }

    /// Makes the changes in the files.
    pub(super) fn apply(&self, files: &mut TokenizerFiles) -> Result<(), TokenizerError> {
        let mut tokenizer = files.json(TOKENIZER)?.unwrap_or_default();
        let mut config = files.json(CONFIG)?.unwrap_or_else(|| json!({}));
        let mut special = files.json(SPECIAL)?;
        let before = (tokenizer.clone(), config.clone(), special.clone());
        for (id, text) in &self.texts {
            let old = rename(&mut tokenizer, *id, text, &files.path(TOKENIZER))?;
            for named in std::iter::once(&mut config).chain(&mut special) {
                replace_text(named, &old, text);
            }
        }
        self.add(&mut tokenizer, &files.path(TOKENIZER))?;
        self.set_roles(&mut tokenizer, &mut config, special.as_mut());
        if let Some(template) = &self.chat_template {
            files.remove(TEMPLATE);
            config["chat_template"] = template.as_str().into();
        }
        if !self.before_templates.is_empty() {
            if let Some(template) = files.text(TEMPLATE)? {
                files.remove(TEMPLATE);
                config["chat_template"] = template.into();
            }
            put_before(&self.before_templates, &mut config["chat_template"]);
        }
        let has_other_tokens = tokenizer["added_tokens"] != before.0["added_tokens"];
        for (name, old, new) in [
            (TOKENIZER, Some(before.0), Some(tokenizer.clone())),
            (CONFIG, Some(before.1), Some(config)),
            (SPECIAL, before.2, special),
        ] {
            if let Some(new) = new.filter(|new| Some(new) != old.as_ref()) {
                files.put(name, &new);
            }
        }
        if has_other_tokens {
            side_tokens::list_in_config(files, &tokenizer)?;
        }
        Ok(())
    }

    /// Adds the tokens that the vocabulary does not have, with the next ids, as the library and transformers do.
    fn add(&self, tokenizer: &mut Value, path: &Path) -> Result<(), TokenizerError> {
        let refused = |error: tokenizers::Error| invalid(path, &*error);
        let mut library: tokenizers::Tokenizer =
            tokenizers::Tokenizer::from_bytes(tokenizer.to_string()).map_err(refused)?;
        let is_added = |text: &str| library.get_added_vocabulary().get_vocab().contains_key(text);
        let roles = self.roles.values().chain(&self.additional);
        let special: Vec<AddedToken> =
            roles.filter(|text| !is_added(text)).map(|text| AddedToken::from(text.as_str(), true)).collect();
        let plain = self.tokens.iter().filter(|text| library.token_to_id(text).is_none());
        let plain: Vec<AddedToken> =
            plain.map(|text| AddedToken::from(text.as_str(), false).normalized(false)).collect();
        if special.is_empty() && plain.is_empty() {
            return Ok(());
        }
        library.add_special_tokens(&special);
        library.add_tokens(&plain);
        let text = library.to_string(false).map_err(refused)?;
        *tokenizer = serde_json::from_str(&text).map_err(|error| invalid(path, &error))?;
        Ok(())
    }

    fn set_roles(&self, tokenizer: &mut Value, config: &mut Value, mut special: Option<&mut Value>) {
        for (role, text) in &self.roles {
            let content = |value: &Value| value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned);
            let old = content(&config[*role]).or_else(|| content(special.as_deref()?.get(*role)?));
            if let Some(old) = old.filter(|old| old != text) {
                replace_in_processor(tokenizer, &old, text);
            }
            config[*role] = text.as_str().into();
            if let Some(special) = special.as_deref_mut() {
                special[*role] = text.as_str().into();
            }
        }
        if !self.additional.is_empty() {
            for named in std::iter::once(config).chain(special) {
                let list =
                    named.as_object_mut().map(|keys| keys.entry("additional_special_tokens").or_insert(json!([])));
                let Some(list) = list.and_then(Value::as_array_mut) else { continue };
                list.extend(self.additional.iter().map(|text| text.as_str().into()));
                let mut seen = Vec::new();
                list.retain(|token| {
                    !seen.contains(token) && {
                        seen.push(token.clone());
                        true
                    }
                });
            }
        }
    }
}

/// Puts statements in front of a template, or of each in a list.
fn put_before(statements: &str, templates: &mut Value) {
    match templates {
        Value::String(template) => {
            // The line break after a block is none of the text.
            let between = if template.starts_with('\n') { "\n" } else { "" };
            *template = format!("{statements}{between}{template}");
        }
        Value::Array(named) => {
            named.iter_mut().filter_map(|entry| entry.get_mut("template")).for_each(|one| put_before(statements, one));
        }
        _ => {}
    }
}

/// Gives the added token `id` another text; returns the text that it had.
fn rename(tokenizer: &mut Value, id: u32, text: &str, path: &Path) -> Result<String, TokenizerError> {
    let fault = |reason: String| TokenizerError::Invalid { path: path.to_owned(), reason };
    let is_taken = |token: &Value| token["content"] == text && token["id"] != id;
    let added = tokenizer["added_tokens"].as_array_mut().ok_or_else(|| fault("it has no added_tokens".into()))?;
    if added.iter().any(is_taken) {
        return Err(fault(format!("added_tokens_overrides gives id {id} the text {text:?}, which another token has")));
    }
    let token = added
        .iter_mut()
        .find(|token| token["id"] == id)
        .ok_or_else(|| fault(format!("added_tokens_overrides names id {id}, which is none of its added tokens")))?;
    let old = token["content"].as_str().unwrap_or_default().to_owned();
    token["content"] = text.into();
    if let Some(vocabulary) = tokenizer["model"]["vocab"].as_object_mut()
        && let Some(number) = vocabulary.remove(&old)
    {
        vocabulary.insert(text.to_owned(), number);
    }
    replace_in_processor(tokenizer, &old, text);
    Ok(old)
}

/// The rule for the tokens around a text names them by text and id.
fn replace_in_processor(tokenizer: &mut Value, old: &str, new: &str) {
    let id = tokenizer["added_tokens"].as_array().into_iter().flatten().find(|token| token["content"] == new);
    let Some(id) = id.map(|token| token["id"].clone()) else { return };
    let Some(outer) = tokenizer.get_mut("post_processor") else { return };
    let list = match outer["processors"].is_array() {
        true => outer["processors"].as_array_mut().into_iter().flatten().collect(),
        false => vec![outer],
    };
    for processor in list.into_iter().filter(|processor| processor["type"] == "TemplateProcessing") {
        let Some(named) = processor["special_tokens"].as_object_mut() else { continue };
        if named.remove(old).is_none() {
            continue;
        }
        named.insert(new.to_owned(), json!({ "id": new, "ids": [id], "tokens": [new] }));
        for piece in ["single", "pair"] {
            for part in processor[piece].as_array_mut().into_iter().flatten() {
                if let Some(token) = part.get_mut("SpecialToken").filter(|token| token["id"] == old) {
                    token["id"] = new.into();
                }
            }
        }
    }
}

/// Replaces a token's text wherever a file of roles names it.
fn replace_text(value: &mut Value, old: &str, new: &str) {
    match value {
        Value::String(text) if text == old => *value = new.into(),
        Value::Array(items) => items.iter_mut().for_each(|item| replace_text(item, old, new)),
        Value::Object(keys) => keys
            .iter_mut()
            .filter(|(key, _)| *key != "chat_template")
            .for_each(|(_, item)| replace_text(item, old, new)),
        _ => {}
    }
}

#[cfg(test)]
#[path = "token_changes_tests.rs"]
mod tests;
