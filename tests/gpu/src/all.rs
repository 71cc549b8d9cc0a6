//! Runs every stage, in processes of their own.

use anyhow::{Context, Result, ensure};
use phalanx_gpu::stages::{Options, Report, Stage};
use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Lines of a failed process that are shown.
const LOG_LINES: usize = 12;

/// A process: a stage, or a part of one.
#[derive(Clone, Debug)]
struct Job {
    stage: Stage,
    only: Option<String>,
}

/// How a stage ended.
#[derive(Debug)]
struct Outcome {
    stage: Stage,
    report: Report,
    /// Why processes gave no report: a sentence each.
    lost: Vec<String>,
    /// Time of its processes.
    seconds: f64,
}

/// What the processes of some stages left.
#[derive(Debug, Default)]
struct Ended {
    /// Those that gave no report, and why.
    lost: Vec<(Job, String)>,
    /// Time of the processes, by stage.
    seconds: BTreeMap<&'static str, f64>,
}

/// Runs these stages within `budget`.
pub fn run(out: &Path, stages: Vec<Stage>, budget: Duration, options: &Options) -> Result<()> {
    let (begin, program) = (Instant::now(), std::env::current_exe().context("finding this program")?);
    std::fs::create_dir_all(out).with_context(|| format!("making {}", out.display()))?;
    let share = |stages: &[Stage]| stages.iter().map(|stage| stage.share()).sum::<f64>();
    let mut outcomes = Vec::new();
    let mut rest = &stages[..];
    while let Some(first) = rest.first() {
        // Neighbours that only check run side by side.
        let n = rest.iter().take_while(|stage| stage.is_check() && first.is_check()).count().max(1);
        let (now, later) = rest.split_at(n);
        let limit = budget.saturating_sub(begin.elapsed()).mul_f64(share(now) / share(rest));
        let names: Vec<&str> = now.iter().map(|stage| stage.name()).collect();
        println!("== {} (at most {:.0} s)", names.join(", "), limit.as_secs_f64());
        let ended = side_by_side(&program, out, now, limit, options)?;
        for stage in now {
            let outcome = outcome(out, *stage, &ended, options);
            println!("-- {}: {}", stage.name(), outcome.report);
            outcome.lost.iter().for_each(|lost| println!("{lost}"));
            outcomes.push(outcome);
        }
        rest = later;
    }
    summarise(out, &outcomes)
}

/// Whole steps of a sample.
const STEPS_SAMPLED: usize = 3;

/// The parts of a stage, or the whole of it.
fn jobs(stage: Stage, options: &Options) -> Vec<Job> {
    let mut parts = stage.parts();
    match stage {
        Stage::Steps if options.sample => parts.truncate(STEPS_SAMPLED),
        // Each process makes all cases first, which takes longer than one case of each operation.
        Stage::Operations if options.sample => parts.clear(),
        // Measurements have the GPU to themselves.
        _ if !stage.is_check() => parts.clear(),
        _ => {}
    }
    let whole = parts.is_empty().then_some(Job { stage, only: None });
    parts.into_iter().map(|part| Job { stage, only: Some(part) }).chain(whole).collect()
}

