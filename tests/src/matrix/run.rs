//! Trains cells and compares their metrics with one rank.

use super::cell::Cell;
use super::model::Shape;
use anyhow::Context;
use phalanx::config::precision::DeviceChoice;
use phalanx::{Control, Event, Job, Report, Runtime};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// Steps of a curve; a checkpoint is saved after half of them.
pub const STEPS: u64 = 8;
/// Seconds after which a silent rank process is replaced: long, since several ranks share a core here.
const DETECTION_S: u32 = 30;
/// Rows of a step, over all ranks.
const BATCH_ROWS: usize = 8;

/// Allowed difference of a curve from the reference.
#[derive(Clone, Copy, Debug)]
pub struct Tolerance {
    /// Largest difference of a loss, in nats.
    pub loss: f64,
    /// Largest relative difference of a gradient norm.
    pub norm: f64,
}

impl Tolerance {
    /// Allows for another order of f32 sums: ten times the worst difference of the whole matrix, 7.8e-8 of a loss and 2.5e-7 of
    /// a norm.
    pub const F32: Tolerance = Tolerance { loss: 8e-7, norm: 2.5e-6 };

    /// Whether a difference of loss and norm is within the tolerance.
    pub fn admits(&self, difference: (f64, f64)) -> bool {
        difference.0 <= self.loss && difference.1 <= self.norm
    }
}

/// A model and options to train.
#[derive(Clone, Copy, Debug)]
pub struct Task {
    /// The model.
    pub shape: Shape,
    /// Keys of the job besides `FIXED_KEYS`.
    pub extra: &'static [(&'static str, &'static str)],
}

impl Task {
    /// A model in f32, every weight trained.
    pub const fn plain(shape: Shape) -> Task {
        Task { shape, extra: &[] }
    }
}

/// Where the ranks of a cell run.
#[derive(Clone, Debug)]
pub enum Ranks {
    /// On the processors, as threads of this process.
    Threads,
    /// On a device, as processes that this runtime starts.
    Processes(Runtime, DeviceChoice),
}

/// Loss and gradient norm of each step.
pub type Curve = Vec<(f64, f64)>;

/// Metrics and files of a run.
#[derive(Clone, Debug)]
pub struct Run {
    /// The steps that ran.
    pub curve: Curve,
    /// Validation losses.
    pub evals: Vec<f64>,
    /// Checkpoint of the last step.
    pub checkpoint: PathBuf,
    /// The exported model.
    pub model: PathBuf,
    /// The output folder.
    output: PathBuf,
}

/// As [`train_on`], on threads of this process.
///
/// # Errors
/// Those of the job.
pub fn train(task: &Task, cell: &Cell, dir: &Path, until: u64, resume: Option<&Path>) -> anyhow::Result<Run> {
    train_on(&Ranks::Threads, task, cell, dir, until, resume)
}

/// Trains from the first step, or from the checkpoint `resume`, to step `until` of [`STEPS`].
///
/// # Errors
/// Those of the job.
pub fn train_on(
    ranks: &Ranks,
    task: &Task,
    cell: &Cell,
    dir: &Path,
    until: u64,
    resume: Option<&Path>,
) -> anyhow::Result<Run> {
    let text = dir.join("text.jsonl");
    if !text.exists() {
        std::fs::write(&text, documents())?;
    }
    let output = dir.join(format!("{cell}-{until}").replace(' ', "-"));
    let resume = resume.map_or("none".into(), |p| p.display().to_string());
    let mut job = Job::builder();
    for (key, value) in task.shape.keys().iter().chain(FIXED_KEYS).chain(task.extra) {
        job = job.set(*key, value);
    }
    for (key, value) in cell.keys() {
        job = job.set(key, value);
    }
    let device = if let Ranks::Processes(_, device) = ranks { *device } else { DeviceChoice::Cpu };
    let job = job
        .set("device", device.word())
        .set("elastic.detection_time", DETECTION_S)
        .set("microbatches_per_step", BATCH_ROWS)
        .set("datasets.0.path", text.display())
        .set("dataset_prepared_path", dir.join("data").display())
        .set("max_steps", until)
        .set("resume_from_checkpoint", resume)
        .set("output_dir", output.display())
        .build()?;
    let (curve, evals) = (Mutex::new(Vec::new()), Mutex::new(Vec::new()));
    let follow = |event: &Event| match event {
        Event::Step(m) => curve.lock().expect("no holder of the lock panics").push((m.loss, m.grad_norm)),
        Event::Eval(m) => evals.lock().expect("no holder of the lock panics").push(m.eval_loss),
        _ => {}
    };
    let report = match ranks {
        Ranks::Threads => job.run_with(&Control::default(), follow)?,
        Ranks::Processes(runtime, _) => run_processes(runtime, job, follow)?,
    };
    let checkpoint = report.checkpoint.context("no checkpoint was saved")?;
    let model = report.model_dir.context("no model was exported")?;
    Ok(Run { curve: curve.into_inner()?, evals: evals.into_inner()?, checkpoint, model, output })
}

/// Runs a job whose ranks are processes to its end.
fn run_processes(runtime: &Runtime, job: Job, follow: impl Fn(&Event)) -> anyhow::Result<Report> {
    let events = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    events.block_on(async {
        let job = runtime.start(job).await?;
        let mut events = job.events();
        while let Some(event) = events.next().await {
            follow(&event?);
        }
        Ok(job.wait().await?)
    })
}

