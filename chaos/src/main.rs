//! `phalanx-chaos sim`: runs seeds, prints faults and incidents, and shrinks failing plans.

mod progress;

use crate::progress::Progress;
use anyhow::{Context, bail};
use clap::{Parser, Subcommand};
use phalanx_chaos::help::FAULTS;
use phalanx_chaos::mutation::Mutation;
use phalanx_chaos::plan::{Fault, Plan};
use phalanx_chaos::shrink::shrink;
use phalanx_chaos::sim::{Config, Outcome, run};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Fault injection for Phalanx.
#[derive(Parser)]
#[command(name = "phalanx-chaos")]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Simulates jobs under faults.
    #[command(after_long_help = FAULTS)]
    Sim(Sim),
}

#[derive(clap::Args)]
struct Sim {
    /// Seed of the job and its faults.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Runs a range of seeds instead, such as `0..1000`.
    #[arg(long, value_name = "FROM..TO")]
    seeds: Option<String>,
    /// Ranks of the job; drawn from the seed if absent.
    #[arg(long)]
    ranks: Option<u32>,
    /// Kills this many ranks at once instead of random faults.
    #[arg(long, requires = "ranks")]
    kill: Option<u32>,
    /// Injects the faults of this file instead of random ones (JSON, as printed for a failing seed).
    #[arg(long)]
    plan: Option<PathBuf>,
    /// Breaks a rule deliberately.
    #[arg(long)]
    mutation: Option<Mutation>,
    /// Prints the outcome as JSON.
    #[arg(long)]
    json: bool,
}

fn main() -> std::process::ExitCode {
    let Command::Sim(args) = Args::parse().command;
    let result = match &args.seeds {
        Some(range) => many(&args, range),
        None => one(&args),
    };
    match result {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            std::process::ExitCode::FAILURE
        }
    }
}

impl Sim {
    fn config(&self, seed: u64) -> Config {
        let config = self.ranks.map_or_else(|| Config::small(seed), |n| Config::with_ranks(seed, n));
        Config { mutation: self.mutation, ..config }
    }

    fn plan(&self, config: &Config) -> anyhow::Result<Plan> {
        if let Some(path) = &self.plan {
            let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
            return serde_json::from_str(&text).with_context(|| format!("{} is not a valid plan", path.display()));
        }
        Ok(match self.kill {
            Some(n) => Plan::mass_failure(config.seed, config.n_nodes, config.n_slots, n),
            None => Plan::random(config.seed, config.n_nodes, config.n_slots, config.safety_ms),
        })
    }
}

fn one(args: &Sim) -> anyhow::Result<()> {
    let config = args.config(args.seed);
    let plan = args.plan(&config)?;
    let began = Instant::now();
    let outcome = run(config, &plan);
    if args.json {
        println!("{}", serde_json::to_string_pretty(&outcome)?);
    } else {
        print(&config, &outcome, began);
    }
    let Some(violation) = &outcome.violation else { return Ok(()) };
    let small = shrink(config, &plan);
    eprintln!("smallest plan that fails:\n{}", serde_json::to_string_pretty(&small)?);
    bail!("seed {}: {}: {}", args.seed, violation.invariant, violation.what)
}

