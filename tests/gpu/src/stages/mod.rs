//! The stages of `phalanx-gpu`.

mod ceilings;
mod driver;
mod faults;
mod libraries;
mod operations;
mod peers;
mod rates;
mod steps;

use crate::open;
use anyhow::Result;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::Path;

/// A stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Finds the libraries and the GPU.
    Libraries,
    /// Checks what is taken for granted of the driver and of NCCL.
    Driver,
    /// Measures copies and products.
    Ceilings,
    /// Compares every operation with the CPU.
    Operations,
    /// Compares whole steps with the CPU.
    Steps,
    /// Kills and stops ranks of a job on the GPU.
    Faults,
    /// Measures every operation of a step of a large model.
    Rates,
    /// Measures the whole step beside PyTorch.
    Peers,
}

impl Stage {
    /// All stages, in the order in which they run.
    pub const ALL: [Stage; 8] = [
        Stage::Libraries,
        Stage::Driver,
        Stage::Ceilings,
        Stage::Operations,
        Stage::Steps,
        Stage::Faults,
        Stage::Rates,
        Stage::Peers,
    ];

    /// Its name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Stage::Libraries => "libraries",
            Stage::Driver => "driver",
            Stage::Ceilings => "ceilings",
            Stage::Operations => "operations",
            Stage::Steps => "steps",
            Stage::Faults => "faults",
            Stage::Rates => "rates",
            Stage::Peers => "peers",
        }
    }

    /// Its part of the time, relative to the others.
    pub const fn share(self) -> f64 {
        match self {
            Stage::Libraries | Stage::Driver => 0.5,
            Stage::Ceilings => 1.0,
            Stage::Operations | Stage::Steps | Stage::Faults | Stage::Rates | Stage::Peers => 3.0,
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

/// Runs a stage on the GPU of this machine. `python` is one with PyTorch.
///
/// # Errors
/// When there is no GPU, or a measurement cannot run. Failed checks are part of the report.
pub fn run(stage: Stage, python: Option<&Path>) -> Result<Report> {
    let gpu = open::gpu()?;
    match stage {
        Stage::Libraries => libraries::run(&gpu),
        Stage::Driver => driver::run(&gpu),
        Stage::Ceilings => ceilings::run(&gpu),
        Stage::Operations => operations::run(&gpu),
        Stage::Steps => steps::run(&gpu),
        Stage::Faults => faults::run(&gpu),
        Stage::Rates => rates::run(&gpu),
        Stage::Peers => peers::run(&gpu, python),
    }
}
