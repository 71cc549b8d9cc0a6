//! The step of a model with 1 billion parameters, beside the same step in PyTorch (`tests/peers/gpu_step.py`, which this program
//! carries).

use super::Report;
use super::rates::{batch, model};
use crate::measure;
use crate::step::StepCase;
use anyhow::{Context, Result, ensure};
use phalanx_cuda::CudaDevice;
use phalanx_strategies::model::{BatchShape, ModelConfig};
use phalanx_strategies::passes::precision::Precision;
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::process::Command;

const SCRIPT: &str = include_str!("../../../peers/gpu_step.py");
/// Steps that are measured.
const N_STEPS: u64 = 10;

/// A line of the script.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Line {
    torch: String,
    attention: String,
    step_ms: f64,
    tokens_per_s: f64,
    peak_bytes: Option<f64>,
    error: Option<String>,
}

/// Compiles PyTorch's step. The compiler keeps it in a folder of results, where [`run`] finds it.
pub(super) fn compile(gpu: &CudaDevice, python: Option<&Path>, out: &Path) -> Result<Report> {
    let mut report = Report::new(&gpu.gpus()[0].name, &["step", "outcome"]);
    match usable(gpu, python) {
        Ok(python) => {
            for line in measure_pytorch(&python, &model(gpu), batch(gpu), 0, out)? {
                let name = format!("PyTorch {}, attention {}", line.torch, line.attention);
                report.row(&[&name, &line.error.as_deref().unwrap_or("compiled")]);
            }
        }
        Err(reason) => report.row(&[&"PyTorch", &format!("not compiled: {reason:#}")]),
    }
    Ok(report)
}

pub(super) fn run(gpu: &CudaDevice, python: Option<&Path>, out: &Path) -> Result<Report> {
    let (model, batch) = (model(gpu), batch(gpu));
    let case = StepCase::new("1B in bf16", model.clone(), batch, Precision::Bf16);
    let columns = ["step", "ms", "tokens/s", "GiB", "ours / its tokens/s", "ours / its memory"];
    let mut report = Report::new(&gpu.gpus()[0].name, &columns);
    let timed = case.time(gpu, 0, N_STEPS as usize)?;
    let (seconds, bytes) = (timed.median(), timed.bytes);
    let rate = batch.n_tokens() as f64 / seconds;
    let gib = |bytes: f64| format!("{:.2}", bytes / (1u64 << 30) as f64);
    report.row(&[&"Phalanx", &format!("{:.2}", seconds * 1e3), &format!("{rate:.0}"), &gib(bytes as f64), &"", &""]);
    report.check(Ok(()));

    let python = match usable(gpu, python) {
        Ok(python) => python,
        Err(reason) => {
            report.row(&[&format!("PyTorch: not measured: {reason:#}")]);
            return Ok(report);
        }
    };
    for line in measure_pytorch(&python, &model, batch, N_STEPS, out)? {
        let name = format!("PyTorch {}, attention {}", line.torch, line.attention);
        if let Some(error) = line.error {
            report.row(&[&format!("{name}: {error}")]);
            continue;
        }
        let memory = line.peak_bytes.unwrap_or(f64::NAN);
        report.row(&[
            &name,
            &format!("{:.2}", line.step_ms),
            &format!("{:.0}", line.tokens_per_s),
            &gib(memory),
            &format!("{:.2}", rate / line.tokens_per_s),
            &format!("{:.2}", bytes as f64 / memory),
        ]);
    }
    Ok(report)
}

/// A Python whose PyTorch uses this GPU: the one that is named, or the first in `PATH`.
fn usable(gpu: &CudaDevice, python: Option<&Path>) -> Result<PathBuf> {
    ensure!(!measure::is_software(gpu), "it cannot use the software GPU");
    let program = python.map_or_else(|| PathBuf::from("python3"), Path::to_owned);
    let code = "import torch, sys; sys.exit(0 if torch.cuda.is_available() else 'its PyTorch finds no GPU')";
    let ran = Command::new(&program).args(["-c", code]).output();
    let ran = ran.with_context(|| format!("starting {}; --python names another", program.display()))?;
    let error = String::from_utf8_lossy(&ran.stderr);
    let last = error.trim().lines().last().unwrap_or("it failed");
    ensure!(ran.status.success(), "{}: {last}; --python names another", program.display());
    Ok(program)
}

/// Runs the script with the shape of our step.
fn measure_pytorch(
    python: &Path,
    model: &ModelConfig,
    batch: BatchShape,
    n_steps: u64,
    out: &Path,
) -> Result<Vec<Line>> {
    let shape = serde_json::json!({
        "vocab_size": model.vocab_size, "hidden_size": model.hidden_size, "intermediate_size": model.intermediate_size,
        "n_layers": model.n_layers, "n_heads": model.n_heads, "n_kv_heads": model.n_kv_heads,
        "head_dim": model.head_dim, "rope_theta": model.rope_theta, "norm_eps": model.norm_eps,
        "n_rows": batch.n_rows, "seq_len": batch.seq_len,
    });
    let script = std::env::temp_dir().join(format!("phalanx-gpu-{}.py", std::process::id()));
    std::fs::write(&script, SCRIPT).with_context(|| format!("writing {}", script.display()))?;
    let ran = Command::new(python)
        .arg(&script)
        .env("TORCHINDUCTOR_CACHE_DIR", out.join("compiled"))
        .args(["--steps", &n_steps.to_string(), "--shape", &shape.to_string()])
        .output()
        .with_context(|| format!("starting {}", python.display()));
    std::fs::remove_file(&script).with_context(|| format!("removing {}", script.display()))?;
    let ran = ran?;
    let error = String::from_utf8_lossy(&ran.stderr);
    ensure!(ran.status.success(), "{}: {}", python.display(), error.trim().lines().last().unwrap_or_default());
    lines(&String::from_utf8_lossy(&ran.stdout))
}

fn lines(out: &str) -> Result<Vec<Line>> {
    let lines = out.lines().filter(|line| line.starts_with('{'));
    let lines: Vec<Line> = lines.map(serde_json::from_str).collect::<Result<_, _>>().context("a line of the script")?;
    ensure!(!lines.is_empty(), "the script printed nothing");
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_script_are_read_and_others_are_passed_over() {
        let out = "a warning\n{\"torch\": \"2.9\", \"attention\": \"cudnn\", \"step_ms\": 150.0, \"tokens_per_s\": 54613.3, \
                   \"loss\": 11.8, \"peak_bytes\": 4e10}\n{\"torch\": \"2.9\", \"attention\": \"default\", \"error\": \"no\"}\n";

        let lines = lines(out).unwrap();

        assert_eq!((lines.len(), lines[0].step_ms, lines[0].peak_bytes), (2, 150.0, Some(4e10)));
        assert_eq!(lines[1].error.as_deref(), Some("no"));
        assert!(super::lines("nothing\n").is_err());
    }
}
