//! The whole matrix: every combination of axes up to a number of ranks, with every ZeRO stage, schedule and option, compared
//! with one rank; each cell resumes from the checkpoint of a cell that differs in most axes.
//!
//! `cargo run --release -p phalanx-tests --bin matrix -- --help`

use anyhow::Context;
use clap::Parser;
use clap::builder::PossibleValuesParser;
use indicatif::{ProgressBar, ProgressStyle};
use phalanx::config::precision::DeviceChoice;
use phalanx::{Runtime, rank_process};
use phalanx_tests::matrix::cell::{Cell, cells};
use phalanx_tests::matrix::chain::chain;
use phalanx_tests::matrix::model::Shape;
use phalanx_tests::matrix::pairs::{axis_pairs, pairwise};
use phalanx_tests::matrix::run::{Outcome, Ranks, Task, Tolerance, compare_on};
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
    /// The device. On GPUs, each rank is a process.
    #[arg(long, value_parser = PossibleValuesParser::new(["cpu", "cuda"]), default_value = "cpu")]
    device: String,
    /// The cells: all; a few with every pair of choices (pairs); ten of four ranks with every pair of axes (axes).
    #[arg(long, value_parser = PossibleValuesParser::new(["all", "pairs", "axes"]), default_value = "all")]
    select: String,
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
    // Rank processes are this program.
    let program = rank_process();
    let args = Args::parse();
    let rings = Shape::ALL.map(|shape| ring(&args, shape));
    let ranks = match args.device.as_str() {
        "cuda" => Ranks::Processes(Runtime::new(program)?, DeviceChoice::Cuda),
        _ => Ranks::Threads,
    };
    let bar = ProgressBar::new(rings.iter().map(Vec::len).sum::<usize>() as u64);
    bar.set_style(ProgressStyle::with_template("{wide_bar} {pos}/{len} cells, {elapsed} elapsed, {eta} left  {msg}")?);
    let outcomes = Mutex::new(Vec::new());
    let each = |outcome: Outcome| {
        print(&args, &bar, &outcome);
        bar.inc(1);
        outcomes.lock().expect("no holder of the lock panics").push(outcome);
    };
    run(&args, &ranks, &rings, &each)?;
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

/// The cells of a model, in the order in which they resume from each other.
fn ring(args: &Args, shape: Shape) -> Vec<Cell> {
    let of_shape = |chosen: Vec<(Shape, Cell)>| {
        chosen.into_iter().filter(|(of, _)| *of == shape).map(|(_, cell)| cell).collect::<Vec<Cell>>()
    };
    let selected = match args.select.as_str() {
        "pairs" => of_shape(pairwise(args.max_ranks)),
        "axes" => of_shape(axis_pairs()),
        _ => cells(args.max_ranks),
    };
    chain(selected.into_iter().filter(|c| c.to_string().contains(&args.only)).collect())
}

/// Each model has its own ring; `jobs` rings run at a time.
fn run(args: &Args, ranks: &Ranks, rings: &[Vec<Cell>], each: &(impl Fn(Outcome) + Sync)) -> anyhow::Result<()> {
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some((shape, ring)) = Shape::ALL.iter().zip(rings).nth(next.fetch_add(1, Ordering::Relaxed)) {
            let dir = tempfile::tempdir()?;
            compare_on(ranks, &Task::plain(*shape), ring, dir.path(), each)?;
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
