//! The texts that types of pairs make of records, compared with those of Axolotl.

use super::data_plan::data_config;
use super::plan::tokenizer;
use crate::config::JobConfig;
use crate::config::pair_form::{PairForm, PairSection};
use crate::data::document::Sample;
use crate::data::record::RecordReader;
use crate::data::template_sources::template_sources;
use crate::data::tokenizer::Tokenizer;
use serde_json::Value;
use std::ops::Range;
use std::path::Path;

/// The tokenizer, and the reader of a data set of this description; `objective` is the key that names one.
fn reader(case: &Value, dir: &Path, objective: &str) -> (Tokenizer, RecordReader) {
    let data = dir.join("data.jsonl");
    std::fs::write(&data, "{}").unwrap();
    let mut dataset = case["dataset"].clone();
    dataset["path"] = data.display().to_string().into();
    let template = case["chat_template"].as_str().unwrap_or("chatml");
    let text = format!(
        "base_model: {}\nmax_steps: 1\n{objective}\nchat_template: {template}\ndatasets: [{dataset}]\n",
        phalanx_needs::reference("models/tiny-qwen3").display()
    );
    let job = JobConfig::from_yaml_str(&text, &[]).unwrap();
    let tokenizer = tokenizer(&job).unwrap();
    let dataset = data_config(&job).unwrap().datasets.remove(0);
    let source = template_sources(&dataset.template, &tokenizer, &data).unwrap();
    let template = || Ok(Some((tokenizer.parse_template(&source.plain)?, None)));
    let reader = RecordReader::new(&dataset, false, template).unwrap();
    (tokenizer, reader)
}

/// Prompt and answer of a document.
fn divided(sample: Sample) -> (String, String) {
    match sample {
        Sample::Answer { document, .. } => {
            let at = document.trained[0].start;
            (document.text[..at].to_owned(), document.text[at..].to_owned())
        }
        other => panic!("{other:?} is no text"),
    }
}

#[test]
fn types_of_pairs_make_the_texts_of_axolotl() {
    let file = std::fs::read(phalanx_needs::reference("preference/texts.json")).unwrap();
    let texts: Value = serde_json::from_slice(&file).unwrap();
    let is_known = |kind: &Value| match kind {
        Value::String(word) => PairForm::of(word).is_some(),
        other => PairSection::is_of(&serde_yaml_ng::to_value(other).unwrap().as_mapping().unwrap().clone()),
    };
    let mut n_compared = 0;
    for case in texts["cases"].as_array().unwrap() {
        if !["dpo", "orpo"].contains(&case["rl"].as_str().unwrap()) || !is_known(&case["dataset"]["type"]) {
            continue;
        }
        let dir = tempfile::tempdir().unwrap();
        let (_, reader) = reader(case, dir.path(), "rl: orpo");
        for (row, made) in case["rows"].as_array().unwrap().iter().zip(case["made"].as_array().unwrap()) {
            if made.get("error").is_some() {
                continue;
            }
            let found: Vec<(String, String)> = reader.samples(row).unwrap().into_iter().map(divided).collect();
            let expected = ["chosen", "rejected"].map(|key| made[key].as_str().unwrap());
            for ((prompt, answer), expected) in found.iter().zip(expected) {
                assert_eq!(prompt, made["prompt"].as_str().unwrap(), "{}: {row}", case["dataset"]);
                assert_eq!(answer, expected, "{}: {row}", case["dataset"]);
            }
            n_compared += 1;
        }
    }
    assert!(n_compared > 50, "{n_compared}");
}

/// The whole conversation counts, with what the template writes and nothing else.
#[test]
fn conversations_of_reward_models_have_the_tokens_of_axolotl() {
    let file = std::fs::read(phalanx_needs::reference("preference/texts.json")).unwrap();
    let texts: Value = serde_json::from_slice(&file).unwrap();
    let mut n_compared = 0;
    for case in texts["cases"].as_array().unwrap().iter().filter(|case| case["rl"] == "reward") {
        let dir = tempfile::tempdir().unwrap();
        let (tokenizer, reader) = reader(case, dir.path(), "reward_model: true");
        for (row, made) in case["rows"].as_array().unwrap().iter().zip(case["made"].as_array().unwrap()) {
            for (sample, key) in reader.samples(row).unwrap().into_iter().zip(["chosen_ids", "rejected_ids"]) {
                let Sample::Answer { document, .. } = sample else { panic!("{sample:?} is no text") };
                let ids = tokenizer.encode(&document.text).unwrap();
                assert_eq!(serde_json::json!(ids), made[key], "{row}");
                let lengths: Vec<usize> = document.trained.iter().map(Range::len).collect();
                assert!(!document.bounded && lengths == [document.text.len()], "{document:?}");
                n_compared += 1;
            }
        }
    }
    assert_eq!(n_compared, 8);
}
