//! `phalanx-gpu`: checks and measures the CUDA machine on the GPU of this machine.

use anyhow::{Context, Result, ensure};
use clap::Parser;
use phalanx_gpu::stages::{self, Report, Stage};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

/// Checks and measures the CUDA machine on the GPU of this machine.
///
/// Every stage runs in a process of its own with a time budget, so that a crash or a hang of one does not end the rest.
#[derive(Debug, Parser)]
#[command(
    version,
    after_help = "Examples:\n  phalanx-gpu all --out results --minutes 8\n  phalanx-gpu operations --out results\n\n\
                  NVIDIA's libraries are found beside Python packages and in the system's folders; PHALANX_CUDA_LIBS names others."
)]
struct Cli {
    #[command(subcommand)]
    command: Action,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    /// Runs all stages, and prints their tables and a summary.
    All {
        /// Folder of the results: a JSON file for each stage, and summary.json.
        #[arg(long)]
        out: PathBuf,
        /// Time for all stages.
        #[arg(long, default_value_t = 8.0)]
        minutes: f64,
        /// A Python with PyTorch; without it, the first in PATH.
        #[arg(long)]
        python: Option<PathBuf>,
    },
    /// Runs one stage.
    #[command(flatten)]
    One(One),
}

#[derive(Debug, clap::Subcommand)]
enum One {
    /// Finds the libraries and the GPU.
    Libraries(Out),
    /// Checks what is taken for granted of the driver and of NCCL.
    Driver(Out),
    /// Measures copies and products: the ceilings of everything else.
    Ceilings(Out),
    /// Compares every operation with the CPU.
    Operations(Out),
    /// Compares whole steps of small models with the CPU.
    Steps(Out),
    /// Kills and stops ranks of a job on the GPU.
    Faults(Out),
    /// Measures every operation of a step of a model with 1 billion parameters.
    Rates(Out),
    /// Measures the whole step beside torch.compile, with PyTorch's default attention and with that of cuDNN.
    Peers(Out),
}

#[derive(Debug, clap::Args)]
struct Out {
    /// Folder of the results.
    #[arg(long)]
    out: PathBuf,
    /// A Python with PyTorch; without it, the first in PATH.
    #[arg(long)]
    python: Option<PathBuf>,
}

fn main() -> ExitCode {
    // The ranks of `faults` are processes of this program.
    phalanx::rank_process();
    let done = match Cli::parse().command {
        Action::All { out, minutes, python } => all(&out, Duration::from_secs_f64(minutes * 60.0), python.as_deref()),
        Action::One(one) => {
            let (stage, Out { out, python }) = match one {
                One::Libraries(out) => (Stage::Libraries, out),
                One::Driver(out) => (Stage::Driver, out),
                One::Ceilings(out) => (Stage::Ceilings, out),
                One::Operations(out) => (Stage::Operations, out),
                One::Steps(out) => (Stage::Steps, out),
                One::Faults(out) => (Stage::Faults, out),
                One::Rates(out) => (Stage::Rates, out),
                One::Peers(out) => (Stage::Peers, out),
            };
            run(stage, &out, python.as_deref())
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs a stage in this process.
fn run(stage: Stage, out: &Path, python: Option<&Path>) -> Result<()> {
    let report = stages::run(stage, python)?;
    println!("{report}");
    std::fs::create_dir_all(out).with_context(|| format!("making {}", out.display()))?;
    let path = out.join(format!("{}.json", stage.name()));
    std::fs::write(&path, serde_json::to_string_pretty(&report)?)
        .with_context(|| format!("writing {}", path.display()))?;
    ensure!(report.failures.is_empty(), "{}: {} checks failed", stage.name(), report.failures.len());
    Ok(())
}

/// Runs every stage in a process of its own.
fn all(out: &Path, budget: Duration, python: Option<&Path>) -> Result<()> {
    let (begin, program) = (Instant::now(), std::env::current_exe().context("finding this program")?);
    let mut outcomes = Vec::new();
    for (i, stage) in Stage::ALL.into_iter().enumerate() {
        let left = budget.saturating_sub(begin.elapsed());
        let fraction = stage.share() / Stage::ALL[i..].iter().map(|stage| stage.share()).sum::<f64>();
        println!("== {} (at most {:.0} s)", stage.name(), left.mul_f64(fraction).as_secs_f64());
        let mut command = Command::new(&program);
        command.arg(stage.name()).arg("--out").arg(out).stdin(Stdio::null());
        if let Some(python) = python {
            command.arg("--python").arg(python);
        }
        outcomes.push((stage, within(&mut command, left.mul_f64(fraction))?));
    }
    println!("== summary");
    let mut summary = serde_json::Map::new();
    for (stage, outcome) in &outcomes {
        let text = std::fs::read_to_string(out.join(format!("{}.json", stage.name()))).unwrap_or_default();
        let report: Report = serde_json::from_str(&text).unwrap_or_default();
        let state =
            outcome.clone().unwrap_or_else(|| format!("{} of {} checks passed", report.n_passed(), report.n_checks));
        println!("{:12} {state}", stage.name());
        summary.insert(stage.name().to_owned(), serde_json::json!({"outcome": state, "report": report}));
    }
    std::fs::write(out.join("summary.json"), serde_json::to_string_pretty(&summary)?)
        .context("writing summary.json")?;
    let n_failed = outcomes.iter().filter(|(_, outcome)| outcome.is_some()).count();
    ensure!(n_failed == 0, "{n_failed} of {} stages failed", outcomes.len());
    Ok(())
}

/// Runs a command for at most `limit`; returns how it failed.
fn within(command: &mut Command, limit: Duration) -> Result<Option<String>> {
    let (begin, mut child) = (Instant::now(), command.spawn().context("starting a stage")?);
    loop {
        if let Some(status) = child.try_wait().context("waiting for a stage")? {
            return Ok((!status.success()).then(|| format!("ended with {status}")));
        }
        if begin.elapsed() > limit {
            child.kill().context("ending a stage")?;
            child.wait().context("waiting for a stage")?;
            return Ok(Some(format!("took more than {:.0} s", limit.as_secs_f64())));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