/// Runs all jobs of some stages, as many at a time as there are processors.
fn side_by_side(program: &Path, out: &Path, stages: &[Stage], limit: Duration, options: &Options) -> Result<Ended> {
    let mut waiting: VecDeque<Job> = stages.iter().flat_map(|stage| jobs(*stage, options)).collect();
    let n_max = std::thread::available_parallelism().map_or(1, usize::from);
    let (begin, mut running, mut ended): (_, Vec<(Job, Child, Instant)>, _) =
        (Instant::now(), Vec::new(), Ended::default());
    while !waiting.is_empty() || !running.is_empty() {
        let is_late = begin.elapsed() > limit;
        while running.len() < n_max
            && let Some(job) = waiting.pop_front()
        {
            if is_late {
                ended.lost.push((job, "had no time left".to_owned()));
                continue;
            }
            let child = start(program, out, &job, options)?;
            running.push((job, child, Instant::now()));
        }
        for (job, mut child, since) in std::mem::take(&mut running) {
            let status = child.try_wait().context("waiting for a stage")?;
            if status.is_none() && !is_late {
                running.push((job, child, since));
                continue;
            }
            *ended.seconds.entry(job.stage.name()).or_default() += since.elapsed().as_secs_f64();
            match status {
                Some(_) if report_of(out, &job).is_some() => {}
                Some(status) => ended.lost.push((job, format!("ended with {status}"))),
                None => {
                    child.kill().context("ending a stage")?;
                    child.wait().context("waiting for a stage")?;
                    ended.lost.push((job, format!("took more than {:.0} s", limit.as_secs_f64())));
                }
            }
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(ended)
}

fn start(program: &Path, out: &Path, job: &Job, options: &Options) -> Result<Child> {
    let path = path_of(out, job);
    std::fs::create_dir_all(path.parent().unwrap_or(out)).context("making a folder of results")?;
    if path.exists() {
        std::fs::remove_file(&path).with_context(|| format!("removing {}, an earlier result", path.display()))?;
    }
    let log = File::create(path.with_extension("log")).context("making a log")?;
    let mut command = Command::new(program);
    command.arg(job.stage.name()).arg("--out").arg(out).args(options.args());
    command.args(job.only.iter().flat_map(|only| ["--only", only]));
    command.stdin(Stdio::null()).stdout(log.try_clone().context("sharing a log")?).stderr(log);
    command.spawn().context("starting a stage")
}

fn path_of(out: &Path, job: &Job) -> PathBuf {
    out.join(job.stage.file(job.only.as_deref()))
}

fn report_of(out: &Path, job: &Job) -> Option<Report> {
    let text = std::fs::read_to_string(path_of(out, job)).ok()?;
    serde_json::from_str(&text).ok()
}

/// Joins what the processes of a stage have left.
fn outcome(out: &Path, stage: Stage, ended: &Ended, options: &Options) -> Outcome {
    let reports = jobs(stage, options).into_iter().filter_map(|job| report_of(out, &job));
    let report = reports.reduce(Report::joined).unwrap_or_default();
    let of_stage = ended.lost.iter().filter(|(job, _)| job.stage == stage);
    let lost = of_stage.map(|(job, why)| {
        let name = [stage.name()].into_iter().chain(job.only.as_deref()).collect::<Vec<_>>().join(" ");
        let log = std::fs::read_to_string(path_of(out, job).with_extension("log")).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        let last = lines[lines.len().saturating_sub(LOG_LINES)..].join("\n  ");
        format!("{name} {why}; its last lines:\n  {last}")
    });
    let seconds = ended.seconds.get(stage.name()).copied().unwrap_or(0.0);
    Outcome { stage, report, lost: lost.collect(), seconds }
}

/// Prints a line for each stage, and writes `summary.json`.
fn summarise(out: &Path, outcomes: &[Outcome]) -> Result<()> {
    println!("== summary");
    let mut summary = serde_json::Map::new();
    for Outcome { stage, report, lost, seconds } in outcomes {
        let mut state = format!("{} of {} checks passed", report.n_passed(), report.n_checks);
        if !lost.is_empty() {
            state += &format!("; {} processes without a report", lost.len());
        }
        println!("{:12} {state}; {seconds:.0} s of its processes", stage.name());
        let outcome = serde_json::json!({"outcome": state, "report": report, "lost": lost, "seconds": seconds});
        summary.insert(stage.name().to_owned(), outcome);
    }
    std::fs::write(out.join("summary.json"), serde_json::to_string_pretty(&summary)?)
        .context("writing summary.json")?;
    let is_failed = |outcome: &&Outcome| !outcome.lost.is_empty() || !outcome.report.failures.is_empty();
    let n_failed = outcomes.iter().filter(is_failed).count();
    ensure!(n_failed == 0, "{n_failed} of {} stages failed", outcomes.len());
    Ok(())
}
