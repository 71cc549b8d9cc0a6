//! Describes this machine as hardware of a plan, with rates measured in steps of a small model on all ranks at once.

use super::probe::{Sample, Work, samples, small};
use crate::config::JobConfig;
use crate::config::precision::DeviceChoice;
use crate::devices::choice_of;
use crate::devices::kept::Measurements;
use crate::error::JobError;
use crate::error::fit::FitError;
use crate::memory_limit;
use crate::train::plan::ModelPlan;
use phalanx_device::world::LOCAL_RANKS_MAX;
use phalanx_strategies::mesh::Mesh;
use phalanx_strategies::model::ModelConfig;
use phalanx_strategies::plan::Hardware;
use phalanx_strategies::plan::hardware::Rate;
use phalanx_strategies::program::Compute;
use phalanx_strategies::world::Mover;
use std::collections::BTreeMap;

/// Maximum number of ranks measured together; more ranks share the cores in the same way.
const RANKS_MAX: usize = 8;

/// This machine as seen by each of `n_ranks` ranks, with the job's threads per rank or an equal share of the cores: as an earlier call
/// has measured it, unless asked to `remeasure`.
pub(super) fn this_machine(
    named: Hardware,
    config: &JobConfig,
    plan: &ModelPlan,
    model: &ModelConfig,
    n_ranks: usize,
    remeasure: bool,
) -> Result<Hardware, JobError> {
    if n_ranks > LOCAL_RANKS_MAX as usize {
        return Err(FitError::Measured { n_ranks }.into());
    }
    let n_threads = config.precision.threads.unwrap_or_else(|| (plan.device.available_threads() / n_ranks).max(1));
    let probe = small(plan, model);
    let n_measured = n_ranks.min(RANKS_MAX);
    let memory_bytes = memory_bytes().unwrap_or(named.memory_bytes) / n_ranks as u64;
    let (kept, key) = (Measurements::in_cache("rates.json"), key(&probe, n_ranks, n_threads));
    // Another GPU may be there by now.
    let uses_kept = !remeasure && choice_of(&*plan.device) == DeviceChoice::Cpu;
    let known = kept.get::<Hardware>(&key).filter(|known| uses_kept && known.clone().validate().is_ok());
    if let Some(known) = known {
        return Ok(Hardware { memory_bytes, ..known });
    }
    let mut all = samples(&probe, Mesh { dp_shard: n_measured, ..Mesh::ONE }, n_threads)?;
    if n_measured > 1 {
        let replicas = samples(&probe, Mesh { dp_replicate: n_measured, ..Mesh::ONE }, n_threads)?;
        all.extend(replicas);
    }
    // The measured ranks use all cores; further ranks share them.
    let sharing = n_ranks as f64 / n_measured as f64;
    all.iter_mut().for_each(|sample| sample.seconds *= sharing);
    let devices_per_node = n_ranks as u32;
    let measured = Hardware { memory_bytes, devices_per_node, mover: Mover::Ranks, ..rates(named, &all) };
    kept.keep(&key, &measured);
    Ok(measured)
}

/// What the rates depend on, besides the machine.
fn key(probe: &ModelPlan, n_ranks: usize, n_threads: usize) -> String {
    let step = format!("{:?} {:?} {:?}", probe.model.known(), probe.batch, probe.spec);
    let step = blake3::hash(step.as_bytes()).to_hex();
    format!("{}; {n_ranks} ranks of {n_threads} threads; step {}", probe.device.name(), &step[..32])
}

