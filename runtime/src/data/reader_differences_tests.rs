//! Tokenizers that transformers reads by other rules than those of `tokenizer.json`; expected ids are those of transformers 5.24.

use super::*;
use serde_json::json;
use std::path::Path;

/// The tokenizer of a small reference model whose configurations have other keys.
fn folder(model: &str, config: &Value, model_config: &Value) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let from = phalanx_needs::reference("models").join(model);
    std::fs::copy(from.join("tokenizer.json"), dir.path().join("tokenizer.json")).unwrap();
    for (name, content) in [("tokenizer_config.json", config), ("config.json", model_config)] {
        std::fs::write(dir.path().join(name), content.to_string()).unwrap();
    }
    dir
}

fn written(dir: &Path, name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(dir.join(name)).unwrap()).unwrap()
}

/// The tokens of texts, written as in the vocabulary, here and by the `tokenizer.json` of an export.
fn tokens(dir: &Path, texts: &[&str]) -> Vec<String> {
    let tokenizer = Tokenizer::from_dir(dir).unwrap();
    let out = tempfile::tempdir().unwrap();
    tokenizer.write_files(out.path()).unwrap();
    let exported = tokenizers::Tokenizer::from_file(out.path().join("tokenizer.json")).unwrap();
    let again = Tokenizer::from_dir(out.path()).unwrap();
    assert_eq!(again.fingerprint(), tokenizer.fingerprint(), "an export is read as it was written");
    let shown = |text: &&str| {
        let ids = tokenizer.encode(text).unwrap();
        assert_eq!(exported.encode(*text, false).unwrap().get_ids(), ids, "{text:?}");
        ids.iter().map(|id| tokenizer.token_text(*id).unwrap()).collect::<Vec<_>>().join(" ")
    };
    texts.iter().map(shown).collect()
}

#[test]
fn class_of_llama_has_its_own_rules_for_blanks() {
    const TEXTS: [&str; 4] = ["on", " on", "</s>on", "</s> on"];
    let of = |keys: Value| {
        let mut config = json!({ "tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>" });
        config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        tokens(folder("tiny-llama2", &config, &json!({})).path(), &TEXTS)
    };

    assert_eq!(of(json!({})), ["▁on", "▁on", "</s> o n", "</s> ▁on"]);
    assert_eq!(of(json!({ "legacy": true })), ["▁on", "▁on", "</s> ▁on", "</s> ▁on"]);
    assert_eq!(of(json!({ "add_prefix_space": false })), ["o n", "▁on", "</s> o n", "</s> ▁on"]);
}

#[test]
fn class_with_other_ids_is_named_and_another_class_of_the_file_is_not() {
    let note = |model: &str, class: &str, family: &str| {
        let config = json!({ "tokenizer_class": class });
        let dir = folder(model, &config, &json!({ "model_type": family }));
        Tokenizer::from_dir(dir.path()).unwrap().notes().join("\n")
    };

    assert!(note("tiny-llama2", "LlamaTokenizer", "llama").contains("class LlamaTokenizer"));
    assert_eq!(note("tiny-llama2", "PreTrainedTokenizerFast", "llama"), "");
    assert_eq!(note("tiny-llama2", "LlamaTokenizer", "mistral"), "", "transformers reads the file for this family");
    assert_eq!(note("tiny-llama3", "LlamaTokenizer", "llama"), "", "and for a vocabulary of bytes");
}

#[test]
fn rules_that_lose_characters_are_not_followed() {
    let config = json!({ "tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>" });
    let dir = folder("tiny-llama2", &config, &json!({ "model_type": "qwen2" }));

    let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();

    assert_eq!(tokenizer.decode(&tokenizer.encode("a b").unwrap(), true).unwrap(), "a b");
    assert!(tokenizer.notes()[0].contains("Qwen2Tokenizer, whose rules lose characters"), "{:?}", tokenizer.notes());
}

#[test]
fn unknown_class_is_named_and_not_exported() {
    let config = json!({ "tokenizer_class": "NoSuchTokenizer", "bos_token": "<s>" });
    let dir = folder("tiny-llama2", &config, &json!({}));
    let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();
    let out = tempfile::tempdir().unwrap();
    tokenizer.write_files(out.path()).unwrap();

    assert!(tokenizer.notes()[0].contains("NoSuchTokenizer"), "{:?}", tokenizer.notes());
    assert_eq!(written(out.path(), "tokenizer_config.json")["tokenizer_class"], CLASS_OF_FILE);
}

#[test]
fn tokens_of_a_class_that_no_file_names_are_added_and_written() {
    let dir = folder("tiny-llama3", &json!({}), &json!({ "model_type": "gpt2" }));
    let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();
    let out = tempfile::tempdir().unwrap();
    tokenizer.write_files(out.path()).unwrap();

    assert_eq!((tokenizer.eos_id(), tokenizer.bos_id()), (Some(352), Some(352)));
    assert_eq!(written(out.path(), "tokenizer_config.json")["eos_token"], "<|endoftext|>");
}

#[test]
fn setting_of_the_beginning_that_transformers_ignores_has_no_effect_and_is_named() {
    let dir = folder("tiny-llama2", &json!({ "bos_token": "<s>", "add_bos_token": false }), &json!({}));
    let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();

    assert_eq!(tokenizer.document_start(), tokenizer.bos_id());
    assert!(tokenizer.notes()[0].contains("add_bos_token: false"), "{:?}", tokenizer.notes());
    let without_role = folder("tiny-llama2", &json!({ "bos_token": null }), &json!({}));
    assert_eq!(Tokenizer::from_dir(without_role.path()).unwrap().document_start(), Some(1), "the file decides");
}

#[test]
fn special_tokens_in_texts_are_split_if_the_files_say_so() {
    let of = |splits: bool| {
        let config = json!({ "bos_token": "<s>", "split_special_tokens": splits });
        let dir = folder("tiny-llama2", &config, &json!({}));
        let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();
        (tokenizer.encode("</s>").unwrap().len(), tokenizer.fingerprint())
    };

    let (whole, split) = (of(false), of(true));

    assert!(whole.0 == 1 && split.0 > 1, "{split:?}");
    assert_ne!(whole.1, split.1, "tokens of one are no tokens of the other");
}

/// The export of a model has its family beside the tokenizer, whatever the folder had that the tokenizer came from.
#[test]
fn family_of_a_described_model_chooses_the_rules_as_beside_its_export() {
    let folder = |family: &str| {
        folder("tiny-llama2", &json!({ "tokenizer_class": "LlamaTokenizerFast" }), &json!({ "model_type": family }))
    };
    let (llama, qwen) = (folder("llama"), folder("qwen2"));

    let chosen = Tokenizer::for_family(llama.path(), "qwen2").unwrap();

    assert_eq!(chosen.fingerprint(), Tokenizer::from_dir(qwen.path()).unwrap().fingerprint());
    assert_ne!(chosen.fingerprint(), Tokenizer::from_dir(llama.path()).unwrap().fingerprint());
}
