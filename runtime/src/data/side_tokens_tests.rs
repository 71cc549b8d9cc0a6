//! Ids of added tokens; the expected ones are those of transformers 5.24 for the same files.

use super::*;
use crate::data::tokenizer::Tokenizer;

const TEXT: &str = "a<|im_start|>x <|im_end|>yo[PAD]";
const START: &str = "<|im_start|>";
const END: &str = "<|im_end|>";

/// A folder with the tokenizer of a small Llama 3 and other side files.
fn folder(keys: Value, others: &[(&str, Value)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let from = phalanx_needs::reference("models/tiny-llama3");
    std::fs::copy(from.join(TOKENIZER), dir.path().join(TOKENIZER)).unwrap();
    let mut config: Value = serde_json::from_slice(&std::fs::read(from.join(CONFIG)).unwrap()).unwrap();
    config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
    std::fs::write(dir.path().join(CONFIG), config.to_string()).unwrap();
    for (name, content) in others {
        std::fs::write(dir.path().join(name), content.to_string()).unwrap();
    }
    dir
}

fn token(text: &str) -> Value {
    json!({ "content": text, "special": true, "lstrip": false, "rstrip": false, "normalized": false, "single_word": false })
}

/// Ids of the two tokens of a turn, of EOS and of padding; 0 for a token that is none.
fn ids(keys: Value, others: &[(&str, Value)]) -> [u32; 4] {
    let dir = folder(keys, others);
    let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();
    let encoded = tokenizer.encode(TEXT).unwrap();
    let of = |text: &str| tokenizer.token_id(text).filter(|id| encoded.contains(id)).unwrap_or_default();
    let found = [of(START), of(END), tokenizer.eos_id().unwrap_or_default(), tokenizer.pad_id().unwrap_or_default()];

    let out = tempfile::tempdir().unwrap();
    tokenizer.write_files(out.path()).unwrap();
    let library = tokenizers::Tokenizer::from_file(out.path().join(TOKENIZER)).unwrap();
    assert_eq!(library.encode(TEXT, false).unwrap().get_ids(), encoded, "an export has the same tokens");
    let again = Tokenizer::from_dir(out.path()).unwrap();
    assert_eq!(again.fingerprint(), tokenizer.fingerprint());
    found
}

#[test]
fn tokens_of_all_lists_get_the_next_ids_in_the_order_of_transformers() {
    let decoder = json!({ "512": token(START), "513": token(END) });
    let reversed = json!({ "513": token(START), "400": token(END) });
    let added = ("added_tokens.json", json!({ END: 513, START: 512 }));

    assert_eq!(ids(json!({ "added_tokens_decoder": decoder }), &[]), [352, 353, 1, 2]);
    assert_eq!(ids(json!({ "added_tokens_decoder": reversed }), &[]), [353, 352, 1, 2]);
    assert_eq!(ids(json!({ "additional_special_tokens": [START, END] }), &[]), [352, 353, 1, 2]);
    assert_eq!(ids(json!({ "extra_special_tokens": [START, token(END)] }), &[]), [352, 353, 1, 2]);
    for key in ["extra_special_tokens", "model_specific_special_tokens"] {
        assert_eq!(ids(json!({ key: { "turn_token": START } }), &[]), [352, 0, 1, 2], "{key}");
    }
    assert_eq!(ids(json!({ "turn_token": START }), &[]), [352, 0, 1, 2]);
    assert_eq!(ids(json!({}), std::slice::from_ref(&added)), [352, 353, 1, 2]);
    assert_eq!(ids(json!({ "eos_token": END }), &[added]), [352, 353, 353, 2]);
}

#[test]
fn role_that_tokenizer_json_lacks_is_added() {
    let decoder = json!({ "512": token(START), "513": token(END) });

    assert_eq!(ids(json!({ "eos_token": END }), &[]), [0, 352, 352, 2]);
    assert_eq!(ids(json!({ "pad_token": token("[PAD]") }), &[]), [0, 0, 1, 352]);
    assert_eq!(ids(json!({ "eos_token": END, "added_tokens_decoder": decoder }), &[]), [352, 353, 353, 2]);
    assert_eq!(ids(json!({ "eos_token": "" }), &[]), [0, 0, 0, 2]);
}

#[test]
fn map_of_special_tokens_counts_only_without_a_list_of_added_tokens() {
    let map = [(SPECIAL, json!({ "eos_token": START, "additional_special_tokens": ["[PAD]"] }))];
    let decoder = json!({ "512": token(START), "513": token(END) });

    assert_eq!(ids(json!({ "eos_token": END }), &map), [352, 0, 352, 2]);
    assert_eq!(ids(json!({ "eos_token": END, "added_tokens_decoder": decoder }), &map), [352, 353, 353, 2]);
}

#[test]
fn list_in_the_configuration_agrees_with_an_exported_tokenizer() {
    let dir = folder(json!({ "added_tokens_decoder": { "512": token(START), "513": token(END) } }), &[]);
    let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();

    let files: BTreeMap<String, Vec<u8>> = tokenizer.files().collect();
    let config: Value = serde_json::from_slice(&files[CONFIG]).unwrap();
    assert_eq!(config["added_tokens_decoder"]["352"]["content"], START);
    assert_eq!(config["added_tokens_decoder"].as_object().unwrap().len(), 5);
    assert!(tokenizer.notes()[0].contains("\"<|im_start|>\" (id 352)"), "{:?}", tokenizer.notes());
    assert!(!files.contains_key(ADDED));
}

#[test]
fn class_that_builds_its_tokenizer_takes_the_tokens_of_the_list_alone() {
    let class = |keys: Value| {
        let mut all = json!({ "tokenizer_class": "GPT2Tokenizer", "unk_token": null });
        all.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        all
    };
    let decoder = json!({ "512": token(START), "513": token(END) });

    assert_eq!(ids(class(json!({ "additional_special_tokens": [START, END] })), &[]), [352, 353, 1, 2]);
    assert_eq!(ids(class(json!({ "added_tokens_decoder": decoder, "eos_token": END })), &[]), [352, 353, 353, 2]);
}

#[test]
fn roles_of_the_model_and_lists_of_both_files_are_added() {
    let map = |keys: Value| [(SPECIAL, keys)];

    assert_eq!(ids(json!({}), &map(json!({ "turn_token": token(START) }))), [352, 0, 1, 2]);
    assert_eq!(
        ids(json!({ "additional_special_tokens": [START] }), &map(json!({ "additional_special_tokens": [END] }))),
        [352, 0, 1, 2],
        "the list of the other file counts alone"
    );
    assert_eq!(
        ids(json!({ "extra_special_tokens": [START] }), &map(json!({ "extra_special_tokens": [END, START] }))),
        [352, 353, 1, 2]
    );
}

#[test]
fn long_numbers_of_a_rewritten_configuration_stay_exact() {
    let dir = folder(json!({ "pad_token": "[PAD]" }), &[]);
    let path = dir.path().join(CONFIG);
    let text = std::fs::read_to_string(&path).unwrap();
    let long = r#""model_max_length":1000000000000000019884624838656,"added_tokens_decoder":{}"#;
    std::fs::write(&path, text.replace(r#""model_max_length":256"#, long)).unwrap();
    let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();

    let files: BTreeMap<String, Vec<u8>> = tokenizer.files().collect();

    let config = std::str::from_utf8(&files[CONFIG]).unwrap();
    assert!(config.contains(r#""model_max_length": 1000000000000000019884624838656"#), "{config}");
}
