//! Tokens that only the files beside `tokenizer.json` add, with the ids that transformers gives them.
//!
//! `tokenizer_config.json` lists tokens in `added_tokens_decoder`, names some as roles and more as `additional_special_tokens`;
//! older tokenizers have `special_tokens_map.json` and `added_tokens.json` instead. transformers adds whatever of them
//! `tokenizer.json` lacks, in this order, with the next ids: the ids in the lists are not looked at. Here they are written into
//! `tokenizer.json`, so that every reader of an export has them too.
//!
//! Source: transformers 5.24, `PreTrainedTokenizerBase._from_pretrained` and `TokenizersBackend.__init__`.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};
use tokenizers::AddedToken;

use super::tokenizer::TokenizerError;
use super::tokenizer_files::{ADDED, CONFIG, SPECIAL, TOKENIZER, TokenizerFiles, invalid};

/// The roles of tokens, in the order in which transformers adds them.
const ROLES: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Writes the missing tokens into `tokenizer.json`; returns their texts and ids.
///
/// # Errors
/// When a file is malformed.
pub(super) fn merge(files: &mut TokenizerFiles) -> Result<Vec<(String, u32)>, TokenizerError> {
    let mut tokenizer = files.json(TOKENIZER)?.unwrap_or_default();
    let config = files.json(CONFIG)?.unwrap_or_default();
    let special = files.json(SPECIAL)?.unwrap_or_default();
    let added = files.json(ADDED)?.unwrap_or_default();
    files.remove(ADDED);
    let known: BTreeMap<String, AddedToken> = added_tokens(&tokenizer)
        .filter_map(|token| Some((token["content"].as_str()?.to_owned(), described(token, false)?)))
        .collect();
    let wanted = wanted(&tokenizer, &config, &special, &added, &known);
    if wanted.iter().all(|token| known.get(&token.content) == Some(token)) {
        return Ok(Vec::new());
    }
    let path = files.path(TOKENIZER);
    let mut library: tokenizers::Tokenizer =
        tokenizers::Tokenizer::from_bytes(tokenizer.to_string()).map_err(|error| invalid(&path, &*error))?;
    library.add_tokens(&wanted);
    set_added(&mut tokenizer, &library);
    files.put(TOKENIZER, format!("{tokenizer:#}\n").into_bytes());
    list_in_config(files, &tokenizer)?;
    let new = wanted.iter().filter(|token| !known.contains_key(&token.content));
    Ok(new.filter_map(|token| Some((token.content.clone(), library.token_to_id(&token.content)?))).collect())
}

/// The tokens that the files beside `tokenizer.json` add.
fn wanted(
    tokenizer: &Value,
    config: &Value,
    special: &Value,
    added: &Value,
    known: &BTreeMap<String, AddedToken>,
) -> Vec<AddedToken> {
    let listed = config["added_tokens_decoder"].as_object();
    // With such a list, transformers reads neither of the older files.
    let sources: Vec<&Value> = if listed.is_some() { vec![config] } else { vec![special, config] };
    let role = |role: &str| sources.iter().find_map(|source| source.get(role)).and_then(|token| described(token, true));
    let roles: Vec<AddedToken> = ROLES.iter().filter_map(|name| role(name)).chain(own_roles(config)).collect();
    let extra: Vec<AddedToken> = sources.iter().rev().flat_map(|source| extra(source)).collect();
    let named: BTreeSet<&str> = roles.iter().map(|token| token.content.as_str()).collect();
    let mut wanted: Vec<AddedToken> = match listed {
        Some(listed) => {
            let by_id: BTreeMap<u64, &Value> =
                listed.iter().filter_map(|(id, token)| Some((id.parse().ok()?, token))).collect();
            by_id.into_values().filter_map(|token| described(token, false)).collect()
        }
        None => {
            of_added(added, tokenizer, &|text| named.contains(text) || extra.iter().any(|token| token.content == text))
        }
    };
    wanted.retain(|token| listed.is_some() || !known.contains_key(&token.content));
    for token in &mut wanted {
        let was_special = known.get(&token.content).is_some_and(|known| known.special);
        token.special |= was_special || named.contains(token.content.as_str());
    }
    for token in roles.into_iter().chain(extra) {
        if !known.contains_key(&token.content) && !wanted.iter().any(|other| other.content == token.content) {
            wanted.push(token);
        }
    }
    wanted
}

