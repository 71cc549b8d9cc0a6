//! `phalanx eval`: the loss of models, adapters and checkpoints.

use crate::support::Project;
use phalanx::data::tokenizer::Tokenizer;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The result of `phalanx eval --json` with these arguments.
fn eval(p: &Project, args: &[&str]) -> Value {
    let run = p.run(&[&["eval", "--json"], args].concat()).succeeds();
    serde_json::from_str(&run.stdout).unwrap_or_else(|error| panic!("{error}: {}", run.stdout))
}

fn loss(result: &Value) -> f64 {
    result["loss"].as_f64().unwrap()
}

/// The last evaluation of a run.
fn last_eval(p: &Project, out: &str) -> f64 {
    let text = std::fs::read_to_string(p.path(out).join("metrics.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter_map(|line| line["eval_loss"].as_f64()).next_back().unwrap()
}

const HELD_OUT: [&str; 2] = ["--val_set_size", "20"];

#[test]
fn exported_model_and_checkpoint_have_the_loss_of_the_last_evaluation_of_their_run() {
    let p = Project::new();
    p.train(&HELD_OUT).succeeds();
    let expected = last_eval(&p, "out");
    let of = |args: &[&str]| eval(&p, &[&["job.yaml"], &HELD_OUT[..], args].concat());

    let (model, checkpoint) = (of(&[]), of(&["--model", "out/checkpoints/step-0000000020.g0001"]));

    assert_eq!((loss(&model), loss(&checkpoint)), (expected, expected));
    assert_eq!((model["kind"].as_str(), checkpoint["kind"].as_str()), (Some("model"), Some("checkpoint")));
    assert_eq!((model["rows"].as_u64(), model["data"].as_str()), (Some(20), Some("val_set_size")));
    assert_eq!(model["predicted_tokens"].as_u64(), Some(20 * 31));
    assert!((model["perplexity"].as_f64().unwrap() - expected.exp()).abs() < 1e-9);
    let earlier = of(&["--model", "out/checkpoints/step-0000000010.g0001"]);
    assert!(loss(&earlier) > expected, "{earlier}");
    for of_run in [eval(&p, &["out"]), of(&["--model", "out"])] {
        assert_eq!((of_run["kind"].as_str(), loss(&of_run)), (Some("model"), expected), "{of_run}");
    }
    assert_eq!(loss(&eval(&p, &["out/checkpoints/step-0000000010.g0001"])), loss(&earlier));
    // As when the run had gone on since it wrote its model.
    let model = std::fs::File::open(p.path("out/model")).unwrap();
    model.set_modified(std::time::SystemTime::now() - std::time::Duration::from_secs(3600)).unwrap();
    for args in [&["eval", "job.yaml", "--json"][..], &["generate", "out", "--prompt", "The", "--max-new-tokens", "1"]]
    {
        let told = p.run(args).succeeds().stderr;
        assert!(told.contains("written before its run was saved at step 20"), "{told}");
    }
    let all = eval(&p, &["job.yaml"]);
    assert_eq!(all["data"].as_str(), Some("datasets"));
    let table = p.run(&["eval", "job.yaml"]).succeeds().stdout;
    assert!(table.contains("model ") && table.contains(&format!("{:.5}", loss(&all))), "{table}");
}

#[test]
fn adapter_has_the_loss_of_the_run_that_trained_it() {
    let p = Project::new();
    p.train(&["--output_dir", "base"]).succeeds();
    let yaml = crate::support::YAML.split_once("datasets:").unwrap().1.replace("DIR/out", "tuned");
    let keys = "adapter: lora\nlora_r: 4\nlora_dropout: 0.1\nlora_target_linear: true\nval_set_size: 20\n";
    p.write("lora.yaml", &format!("base_model: DIR/base/model\n{keys}datasets:{yaml}"));
    p.run(&["train", "lora.yaml", "--learning_rate", "0.05"]).succeeds();
    let expected = last_eval(&p, "tuned");

    let adapter = eval(&p, &["lora.yaml"]);

    assert_eq!(adapter["kind"].as_str(), Some("adapter"));
    assert!((loss(&adapter) / expected - 1.0).abs() < 1e-6, "{adapter} {expected}");
    let checkpoint = eval(&p, &["lora.yaml", "--model", "tuned/checkpoints/step-0000000020.g0001"]);
    assert_eq!(loss(&checkpoint), expected);
    let base = eval(&p, &["lora.yaml", "--model", "base/model"]);
    assert!((loss(&base) - expected).abs() > 1e-3, "the adapter changes the model: {base}");
    let in_4_bits = ["lora.yaml", "--load_in_4bit", "true", "--output_dir", "tuned4"];
    p.run(&[&["train"], &in_4_bits[..], &["--learning_rate", "0.05"]].concat()).succeeds();
    let [quantised, whole] = [eval(&p, &in_4_bits), eval(&p, &["lora.yaml", "--model", "tuned4/model"])];
    assert_eq!(quantised["frozen_weights"].as_str(), Some("nf4"));
    let expected = last_eval(&p, "tuned4");
    assert!((loss(&quantised) / expected - 1.0).abs() < 1e-6, "{quantised} {expected}");
    assert!((loss(&whole) / expected - 1.0).abs() > 1e-5, "the frozen weights are rounded: {whole} {expected}");
}

#[test]
fn model_that_is_not_there_is_refused() {
    let p = Project::new();

    p.run(&["eval", "job.yaml"]).refuses(&["no trained model and no checkpoint", "--model"]);
    p.run(&["eval", "job.yaml", "--model", "nowhere"]).refuses(&["nowhere"]);
    std::fs::create_dir(p.path("empty")).unwrap();
    p.run(&["eval", "job.yaml", "--model", "empty"]).refuses(&["empty", "no checkpoint"]);
    p.run(&["eval", "empty"]).refuses(&["empty", "phalanx eval my.yaml --model"]);
    p.run(&["eval", "job.yaml", "--model"]).refuses(&["--model", "value"]);
}

/// The first rows of the reference text, as rows of token ids.
fn reference_rows(model: &Path, n_rows: usize, row_len: usize) -> String {
    let tokenizer = Tokenizer::from_dir(model).unwrap();
    let text = std::fs::read_to_string(model.join("../../text.txt")).unwrap();
    let ids: Vec<u32> = tokenizer.document_start().into_iter().chain(tokenizer.encode(&text).unwrap()).collect();
    ids.chunks(row_len).take(n_rows).map(|row| format!("{}\n", serde_json::json!({"input_ids": row}))).collect()
}

#[test]
fn loss_of_the_reference_models_is_that_of_transformers() {
    let p = Project::new();
    let reference = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/reference"));
    let models = std::fs::read_dir(reference.join("models")).unwrap().map(|entry| entry.unwrap().path());
    let mut n_models = 0;
    for model in models {
        let name = model.file_name().unwrap().to_str().unwrap();
        let numbers = std::fs::read_to_string(reference.join(format!("numbers/{name}.json"))).unwrap();
        let numbers: Value = serde_json::from_str(&numbers).unwrap();
        let hyper = |key: &str| numbers["hyperparameters"][key].as_u64().unwrap() as usize;
        let (n_rows, row_len) = (hyper("batch"), hyper("seq"));
        p.write("rows.jsonl", &reference_rows(&model, n_rows, row_len));
        // Two of three microbatches are whole.
        p.write("eval.yaml", &format!(
            "base_model: {}\ndatasets:\n  - path: rows.jsonl\n    type:\nsequence_len: {row_len}\nmicro_batch_size: 3\nmax_steps: 1\nbf16: false\noutput_dir: {name}\n",
            model.display()
        ));

        let found = eval(&p, &["eval.yaml", "--model", model.to_str().unwrap()]);

        // The first step of the reference run has the loss of the untrained model over these rows.
        let expected = numbers["float64"]["curve"][0]["loss"].as_f64().unwrap();
        assert_eq!(found["predicted_tokens"].as_u64(), Some((n_rows * (row_len - 1)) as u64), "{name}");
        // f32 differs from f64 by the rounding of its sums.
        assert!((loss(&found) / expected - 1.0).abs() < 2e-6, "{name}: {found} {expected}");
        n_models += 1;
    }
    assert!(n_models >= 9);
}
