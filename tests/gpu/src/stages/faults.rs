//! Two rank processes of the real runtime, one of which is killed or stopped: the job ends with the weights of an undisturbed one.
//! They share the GPU if there is one, and their collectives are in host memory; with several GPUs each has its own, and NCCL
//! carries the tensors. The ranks are processes of this program.

use super::Report;
use anyhow::{Context, Result, ensure};
use phalanx::{Event, Job, RankProgram, RunningJob, Runtime};
use phalanx_cuda::CudaDevice;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

const N_STEPS: u64 = 40;
/// Longer than a scenario takes.
const PATIENCE: Duration = Duration::from_secs(180);
/// A stopped rank counts as hung after this time.
const DETECTION_S: f64 = 4.0;

/// After this step, the rank in this slot gets this signal.
pub(super) type Signal = (u64, usize, &'static str);

/// Keys of a job's configuration, and their values.
pub(super) type Keys<'a> = &'a [(&'a str, &'a str)];

/// The scenarios and their signals.
const SCENARIOS: [(&str, &[Signal]); 3] = [
    ("undisturbed", &[]),
    ("ranks killed at steps 5, 15 and 25", &[(5, 1, "KILL"), (15, 0, "KILL"), (25, 1, "KILL")]),
    ("a rank stopped at step 10", &[(10, 1, "STOP")]),
];

/// What a job left.
pub(super) struct Ended {
    /// Bits of each step's loss.
    pub(super) losses: Vec<u64>,
    pub(super) weights: Vec<u8>,
    pub(super) n_incidents: usize,
    /// Communicators over NCCL, if the job logs them.
    pub(super) n_over_nccl: usize,
    pub(super) seconds: f64,
}

pub(super) fn run(gpu: &CudaDevice) -> Result<Report> {
    let mut report = Report::new(&gpu.gpus()[0].name, &["scenario", "s", "incidents", "weights"]);
    let folder = std::env::temp_dir().join(format!("phalanx-gpu-faults-{}", std::process::id()));
    let events =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("starting an event loop")?;
    let mut undisturbed: Option<Ended> = None;
    for (i, (name, signals)) in SCENARIOS.into_iter().enumerate() {
        let ended =
            events.block_on(scenario(&folder, &i.to_string(), N_STEPS, KEYS, signals)).with_context(|| name.to_owned());
        let outcome = ended.and_then(|ended| {
            let (losses, weights) =
                undisturbed.as_ref().map_or((&ended.losses, &ended.weights), |u| (&u.losses, &u.weights));
            let is_equal = *losses == ended.losses && *weights == ended.weights;
            let cells = (format!("{:.1}", ended.seconds), if is_equal { "equal" } else { "differ" });
            report.row(&[&name, &cells.0, &ended.n_incidents, &cells.1]);
            ensure!(ended.losses.len() == N_STEPS as usize, "{name}: {} steps", ended.losses.len());
            // A rank may be lost while another is replaced, which is one incident.
            ensure!(ended.n_incidents > 0 || signals.is_empty(), "{name}: no incident");
            ensure!(is_equal, "{name}: losses or weights differ from those of the undisturbed job");
            undisturbed.get_or_insert(ended);
            Ok(())
        });
        report.check(outcome);
    }
    std::fs::remove_dir_all(&folder).with_context(|| format!("removing {}", folder.display()))?;
    Ok(report)
}

/// Two ranks, with sums in a fixed order.
const KEYS: Keys<'static> = &[("dp_replicate_size", "2"), ("reproducible", "true")];

/// Runs a small job with these keys to its end and sends the signals on the way. Its output is below `folder`.
pub(super) async fn scenario(
    folder: &Path,
    name: &str,
    n_steps: u64,
    keys: Keys<'_>,
    signals: &[Signal],
) -> Result<Ended> {
    let begin = Instant::now();
    let runtime = Runtime::new(RankProgram::at(std::env::current_exe().context("finding this program")?))?;
    let job = runtime.start(job(folder, &folder.join(name), n_steps, keys)?).await?;
    let follow = async {
        let (mut events, mut losses, mut next) = (job.events(), Vec::new(), signals.iter().peekable());
        let (mut n_incidents, mut n_over_nccl) = (0, 0);
        while let Some(event) = events.next().await {
            match event? {
                Event::Step(m) => {
                    losses.push(m.loss.to_bits());
                    if let Some((_, slot, signal)) = next.next_if(|(step, ..)| m.step >= *step) {
                        send(&job, *slot, signal).await?;
                    }
                }
                Event::Note(note) if note.contains("detect ") => {
                    println!("{note}");
                    n_incidents += 1;
                }
                Event::Note(note) if note.contains("collectives over NCCL") => n_over_nccl += 1,
                _ => {}
            }
        }
        Ok::<_, anyhow::Error>((losses, n_incidents, n_over_nccl))
    };
    let followed = tokio::time::timeout(PATIENCE, follow).await;
    if followed.is_err() {
        job.stop();
    }
    let (losses, n_incidents, n_over_nccl) =
        followed.with_context(|| format!("the job took more than {PATIENCE:?}"))??;
    let model = job.wait().await?.model_dir.context("no model was exported")?;
    let weights = std::fs::read(model.join("model.safetensors")).context("reading the exported model")?;
    Ok(Ended { losses, weights, n_incidents, n_over_nccl, seconds: begin.elapsed().as_secs_f64() })
}

async fn send(job: &RunningJob, slot: usize, signal: &str) -> Result<()> {
    let begin = Instant::now();
    let pid = loop {
        let status = job.status().await.context("asking for the ranks")?;
        let pids: Vec<u32> = status.nodes.iter().flat_map(|node| &node.ranks).filter_map(|rank| rank.pid).collect();
        // A rank that is being replaced has no process.
        if let [_, _] = pids[..] {
            break pids[slot];
        }
        ensure!(begin.elapsed() < PATIENCE, "the job does not get its two ranks back: {pids:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    let sent = Command::new("kill").args([format!("-{signal}"), pid.to_string()]).status().context("starting kill")?;
    ensure!(sent.success(), "process {pid} is gone");
    Ok(())
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
