//! Whole jobs whose ranks share the GPU and exchange tensors over NCCL: with ranks killed, and on pairs of axes.

use super::Report;
use super::faults::{Keys, Signal, scenario};
use crate::apart;
use anyhow::{Context, Result, ensure};
use phalanx_cuda::CudaDevice;
use std::path::PathBuf;

/// Arguments of the process.
#[derive(Clone, Debug, clap::Args)]
pub struct NcclJobs {
    /// Folder of the jobs and of the report.
    #[arg(long)]
    pub folder: PathBuf,
    /// Ranks that are killed in one job.
    #[arg(long)]
    pub kills: u64,
    /// Pairs of axes on which a job runs.
    #[arg(long)]
    pub pairs: usize,
}

const AXES: [&str; 5] =
    ["dp_shard_size", "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "dp_replicate_size"];

/// How far losses of the same job over NCCL and through host memory may differ: sums of four ranks have another order.
const LOSS_TOLERANCE: f64 = 1e-4;

/// Runs the jobs; the report is in the folder afterwards.
///
/// # Errors
/// When there is no GPU. Failed checks are part of the report.
pub fn run(args: &NcclJobs, gpu: &CudaDevice) -> Result<()> {
    let mut report = Report::new(&gpu.gpus()[0].name, &["scenario", "ranks", "s", "figures"]);
    let events =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("starting an event loop")?;
    events.block_on(async {
        let outcome = kills(args, &mut report).await;
        report.check(outcome.context("ranks killed over NCCL"));
        let pairs = (0..AXES.len()).flat_map(|a| (0..a).map(move |b| [AXES[b], AXES[a]]));
        for pair in pairs.take(args.pairs) {
            let outcome = pair_of_axes(args, pair, &mut report).await;
            report.check(outcome.with_context(|| pair.join(" and ")));
        }
    });
    apart::write(&args.folder.join("jobs.json"), &serde_json::to_string(&report)?)
}

/// A job whose ranks are killed one after the other has the losses and weights of an undisturbed one.
async fn kills(args: &NcclJobs, report: &mut Report) -> Result<()> {
    let n_steps = 10 + 5 * args.kills;
    let keys: Keys<'_> = &[("dp_replicate_size", "2"), ("reproducible", "true")];
    let signals: Vec<Signal> =
        (0..args.kills).map(|kill| (5 + 5 * kill, (kill * 7 % 5 % 2) as usize, "KILL")).collect();
    let undisturbed = scenario(&args.folder, "undisturbed", n_steps, keys, &[]).await?;
    let ended = scenario(&args.folder, "killed", n_steps, keys, &signals).await?;
    let is_equal =
        undisturbed.losses == ended.losses && undisturbed.weights.is_some() && undisturbed.weights == ended.weights;
    let name = format!("a job, {} ranks killed", args.kills);
    let figures = format!("{} incidents, weights {}", ended.n_incidents, if is_equal { "equal" } else { "differ" });
    println!("{name}, undisturbed {:.1} s, disturbed {:.1} s: {figures}", undisturbed.seconds, ended.seconds);
    report.row(&[&name, &2, &format!("{:.1}", ended.seconds), &figures]);
    ensure!(is_equal, "losses or weights differ from those of the undisturbed job");
    ensure!(ended.n_incidents as u64 >= args.kills.min(1), "no incident");
    ensure!(undisturbed.n_over_nccl > 0 && ended.n_over_nccl > 0, "the ranks do not use NCCL");
    Ok(())
}

/// A job on 2 x 2 ranks has the losses of the same job with copies through host memory.
async fn pair_of_axes(args: &NcclJobs, pair: [&str; 2], report: &mut Report) -> Result<()> {
    let keys = [(pair[0], "2"), (pair[1], "2"), ("bf16", "false"), ("gradient_accumulation_steps", "2")];
    let name = pair.map(|key| key.trim_end_matches("_size")).join(" x ");
    let staged_keys: Vec<_> = keys.into_iter().chain([("gpu_collectives", "staged")]).collect();
    let over_nccl = scenario(&args.folder, &format!("{name} nccl"), 3, &keys, &[]).await?;
    let staged = scenario(&args.folder, &format!("{name} staged"), 3, &staged_keys, &[]).await?;
    let losses = over_nccl.losses.iter().zip(&staged.losses).map(|(a, b)| (f64::from_bits(*a), f64::from_bits(*b)));
    let worst = losses.map(|(a, b)| (a / b - 1.0).abs()).fold(0.0, f64::max);
    println!("{name}, over NCCL {:.1} s, staged {:.1} s: losses within {worst:.1e}", over_nccl.seconds, staged.seconds);
    report.row(&[&name, &4, &format!("{:.1}", over_nccl.seconds), &format!("losses within {worst:.1e}")]);
    ensure!(over_nccl.n_over_nccl > 0 && staged.n_over_nccl == 0, "the ranks do not use NCCL where they should");
    ensure!(over_nccl.losses.len() == 3 && worst <= LOSS_TOLERANCE, "losses differ by {worst:e}");
    Ok(())
}
