//! Notes about tokenizers that transformers reads otherwise.

use super::*;
use std::path::Path;

/// The tokenizer of a small Llama 2 whose configuration has other keys.
fn llama_with(keys: Value) -> (tempfile::TempDir, Tokenizer) {
    let dir = tempfile::tempdir().unwrap();
    let from = phalanx_needs::reference("models/tiny-llama2");
    std::fs::copy(from.join("tokenizer.json"), dir.path().join("tokenizer.json")).unwrap();
    std::fs::write(dir.path().join("tokenizer_config.json"), keys.to_string()).unwrap();
    let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();
    (dir, tokenizer)
}

fn class_in(dir: &Path) -> Value {
    let text = std::fs::read(dir.join("tokenizer_config.json")).unwrap();
    serde_json::from_slice::<Value>(&text).unwrap()["tokenizer_class"].clone()
}

#[test]
fn class_with_rules_of_its_own_is_named_and_not_exported() {
    for class in ["LlamaTokenizer", "LlamaTokenizerFast"] {
        let (_dir, tokenizer) = llama_with(json!({ "tokenizer_class": class, "bos_token": "<s>" }));
        let out = tempfile::tempdir().unwrap();
        tokenizer.write_files(out.path()).unwrap();

        assert!(tokenizer.notes()[0].contains("LlamaTokenizer"), "{:?}", tokenizer.notes());
        assert_eq!(class_in(out.path()), CLASS_OF_FILE);
    }
    let (dir, tokenizer) = llama_with(json!({ "tokenizer_class": CLASS_OF_FILE, "bos_token": "<s>" }));
    assert!(tokenizer.notes().is_empty(), "{:?}", tokenizer.notes());
    std::fs::write(dir.path().join("config.json"), r#"{"model_type": "mistral"}"#).unwrap();
    std::fs::write(dir.path().join("tokenizer_config.json"), r#"{"tokenizer_class": "LlamaTokenizer"}"#).unwrap();
    assert!(Tokenizer::from_dir(dir.path()).unwrap().notes().is_empty(), "transformers reads the file for this family");
}

#[test]
fn setting_of_the_beginning_that_transformers_ignores_is_named() {
    let (_dir, tokenizer) = llama_with(json!({ "bos_token": "<s>", "add_bos_token": false }));

    assert_eq!(tokenizer.document_start(), None);
    assert!(tokenizer.notes()[0].contains("add_bos_token: false"), "{:?}", tokenizer.notes());
}