/// Hardware on which the predicted time of every sample is close to its measured time.
fn rates(named: Hardware, samples: &[Sample]) -> Hardware {
    let products = |compute| -> Option<Rate> {
        let of = samples.iter().filter_map(|s| match s.work {
            Work::Kernel { cost, compute: Some(own) } if own == compute => Some((cost.matmul_flops, s.seconds)),
            _ => None,
        });
        let (fill_s, peak_flops) = line(&of.collect::<Vec<_>>())?;
        Some(Rate { peak_flops, fraction: 1.0, fill_s })
    };
    let (f32, bf16, fp8) = (products(Compute::F32), products(Compute::Bf16), products(Compute::Fp8));
    let mut work: BTreeMap<&str, (f64, f64)> = BTreeMap::new();
    let mut moved: BTreeMap<&str, Vec<(f64, f64)>> = BTreeMap::new();
    for s in samples {
        match s.work {
            Work::Kernel { compute: Some(_), .. } => {}
            Work::Kernel { cost, compute: None } => {
                let units = if cost.attention_flops > 0.0 { cost.attention_flops } else { cost.streamed_bytes };
                let (all, seconds) = work.entry(s.name).or_default();
                (*all, *seconds) = (*all + units, *seconds + s.seconds);
            }
            Work::Collective { bytes } => moved.entry(s.name).or_default().push((bytes as f64, s.seconds)),
        }
    }
    let streams = work.iter().filter(|(name, _)| !name.starts_with("attention"));
    let (bytes, seconds) = streams.fold((0.0, 0.0), |sum, (_, of)| (sum.0 + of.0, sum.1 + of.1));
    let lines: BTreeMap<&str, (f64, f64)> =
        moved.iter().filter_map(|(name, points)| Some((*name, line(points)?))).collect();
    let mut measured: BTreeMap<String, f64> =
        work.iter().map(|(name, (units, seconds))| (name.to_string(), units / seconds)).collect();
    measured.extend(lines.iter().map(|(name, (_, bytes_per_s))| (name.to_string(), *bytes_per_s)));
    // Operations that only copy are as fast as a gather.
    if let Some(copy) = measured.get("all_gather").copied() {
        for name in ["all_to_all", "broadcast", "shift", "send", "recv"] {
            measured.entry(name.into()).or_insert(copy);
        }
    }
    let attention = work.get("attention").map(|(flops, seconds)| flops / seconds);
    let matmul_f32 = f32.or(bf16).unwrap_or(named.matmul_f32);
    let matmul_bf16 = bf16.or(f32).unwrap_or(named.matmul_bf16);
    let peak = matmul_f32.peak_flops.max(matmul_bf16.peak_flops);
    Hardware {
        matmul_f32,
        matmul_bf16,
        fp8_speedup: fp8.map_or(named.fp8_speedup, |rate| rate.best() / matmul_bf16.best()),
        attention_fraction: attention.map_or(named.attention_fraction, |rate| (rate / peak).min(1.0)),
        memory_bytes_per_s: bytes / seconds,
        memory_fraction: 1.0,
        launch_s: samples.iter().map(|s| s.seconds).fold(f64::INFINITY, f64::min),
        collective_start_s: lines.values().map(|(latency, _)| *latency).reduce(f64::min).unwrap_or(0.0),
        measured,
        ..named
    }
}

/// Latency in seconds, and units per second, of the line through points `(units, seconds)` with the smallest relative
/// errors: least squares of `1 = (a + b units) / seconds`.
fn line(points: &[(f64, f64)]) -> Option<(f64, f64)> {
    let sum = |f: &dyn Fn(f64, f64) -> f64| points.iter().map(|(u, s)| f(*u, s.max(1e-9))).sum::<f64>();
    let (aa, ab, bb) = (sum(&|_, s| 1.0 / (s * s)), sum(&|u, s| u / (s * s)), sum(&|u, s| u * u / (s * s)));
    let (a, b) = (sum(&|_, s| 1.0 / s), sum(&|u, s| u / s));
    let det = aa * bb - ab * ab;
    let fitted = ((a * bb - b * ab) / det, (b * aa - a * ab) / det);
    let (latency, per_unit) = if fitted.0 >= 0.0 && fitted.1 > 0.0 { fitted } else { (0.0, b / bb) };
    (per_unit > 0.0 && per_unit.is_finite()).then(|| (latency, 1.0 / per_unit))
}

/// Memory of this machine; `None` if the system does not report it.
fn memory_bytes() -> Option<u64> {
    let mut system = sysinfo::System::new().ok()?;
    system.refresh_memory();
    Some(memory_limit::usable(system.total_memory()))
}
