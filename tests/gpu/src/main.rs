//! `phalanx-gpu`: checks and measures the CUDA machine on the GPU of this machine.

mod all;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use phalanx_gpu::nccl_rank::NcclRank;
use phalanx_gpu::stages::nccl_jobs::{self, NcclJobs};
use phalanx_gpu::stages::{self, Options, Stage};
use phalanx_softgpu::Installation;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Checks and measures the CUDA machine on the GPU of this machine.
///
/// Every stage runs in processes of its own with a time budget, so that a crash or a hang of one does not end the rest. Checks run
/// side by side, measurements alone.
#[derive(Debug, Parser)]
#[command(
    version,
    after_help = "Examples:\n  phalanx-gpu all --out results --minutes 8\n  phalanx-gpu all --out results --stages rates,peers\n  phalanx-gpu operations --out results --only attention\n\n\
                  NVIDIA's libraries are found beside Python packages and in the system's folders; PHALANX_CUDA_LIBS names others."
)]
struct Cli {
    /// Uses the software GPU of this build instead of a GPU; its settings are variables such as SOFTGPU_ARCH=89.
    #[arg(long, global = true)]
    software_gpu: bool,
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
        /// Only these stages, by their names.
        #[arg(long, value_delimiter = ',', value_parser = stage)]
        stages: Vec<Stage>,
        #[command(flatten)]
        options: Options,
    },
    /// Runs one stage.
    #[command(flatten)]
    One(One),
    /// A rank of the stage `nccl`.
    #[command(hide = true)]
    NcclRank(NcclRank),
    /// The jobs of the stage `nccl`.
    #[command(hide = true)]
    NcclJobs(NcclJobs),
}

#[derive(Debug, clap::Subcommand)]
enum One {
    /// Finds the libraries and the GPU.
    Libraries(Out),
    /// Runs NCCL between ranks that share the GPU: operations, aborts, deaths, costs, whole jobs.
    Nccl(Out),
    /// Checks what is taken for granted of the driver and of NCCL.
    Driver(Out),
    /// Measures copies and products: the ceilings of everything else.
    Ceilings(Out),
    /// Compares every operation with the CPU.
    Operations(Out),
    /// Compares whole steps of small models with the CPU.
    Steps(Out),
    /// Compiles PyTorch's step, for peers to find it compiled.
    Compile(Out),
    /// Kills and stops ranks of a job on the GPU.
    Faults(Out),
    /// Measures every operation of a step of a model with 1 billion parameters.
    Rates(Out),
    /// Measures the whole step beside torch.compile, with PyTorch's default attention and with that of cuDNN.
    Peers(Out),
    /// Measures steps of a model with 8 billion parameters: adapters, and all weights with 8-bit state.
    Large(Out),
}

#[derive(Debug, clap::Args)]
struct Out {
    /// Folder of the results.
    #[arg(long)]
    out: PathBuf,
    /// Only the operation or the step of this name, as the stages operations, steps and large show them.
    #[arg(long)]
    only: Option<String>,
    #[command(flatten)]
    options: Options,
}

fn stage(name: &str) -> Result<Stage, String> {
    let names = || Stage::ALL.map(Stage::name).join(", ");
    Stage::ALL.into_iter().find(|stage| stage.name() == name).ok_or_else(|| format!("stages are {}", names()))
}

fn main() -> ExitCode {
    if std::env::var_os(phalanx_gpu::APART).is_some() {
        // SAFETY: the process has one thread yet.
        #[allow(unsafe_code)]
        unsafe {
            std::env::set_var("NCCL_HOSTID", std::process::id().to_string());
        }
    }
    // The ranks of jobs are processes of this program.
    phalanx::rank_process();
    let filter = tracing_subscriber::EnvFilter::try_from_env("PHALANX_LOG");
    let filter = filter.unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false).init();
    let cli = Cli::parse();
    if cli.software_gpu {
        match Installation::new() {
            // SAFETY: the process has one thread yet.
            #[allow(unsafe_code)]
            Ok(gpu) => unsafe { std::env::set_var("PHALANX_CUDA_LIBS", gpu.dir()) },
            Err(error) => {
                eprintln!("error: installing the software GPU: {error}");
                return ExitCode::FAILURE;
            }
        }
    }
    let done = match cli.command {
        Action::All { out, minutes, stages, options } => {
            let asked = Stage::ALL.into_iter().filter(|stage| stages.is_empty() || stages.contains(stage)).collect();
            all::run(&out, asked, Duration::from_secs_f64(minutes * 60.0), &options)
        }
        Action::NcclRank(args) => phalanx_gpu::nccl_rank::run(&args),
        Action::NcclJobs(args) => phalanx_gpu::open::gpu().and_then(|gpu| nccl_jobs::run(&args, &gpu)),
        Action::One(one) => {
            let (stage, out) = match one {
                One::Libraries(out) => (Stage::Libraries, out),
                One::Nccl(out) => (Stage::Nccl, out),
                One::Driver(out) => (Stage::Driver, out),
                One::Ceilings(out) => (Stage::Ceilings, out),
                One::Operations(out) => (Stage::Operations, out),
                One::Steps(out) => (Stage::Steps, out),
                One::Compile(out) => (Stage::Compile, out),
                One::Faults(out) => (Stage::Faults, out),
                One::Rates(out) => (Stage::Rates, out),
                One::Peers(out) => (Stage::Peers, out),
                One::Large(out) => (Stage::Large, out),
            };
            run(stage, &out)
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
fn run(stage: Stage, Out { out, only, options }: &Out) -> Result<()> {
    let report = stages::run(stage, only.as_deref(), out, options)?;
    println!("{report}");
    let path = out.join(stage.file(only.as_deref()));
    let folder = path.parent().expect("a file in a folder");
    std::fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
    std::fs::write(&path, serde_json::to_string_pretty(&report)?)
        .with_context(|| format!("writing {}", path.display()))?;
    ensure!(report.failures.is_empty(), "{}: {} checks failed", stage.name(), report.failures.len());
    Ok(())
}
