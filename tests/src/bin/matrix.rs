//! The whole matrix: every combination of axes up to a number of ranks, with every ZeRO stage, schedule and option, compared
//! with one rank; each cell resumes from the checkpoint of a cell that differs in most axes.
//!
//! `cargo run --release -p phalanx-tests --bin matrix -- --help`

use anyhow::Context;
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use phalanx_tests::matrix::cell::{Cell, cells};
use phalanx_tests::matrix::chain::chain;
use phalanx_tests::matrix::model::Shape;
use phalanx_tests::matrix::run::{Outcome, Task, Tolerance, compare};
use phalanx_tests::matrix::table::{json_line, table, with_table};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Trains two small models in every combination of mesh and options and compares with one rank. Exit code 1 if any differs.
#[derive(Parser)]
struct Args {
    /// Largest number of ranks of a mesh.
    #[arg(default_value_t = 8)]
    max_ranks: usize,
    /// Only cells whose name contains this, such as `cp 2` or `ZeRO-3`.
    #[arg(long, default_value = "")]
    only: String,
    /// Number of models that train at the same time.
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// Print a line of JSON for each cell instead of text.
    #[arg(long)]
    json: bool,
    /// Write the table between the markers of this file.
    #[arg(long)]
    write: Option<PathBuf>,
}

fn main() -> anyhow::Result<ExitCode> {
    let args = Args::parse();
    let ring = chain(cells(args.max_ranks).into_iter().filter(|c| c.to_string().contains(&args.only)).collect());
    let bar = ProgressBar::new((ring.len() * Shape::ALL.len()) as u64);
    bar.set_style(ProgressStyle::with_template("{wide_bar} {pos}/{len} cells, {elapsed} elapsed, {eta} left  {msg}")?);
    let outcomes = Mutex::new(Vec::new());
    let each = |outcome: Outcome| {
        print(&args, &bar, &outcome);
        bar.inc(1);
        outcomes.lock().expect("no holder of the lock panics").push(outcome);
    };
    run(&args, &ring, &each)?;
    bar.finish_and_clear();
    let outcomes = outcomes.into_inner()?;
    let table = table(&outcomes, &Tolerance::F32);
    if !args.json {
        println!("\n{table}");
    }
    if let Some(path) = &args.write {
        let text = std::fs::read_to_string(path)?;
        let text = with_table(&text, &table).with_context(|| format!("{} has no markers", path.display()))?;
        std::fs::write(path, text)?;
    }
    let failed = outcomes.iter().filter(|o| !o.passed(&Tolerance::F32)).count();
    Ok(if failed == 0 && !outcomes.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Each model has its own ring; `jobs` rings run at a time.
fn run(args: &Args, ring: &[Cell], each: &(impl Fn(Outcome) + Sync)) -> anyhow::Result<()> {
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some(shape) = Shape::ALL.get(next.fetch_add(1, Ordering::Relaxed)) {
            let dir = tempfile::tempdir()?;
            compare(&Task::plain(*shape), ring, dir.path(), each)?;
        }
        anyhow::Ok(())
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..args.jobs.max(1)).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|w| w.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
}

fn print(args: &Args, bar: &ProgressBar, outcome: &Outcome) {
    let passed = outcome.passed(&Tolerance::F32);
    let line = match (&outcome.distance, args.json) {
        (_, true) => json_line(outcome, &Tolerance::F32).to_string(),
        (Ok((loss, norm)), false) => {
            let verdict = if passed { "ok  " } else { "FAIL" };
            let (shape, cell, from) = (outcome.shape, outcome.cell, outcome.from);
            format!("{verdict} {shape} {cell}: loss {loss:.1e} norm {norm:.1e} (resumed from {from})")
        }
        (Err(error), false) => format!("FAIL {} {}: {error}", outcome.shape, outcome.cell),
    };
    bar.suspend(|| println!("{line}"));
}
