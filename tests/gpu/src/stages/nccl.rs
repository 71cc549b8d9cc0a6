//! NCCL with several ranks on one GPU. By a `NCCL_HOSTID` for each process NCCL takes them for machines of their own, between
//! which it connects by sockets: its real initialisation, launches, aborts and errors run, and what needs several GPUs does not:
//! NVLink, peer memory, InfiniBand. NCCL before 2.30 does not look closer.

use super::Report;
use crate::nccl_rank::{Figures, Scenario};
use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use phalanx_cuda::CudaDevice;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longest time for a scenario, and for all jobs.
const SCENARIO_MAX: Duration = Duration::from_secs(60);
const JOBS_MAX: Duration = Duration::from_secs(100);
/// Lines of a failed process that are shown.
const LOG_LINES: usize = 24;
/// Pause between two looks at the ends of processes.
const PAUSE: Duration = Duration::from_millis(5);

/// A scenario: its name in the table, ranks, rounds on a GPU and on the software GPU, and settings.
struct Run {
    name: &'static str,
    scenario: Scenario,
    ranks: u32,
    rounds: [u32; 2],
    settings: &'static [(&'static str, &'static str)],
}

const fn of(name: &'static str, scenario: Scenario, ranks: u32, rounds: [u32; 2]) -> Run {
    Run { name, scenario, ranks, rounds, settings: &[("NCCL_LAUNCH_ORDER_IMPLICIT", "1")] }
}

const RUNS: [Run; 8] = [
    of("every operation and type, 2 ranks", Scenario::Operations, 2, [1; 2]),
    of("every operation and type, 4 ranks", Scenario::Operations, 4, [1; 2]),
    of("three communicators, launches in order", Scenario::OneOrder, 2, [50, 5]),
    Run {
        settings: &[("NCCL_LAUNCH_ORDER_IMPLICIT", "0")],
        ..of("three communicators, no order kept", Scenario::OneOrder, 2, [50, 5])
    },
    Run {
        settings: &[("NCCL_LAUNCH_ORDER_IMPLICIT", "0")],
        ..of("three communicators, opposite orders", Scenario::OppositeOrders, 2, [50, 5])
    },
    Run {
        // Freed memory is overwritten, so that a use of it shows.
        settings: &[("NCCL_LAUNCH_ORDER_IMPLICIT", "1"), ("MALLOC_PERTURB_", "165")],
        ..of("aborts at every time", Scenario::Aborts, 2, [48, 18])
    },
    of("a rank dies", Scenario::Killed, 3, [1; 2]),
    of("costs", Scenario::Costs, 2, [500, 50]),
];

pub(super) fn run(gpu: &CudaDevice) -> Result<Report> {
    let device = &gpu.gpus()[0].name;
    let mut report = Report::new(device, &["scenario", "ranks", "s", "figures"]);
    let folder = std::env::temp_dir().join(format!("phalanx-gpu-nccl-{}", std::process::id()));
    std::fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
    let is_soft = device.contains("softgpu");
    let begin = Instant::now();
    let jobs = start_jobs(&folder.join("jobs"), is_soft)?;
    // Jobs run beside the scenarios, but not beside the last one, which measures.
    let (measured, checked) = RUNS.split_last().context("a scenario")?;
    let mut tell = |i: usize, run: &Run| {
        let begin = Instant::now();
        let outcome = scenario(&folder.join(i.to_string()), run, is_soft).with_context(|| run.name);
        let figures = outcome.as_ref().map_or_else(|_| "failed".to_owned(), text);
        let seconds = format!("{:.1}", begin.elapsed().as_secs_f64());
        // At once: a caller that ends the stage early has the rows so far.
        eprintln!("{}, {} ranks, {seconds} s: {figures}", run.name, run.ranks);
        report.row(&[&run.name, &run.ranks, &seconds, &figures]);
        outcome.as_ref().err().into_iter().for_each(|error| eprintln!("{error:#}"));
        report.check(outcome.map(drop));
    };
    checked.iter().enumerate().for_each(|(i, run)| tell(i, run));
    let ended = jobs.end(JOBS_MAX).and_then(|text| Ok(serde_json::from_str::<Report>(&text)?));
    tell(checked.len(), measured);
    match ended {
        Ok(of_jobs) => {
            report = report.joined(of_jobs);
        }
        Err(error) => report.check(Err(error.context("whole jobs"))),
    }
    println!("{:.0} s in all", begin.elapsed().as_secs_f64());
    std::fs::remove_dir_all(&folder).with_context(|| format!("removing {}", folder.display()))?;
    Ok(report)
}

fn text(figures: &Figures) -> String {
    figures.iter().map(|(name, figure)| format!("{name} {figure:.1}")).collect::<Vec<_>>().join(", ")
}

/// A process of this program, whose output goes to a file.
struct Process {
    child: Child,
    log: PathBuf,
    /// Where it leaves its result.
    result: PathBuf,
}

