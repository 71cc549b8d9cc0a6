//! Preference tuning compared with TRL: loss, gradient norm and every scalar of each step, from the same weights and adapters, on the
//! CPU and on the software GPU. `tests/reference/preference.py` makes the numbers, and `tests/reference/weighted.py` those of PyTorch for
//! tokens that count more or less.

use anyhow::{Context, Result, ensure};
use phalanx::events::StepMetrics;
use phalanx::{Control, Event, Job};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Largest distance of a loss and of a scalar, relative to numbers above 1: both run in f32, and sums of log-probabilities are of
/// order 100.
const LOSS: f64 = 2e-5;
/// Largest relative distance of a gradient norm.
const NORM: f64 = 1e-4;

/// TRL's numbers, by name.
fn references() -> Result<Vec<(String, Value)>> {
    let folder = phalanx_needs::reference("numbers");
    let mut found = Vec::new();
    for entry in std::fs::read_dir(&folder)? {
        let path = entry?.path();
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        if path.extension().is_some_and(|ext| ext == "json") {
            let numbers: Value = serde_json::from_slice(&std::fs::read(&path)?)?;
            found.extend(numbers.get("records").is_some().then_some((name, numbers)));
        }
    }
    found.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(found)
}

/// The steps of the same job in Phalanx; `keys` are added to it.
fn steps_of(numbers: &Value, dir: &Path, keys: &[(&str, &str)]) -> Result<Vec<StepMetrics>> {
    let records = numbers["records"].as_array().context("pairs")?;
    let lines: Vec<String> = records.iter().map(Value::to_string).collect();
    let data = dir.join("pairs.jsonl");
    std::fs::write(&data, lines.join("\n"))?;
    let model: PathBuf = phalanx_needs::reference("models").join(numbers["model"].as_str().context("a model")?);
    let run = &numbers["hyperparameters"];
    let mut job = Job::builder();
    for (key, value) in [
        ("device", "cpu".to_owned()),
        ("base_model", model.display().to_string()),
        ("datasets.0.path", data.display().to_string()),
        ("datasets.0.type", "preference".into()),
        ("chat_template", "jinja".into()),
        ("chat_template_jinja", numbers["template"].to_string()),
        ("output_dir", dir.join("out").display().to_string()),
        ("dataset_prepared_path", dir.join("prepared").display().to_string()),
        ("shuffle", "false".into()),
        ("sequence_len", "96".into()),
        ("micro_batch_size", run["batch"].to_string()),
        ("max_steps", run["steps"].to_string()),
        ("learning_rate", run["lr"].to_string()),
        ("lr_scheduler", "constant".into()),
        ("warmup_steps", "0".into()),
        ("adam_beta1", run["betas"][0].to_string()),
        ("adam_beta2", run["betas"][1].to_string()),
        ("adam_epsilon", run["eps"].to_string()),
        ("weight_decay", run["wd"].to_string()),
        ("max_grad_norm", run["clip_norm"].to_string()),
    ] {
        job = job.set(key, value);
    }
    if numbers["adapter"].as_object().is_some_and(|keys| !keys.is_empty()) {
        job = job.set("adapter", "lora");
    }
    for table in ["adapter", "keys"] {
        for (key, value) in numbers[table].as_object().context("keys of the job")? {
            let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            job = job.set(key.as_str(), value);
        }
    }
    for (key, value) in keys {
        job = job.set(*key, *value);
    }
    let mut steps = Vec::new();
    job.build()?.run_with(&Control::default(), |event| {
        if let Event::Step(m) = event {
            steps.push(m.clone());
        }
    })?;
    Ok(steps)
}

/// What differs too much, as a line for each number.
fn differences(name: &str, numbers: &Value, steps: &[StepMetrics]) -> Result<Vec<String>> {
    let curve = numbers["curve"].as_array().context("a curve")?;
    ensure!(curve.len() == steps.len() && !curve.is_empty(), "{name}: {} steps, TRL has {}", steps.len(), curve.len());
    let mut found = Vec::new();
    for (ours, theirs) in steps.iter().zip(curve) {
        for (key, wanted) in theirs.as_object().context("a step")? {
            let wanted = wanted.as_f64().context("a number")?;
            let have = match key.as_str() {
                "loss" => Some(ours.loss),
                "grad_norm" => Some(ours.grad_norm),
                key => ours.scalars.get(key).copied(),
            };
            let have = have.with_context(|| format!("{name}: {key} is not reported"))?;
            let bound = if key == "grad_norm" { NORM * wanted.abs() } else { LOSS * wanted.abs().max(1.0) };
            if (have - wanted).abs() > bound || have.is_nan() {
                found.push(format!("{name} step {}: {key} is {have}, in TRL {wanted}", ours.step));
            }
        }
    }
    Ok(found)
}

#[test]
fn every_objective_follows_trl() -> Result<()> {
    let mut found = Vec::new();
    let references = references()?;
    ensure!(references.len() >= 30, "{} references", references.len());
    for (name, numbers) in references {
        let dir = tempfile::tempdir()?;
        found.extend(differences(&name, &numbers, &steps_of(&numbers, dir.path(), &[])?)?);
    }
    ensure!(found.is_empty(), "{} numbers differ:\n{}", found.len(), found.join("\n"));
    Ok(())
}

/// As in TRL's own `precompute_ref_log_probs`.
#[test]
fn references_that_are_computed_before_the_first_step_follow_trl() -> Result<()> {
    let mut found = Vec::new();
    let of_dpo = |numbers: &Value| numbers["keys"]["rl"] == "dpo" || numbers["keys"]["rl"] == "ipo";
    let references: Vec<_> = references()?.into_iter().filter(|(_, numbers)| of_dpo(numbers)).collect();
    ensure!(references.len() >= 12, "{} references", references.len());
    for (name, numbers) in references {
        let dir = tempfile::tempdir()?;
        let steps = steps_of(&numbers, dir.path(), &[("precompute_ref_log_probs", "true")])?;
        found.extend(differences(&name, &numbers, &steps)?);
    }
    ensure!(found.is_empty(), "{} numbers differ:\n{}", found.len(), found.join("\n"));
    Ok(())
}

/// Sums are over the step, however it is divided.
#[test]
fn microbatches_of_a_step_add_up_to_the_numbers_of_trl() -> Result<()> {
    let mut found = Vec::new();
    for (name, numbers) in references()?
        .into_iter()
        .filter(|(name, _)| ["-dpo", "-ipo", "-reward", "-weighted"].iter().any(|end| name.ends_with(end)))
    {
        let dir = tempfile::tempdir()?;
        let keys = [("micro_batch_size", "1"), ("gradient_accumulation_steps", "4")];
        found.extend(differences(&name, &numbers, &steps_of(&numbers, dir.path(), &keys)?)?);
    }
    ensure!(found.is_empty(), "{} numbers differ:\n{}", found.len(), found.join("\n"));
    Ok(())
}
