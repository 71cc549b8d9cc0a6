//! The stages of `phalanx-gpu`.

mod ceilings;
mod driver;
mod faults;
mod large;
mod libraries;
mod nccl;
pub mod nccl_jobs;
mod operations;
mod peers;
mod rates;
mod recovery;
mod steps;

use crate::{cases, open, step};
use anyhow::{Context, Result, ensure};
use phalanx_cuda::AttentionChoice;
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};

/// What is checked and measured, and with what.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Options {
    /// A Python with PyTorch; without it, the first in PATH.
    #[arg(long)]
    pub python: Option<PathBuf>,
    /// What attention runs through: cudnn requires cuDNN, own are the kernels of Phalanx, auto takes cuDNN where it is present.
    #[arg(long, value_enum, default_value_t)]
    pub attention: Attention,
    /// Runs one case of each operation and a few whole steps only; the tests of this crate run all of them.
    #[arg(long)]
    pub sample: bool,
    /// Converts weights that only products in bf16 read in each step, instead of storing them as bf16 numbers and a rest.
    #[arg(long)]
    pub convert_weights: bool,
    /// Launches kernels before the ones before them have ended, from sm_90 on.
    #[arg(long)]
    pub early_launches: bool,
}

/// What attention runs through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Attention {
    /// cuDNN where it is present.
    #[default]
    Auto,
    /// cuDNN.
    Cudnn,
    /// The kernels of Phalanx.
    Own,
}

impl Options {
    /// The same options on a command line.
    pub fn args(&self) -> Vec<OsString> {
        let name = match self.attention {
            Attention::Auto => "auto",
            Attention::Cudnn => "cudnn",
            Attention::Own => "own",
        };
        let python = self.python.iter().flat_map(|python| ["--python".into(), python.into()]);
        let flags = [
            ("--sample", self.sample),
            ("--convert-weights", self.convert_weights),
            ("--early-launches", self.early_launches),
        ];
        let flags = flags.into_iter().filter(|(_, is_set)| *is_set).map(|(flag, _)| flag.into());
        ["--attention".into(), name.into()].into_iter().chain(python).chain(flags).collect()
    }

    fn choice(&self) -> AttentionChoice {
        match self.attention {
            Attention::Auto => AttentionChoice::Auto,
            Attention::Cudnn => AttentionChoice::Cudnn,
            Attention::Own => AttentionChoice::Own,
        }
    }
}

/// A stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Finds the libraries and the GPU.
    Libraries,
    /// Runs NCCL between ranks that share the GPU.
    Nccl,
    /// Checks what is taken for granted of the driver and of NCCL.
    Driver,
    /// Measures copies and products.
    Ceilings,
    /// Compares every operation with the CPU.
    Operations,
    /// Compares whole steps with the CPU.
    Steps,
    /// Compiles PyTorch's step, for `Peers` to find it compiled.
    Compile,
    /// Kills and stops ranks of a job on the GPU.
    Faults,
    /// Measures every operation of a step of a large model.
    Rates,
    /// Measures the whole step beside PyTorch.
    Peers,
    /// Measures steps of a model with 8 billion parameters.
    Large,
}

impl Stage {
    /// All stages, in the order in which they run.
    pub const ALL: [Stage; 11] = [
        Stage::Libraries,
        Stage::Nccl,
        Stage::Compile,
        Stage::Driver,
        Stage::Operations,
        Stage::Steps,
        Stage::Faults,
        Stage::Ceilings,
        Stage::Rates,
        Stage::Peers,
        Stage::Large,
    ];

    /// Its name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Stage::Libraries => "libraries",
            Stage::Nccl => "nccl",
            Stage::Driver => "driver",
            Stage::Ceilings => "ceilings",
            Stage::Operations => "operations",
            Stage::Steps => "steps",
            Stage::Compile => "compile",
            Stage::Faults => "faults",
            Stage::Rates => "rates",
            Stage::Peers => "peers",
            Stage::Large => "large",
        }
    }

    /// Whether load of other processes does not change what it finds.
    pub const fn is_check(self) -> bool {
        matches!(self, Stage::Compile | Stage::Driver | Stage::Operations | Stage::Steps)
    }

    /// Parts that can be asked for; none if the stage is not divided. Parts of checks run in processes of their own, since an error of
    /// a kernel makes the GPU useless to its process.
    pub fn parts(self) -> Vec<String> {
        match self {
            Stage::Operations => {
                let mut names: Vec<String> = cases::all().iter().map(|case| case.op.name().to_owned()).collect();
                names.sort_unstable();
                names.dedup();
                names
            }
            Stage::Steps => step::all().into_iter().map(|case| case.name).collect(),
            Stage::Large => large::names(),
            _ => Vec::new(),
        }
    }

    /// The file of its report below the folder of results; `only` names a part.
    pub fn file(self, only: Option<&str>) -> PathBuf {
        let is_plain = |c: char| c.is_ascii_alphanumeric();
        match only {
            Some(part) => format!("{}/{}.json", self.name(), part.replace(|c| !is_plain(c), "-")).into(),
            None => format!("{}.json", self.name()).into(),
        }
    }

    /// Its part of the time, relative to the others.
    pub const fn share(self) -> f64 {
        match self {
            Stage::Libraries | Stage::Driver => 0.5,
            Stage::Ceilings | Stage::Compile => 1.0,
            Stage::Operations | Stage::Steps | Stage::Faults | Stage::Rates | Stage::Peers | Stage::Large => 3.0,
            Stage::Nccl => 6.0,
        }
    }
}

