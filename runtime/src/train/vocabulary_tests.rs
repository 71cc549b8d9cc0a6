//! What added tokens mean for the model of a job.

use super::*;
use crate::data::tokenizer::Tokenizer;

fn job(keys: &str) -> JobConfig {
    let dir = phalanx_needs::reference("models/tiny-llama2");
    let text = format!("base_model: {}\nmax_steps: 1\ndatasets: [{{path: a, type: alpaca}}]\n{keys}\n", dir.display());
    JobConfig::from_yaml_str(&text, &[]).unwrap()
}

fn adjusted(keys: &str) -> (Option<Grown>, Value, Tokenizer) {
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

    assert_eq!(grown, Some(Grown { from: 352, to: 354, mean: true }));
    assert_eq!((&config["vocab_size"], &config["eos_token_id"]), (&json!(354), &json!(tokenizer.eos_id().unwrap())));
    let rounded = adjusted("tokens: [<|a|>]\nresize_token_embeddings_to_32x: true\nmean_resizing_embeddings: false").0;
    assert_eq!(rounded, Some(Grown { from: 352, to: 384, mean: false }));
}

#[test]
fn role_of_a_known_token_changes_no_size() {
    let (grown, config, _) = adjusted("special_tokens: {eos_token: <s>}");

    assert_eq!(grown, None);
    assert_eq!(config, json!({ "vocab_size": 352, "eos_token_id": 1 }));
}

#[test]
fn adapters_need_the_embedding_for_new_tokens_but_not_for_padding() {
    const LORA: &str = "adapter: lora\nlora_target_linear: true\n";

    let refused = refusal(&format!("{LORA}special_tokens: {{eos_token: <|im_end|>}}"), |_| ()).unwrap();
    assert!(refused.contains("adds <|im_end|>") && refused.contains("lora_modules_to_save"), "{refused}");
    let multiple = refusal(&format!("{LORA}resize_token_embeddings_to_32x: true"), |config| {
        config["vocab_size"] = 351.into();
    });
    assert!(multiple.as_ref().unwrap().contains("needs 1 more rows in the embedding"), "{multiple:?}");
    let saved =
        format!("{LORA}lora_modules_to_save: [embed_tokens, lm_head]\nspecial_tokens: {{eos_token: <|im_end|>}}");
    assert_eq!(adjusted(&saved).0.unwrap().to, 353);
    let pad = format!("{LORA}special_tokens: {{pad_token: <|pad|>}}");
    let (grown, _, tokenizer) = adjusted(&pad);
    assert_eq!(grown, None);
    assert!(notes(&job(&pad), &tokenizer)[0].contains("<|pad|>"));
    let whole = "special_tokens: {pad_token: <|pad|>}";
    assert!(notes(&job(whole), &adjusted(whole).2).is_empty());
    assert_eq!(adjusted(whole).1["pad_token_id"], json!(352));
}

/// Why a job on a model with 32 rows more than tokens is refused.
fn refusal_beside_padding(keys: &str) -> Option<String> {
    refusal(keys, |config| config["vocab_size"] = 384.into())
}

/// Why a job on a model with a changed configuration is refused.
fn refusal(keys: &str, change: impl Fn(&mut Value)) -> Option<String> {
    let (base, padded) = (phalanx_needs::reference("models/tiny-llama2"), tempfile::tempdir().unwrap());
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(base.join(name), padded.path().join(name)).unwrap();
    }
    let mut config = serde_json::from_slice(&std::fs::read(base.join("config.json")).unwrap()).unwrap();
    change(&mut config);
    std::fs::write(padded.path().join("config.json"), config.to_string()).unwrap();
    let text = format!(
        "base_model: {}\nmax_steps: 1\ndatasets: [{{path: a, type: alpaca}}]\n{keys}\n",
        padded.path().display()
    );
    let job = JobConfig::from_yaml_str(&text, &[]).unwrap();
    let tokenizer = crate::train::plan::tokenizer(&job).unwrap();
    let plan = crate::train::plan::model_plan_on(&job, &tokenizer, || Ok((crate::devices::host(), None)));
    plan.err().map(|error| error.to_string())
}