/// The tokens of `added_tokens.json`, by id; those whose ids `tokenizer.json` has given away are not added.
fn of_added(added: &Value, tokenizer: &Value, is_special: &dyn Fn(&str) -> bool) -> Vec<AddedToken> {
    let taken: BTreeSet<u64> = added_tokens(tokenizer).filter_map(|token| token["id"].as_u64()).collect();
    let by_id: BTreeMap<u64, &String> =
        added.as_object().into_iter().flatten().filter_map(|(text, id)| Some((id.as_u64()?, text))).collect();
    let free = by_id.into_iter().filter(|(id, text)| !taken.contains(id) && !text.is_empty());
    free.map(|(_, text)| AddedToken::from(text.as_str(), is_special(text))).collect()
}

/// Roles that only this model has, such as `image_token`.
fn own_roles(config: &Value) -> impl Iterator<Item = AddedToken> {
    let keys = config.as_object().into_iter().flatten();
    let own =
        keys.filter(|(key, value)| key.ends_with("_token") && !ROLES.contains(&key.as_str()) && value.is_string());
    let named = config["extra_special_tokens"].as_object().into_iter().flatten();
    own.chain(named).filter_map(|(_, token)| described(token, true))
}

/// Special tokens without a role.
fn extra(source: &Value) -> Vec<AddedToken> {
    let list = |key: &str| source[key].as_array().filter(|list| !list.is_empty());
    let list = list("extra_special_tokens").or_else(|| list("additional_special_tokens"));
    list.into_iter().flatten().filter_map(|token| described(token, true)).collect()
}

/// A token that a file gives as its text or as an object; `None` for anything else.
fn described(token: &Value, is_special: bool) -> Option<AddedToken> {
    let flag = |key: &str| token[key].as_bool();
    let found = match token {
        Value::String(text) => AddedToken::from(text.as_str(), is_special),
        token => {
            let special = flag("special").unwrap_or(is_special);
            let plain = AddedToken::from(token["content"].as_str()?, special);
            AddedToken {
                single_word: flag("single_word").unwrap_or(false),
                lstrip: flag("lstrip").unwrap_or(false),
                rstrip: flag("rstrip").unwrap_or(false),
                normalized: flag("normalized").unwrap_or(plain.normalized),
                ..plain
            }
        }
    };
    (!found.content.is_empty()).then_some(found)
}

fn added_tokens(tokenizer: &Value) -> impl Iterator<Item = &Value> {
    tokenizer["added_tokens"].as_array().into_iter().flatten()
}

/// Writes the added tokens of the library into a `tokenizer.json`.
fn set_added(tokenizer: &mut Value, library: &tokenizers::Tokenizer) {
    let by_id: BTreeMap<u32, AddedToken> = library.get_added_tokens_decoder().into_iter().collect();
    let tokens = by_id.iter().map(|(id, token)| {
        json!({ "id": id, "content": token.content, "single_word": token.single_word, "lstrip": token.lstrip,
                "rstrip": token.rstrip, "normalized": token.normalized, "special": token.special })
    });
    tokenizer["added_tokens"] = tokens.collect();
}

/// Brings the list of `tokenizer_config.json`, if it has one, into agreement with a changed `tokenizer.json`: some classes of
/// transformers read the list instead.
///
/// # Errors
/// When the file is malformed.
pub(super) fn list_in_config(files: &mut TokenizerFiles, tokenizer: &Value) -> Result<(), TokenizerError> {
    let Some(mut config) = files.json(CONFIG)? else { return Ok(()) };
    if !config["added_tokens_decoder"].is_object() {
        return Ok(());
    }
    let entry = |token: &Value| {
        let mut token = token.as_object()?.clone();
        let id = token.remove("id")?;
        Some((id.to_string(), Value::Object(token)))
    };
    let list: Map<String, Value> = added_tokens(tokenizer).filter_map(entry).collect();
    config["added_tokens_decoder"] = Value::Object(list);
    files.put(CONFIG, format!("{config:#}\n").into_bytes());
    Ok(())
}

#[cfg(test)]
#[path = "side_tokens_tests.rs"]
mod tests;
