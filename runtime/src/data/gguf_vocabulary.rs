//! A tokenizer as the metadata of a GGUF file: the keys `tokenizer.*` that llama.cpp reads.
//!
//! llama.cpp has its own byte-pair tokenizer, whose rules for splitting a text have names, and a SentencePiece tokenizer, which
//! joins the pair whose token has the greatest score: here the rank of its merge, so that both join the same pairs.

use super::tokenizer::Tokenizer;
use phalanx_storage::gguf::Meta;
use serde_json::Value;
use std::collections::BTreeMap;
use thiserror::Error;

/// Why a tokenizer cannot be written.
#[allow(missing_docs, reason = "each variant's message says what its fields are")]
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum VocabularyError {
    /// llama.cpp has no such tokenizer.
    #[error("the tokenizer cannot be written to a GGUF file: {what}")]
    Unknown { what: String },
    /// More tokens than rows of the embedding.
    #[error("the tokenizer has {n_tokens} tokens, but the model's vocabulary has {vocab_size}")]
    Size { n_tokens: usize, vocab_size: usize },
}

// Types of tokens, as llama.cpp numbers them.
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

/// Score of a token that no merge makes.
const LOWEST: f32 = -1e6;

/// Regular expressions that split a text before its bytes are merged, and their names in llama.cpp.
const SPLITS: [(&str, &str); 3] = [
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "llama-bpe",
    ),
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "qwen2",
    ),
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "tekken",
    ),
];

/// The metadata of a tokenizer for a model with `vocab_size` rows in its embedding.
///
/// # Errors
/// When llama.cpp has no such tokenizer, or the model has too few rows.
pub(crate) fn metadata(tokenizer: &Tokenizer, vocab_size: usize) -> Result<Vec<(String, Meta)>, VocabularyError> {
    let n_tokens = tokenizer.vocab_size();
    if n_tokens > vocab_size {
        return Err(VocabularyError::Size { n_tokens, vocab_size });
    }
    let json = &tokenizer.json();
    let unknown = |what: String| VocabularyError::Unknown { what };
    let model = &json["model"];
    if model["type"] != "BPE" {
        return Err(unknown(format!("its model is {}, expected \"BPE\"", model["type"])));
    }
    let merges = merges(model).ok_or_else(|| unknown("its merges are no list of pairs".into()))?;
    let is_sentencepiece = model["byte_fallback"] == Value::Bool(true);
    let (tokens, kinds) = tokens_of(json, vocab_size, is_sentencepiece).map_err(unknown)?;
    let kind = if is_sentencepiece { "llama" } else { "gpt2" };
    let rule = if is_sentencepiece { "default" } else { split_rule(json, merges.is_empty()).map_err(unknown)? };
    let mut meta = vec![("model", Meta::Text(kind.into())), ("pre", Meta::Text(rule.into()))];
    if is_sentencepiece {
        meta.push(("scores", Meta::F32s(scores(&tokens, &merges))));
        meta.push(("add_space_prefix", Meta::Bool(adds_space(json))));
    } else {
        meta.push(("merges", Meta::Texts(merges.iter().map(|(a, b)| format!("{a} {b}")).collect())));
    }
    meta.push(("tokens", Meta::Texts(tokens)));
    meta.push(("token_type", Meta::I32s(kinds)));
    let end_of_turn = tokenizer.stop_ids().iter().copied().find(|id| Some(*id) != tokenizer.eos_id());
    let ids = [
        ("eot_token_id", end_of_turn),
        ("bos_token_id", tokenizer.bos_id()),
        ("eos_token_id", tokenizer.eos_id()),
        ("padding_token_id", tokenizer.pad_id()),
    ];
    meta.extend(ids.into_iter().filter_map(|(key, id)| Some((key, Meta::U32(id?)))));
    meta.push(("add_bos_token", Meta::Bool(tokenizer.document_start().is_some())));
    meta.push(("add_eos_token", Meta::Bool(false)));
    let mut named: Vec<(String, Meta)> =
        meta.into_iter().map(|(key, value)| (format!("tokenizer.ggml.{key}"), value)).collect();
    if let Some(template) = tokenizer.chat_template() {
        named.push(("tokenizer.chat_template".into(), Meta::Text(template.into())));
    }
    Ok(named)
}

/// The text of each id and its kind; ids without a token are padding.
fn tokens_of(json: &Value, vocab_size: usize, is_sentencepiece: bool) -> Result<(Vec<String>, Vec<i32>), String> {
    let model = &json["model"];
    let vocab = model["vocab"].as_object().ok_or("it has no vocabulary")?;
    let mut tokens: Vec<String> = (0..vocab_size).map(|i| format!("[PAD{i}]")).collect();
    let mut kinds = vec![UNUSED; vocab_size];
    let mut put = |id: Option<u64>, token: &str, kind: i32| {
        let id = id.and_then(|id| usize::try_from(id).ok()).filter(|id| *id < vocab_size);
        let id = id.ok_or_else(|| format!("the token {token:?} has no valid id"))?;
        (tokens[id], kinds[id]) = (token.to_owned(), kind);
        Ok::<_, String>(())
    };
    for (token, id) in vocab {
        let is_byte = is_sentencepiece && token.len() == 6 && token.starts_with("<0x") && token.ends_with('>');
        let kind = match () {
            () if is_byte => BYTE,
            () if model["unk_token"].as_str() == Some(token) => UNKNOWN,
            () => NORMAL,
        };
        put(id.as_u64(), token, kind)?;
    }
    for added in json["added_tokens"].as_array().into_iter().flatten() {
        let content = added["content"].as_str().unwrap_or_default();
        let kind = match added["special"] == Value::Bool(true) {
            _ if is_sentencepiece && model["unk_token"].as_str() == Some(content) => UNKNOWN,
            true => CONTROL,
            false => USER_DEFINED,
        };
        put(added["id"].as_u64(), content, kind)?;
    }
    Ok((tokens, kinds))
}