#[test]
fn tokens_whose_rows_nothing_trains_are_refused_though_the_model_has_the_rows() {
    const LORA: &str = "adapter: lora\nlora_target_linear: true\n";
    const SAVED: &str = "lora_modules_to_save: [embed_tokens, lm_head]\n";

    for keys in [
        "tokens: [<|a|>]",
        "special_tokens: {eos_token: <|a|>}",
        "special_tokens: {additional_special_tokens: [<|a|>]}",
    ] {
        let refused = refusal_beside_padding(&format!("{LORA}{keys}")).unwrap();
        assert!(refused.contains("adds <|a|>, but does not train model.embed_tokens and lm_head"), "{refused}");
        assert_eq!(refusal_beside_padding(&format!("{LORA}{SAVED}{keys}")), None);
        assert_eq!(refusal_beside_padding(keys), None);
    }
    let half = refusal_beside_padding(&format!("{LORA}lora_modules_to_save: [embed_tokens]\ntokens: [<|a|>]")).unwrap();
    assert!(half.contains("does not train lm_head,"), "{half}");
    let frozen = refusal_beside_padding("trained_parameters: [model.layers]\ntokens: [<|a|>]").unwrap();
    assert!(frozen.contains("add them to trained_parameters"), "{frozen}");
    assert_eq!(refusal_beside_padding(&format!("{LORA}special_tokens: {{pad_token: <|pad|>, eos_token: <s>}}")), None);
}

#[test]
fn way_out_for_new_tokens_is_one_that_the_model_has() {
    let of = |more: &str| {
        let keys = format!("adapter: lora\nlora_target_linear: true\ntokens: [<|a|>]\n{more}");
        refusal(&keys, |config| config["tie_word_embeddings"] = true.into())
    };

    let refused = of("").unwrap();

    assert!(
        refused.contains("train without `adapter`, since the embedding of this model is also its head"),
        "{refused}"
    );
    assert!(!refused.contains("lora_modules_to_save"), "{refused}");
}

