//! The texts that types of pairs make of records, compared with those of Axolotl.

use super::data_plan::data_config;
use super::plan::tokenizer;
use crate::config::JobConfig;
use crate::config::pair_form::{PairForm, PairSection};
use crate::data::document::Sample;
use crate::data::prepare::template_sources;
use crate::data::record::RecordReader;
use serde_json::Value;
use std::path::Path;

/// The reader of a data set of this description.
fn reader(case: &Value, dir: &Path) -> RecordReader {
    let data = dir.join("data.jsonl");
    std::fs::write(&data, "{}").unwrap();
    let mut dataset = case["dataset"].clone();
    dataset["path"] = data.display().to_string().into();
    let template = case["chat_template"].as_str().unwrap_or("chatml");
    let text = format!(
        "base_model: {}\nmax_steps: 1\nrl: orpo\nchat_template: {template}\ndatasets: [{dataset}]\n",
        phalanx_needs::reference("models/tiny-qwen3").display()
    );
    let job = JobConfig::from_yaml_str(&text, &[]).unwrap();
    let tokenizer = tokenizer(&job).unwrap();
    let dataset = data_config(&job).unwrap().datasets.remove(0);
    let source = template_sources(&dataset.template, &tokenizer, &data).unwrap();
    RecordReader::new(&dataset, false, || Ok(Some((tokenizer.parse_template(&source.plain)?, None)))).unwrap()
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
        let reader = reader(case, dir.path());
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