impl Process {
    fn start(command: &mut Command, log: PathBuf, result: PathBuf) -> Result<Process> {
        let file = std::fs::File::create(&log).with_context(|| format!("writing {}", log.display()))?;
        let errors = file.try_clone().context("sharing a file")?;
        let child =
            command.stdin(Stdio::null()).stdout(file).stderr(errors).spawn().context("starting this program")?;
        Ok(Process { child, log, result })
    }

    /// How it has ended, once it has: well, or as the sentence says. One that has not by `give_up` is ended.
    fn ended(&mut self, give_up: Instant) -> Result<Option<Result<(), String>>> {
        if let Some(status) = self.child.try_wait().context("waiting for a process")? {
            return Ok(Some(if status.success() { Ok(()) } else { Err(format!("ended with {status}")) }));
        }
        if Instant::now() < give_up {
            return Ok(None);
        }
        self.kill()?;
        Ok(Some(Err("did not end in time".to_owned())))
    }

    fn kill(&mut self) -> Result<()> {
        self.child.kill().context("ending a process")?;
        self.child.wait().context("waiting for a process").map(drop)
    }

    /// The end of its output.
    fn last_lines(&self) -> String {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(LOG_LINES)..].join("\n  ")
    }

    fn result(&self) -> Result<String> {
        std::fs::read_to_string(&self.result)
            .with_context(|| format!("no result; its last lines:\n  {}", self.last_lines()))
    }

    /// Its result.
    ///
    /// # Errors
    /// The end of its output, if it fails or takes too long.
    fn end(mut self, patience: Duration) -> Result<String> {
        let give_up = Instant::now() + patience;
        loop {
            match self.ended(give_up)? {
                Some(Ok(())) => return self.result(),
                Some(Err(how)) => bail!("a process {how}; its last lines:\n  {}", self.last_lines()),
                None => std::thread::sleep(PAUSE),
            }
        }
    }
}

/// This program, among processes that NCCL takes for one machine each.
fn this_program() -> Result<Command> {
    let mut command = Command::new(std::env::current_exe().context("finding this program")?);
    // Ranks on one machine need no other network.
    command.env("NCCL_SOCKET_IFNAME", "lo").env("NCCL_IB_DISABLE", "1");
    Ok(command)
}

/// Runs the ranks of a scenario; the figures of the first.
fn scenario(folder: &Path, run: &Run, is_soft: bool) -> Result<Figures> {
    std::fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
    let name = run.scenario.to_possible_value().context("a scenario has a name")?;
    let rounds = run.rounds[usize::from(is_soft)];
    let start = |rank: u32| {
        let numbers = [("--rank", rank), ("--ranks", run.ranks), ("--rounds", rounds)];
        let numbers = numbers.into_iter().flat_map(|(name, number)| [name.to_owned(), number.to_string()]);
        let mut command = this_program()?;
        command.arg("nccl-rank").arg("--folder").arg(folder).args(["--scenario", name.get_name()]).args(numbers);
        command.env("NCCL_HOSTID", rank.to_string()).envs(run.settings.iter().copied());
        let result = folder.join(format!("figures-{rank}.json"));
        Process::start(&mut command, folder.join(format!("{rank}.log")), result)
    };
    let mut processes = (0..run.ranks).map(start).collect::<Result<Vec<_>>>()?;
    let dies = (run.scenario == Scenario::Killed).then_some(run.ranks as usize - 1);
    end_all(&mut processes, dies, Instant::now() + SCENARIO_MAX)?;
    Ok(serde_json::from_str(&processes[0].result()?)?)
}

/// Waits until all ranks have succeeded, except that one `dies`.
///
/// # Errors
/// The end of the output of the first that fails: the others wait for it in vain, and are ended.
fn end_all(processes: &mut [Process], dies: Option<usize>, give_up: Instant) -> Result<()> {
    let mut running: Vec<usize> = (0..processes.len()).collect();
    while !running.is_empty() {
        for rank in std::mem::take(&mut running) {
            match processes[rank].ended(give_up)? {
                None => running.push(rank),
                Some(how) if how.is_ok() == (dies != Some(rank)) => {}
                Some(how) => {
                    let how = how.err().unwrap_or_else(|| "does not die".to_owned());
                    // If it has waited in vain, another one tells why.
                    let lines: Vec<String> = processes.iter().map(Process::last_lines).collect();
                    let lines = lines.join("\n  the next rank:\n  ");
                    processes.iter_mut().try_for_each(Process::kill)?;
                    bail!("rank {rank} {how}; the last lines of all ranks:\n  {lines}");
                }
            }
        }
        std::thread::sleep(PAUSE);
    }
    Ok(())
}

/// Starts the process that runs whole jobs, whose ranks are processes of their own.
fn start_jobs(folder: &Path, is_soft: bool) -> Result<Process> {
    std::fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
    let mut command = this_program()?;
    let (kills, pairs) = if is_soft { ("3", "1") } else { ("20", "10") };
    command.arg("nccl-jobs").arg("--folder").arg(folder).args(["--kills", kills, "--pairs", pairs]);
    command.env(crate::APART, "1").env("PHALANX_LOG", "warn,phalanx_cuda=debug");
    Process::start(&mut command, folder.join("jobs.log"), folder.join("jobs.json"))
}
