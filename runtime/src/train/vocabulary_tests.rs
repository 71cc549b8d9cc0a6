//! What added tokens mean for the model of a job.

use super::*;
use crate::data::tokenizer::Tokenizer;

fn job(keys: &str) -> JobConfig {
    let dir = phalanx_needs::reference("models/tiny-llama2");
    let text = format!("base_model: {}\nmax_steps: 1\ndatasets: [{{path: a, type: alpaca}}]\n{keys}\n", dir.display());
    JobConfig::from_yaml_str(&text, &[]).unwrap()
}

fn adjusted(keys: &str) -> (Result<Option<Grown>, JobError>, Value, Tokenizer) {
    let job = job(keys);
    let base = Tokenizer::from_dir(&phalanx_needs::reference("models/tiny-llama2")).unwrap();
    let tokenizer = changed(&job, &base).unwrap();
    let mut config = json!({ "vocab_size": base.vocab_size(), "eos_token_id": 2 });
    let grown = adjust(&job, &mut config, &tokenizer);
    (grown, config, tokenizer)
}

#[test]
fn vocabulary_grows_by_the_tokens_that_have_no_row() {
    let (grown, config, tokenizer) = adjusted("special_tokens: {eos_token: <|im_end|>}\ntokens: [<|a|>]");

    assert_eq!(grown.unwrap(), Some(Grown { from: 352, to: 354, mean: true }));
    assert_eq!((&config["vocab_size"], &config["eos_token_id"]), (&json!(354), &json!(tokenizer.eos_id().unwrap())));
    let rounded = adjusted("tokens: [<|a|>]\nresize_token_embeddings_to_32x: true\nmean_resizing_embeddings: false").0;
    assert_eq!(rounded.unwrap(), Some(Grown { from: 352, to: 384, mean: false }));
}

#[test]
fn role_of_a_known_token_changes_no_size() {
    let (grown, config, _) = adjusted("special_tokens: {eos_token: <s>}");

    assert_eq!(grown.unwrap(), None);
    assert_eq!(config, json!({ "vocab_size": 352, "eos_token_id": 1 }));
}

#[test]
fn adapters_need_the_embedding_for_new_tokens_but_not_for_padding() {
    const LORA: &str = "adapter: lora\nlora_target_linear: true\n";

    let refused = adjusted(&format!("{LORA}special_tokens: {{eos_token: <|im_end|>}}")).0.unwrap_err().to_string();
    assert!(refused.contains("1 more rows") && refused.contains("lora_modules_to_save"), "{refused}");
    let saved =
        format!("{LORA}lora_modules_to_save: [embed_tokens, lm_head]\nspecial_tokens: {{eos_token: <|im_end|>}}");
    assert_eq!(adjusted(&saved).0.unwrap().unwrap().to, 353);
    let pad = format!("{LORA}special_tokens: {{pad_token: <|pad|>}}");
    let (grown, _, tokenizer) = adjusted(&pad);
    assert_eq!(grown.unwrap(), None);
    assert!(notes(&job(&pad), &tokenizer)[0].contains("<|pad|>"));
    let whole = "special_tokens: {pad_token: <|pad|>}";
    assert!(notes(&job(whole), &adjusted(whole).2).is_empty());
    assert_eq!(adjusted(whole).1["pad_token_id"], json!(352));
}

#[test]
fn reinitialised_model_has_the_shape_of_its_directory_and_none_of_its_weights() {
    let plan = |keys: &str| {
        let job = job(keys);
        let tokenizer = crate::train::plan::tokenizer(&job).unwrap();
        crate::train::plan::model_plan_on(&job, &tokenizer, || Ok((crate::devices::host(), None))).unwrap()
    };

    let (kept, random) = (plan(""), plan("reinit_weights: true"));
    let grown = plan("reinit_weights: true\ntokens: [<|a|>]");

    assert!(kept.weights.is_some());
    assert_eq!((&random.weights, &random.hf_config), (&None, &kept.hf_config));
    assert_eq!((grown.grown, &grown.hf_config["vocab_size"]), (None, &json!(353)));
}

#[test]
fn ends_of_turns_that_no_token_spells_are_told() {
    let told = |keys: &str| notes(&job(keys), &adjusted(keys).2).join("\n");

    let misspelt = told("tokens: [<|end|>]\neot_tokens: [<|end|>, <|end_of_trun|>]");

    assert!(misspelt.contains("eot_tokens has <|end_of_trun|>, which the vocabulary has no token for"), "{misspelt}");
    assert!(!told("tokens: [<|end|>]\neot_tokens: [<|end|>]").contains("eot_tokens"));
}