/// The pairs of a byte-pair model, written as lists or as texts.
fn merges(model: &Value) -> Option<Vec<(&str, &str)>> {
    model["merges"]
        .as_array()?
        .iter()
        .map(|merge| match merge {
            Value::String(text) => text.split_once(' '),
            _ => Some((merge[0].as_str()?, merge[1].as_str()?)),
        })
        .collect()
}

fn scores(tokens: &[String], merges: &[(&str, &str)]) -> Vec<f32> {
    let mut ranks = BTreeMap::new();
    for (rank, (a, b)) in merges.iter().enumerate() {
        ranks.entry(format!("{a}{b}")).or_insert(rank);
    }
    tokens.iter().map(|token| ranks.get(token).map_or(LOWEST, |rank| -(*rank as f32))).collect()
}

/// Whether a text gets a space before its first character.
fn adds_space(json: &Value) -> bool {
    let steps = |step: &Value, list: &str| -> Vec<Value> {
        step[list].as_array().cloned().unwrap_or_else(|| vec![step.clone()])
    };
    let prepends = steps(&json["normalizer"], "normalizers").iter().any(|step| step["type"] == "Prepend");
    let metaspace = steps(&json["pre_tokenizer"], "pretokenizers").into_iter().any(|step| {
        step["type"] == "Metaspace"
            && step["prepend_scheme"] != "never"
            && step["add_prefix_space"] != Value::Bool(false)
    });
    prepends || metaspace
}

/// The name of the rule that splits texts.
fn split_rule(json: &Value, merges_nothing: bool) -> Result<&'static str, String> {
    if !(json["normalizer"].is_null() || json["normalizer"]["type"] == "NFC") {
        return Err(format!("it changes texts by {}", json["normalizer"]["type"]));
    }
    let rule = &json["pre_tokenizer"];
    let steps = rule["pretokenizers"].as_array().map_or(std::slice::from_ref(rule), Vec::as_slice);
    let kinds: Vec<&str> = steps.iter().map(|step| step["type"].as_str().unwrap_or_default()).collect();
    let uses_regex = |step: &Value| step["use_regex"] != Value::Bool(false);
    match kinds[..] {
        // Bytes that are never merged are the same tokens however a text is split.
        ["ByteLevel"] if uses_regex(&steps[0]) || merges_nothing => Ok("gpt-2"),
        ["Digits", "ByteLevel"] if uses_regex(&steps[1]) && steps[0]["individual_digits"] == Value::Bool(true) => {
            Ok("smollm")
        }
        ["Split", "ByteLevel"] if !uses_regex(&steps[1]) => {
            let regex = steps[0]["pattern"]["Regex"].as_str().unwrap_or_default();
            let known = SPLITS.iter().find(|(known, _)| *known == regex);
            known
                .map(|(_, name)| *name)
                .ok_or_else(|| format!("llama.cpp knows no rule {regex:?} for splitting a text"))
        }
        _ => Err(format!("llama.cpp knows no rule of the steps {} for splitting a text", kinds.join(", "))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn value<'a>(meta: &'a [(String, Meta)], key: &str) -> &'a Meta {
        &meta.iter().find(|(found, _)| found == &format!("tokenizer.ggml.{key}")).unwrap().1
    }

    #[test]
    fn byte_tokenizer_is_a_byte_pair_tokenizer_without_merges_and_unused_rows_are_marked() {
        let meta = metadata(&Tokenizer::bytes(), 300).unwrap();

        assert_eq!(value(&meta, "model"), &Meta::Text("gpt2".into()));
        assert_eq!(value(&meta, "pre"), &Meta::Text("gpt-2".into()));
        assert_eq!(value(&meta, "merges"), &Meta::Texts(Vec::new()));
        let (Meta::Texts(tokens), Meta::I32s(kinds)) = (value(&meta, "tokens"), value(&meta, "token_type")) else {
            panic!("{meta:?}")
        };
        assert_eq!((tokens[65].as_str(), kinds[65]), ("A", NORMAL));
        assert_eq!((tokens[256].as_str(), kinds[256]), ("<|bos|>", CONTROL));
        assert_eq!((tokens[299].as_str(), kinds[299]), ("[PAD299]", UNUSED));
        let error = metadata(&Tokenizer::bytes(), 100).unwrap_err();
        assert_eq!(error.to_string(), "the tokenizer has 264 tokens, but the model's vocabulary has 100");
    }

    #[test]
    fn scores_follow_the_ranks_of_merges() {
        let tokens = ["a", "ab", "abc"].map(str::to_owned);

        assert_eq!(scores(&tokens, &[("a", "b"), ("ab", "c"), ("a", "bc")]), [LOWEST, 0.0, -1.0]);
    }

    #[test]
    fn rules_for_splitting_are_named_as_in_llama_cpp_and_others_are_refused() {
        let split = |regex: &str| {
            json!({"normalizer": null, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": regex}}, {"type": "ByteLevel", "use_regex": false}]}})
        };
        let plain = json!({"normalizer": null, "pre_tokenizer": {"type": "ByteLevel", "use_regex": true}});

        for (regex, name) in SPLITS {
            assert_eq!(split_rule(&split(regex), false), Ok(name));
        }
        assert_eq!(split_rule(&plain, false), Ok("gpt-2"));
        assert!(split_rule(&split("x+"), false).unwrap_err().contains("x+"));
        assert!(split_rule(&json!({"normalizer": {"type": "Lowercase"}}), false).unwrap_err().contains("Lowercase"));
    }
}