/// Rows hold several documents; the norm is clipped in some steps and not in others.
const FIXED_KEYS: &[(&str, &str)] = &[
    ("tokenizer", "bytes"),
    ("datasets.0.type", "completion"),
    ("sequence_len", "32"),
    ("sample_packing", "true"),
    ("excess_length_strategy", "truncate"),
    ("micro_batch_size", "1"),
    ("learning_rate", "1e-3"),
    ("lr_scheduler", "constant"),
    ("warmup_steps", "2"),
    ("max_grad_norm", "0.5"),
    ("weight_decay", "0.1"),
    ("threads", "1"),
];

/// Short documents of different lengths, so that packed rows hold several, each with a worse one for runs over pairs.
fn documents() -> String {
    let mut text = String::new();
    let mut state = 7u64;
    for i in 0..160 {
        let mut words = String::new();
        let n = 1 + (state >> 33) % 5;
        for _ in 0..n {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            words.push_str(
                ["the line ", "holds ", "when one ", "steps up ", "falls ", "behind "][(state >> 40) as usize % 6],
            );
        }
        let pair = format!("\"prompt\": \"{} \", \"chosen\": \"{words}\", \"rejected\": \"{n} behind {i}\"", i % 13);
        let whole = format!("{} {words}", i % 13);
        // The same as tokens that count more or less, or not at all.
        let weights: Vec<f64> = (0..whole.len()).map(|t| ((i + t) % 4) as f64 * 0.3).collect();
        let tokens = format!("\"input_ids\": {:?}, \"loss_weights\": {weights:?}", whole.as_bytes());
        text.push_str(&format!("{{\"text\": \"{whole}\", {pair}, {tokens}}}\n"));
    }
    text
}

/// The largest difference of a loss from the reference, and the largest relative difference of a norm.
pub fn distance(curve: &[(f64, f64)], reference: &[(f64, f64)]) -> (f64, f64) {
    if curve.len() != reference.len() || curve.is_empty() {
        return (f64::INFINITY, f64::INFINITY);
    }
    let pairs = || curve.iter().zip(reference);
    let worst = |worst: f64, d: f64| if d.is_nan() { f64::INFINITY } else { worst.max(d) };
    let loss = pairs().fold(0.0, |w, (a, b)| worst(w, (a.0 - b.0).abs()));
    let norm = pairs().fold(0.0, |w, (a, b)| worst(w, (a.1 - b.1).abs() / b.1));
    (loss, norm)
}

/// Outcome of a cell.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The model.
    pub shape: Shape,
    /// The cell.
    pub cell: Cell,
    /// The cell from whose checkpoint it resumed.
    pub from: Cell,
    /// The largest differences from one rank, or the error.
    pub distance: Result<(f64, f64), String>,
}

impl Outcome {
    /// Whether the cell trained like one rank.
    pub fn passed(&self, tolerance: &Tolerance) -> bool {
        self.distance.as_ref().is_ok_and(|d| tolerance.admits(*d))
    }
}

/// As [`compare_on`], on threads of this process.
///
/// # Errors
/// When the job of one rank fails; the error of a cell is its outcome.
pub fn compare(task: &Task, ring: &[Cell], dir: &Path, each: impl FnMut(Outcome)) -> anyhow::Result<()> {
    compare_on(&Ranks::Threads, task, ring, dir, each)
}

/// Trains each cell for the first half of the steps from scratch, and for the second half from the checkpoint of its
/// predecessor in the ring; compares with one rank on the CPU and passes each outcome to `each`.
///
/// # Errors
/// When the job of one rank fails; the error of a cell is its outcome.
pub fn compare_on(
    ranks: &Ranks,
    task: &Task,
    ring: &[Cell],
    dir: &Path,
    mut each: impl FnMut(Outcome),
) -> anyhow::Result<()> {
    let reference = train(task, &Cell::ALONE, dir, STEPS, None)?.curve;
    let (first_steps, last_steps) = reference.split_at((STEPS / 2) as usize);
    let mut previous: Option<(Cell, Run)> = None;
    let mut waiting = None;
    let mut finish = |cell: Cell, first: (f64, f64), from: &(Cell, Run)| {
        let second = train_on(ranks, task, &cell, dir, STEPS, Some(&from.1.checkpoint)).and_then(|run| {
            std::fs::remove_dir_all(&run.output)?;
            Ok(distance(&run.curve, last_steps))
        });
        let worst = |second: (f64, f64)| (first.0.max(second.0), first.1.max(second.1));
        let distance = second.map(worst).map_err(|e| format!("from {}: {e:#}", from.0));
        each(Outcome { shape: task.shape, cell, from: from.0, distance });
    };
    let mut failed = Vec::new();
    for cell in ring {
        match train_on(ranks, task, cell, dir, STEPS / 2, None) {
            Err(error) => failed.push((*cell, format!("{error:#}"))),
            Ok(run) => {
                let first = distance(&run.curve, first_steps);
                match previous.replace((*cell, run)) {
                    None => waiting = Some((*cell, first)),
                    Some(from) => {
                        finish(*cell, first, &from);
                        std::fs::remove_dir_all(&from.1.output)?;
                    }
                }
            }
        }
    }
    if let (Some((cell, first)), Some(last)) = (waiting, &previous) {
        finish(cell, first, last);
        std::fs::remove_dir_all(&last.1.output)?;
    }
    for (cell, error) in failed {
        each(Outcome { shape: task.shape, cell, from: cell, distance: Err(error) });
    }
    Ok(())
}
