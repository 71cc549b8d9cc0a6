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

use super::tokenizer_error::TokenizerError;
use super::tokenizer_files::{ADDED, CONFIG, SPECIAL, TOKENIZER, TokenizerFiles, invalid};
use super::transformers_class::{TransformersClass, have_same_rules};

/// The roles of tokens, in the order in which transformers adds them.
const ROLES: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Writes the tokens that are missing, and the rules of the class that reads the files, into `tokenizer.json`; returns the texts
/// and ids of the tokens.
///
/// # Errors
/// When a file is malformed.
pub(super) fn merge(
    files: &mut TokenizerFiles,
    class: Option<&TransformersClass>,
) -> Result<Vec<(String, u32)>, TokenizerError> {
    let tokenizer = files.json(TOKENIZER)?.unwrap_or_default();
    let added = files.json(ADDED)?.unwrap_or_default();
    let sources = Sources::of(files)?;
    files.remove(ADDED);
    if let Some(class) = class {
        sources.write_roles(class, files);
    }
    let own: Vec<AddedToken> = by_id(added_tokens(&tokenizer).filter_map(|token| Some((token["id"].as_u64()?, token))));
    let named = sources.named(class);
    // A class that builds its tokenizer from the vocabulary begins without added tokens.
    let of_file: BTreeMap<&str, &AddedToken> = own.iter().map(|token| (token.content.as_str(), token)).collect();
    let known = if class.is_some() { BTreeMap::new() } else { of_file.clone() };
    let wanted = wanted(&tokenizer, &added, &sources, &named, &known, class);
    let rebuilt = class.map(|class| class.rebuilt(&tokenizer, &sources.config, named.text_of("unk_token")));
    let is_complete = match &rebuilt {
        Some(rebuilt) => wanted == own && have_same_rules(&tokenizer, rebuilt),
        None => wanted.is_empty(),
    };
    if is_complete {
        return Ok(Vec::new());
    }
    let mut merged = rebuilt.unwrap_or_else(|| tokenizer.clone());
    let path = files.path(TOKENIZER);
    let mut library: tokenizers::Tokenizer =
        tokenizers::Tokenizer::from_bytes(merged.to_string()).map_err(|error| invalid(&path, &*error))?;
    library.add_tokens(&wanted);
    set_added(&mut merged, &library);
    if let Some(class) = class {
        let bos = named.text_of("bos_token");
        class.frame(&mut merged, bos.as_deref().and_then(|bos| Some((bos, library.token_to_id(bos)?))));
    }
    files.put(TOKENIZER, &merged);
    list_in_config(files, &merged)?;
    let new = wanted.iter().filter(|token| !of_file.contains_key(token.content.as_str()));
    Ok(new.filter_map(|token| Some((token.content.clone(), library.token_to_id(&token.content)?))).collect())
}

/// The files beside `tokenizer.json` that name tokens.
struct Sources {
    config: Value,
    /// Null with a list of added tokens in the other file, because transformers does not read it then.
    special: Value,
}

/// The special tokens that files or a class name.
struct Named {
    /// By role; first the roles that every class has.
    roles: Vec<(String, AddedToken)>,
    extra: Vec<AddedToken>,
}

impl Sources {
    fn of(files: &TokenizerFiles) -> Result<Self, TokenizerError> {
        let config = files.json(CONFIG)?.unwrap_or_default();
        let special = match config["added_tokens_decoder"].is_object() {
            true => Value::Null,
            false => files.json(SPECIAL)?.unwrap_or_default(),
        };
        Ok(Self { config, special })
    }

    /// Writes the roles that only the class sets into `tokenizer_config.json`, so that they are known without it.
    fn write_roles(&self, class: &TransformersClass, files: &mut TokenizerFiles) {
        let is_set = |role: &str| [&self.config, &self.special].iter().any(|source| source.get(role).is_some());
        let mut config = self.config.as_object().cloned().unwrap_or_default();
        let missing = class.roles.iter().filter(|(role, _)| ROLES.contains(role) && !is_set(role));
        let n_before = config.len();
        config.extend(missing.map(|(role, token)| ((*role).to_owned(), Value::from(*token))));
        if config.len() > n_before {
            files.put(CONFIG, &config.into());
        }
    }

    fn named(&self, class: Option<&TransformersClass>) -> Named {
        let mut roles: Vec<(String, AddedToken)> = Vec::new();
        for role in ROLES {
            let of_file = [&self.special, &self.config].into_iter().find_map(|source| source.get(role));
            let token = match of_file {
                Some(token) => described(token, true),
                None => class.and_then(|class| Some(AddedToken::from(class.role(role)?, true))),
            };
            roles.extend(token.map(|token| (role.to_owned(), token)));
        }
        for (role, token) in own_roles(class, &self.special, &self.config) {
            match roles.iter_mut().find(|(known, _)| *known == role) {
                Some((_, known)) => *known = token,
                None => roles.push((role, token)),
            }
        }
        Named { roles, extra: self.extra() }
    }