#[test]
fn reserved_tokens_that_get_a_meaning_beside_adapters_are_told() {
    let told = |keys: &str| notes(&job(keys), &adjusted("").2).join("\n").contains("added_tokens_overrides");

    const OVERRIDES: &str = "added_tokens_overrides: {2: <|a|>}";
    assert!(told(&format!("adapter: lora\nlora_target_linear: true\n{OVERRIDES}")));
    assert!(!told(OVERRIDES));
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

#[test]
fn exported_template_has_the_values_of_the_jobs_variables_unless_others_are_given() {
    const TEMPLATE: &str = "\\n{{ thinks }} {{ name }}{% for m in messages %}{{ m.content }}{% endfor %}";
    let keys = format!(
        "chat_template: jinja\nchat_template_jinja: \"{TEMPLATE}\"\nchat_template_kwargs: {{thinks: false, name: \"o'Neill\"}}"
    );
    let job = job(&keys);
    let base = Tokenizer::from_dir(&phalanx_needs::reference("models/tiny-llama2")).unwrap();
    let tokenizer = changed(&job, &base).unwrap();

    let exported = exported(&job, &tokenizer).unwrap();

    let template = exported.parse_template(exported.chat_template().unwrap()).unwrap();
    let conversation = |variables: Value| crate::data::chat_template::Conversation {
        messages: vec![crate::data::chat_template::Message::new("user", "Hi")],
        variables: variables.as_object().unwrap().clone(),
        ..Default::default()
    };
    assert_eq!(template.render(&conversation(json!({})), false).unwrap(), "\nFalse o'NeillHi");
    assert_eq!(template.render(&conversation(json!({"thinks": 1})), false).unwrap(), "\n1 o'NeillHi");
    assert!(super::exported(&self::job(""), &base).unwrap().files().eq(base.files()));
}

#[test]
fn every_template_of_the_tokenizer_is_exported_with_the_values_of_the_jobs_variables() {
    let plain = "{{ thinks }}";
    let list =
        json!([{ "name": "default", "template": plain }, { "name": "tool_use", "template": "\ntools {{ thinks }}" }]);
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(
        phalanx_needs::reference("models/tiny-llama2").join("tokenizer.json"),
        dir.path().join("tokenizer.json"),
    )
    .unwrap();
    std::fs::write(dir.path().join("tokenizer_config.json"), json!({ "chat_template": list }).to_string()).unwrap();
    let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();
    let of = |keys: &str| {
        let keys = format!("{keys}chat_template_kwargs: {{thinks: 7}}");
        let job = job(&keys).to_yaml().replace("type: alpaca", "type: chat_template");
        let exported = exported(&JobConfig::from_yaml_str(&job, &[]).unwrap(), &tokenizer).unwrap();
        let rendered =
            |source: &str| exported.parse_template(source).unwrap().render(&Default::default(), false).unwrap();
        [exported.chat_template(), exported.tool_template()].map(|source| source.map(rendered))
    };

    assert_eq!(of(""), [Some("7".into()), Some("\ntools 7".into())]);
    // Conversations with tools were rendered by the one template, too.
    let one = of(&format!("chat_template: jinja\nchat_template_jinja: \"{plain}\"\n"));
    assert_eq!(one, [Some("7".into()), None]);
}

#[test]
fn date_of_a_template_is_told() {
    let told = |template: &str| {
        let job =
            job(&format!("chat_template: jinja\nchat_template_jinja: \"{template}\"")
                .replace("alpaca", "chat_template"));
        let job = JobConfig::from_yaml_str(&job.to_yaml().replace("type: alpaca", "type: chat_template"), &[]).unwrap();
        notes(&job, &adjusted("").2).join("\n").contains("26 Jul 2024")
    };

    assert!(told("{{ strftime_now('%Y') }}{{ messages }}"));
    assert!(!told("{{ messages }}"));
}

#[test]
fn template_of_the_data_sets_is_exported_if_there_is_one() {
    let of = |entries: &str| {
        let dir = phalanx_needs::reference("models/tiny-llama2");
        let text = format!("base_model: {}\nmax_steps: 1\ndatasets: {entries}\n", dir.display());
        let job = JobConfig::from_yaml_str(&text, &[]).unwrap();
        let tokenizer =
            changed(&job, &Tokenizer::from_dir(&phalanx_needs::reference("models/tiny-llama2")).unwrap()).unwrap();
        let template = exported(&job, &tokenizer).unwrap().chat_template().map(str::to_owned);
        (template, notes(&job, &tokenizer).join("\n").contains("several chat templates"))
    };
    let source =
        |name: &str| Some(crate::config::named_templates::NamedTemplate::of(name).unwrap().source().to_owned());
    let entry = |name: &str| format!("{{path: a, type: chat_template, chat_template: {name}}}");

    let (one, several) =
        (of(&format!("[{}]", entry("gemma"))), of(&format!("[{}, {}]", entry("gemma"), entry("llama3"))));

    assert_eq!(one, (source("gemma"), false));
    assert!(several.1 && several.0 != source("gemma") && several.0 != source("llama3"));
}

/// Of pairs, the first record tells whether a template renders them.
#[test]
fn template_of_pairs_of_messages_is_exported_and_that_of_pairs_of_texts_is_not() {
    let base = Tokenizer::from_dir(&phalanx_needs::reference("models/tiny-llama2")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let exported_with = |answer: Value| {
        let path = dir.path().join("pairs.jsonl");
        std::fs::write(&path, json!({ "prompt": answer, "better": answer, "rejected": answer }).to_string()).unwrap();
        let dataset =
            format!("{{path: {}, type: preference, field_chosen: better, chat_template: chatml}}", path.display());
        let model = phalanx_needs::reference("models/tiny-llama2");
        let text = format!("base_model: {}\nmax_steps: 1\nrl: orpo\ndatasets: [{dataset}]\n", model.display());
        let job = JobConfig::from_yaml_str(&text, &[]).unwrap();
        exported(&job, &base).unwrap().chat_template().map(str::to_owned)
    };

    let of_messages = exported_with(json!([{ "role": "user", "content": "a" }]));
    assert!(of_messages.is_some_and(|template| template.contains("<|im_start|>")));
    assert_eq!(exported_with(json!("a")), None);
}
