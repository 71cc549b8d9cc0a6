//! Reward models: transformers computes the same scores from every export, and a run goes on from one.
//!
//! The comparison runs in the Python that `PHALANX_PYTHON` names, or in `python3`. Without transformers there it is skipped.

use anyhow::{Context, Result, bail, ensure};
use phalanx::api::scores::with_scorer;
use phalanx::{Control, Event, Job};
use phalanx_needs::{Need, skip};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Exit code of `check_scores.py` without transformers.
const SKIPPED: i32 = 77;

/// The families that have classifiers of sequences in transformers.
fn families() -> Vec<Value> {
    let decoder = |family: &str| {
        json!({
            "model_type": family, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.1,
        })
    };
    let gpt2 = json!({"model_type": "gpt2", "n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": 64, "initializer_range": 0.1});
    ["llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2"].map(decoder).into_iter().chain([gpt2]).collect()
}

const TEXTS: [&str; 3] =
    ["The line holds.", "Shields up, and no step back!", "a text that is longer than the two other ones"];

/// Trains a reward model for two steps, with these keys beside the others; returns the losses and the exported directory.
fn train(keys: &Value, dir: &Path) -> Result<(Vec<f64>, PathBuf)> {
    let data = dir.join("pairs.jsonl");
    let pair = |i: usize| {
        json!({"prompt": format!("Hoplite {i}"), "chosen": " holds the line.", "rejected": " runs."}).to_string()
    };
    std::fs::write(&data, (0..8).map(pair).collect::<Vec<_>>().join("\n"))?;
    let mut job = json!({
        "datasets": [{"path": data, "type": "preference"}], "reward_model": true, "shuffle": false, "sequence_len": 48,
        "micro_batch_size": 4, "max_steps": 2, "learning_rate": 0.01, "device": "cpu",
    });
    for (key, value) in keys.as_object().context("keys")? {
        job[key] = value.clone();
    }
    let yaml = dir.join("job.yaml");
    // JSON is a subset of YAML.
    std::fs::write(&yaml, job.to_string())?;
    let mut losses = Vec::new();
    let report = Job::from_yaml(&yaml)?.run_with(&Control::default(), |event| {
        if let Event::Step(m) = event {
            losses.push(m.loss);
        }
    })?;
    Ok((losses, report.model_dir.context("a finished run exports its model")?))
}

/// Compares the scores of an export; `false` without transformers.
fn compare(model: &Path, base: Option<&Path>, pad: u32, dir: &Path) -> Result<bool> {
    let (rows, scores) = with_scorer(model, 64, |scorer| {
        let rows = TEXTS.map(|text| scorer.tokenizer().encode(text));
        let rows = rows.into_iter().collect::<Result<Vec<_>, _>>()?;
        let scores = rows.iter().map(|row| scorer.score(row)).collect::<Result<Vec<f32>, _>>()?;
        Ok((rows, scores))
    })?;
    let expected = dir.join("expected.json");
    std::fs::write(&expected, json!({"rows": rows, "scores": scores, "pad": pad}).to_string())?;
    let python = std::env::var("PHALANX_PYTHON").unwrap_or_else(|_| "python3".into());
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/peers/check_scores.py");
    let output = match Command::new(&python).arg(script).args([model, &expected]).args(base).output() {
        Ok(output) => output,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            skip(Need::Transformers, format_args!("`{python}` is not installed"));
            return Ok(false);
        }
        Err(error) => bail!("{python}: {error}"),
    };
    let printed = String::from_utf8_lossy(&output.stdout);
    if output.status.code() == Some(SKIPPED) {
        skip(Need::Transformers, format_args!("{python}: {}", printed.trim()));
        return Ok(false);
    }
    println!("{}: {}", model.display(), printed.trim());
    ensure!(output.status.success(), "{printed}{}", String::from_utf8_lossy(&output.stderr));
    Ok(true)
}

#[test]
fn transformers_computes_the_same_scores_from_the_export_of_every_family() -> Result<()> {
    for family in families() {
        let dir = tempfile::tempdir()?;
        let keys = json!({"model": family, "tokenizer": "bytes", "output_dir": dir.path().join("out")});
        let (_, model) = train(&keys, dir.path())?;
        let config: Value = serde_json::from_slice(&std::fs::read(model.join("config.json"))?)?;

        let pad = config["pad_token_id"].as_u64().context("padding")? as u32;
        if !compare(&model, None, pad, dir.path())? {
            return Ok(());
        }
    }
    Ok(())
}

/// PEFT puts the adapter on the base model, and takes the trained head from it; the merged export needs no base.
#[test]
fn peft_computes_the_same_scores_from_an_exported_adapter() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let base = phalanx_needs::reference("models/tiny-llama3");
    let keys = json!({
        "base_model": base, "output_dir": dir.path().join("out"), "adapter": "lora", "lora_r": 4, "lora_target_linear": true,
        "learning_rate": 0.05,
    });
    let (_, adapter) = train(&keys, dir.path())?;
    let merged = dir.path().join("merged");

    phalanx::train::reexport::reexport(
        &phalanx::train::model_source::ModelSource::find(&adapter, None)?,
        &merged,
        None,
    )?;

    let settings: Value = serde_json::from_slice(&std::fs::read(adapter.join("adapter_config.json"))?)?;
    ensure!(settings["task_type"] == "SEQ_CLS" && settings["modules_to_save"] == json!(["score"]), "{settings}");
    let score = |model: &Path| with_scorer(model, 64, |s| s.score(&s.tokenizer().encode(TEXTS[0])?));
    ensure!((score(&adapter)? - score(&merged)?).abs() < 1e-2, "merged weights are in bf16: {:?}", score(&merged));
    compare(&adapter, Some(&base), 2, dir.path())?;
    Ok(())
}

/// A base model that gives scores keeps its head; one of texts gets a head that depends on the seed alone.
#[test]
fn run_goes_on_from_a_reward_model() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let base = phalanx_needs::reference("models/tiny-qwen3");
    let (first, second) = (dir.path().join("first"), dir.path().join("second"));
    let from = |base: &Path, out: &Path, steps: u32| {
        train(&json!({"base_model": base, "output_dir": out, "max_steps": steps, "bf16": false}), dir.path())
    };

    let (losses, model) = from(&base, &first, 6)?;
    let (rest, _) = from(&model, &second, 1)?;

    ensure!(rest[0] < losses[5] + 0.02, "{losses:?}, then {rest:?}");
    ensure!(losses[0] > 2.0 * rest[0], "a new head would begin again: {losses:?}, then {rest:?}");
    Ok(())
}