/// What a stage found.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The GPU.
    pub device: String,
    /// Heads of the table's columns.
    pub columns: Vec<String>,
    /// Rows of the table.
    pub rows: Vec<Vec<String>>,
    /// Checks that ran.
    pub n_checks: usize,
    /// What failed, a sentence each.
    pub failures: Vec<String>,
}

impl Report {
    fn new(device: &str, columns: &[&str]) -> Report {
        let columns = columns.iter().map(ToString::to_string).collect();
        Report { device: device.to_owned(), columns, ..Report::default() }
    }

    /// Checks that passed.
    pub fn n_passed(&self) -> usize {
        self.n_checks - self.failures.len()
    }

    /// This report, followed by another one of the same stage.
    #[must_use]
    pub fn joined(mut self, other: Report) -> Report {
        self.rows.extend(other.rows);
        self.n_checks += other.n_checks;
        self.failures.extend(other.failures);
        self
    }

    fn row(&mut self, cells: &[&dyn fmt::Display]) {
        self.rows.push(cells.iter().map(ToString::to_string).collect());
    }

    fn check(&mut self, outcome: Result<()>) {
        self.n_checks += 1;
        self.failures.extend(outcome.err().map(|error| format!("{error:#}")));
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.device)?;
        let lines = || std::iter::once(&self.columns).chain(&self.rows);
        let width =
            |i: usize| lines().map(|line| line.get(i).map_or(0, |cell| cell.chars().count())).max().unwrap_or(0);
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        for line in lines().filter(|line| !line.is_empty()) {
            let cells = line.iter().zip(&widths).enumerate().map(|(i, (cell, width))| match i {
                0 => format!("{cell:width$}"),
                _ => format!("{cell:>width$}"),
            });
            writeln!(f, "{}", cells.collect::<Vec<_>>().join("  "))?;
        }
        self.failures.iter().try_for_each(|failure| writeln!(f, "failed: {failure}"))?;
        write!(f, "{} of {} checks passed", self.n_passed(), self.n_checks)
    }
}

/// Runs a stage, or the part `only` of it, on the GPU of this machine. `out` is the folder of results.
///
/// # Errors
/// When there is no GPU, or a measurement cannot run. Failed checks are part of the report.
pub fn run(stage: Stage, only: Option<&str>, out: &Path, options: &Options) -> Result<Report> {
    if let Some(part) = only {
        let parts = stage.parts();
        ensure!(!parts.is_empty(), "{} is not divided, so --only {part} selects nothing", stage.name());
        ensure!(
            parts.iter().any(|name| name == part),
            "{} has no part {part:?}, only {}",
            stage.name(),
            parts.join(", ")
        );
    }
    let gpu = open::gpu()?.with_split_weights(!options.convert_weights).with_early_launches(options.early_launches);
    let gpu = gpu.with_attention(options.choice()).context("choosing the attention")?;
    let is_asked = |name: &str| only.is_none_or(|only| only == name);
    match stage {
        Stage::Libraries => libraries::run(&gpu),
        Stage::Nccl => nccl::run(&gpu),
        Stage::Driver => driver::run(&gpu),
        Stage::Ceilings => ceilings::run(&gpu),
        Stage::Operations => operations::run(&gpu, is_asked, options.sample),
        Stage::Steps => steps::run(&gpu, is_asked),
        Stage::Faults => faults::run(&gpu),
        Stage::Rates => rates::run(&gpu),
        Stage::Compile => peers::compile(&gpu, options.python.as_deref(), out),
        Stage::Peers => peers::run(&gpu, options.python.as_deref(), out),
        Stage::Large => large::run(&gpu, is_asked),
    }
}