fn many(args: &Sim, range: &str) -> anyhow::Result<()> {
    let (from, to) = range.split_once("..").context("expected seeds as FROM..TO")?;
    let (from, to): (u64, u64) = (from.parse()?, to.parse()?);
    let (next, began) = (AtomicU64::new(from), Instant::now());
    let progress = Progress::new(to.saturating_sub(from));
    let work = || -> anyhow::Result<(Totals, Vec<u64>)> {
        let (mut totals, mut failed) = (Totals::default(), vec![]);
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= to {
                return Ok((totals, failed));
            }
            let config = args.config(seed);
            let outcome = run(config, &args.plan(&config)?);
            totals.add(&Totals::of(&outcome));
            let violation = outcome.violation;
            failed.extend(violation.as_ref().map(|_| seed));
            progress.done(violation.map(|v| format!("seed {seed} at {} ms: {}: {}", v.at_ms, v.invariant, v.what)));
        }
    };
    let n_threads = std::thread::available_parallelism().map_or(1, usize::from);
    let (mut totals, mut failed) = (Totals::default(), vec![]);
    std::thread::scope(|scope| -> anyhow::Result<()> {
        let (_shown, ended) = Progress::channel();
        let progress = &progress;
        scope.spawn(move || progress.show(&ended));
        let workers: Vec<_> = (0..n_threads).map(|_| scope.spawn(work)).collect();
        for worker in workers {
            let (here, seeds) = worker.join().expect("a panic ends the process")?;
            totals.add(&here);
            failed.extend(seeds);
        }
        Ok(())
    })?;
    println!(
        "{} seeds: {} incidents, {} returns to a checkpoint, {} worlds with catching-up members, {} members \
         that caught up before they got a rank, {} events in {:.1?}; {} failed",
        to - from,
        totals.n_incidents,
        totals.n_rollbacks,
        totals.n_catch_up_plans,
        totals.n_caught_up,
        totals.n_events,
        began.elapsed(),
        failed.len()
    );
    failed.sort_unstable();
    match failed.first() {
        Some(seed) => one(&Sim { seed: *seed, seeds: None, plan: args.plan.clone(), ..*args }),
        None => Ok(()),
    }
}

/// Totals over many runs.
#[derive(Default)]
struct Totals {
    n_incidents: u64,
    n_rollbacks: u64,
    n_catch_up_plans: u64,
    n_caught_up: u64,
    n_events: u64,
}

impl Totals {
    fn of(outcome: &Outcome) -> Totals {
        let Outcome { n_rollbacks, n_catch_up_plans, n_caught_up, n_events, .. } = *outcome;
        Totals { n_incidents: outcome.incidents.len() as u64, n_rollbacks, n_catch_up_plans, n_caught_up, n_events }
    }

    fn add(&mut self, other: &Totals) {
        self.n_incidents += other.n_incidents;
        self.n_rollbacks += other.n_rollbacks;
        self.n_catch_up_plans += other.n_catch_up_plans;
        self.n_caught_up += other.n_caught_up;
        self.n_events += other.n_events;
    }
}

/// Most faults to print.
const FAULTS_SHOWN: usize = 20;

fn print(config: &Config, outcome: &Outcome, began: Instant) {
    println!(
        "seed {} · {} nodes x {} slots · mesh {} · {}",
        config.seed,
        config.n_nodes,
        config.n_slots,
        config.policy.wanted,
        if config.reproducible { "reproducible" } else { "fast" }
    );
    // A plan may have thousands of faults; incidents are few and all matter.
    let injected = outcome.injected.iter().take(FAULTS_SHOWN);
    let faults = injected.map(|(at, planned)| (*at, format!("fault     {}", describe(&planned.fault))));
    let incidents = outcome.incidents.iter().map(|(at, timeline)| (*at, format!("resumed   {timeline}")));
    let mut lines: Vec<(u64, String)> = faults.chain(incidents).collect();
    lines.sort_by_key(|(at, _)| *at);
    for (at, line) in lines {
        println!("{:>9.3} s  {line}", at as f64 / 1e3);
    }
    if outcome.injected.len() > FAULTS_SHOWN {
        println!("             and {} more faults", outcome.injected.len() - FAULTS_SHOWN);
    }
    println!(
        "{} after {}, {} terms, {} returns to a checkpoint; {} events, {:.1} s of virtual time in {:.2?}; trace {:016x}",
        outcome.step,
        outcome.generation,
        outcome.n_terms,
        outcome.n_rollbacks,
        outcome.n_events,
        outcome.virtual_ms as f64 / 1e3,
        began.elapsed(),
        outcome.trace_hash
    );
    if outcome.violation.is_none() {
        println!("all invariants hold");
    }
}

fn describe(fault: &Fault) -> String {
    serde_json::to_string(fault).expect("a fault is plain data")
}
