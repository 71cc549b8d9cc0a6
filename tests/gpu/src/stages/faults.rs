//! Two rank processes of the real runtime, which are killed and stopped one after the other, without spares and with a warm one: the
//! steps are those of an undisturbed job, and the phases of each recovery are measured. They share the GPU if there is one, and
//! their collectives are in host memory; with several GPUs each has its own, and NCCL carries the tensors. The ranks are
//! processes of this program.

use super::Report;
use super::recovery::{Recovery, Watched, send};
use anyhow::{Context, Result, ensure};
use phalanx::{Job, RankProgram, RunningJob, Runtime};
use phalanx_cuda::CudaDevice;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tokio::time::error::Elapsed;

/// Ranks that are killed, without spares and with a warm one.
const N_KILLS: usize = 5;
/// Steps that suffice for all disturbances, and more than a job makes until it is stopped.
const N_STEPS_MIN: u64 = 100;
const N_STEPS_MAX: u64 = 1_000_000;
/// Most steps of a job that runs to its end: while a spare starts, a fast GPU makes many.
const N_STEPS_COMPARED: u64 = 2_000;
/// Longer than a scenario takes.
const PATIENCE: Duration = Duration::from_secs(180);
/// A stopped rank counts as hung after half of this time.
const DETECTION_S: f64 = 4.0;

