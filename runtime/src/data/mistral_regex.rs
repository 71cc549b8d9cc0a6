//! The rule by which tokenizers of Mistral split words. Many published ones have another rule than the one with which their models were
//! trained; transformers warns of it, and replaces it where `fix_mistral_regex` is set.
//!
//! Source: `_patch_mistral_regex` of transformers 5.24, for a local folder.

use serde_json::{Value, json};

use super::tokenizer_error::TokenizerError;
use super::tokenizer_files::{CONFIG, TOKENIZER, TokenizerFiles};

/// The families that are looked at, and the size of the vocabulary beyond which they are.
const FAMILIES: [&str; 5] = ["mistral", "mistral3", "voxtral", "ministral", "pixtral"];
const N_TOKENS: usize = 100_000;
/// The first version of transformers that writes corrected tokenizers.
const CORRECTED_SINCE: u32 = 5;

/// The rule.
const WORDS: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// What the user should know of a tokenizer with another rule.
const NOTE: &str = "this tokenizer of Mistral splits words by another rule than the one that Mistral trains with; tokens are those that \
                    transformers has by default, with a warning. `\"fix_mistral_regex\": true` in tokenizer_config.json corrects them, as \
                    it does there";

/// Replaces the rule where the files ask for it. Returns a note where they do not, but another rule would be right.
///
/// # Errors
/// When a file is malformed.
pub(super) fn correct(files: &mut TokenizerFiles) -> Result<Option<&'static str>, TokenizerError> {
    let model = files.model_config();
    let version = model["transformers_version"].as_str().and_then(|version| version.split('.').next()?.parse().ok());
    let is_corrected = version.is_some_and(|major: u32| major >= CORRECTED_SINCE);
    let is_other = model["model_type"].as_str().is_some_and(|family| !FAMILIES.contains(&family));
    if !model.is_object() || is_corrected || is_other {
        return Ok(None);
    }
    let mut tokenizer = files.json(TOKENIZER)?.unwrap_or_default();
    let before = &tokenizer["pre_tokenizer"];
    let after = with_words(before);
    if n_tokens(&tokenizer) <= N_TOKENS || before.is_null() || *before == after {
        return Ok(None);
    }
    if files.json(CONFIG)?.unwrap_or_default()["fix_mistral_regex"] != true {
        return Ok(Some(NOTE));
    }
    tokenizer["pre_tokenizer"] = after;
    files.put(TOKENIZER, &tokenizer);
    Ok(None)
}

/// The tokenizer's rules for splitting texts, with Mistral's rule as the first.
fn with_words(before: &Value) -> Value {
    let words = json!({ "type": "Split", "pattern": { "Regex": WORDS }, "behavior": "Isolated", "invert": false });
    let rest = match before["type"].as_str() {
        Some("Sequence") => before["pretokenizers"].as_array().into_iter().flatten().skip(1).cloned().collect(),
        Some("Metaspace") => {
            vec![json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false })]
        }
        _ => vec![before.clone()],
    };
    let splits = [vec![words], rest].concat();
    json!({ "type": "Sequence", "pretokenizers": splits })
}

/// The tokens of the vocabulary and those that were added to it.
fn n_tokens(tokenizer: &Value) -> usize {
    let vocabulary = &tokenizer["model"]["vocab"];
    let is_new = |token: &&Value| token["content"].as_str().is_some_and(|text| vocabulary.get(text).is_none());
    let added = tokenizer["added_tokens"].as_array().into_iter().flatten().filter(is_new).count();
    added + vocabulary.as_object().map_or_else(|| vocabulary.as_array().map_or(0, Vec::len), serde_json::Map::len)
}

#[cfg(test)]
mod tests {
    use super::super::tokenizer::Tokenizer;
    use super::*;

    /// A tokenizer that splits words at blanks only and joins "o" and "W", with more tokens than the rule is looked for in.
    fn folder(n_fillers: usize, config: &Value, model_config: &Value) -> tempfile::TempDir {
        let letters = ["H", "e", "l", "o", "W", "r", "d", "oW"].into_iter().map(str::to_owned);
        let tokens = letters.chain((0..n_fillers).map(|i| format!("<{i}>")));
        let vocabulary: serde_json::Map<String, Value> = tokens.zip((0..).map(|id: u32| id.into())).collect();
        let tokenizer = json!({
            "version": "1.0", "added_tokens": [], "normalizer": null, "post_processor": null, "decoder": null,
            "pre_tokenizer": { "type": "Sequence", "pretokenizers": [
                { "type": "Split", "pattern": { "Regex": r"\S+|\s+" }, "behavior": "Isolated", "invert": false },
                { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false },
            ]},
            "model": { "type": "BPE", "vocab": vocabulary, "merges": ["o W"] },
        });
        let dir = tempfile::tempdir().unwrap();
        let files = [("tokenizer.json", &tokenizer), ("tokenizer_config.json", config), ("config.json", model_config)];
        for (name, content) in files {
            std::fs::write(dir.path().join(name), content.to_string()).unwrap();
        }
        dir
    }

    fn tokens(dir: &std::path::Path) -> (Vec<String>, bool) {
        let tokenizer = Tokenizer::from_dir(dir).unwrap();
        let ids = tokenizer.encode("HelloWorld").unwrap();
        let is_told = tokenizer.notes().iter().any(|note| note.contains("fix_mistral_regex"));
        (ids.iter().map(|id| tokenizer.token_text(*id).unwrap()).collect(), is_told)
    }

    /// Expected tokens are those of transformers 5.24.
    #[test]
    fn rule_of_mistral_is_corrected_where_the_files_ask_for_it_and_named_where_they_do_not() {
        let joined = || "H e l l oW o r l d".split(' ').map(str::to_owned).collect::<Vec<_>>();
        let apart = || "H e l l o W o r l d".split(' ').map(str::to_owned).collect::<Vec<_>>();
        let (fix, old) = (json!({ "fix_mistral_regex": true }), json!({ "model_type": "mistral" }));
        let new = json!({ "model_type": "mistral", "transformers_version": "5.1.0" });
        let fast = |config: &Value| {
            let mut config = config.clone();
            config["tokenizer_class"] = "PreTrainedTokenizerFast".into();
            config
        };

        for (n_fillers, config, model_config, expected) in [
            (N_TOKENS, fix.clone(), &old, (apart(), false)),
            (N_TOKENS, json!({}), &old, (joined(), true)),
            (N_TOKENS, fix.clone(), &new, (joined(), false)),
            (N_TOKENS, fix.clone(), &json!({ "model_type": "llama" }), (joined(), false)),
            (10, fix, &old, (joined(), false)),
        ] {
            let dir = folder(n_fillers, &fast(&config), model_config);
            assert_eq!(tokens(dir.path()), expected, "{n_fillers} {config} {model_config}");
        }
    }

    #[test]
    fn export_has_the_corrected_rule_in_its_file() {
        let config = json!({ "fix_mistral_regex": true, "tokenizer_class": "PreTrainedTokenizerFast" });
        let dir = folder(N_TOKENS, &config, &json!({ "model_type": "mistral" }));
        let out = tempfile::tempdir().unwrap();

        Tokenizer::from_dir(dir.path()).unwrap().write_files(out.path()).unwrap();

        let alone = tokenizers::Tokenizer::from_file(out.path().join("tokenizer.json")).unwrap();
        assert!(!alone.encode("HelloWorld", false).unwrap().get_tokens().contains(&"oW".to_owned()));
    }
}
