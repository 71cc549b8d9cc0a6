//! Compares predicted with measured steps: alternates `phalanx estimate --json` (which calibrates) and a training run for
//! each configuration; prints a table of medians.
//!
//! `plan_accuracy [ROUNDS [STEPS]] [--only NAME]`; needs the `phalanx` binary of the same build in the same folder.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

const JOB: &str = "\
model: {model_type: llama, vocab_size: 4096, hidden_size: 512, intermediate_size: 1408, num_hidden_layers: 6,
        num_attention_heads: 8, num_key_value_heads: 8, max_position_embeddings: 256}
tokenizer: bytes
datasets: [{path: text.txt, type: completion}]
sequence_len: 256
micro_batch_size: 4
max_steps: 8
learning_rate: 3e-4
weight_decay: 0.1
save_steps: none
resume_from_checkpoint: none
output_dir: out
";

/// Meshes and precisions of the benchmark's model and batch.
const CASES: [(&str, &str); 10] = [
    ("1 rank f32", "--bf16 false --threads 2"),
    ("1 rank bf16", "--bf16 true --threads 2"),
    ("dp_replicate 2 f32", "--bf16 false --threads 1 --dp_replicate_size 2"),
    ("dp_replicate 2 bf16", "--bf16 true --threads 1 --dp_replicate_size 2"),
    ("dp_shard 2 zero 3 f32", "--bf16 false --threads 1 --dp_shard_size 2"),
    ("dp_shard 2 zero 3 bf16", "--bf16 true --threads 1 --dp_shard_size 2"),
    ("tp 2 f32", "--bf16 false --threads 1 --tensor_parallel_size 2"),
    ("tp 2 bf16", "--bf16 true --threads 1 --tensor_parallel_size 2"),
    (
        "pp 2 f32",
        "--bf16 false --threads 1 --pipeline_parallel_size 2 --micro_batch_size 1 --gradient_accumulation_steps 4",
    ),
    (
        "pp 2 bf16",
        "--bf16 true --threads 1 --pipeline_parallel_size 2 --micro_batch_size 1 --gradient_accumulation_steps 4",
    ),
];

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize| args.get(i).and_then(|n| n.parse::<usize>().ok());
    let (n_rounds, n_steps) = (number(0).unwrap_or(3), number(1).unwrap_or(12));
    let only = args.iter().position(|a| a == "--only").and_then(|i| args.get(i + 1));
    let cases: Vec<_> = CASES.iter().filter(|(name, _)| only.is_none_or(|part| name.contains(part.as_str()))).collect();
    let phalanx = std::env::current_exe()?.with_file_name("phalanx");
    ensure!(phalanx.exists(), "{} does not exist; run `cargo build --release -p phalanx`", phalanx.display());
    let dir = tempfile::tempdir()?;
    std::fs::write(dir.path().join("text.txt"), sources(Path::new("strategies/src"))?)?;
    std::fs::write(dir.path().join("job.yaml"), JOB)?;
    let mut times: Vec<[Vec<f64>; 2]> = cases.iter().map(|_| [Vec::new(), Vec::new()]).collect();
    for _ in 0..n_rounds {
        for ((_, overrides), [predicted, measured]) in cases.iter().zip(&mut times) {
            let run = |command: &str, more: &[&str]| -> Result<String> {
                let words = overrides.split(' ').chain(more.iter().copied());
                let output =
                    Command::new(&phalanx).current_dir(dir.path()).args([command, "job.yaml"]).args(words).output()?;
                ensure!(output.status.success(), "{command} {overrides}: {}", String::from_utf8_lossy(&output.stderr));
                Ok(String::from_utf8(output.stdout)?)
            };
            let estimate: Value = serde_json::from_str(&run("estimate", &["--json", "--remeasure"])?)?;
            predicted.push(estimate["step_ms"].as_f64().context("the estimate has no step_ms")?);
            let max_steps = n_steps.to_string();
            std::fs::remove_dir_all(dir.path().join("out")).or_else(absent)?;
            run("train", &["--max_steps", &max_steps])?;
            measured.push(step_ms(&dir.path().join("out/metrics.jsonl"))?);
            eprint!(".");
        }
    }
    eprintln!();
    println!("| configuration | predicted ms | measured ms | predicted / measured | of each round |");
    println!("|---|--:|--:|--:|---|");
    for ((name, _), [predicted, measured]) in cases.iter().zip(&times) {
        let ratios: Vec<String> = predicted.iter().zip(measured).map(|(p, m)| format!("{:.2}", p / m)).collect();
        let (p, m) = (median(predicted), median(measured));
        println!("| {name} | {p:.0} | {m:.0} | {:.2} | {} |", p / m, ratios.join(" "));
    }
    Ok(())
}

fn absent(error: std::io::Error) -> std::io::Result<()> {
    if error.kind() == std::io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
}

/// Median of the steps after the first two.
fn step_ms(metrics: &Path) -> Result<f64> {
    let text = std::fs::read_to_string(metrics)?;
    let lines = text.lines().map(serde_json::from_str).collect::<Result<Vec<Value>, _>>()?;
    let all: Vec<f64> = lines.iter().filter_map(|line| line["step_ms"].as_f64()).collect();
    Ok(median(&all[2.min(all.len())..]))
}

fn median(of: &[f64]) -> f64 {
    let mut sorted = of.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The text of all source files of a folder.
fn sources(dir: &Path) -> Result<String> {
    let mut entries: Vec<PathBuf> = std::fs::read_dir(dir)?.map(|e| Ok(e?.path())).collect::<Result<_>>()?;
    entries.sort();
    let mut text = String::new();
    for path in entries {
        if path.is_dir() {
            text += &sources(&path)?;
        } else if path.extension().is_some_and(|e| e == "rs") {
            text += &std::fs::read_to_string(&path)?;
        }
    }
    Ok(text)
}