    /// Special tokens without a role. Both keys have the same meaning; the longer one is the older.
    fn extra(&self) -> Vec<AddedToken> {
        const KEYS: [&str; 2] = ["extra_special_tokens", "additional_special_tokens"];
        let list = |source: &Value, key: &str| source[key].as_array().cloned();
        let [new, old] = KEYS.map(|key| list(&self.config, key));
        let of_config = new.filter(|list| !list.is_empty() || old.is_none()).or(old);
        let [new, old] = KEYS.map(|key| list(&self.special, key));
        let all = match (of_config, new) {
            (of_config, Some(new)) => of_config.into_iter().flatten().chain(new).collect(),
            (Some(of_config), None) => of_config,
            (None, None) => old.unwrap_or_default(),
        };
        all.iter().filter_map(|token| described(token, true)).collect()
    }
}

impl Named {
    fn text_of(&self, role: &str) -> Option<String> {
        self.roles.iter().find(|(name, _)| name == role).map(|(_, token)| token.content.clone())
    }

    fn iter(&self) -> impl Iterator<Item = &AddedToken> {
        self.roles.iter().map(|(_, token)| token).chain(&self.extra)
    }
}

/// The tokens that transformers adds to those it knows, in its order.
fn wanted(
    tokenizer: &Value,
    added: &Value,
    sources: &Sources,
    named: &Named,
    known: &BTreeMap<&str, &AddedToken>,
    class: Option<&TransformersClass>,
) -> Vec<AddedToken> {
    let mut wanted: Vec<AddedToken> = match sources.config["added_tokens_decoder"].as_object() {
        Some(list) => by_id(list.iter().filter_map(|(id, token)| Some((id.parse().ok()?, token)))),
        None => of_files(added, tokenizer, sources, named),
    };
    let of_file = |token: &AddedToken| known.get(token.content.as_str()).copied();
    wanted.retain(|token| of_file(token) != Some(token));
    for token in &mut wanted {
        let was_special = of_file(token).is_some_and(|token| token.special);
        token.special |= was_special || named.roles.iter().any(|(_, named)| named.content == token.content);
    }
    for token in named.iter() {
        if of_file(token).is_none() && !wanted.iter().any(|other| other.content == token.content) {
            wanted.push(token.clone());
        }
    }
    if class.is_some_and(|class| class.loses_flags) {
        for token in wanted.iter_mut().filter(|token| named.iter().any(|named| named.content == token.content)) {
            *token = AddedToken::from(token.content.as_str(), true);
        }
    }
    wanted
}

/// The tokens of `added_tokens.json` and of `tokenizer.json`, which takes precedence, by id.
fn of_files(added: &Value, tokenizer: &Value, sources: &Sources, named: &Named) -> Vec<AddedToken> {
    let of_class = |role: &str| sources.special.get(role).or_else(|| sources.config.get(role)).is_none();
    let roles = named.roles.iter().filter(|(role, _)| ROLES.contains(&role.as_str()) && !of_class(role));
    let special: BTreeSet<&str> =
        roles.map(|(_, token)| token).chain(&named.extra).map(|token| token.content.as_str()).collect();
    let mut tokens: BTreeMap<u64, AddedToken> = BTreeMap::new();
    for (text, id) in added.as_object().into_iter().flatten().filter(|(text, _)| !text.is_empty()) {
        tokens.extend(id.as_u64().map(|id| (id, AddedToken::from(text.as_str(), special.contains(text.as_str())))));
    }
    for token in added_tokens(tokenizer) {
        tokens.extend(token["id"].as_u64().zip(described(token, false)));
    }
    tokens.into_values().collect()
}

fn by_id<'a>(tokens: impl Iterator<Item = (u64, &'a Value)>) -> Vec<AddedToken> {
    let by_id: BTreeMap<u64, &Value> = tokens.collect();
    by_id.into_values().filter_map(|token| described(token, false)).collect()
}

/// Roles that only this model or its class has, such as `image_token`.
fn own_roles(
    class: Option<&TransformersClass>,
    special: &Value,
    config: &Value,
) -> impl Iterator<Item = (String, AddedToken)> {
    let is_own = |role: &str| role.ends_with("_token") && !ROLES.contains(&role);
    let of_class = class.into_iter().flat_map(|class| class.roles).filter(move |(role, _)| is_own(role));
    let of_class = of_class.map(|(role, token)| ((*role).to_owned(), Value::from(*token)));
    let keys = |source: &Value| source.as_object().cloned().into_iter().flatten();
    let of_special = keys(special).filter(move |(role, _)| is_own(role));
    let of_config = keys(config).filter(move |(role, token)| is_own(role) && token.is_string());
    let listed = ["extra_special_tokens", "model_specific_special_tokens"]
        .map(|key| [special, config].map(|source| keys(&source[key])))
        .into_iter()
        .flatten()
        .flatten();
    let all = of_class.chain(of_special).chain(of_config).chain(listed);
    all.filter_map(|(role, token)| Some((role, described(&token, true)?)))
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
    files.put(CONFIG, &config);
    Ok(())
}

#[cfg(test)]
#[path = "side_tokens_tests.rs"]
mod tests;