/// After this step, the rank in this slot gets this signal.
pub(super) type Signal = (u64, usize, &'static str);

/// Keys of a job's configuration, and their values.
pub(super) type Keys<'a> = &'a [(&'a str, &'a str)];

/// What a job left.
pub(super) struct Ended {
    /// Bits of each step's loss.
    pub(super) losses: Vec<u64>,
    /// None if the job was stopped before its end.
    pub(super) weights: Option<Vec<u8>>,
    pub(super) n_incidents: usize,
    /// Communicators over NCCL, if the job logs them.
    pub(super) n_over_nccl: usize,
    pub(super) seconds: f64,
}

/// Two ranks, with sums in a fixed order; steps do not depend on the number of steps.
const KEYS: [(&str, &str); 3] =
    [("dp_replicate_size", "2"), ("reproducible", "true"), ("lr_scheduler", "constant_with_warmup")];

/// A signal, and the position of the rank that gets it.
type Disturbance = (&'static str, usize);

pub(super) fn run(gpu: &CudaDevice) -> Result<Report> {
    let columns: Vec<&str> = ["scenario", "s", "steps"].into_iter().chain(Recovery::COLUMNS).collect();
    let mut report = Report::new(&gpu.gpus()[0].name, &columns);
    let folder = std::env::temp_dir().join(format!("phalanx-gpu-faults-{}", std::process::id()));
    let events =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("starting an event loop")?;
    if let Err(error) = events.block_on(scenarios(&folder, &mut report)) {
        report.check(Err(error));
    }
    std::fs::remove_dir_all(&folder).with_context(|| format!("removing {}", folder.display()))?;
    Ok(report)
}

/// The first job is stopped after its last recovery; the others make as many steps, so that steps after each recovery are compared.
async fn scenarios(folder: &Path, report: &mut Report) -> Result<()> {
    let kills: Vec<Disturbance> = (0..N_KILLS).map(|kill| ("KILL", kill % 2)).collect();
    let ended = disturbed(folder, N_STEPS_MAX, 1, &kills).await;
    let (spared, recoveries) = ended.context("ranks killed, with a warm spare")?;
    row(report, "rank killed, warm spare", &spared, &recoveries);

    let n_steps = (spared.losses.len() as u64).min(N_STEPS_COMPARED);
    let undisturbed = scenario(folder, "undisturbed", n_steps, &KEYS, &[]).await.context("undisturbed")?;
    row(report, "undisturbed", &undisturbed, &[]);
    report.check(are_equal(&spared.losses, &undisturbed.losses).context("ranks killed, with a warm spare"));

    let disturbances: Vec<Disturbance> = kills.into_iter().chain([("STOP", 1)]).collect();
    let ended = disturbed(folder, n_steps, 0, &disturbances).await;
    let (alone, recoveries) = ended.context("ranks killed and stopped, without spares")?;
    let (killed, stopped) = recoveries.split_at(N_KILLS);
    row(report, "rank killed, no spare", &alone, killed);
    row(report, "rank stopped, no spare", &alone, stopped);
    report.check(are_equal(&alone.losses, &undisturbed.losses).context("ranks killed and stopped, without spares"));
    let is_equal = undisturbed.weights.is_some() && undisturbed.weights == alone.weights;
    report.check(is_equal.then_some(()).context("weights differ from those of the undisturbed job"));
    Ok(())
}

/// Compares the losses of a job with those of an undisturbed one, which may have fewer steps.
fn are_equal(losses: &[u64], undisturbed: &[u64]) -> Result<()> {
    ensure!(losses.len() >= undisturbed.len(), "{} steps instead of {}", losses.len(), undisturbed.len());
    let first = losses.iter().zip(undisturbed).position(|(a, b)| a != b);
    ensure!(first.is_none(), "losses differ from those of the undisturbed job from step {} on", first.unwrap_or(0) + 1);
    Ok(())
}

fn row(report: &mut Report, name: &str, ended: &Ended, recoveries: &[Recovery]) {
    let first = [name.to_owned(), format!("{:.1}", ended.seconds), ended.losses.len().to_string()];
    report.rows.push(first.into_iter().chain(Recovery::cells(recoveries)).collect());
}

/// Runs a small job with these keys to its end and sends the signals on the way. Its output is below `folder`.
pub(super) async fn scenario(
    folder: &Path,
    name: &str,
    n_steps: u64,
    keys: Keys<'_>,
    signals: &[Signal],
) -> Result<Ended> {
    let running = Running::start(folder, name, n_steps, keys).await?;
    let mut watched = Watched::new(&running.job);
    let follow = async {
        for (step, slot, signal) in signals {
            watched.until("a step", |watched| watched.step() >= *step).await?;
            send(signal, pid_of(&running.job, *slot).await?)?;
        }
        watched.finish().await
    };
    let followed = tokio::time::timeout(PATIENCE, follow).await;
    running.ended(watched, followed).await
}

/// Runs a small job and measures its recovery from each disturbance, which comes while this many spares are ready. Stops a job of
/// [`N_STEPS_MAX`] afterwards.
async fn disturbed(
    folder: &Path,
    n_steps: u64,
    n_spares: usize,
    disturbances: &[Disturbance],
) -> Result<(Ended, Vec<Recovery>)> {
    let spares = n_spares.to_string();
    let keys: Vec<_> = KEYS.into_iter().chain([("elastic.spare_ranks", &*spares)]).collect();
    let running = Running::start(folder, &format!("spares-{n_spares}"), n_steps, &keys).await?;
    let mut watched = Watched::new(&running.job);
    let mut recoveries = Vec::new();
    let follow = async {
        for (signal, position) in disturbances {
            recoveries.push(watched.recover(signal, *position, n_spares).await?);
        }
        if n_steps == N_STEPS_MAX {
            watched.until("enough steps", |watched| watched.step() >= N_STEPS_MIN).await?;
            running.job.stop();
        }
        watched.finish().await
    };
    let followed = tokio::time::timeout(PATIENCE, follow).await;
    Ok((running.ended(watched, followed).await?, recoveries))
}

/// A job that runs, and when it was started.
struct Running {
    job: RunningJob,
    begin: Instant,
}

impl Running {
    async fn start(folder: &Path, name: &str, n_steps: u64, keys: Keys<'_>) -> Result<Running> {
        let begin = Instant::now();
        let runtime = Runtime::new(RankProgram::at(std::env::current_exe().context("finding this program")?))?;
        let job = runtime.start(job(folder, &folder.join(name), n_steps, keys)?).await?;
        Ok(Running { job, begin })
    }

    /// What the job leaves at its end, once it was `followed` there.
    async fn ended(&self, watched: Watched<'_>, followed: Result<Result<()>, Elapsed>) -> Result<Ended> {
        let outcome = followed.with_context(|| format!("the job took more than {PATIENCE:?}")).and_then(|all| all);
        if outcome.is_err() {
            self.job.stop();
        }
        let report = self.job.wait().await;
        outcome?;
        let read =
            |model: &PathBuf| std::fs::read(model.join("model.safetensors")).context("reading the exported model");
        let weights = report?.model_dir.as_ref().map(read).transpose()?;
        let (losses, n_incidents, n_over_nccl) = (watched.losses, watched.incidents.len(), watched.n_over_nccl);
        Ok(Ended { losses, weights, n_incidents, n_over_nccl, seconds: self.begin.elapsed().as_secs_f64() })
    }
}

/// The process in a slot of a job of two ranks.
async fn pid_of(job: &RunningJob, slot: usize) -> Result<u32> {
    let begin = Instant::now();
    loop {
        let status = job.status().await.context("asking for the ranks")?;
        let pids: Vec<u32> = status.nodes.iter().flat_map(|node| &node.ranks).filter_map(|rank| rank.pid).collect();
        // A rank that is being replaced has no process.
        if let [_, _] = pids[..] {
            return Ok(pids[slot]);
        }
        ensure!(begin.elapsed() < PATIENCE, "the job does not get its two ranks back: {pids:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// A small model.
fn job(folder: &Path, output: &Path, n_steps: u64, more: Keys<'_>) -> Result<Job> {
    let text = folder.join("text.txt");
    std::fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
    let lines: String = (0..400).map(|i| format!("The {i}th hoplite holds the line. ")).collect();
    std::fs::write(&text, lines).with_context(|| format!("writing {}", text.display()))?;
    let keys = [
        ("model.model_type", "llama"),
        ("model.hidden_size", "32"),
        ("model.intermediate_size", "64"),
        ("model.num_hidden_layers", "2"),
        ("model.num_attention_heads", "4"),
        ("model.num_key_value_heads", "2"),
        ("model.max_position_embeddings", "64"),
        ("tokenizer", "bytes"),
        ("datasets.0.type", "completion"),
        ("device", "cuda"),
        ("sequence_len", "32"),
        ("micro_batch_size", "2"),
        ("learning_rate", "1e-2"),
        ("warmup_steps", "2"),
        ("logging_steps", "1"),
    ];
    let job = keys.iter().chain(more).fold(Job::builder(), |job, (key, value)| job.set(*key, value));
    let job = job.set("datasets.0.path", text.display()).set("output_dir", output.display());
    Ok(job.set("max_steps", n_steps).set("save_steps", n_steps).set("elastic.detection_time", DETECTION_S).build()?)
}
