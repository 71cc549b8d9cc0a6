//! Where transformers reads the files of a tokenizer otherwise than this crate, which follows `tokenizer.json` as the
//! `tokenizers` library does.
//!
//! The class `LlamaTokenizer` of transformers 5 takes only the vocabulary from `tokenizer.json`, and has its own rules for
//! blanks: no blank is put before a text behind a special token, and none before a text that begins with one. Tokenizers of
//! Llama 2 have other rules in the file, which transformers 4 followed. Exports name the class that reads the file as it is.
//!
//! Source: transformers 5.24, `models/llama/tokenization_llama.py` and `models/auto/tokenization_auto.py`.

use serde_json::{Value, json};

use super::splitting::Library;
use super::tokenizer::{Tokenizer, TokenizerError};
use super::tokenizer_files::{Settings, TokenizerFiles, invalid};

/// The class that reads `tokenizer.json` as it is.
const CLASS_OF_FILE: &str = "PreTrainedTokenizerFast";

/// Names the class that reads `tokenizer.json` as it is, if transformers would use one that gives other ids; returns a text with
/// other ids.
///
/// # Errors
/// When a file is malformed.
pub(super) fn replace_class(
    files: &mut TokenizerFiles,
    settings: &Settings,
    library: &Library,
    parsed: &Value,
) -> Result<Option<String>, TokenizerError> {
    let Some(scheme) = settings.llama_scheme().filter(|_| !parsed.to_string().contains("\"ByteLevel\"")) else {
        return Ok(None);
    };
    let path = files.tokenizer().0;
    let mut json = parsed.clone();
    json["normalizer"] = Value::Null;
    json["pre_tokenizer"] =
        json!({ "type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": scheme, "split": false });
    let other: Library = serde_json::from_value(json).map_err(|error| invalid(&path, &error))?;
    let specials = parsed["added_tokens"].as_array().into_iter().flatten();
    let special = specials.filter(|token| token["special"] == true).find_map(|token| token["content"].as_str());
    let special = special.unwrap_or_default();
    for text in ["a".into(), " a".into(), "  a".into(), format!("{special}a"), format!("{special} a")] {
        let ids = |library: &Library| library.encode_fast(text.as_str(), false).map(|found| found.get_ids().to_vec());
        if ids(library).ok() != ids(&other).ok() {
            files.set_class(CLASS_OF_FILE)?;
            return Ok(Some(text));
        }
    }
    Ok(None)
}

/// What a user may not expect of the files.
///
/// # Errors
/// When the tokenizer has no tokens for a letter.
pub(super) fn notes(
    settings: &Settings,
    tokenizer: &Tokenizer,
    side_tokens: &[(String, u32)],
    other_class: Option<&str>,
) -> Result<Vec<String>, TokenizerError> {
    let mut notes = Vec::new();
    if !side_tokens.is_empty() {
        let mut listed: Vec<String> =
            side_tokens.iter().take(4).map(|(text, id)| format!("{text:?} (id {id})")).collect();
        if side_tokens.len() > listed.len() {
            listed.push(format!("{} more", side_tokens.len() - listed.len()));
        }
        notes.push(format!(
            "tokenizer.json lacks tokens that the files beside it add: {}; they have the ids that transformers gives them",
            listed.join(", ")
        ));
    }
    if let Some(text) = other_class {
        notes.push(format!(
            "transformers 5 reads this tokenizer with its class LlamaTokenizer, which ignores rules of tokenizer.json: it has \
             other tokens for {text:?}. Tokens here are those of tokenizer.json, and exports name the class {CLASS_OF_FILE}, \
             which follows it"
        ));
    }
    if let Some(adds_bos) = settings.adds_bos().filter(|_| tokenizer.bos_id().is_some())
        && adds_bos != tokenizer.probes_bos()?
    {
        notes.push(format!(
            "tokenizer_config.json has add_bos_token: {adds_bos}, which holds here; transformers 5 ignores it and follows \
             tokenizer.json, which says otherwise"
        ));
    }
    Ok(notes)
}

#[cfg(test)]
#[path = "reader_differences_tests.rs"]
mod tests;
