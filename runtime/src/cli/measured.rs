//! Hardware with the rates that `phalanx-gpu` has measured on a GPU of its kind.

use crate::devices;
use crate::error::JobError;
use crate::error::command::CommandError;
use phalanx_storage::foreign_file;
use phalanx_strategies::plan::Hardware;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Hardware for GPUs, and where its rates come from.
#[derive(Debug)]
pub(super) struct Gpus {
    pub(super) hardware: Hardware,
    /// The file of the measurements; `None` for published figures.
    pub(super) measured: Option<PathBuf>,
}

/// The hardware of this name, with the measurements in `file`, or in the user's cache folder if they are of this hardware.
///
/// # Errors
/// If there is no such hardware; if `file` has no measurements of it.
pub(super) fn gpus(name: &str, file: Option<&Path>) -> Result<Gpus, JobError> {
    let hardware = Hardware::named(name).ok_or_else(|| CommandError::Gpu { found: name.into() })?;
    if let Some(path) = file {
        let measured = Some(path.to_owned());
        return Ok(Gpus { hardware: read(&hardware, path)?, measured });
    }
    let default = devices::cache_folder().map(|cache| cache.join("gpu/summary.json"));
    let found = default.and_then(|path| Some((read(&hardware, &path).ok()?, path)));
    let (hardware, measured) = found.map_or((hardware, None), |(hardware, path)| (hardware, Some(path)));
    Ok(Gpus { hardware, measured })
}

/// Hardware with the published figures of this machine's GPU, or of the usual one if it is not known.
pub(super) fn published() -> Hardware {
    let product = devices::gpu().ok().and_then(|gpu| Some(gpu.gpus().first()?.name.clone())).unwrap_or_default();
    let known = Hardware::NAMES.into_iter().filter_map(Hardware::named).find(|hardware| hardware.is_of(&product));
    known.unwrap_or_else(|| Hardware::named("h100").expect("it is shipped"))
}

/// What `phalanx-gpu` writes for a stage; of the summary, the part of a stage.
#[derive(Debug, Deserialize)]
struct Report {
    device: String,
    rows: Vec<Vec<String>>,
}

#[derive(Debug, Deserialize)]
struct Stage {
    report: Report,
}

/// The longest summary that is read.
const SUMMARY_BYTES_MAX: u64 = 64 << 20;

fn read(hardware: &Hardware, path: &Path) -> Result<Hardware, JobError> {
    let io = |source| JobError::Io { action: "read", path: path.to_owned(), source };
    let text = foreign_file::read_text(path, SUMMARY_BYTES_MAX).map_err(io)?;
    let none = |reason: String| CommandError::Measured { path: path.to_owned(), reason };
    let summary: BTreeMap<String, Stage> = serde_json::from_str(&text).map_err(|e| none(e.to_string()))?;
    let report = |stage: &str| summary.get(stage).map(|stage| &stage.report).filter(|report| !report.rows.is_empty());
    let ceilings = report("ceilings").ok_or_else(|| none("the stage `ceilings` has no rows".into()))?;
    if !hardware.is_of(&ceilings.device) {
        let (found, gpu) = (ceilings.device.clone(), hardware.name.clone());
        return Err(CommandError::MeasuredOther { path: path.to_owned(), found, gpu }.into());
    }
    let mut measured = with_rates(hardware, ceilings, report("rates")).map_err(none)?;
    if let Some(bytes) = report("libraries").and_then(context_bytes) {
        measured.context_bytes = bytes;
    }
    Ok(measured.validate().map_err(CommandError::Hardware)?)
}

/// Products and copies reach the measured fractions of their peaks; operations of a step have their measured rates.
fn with_rates(hardware: &Hardware, ceilings: &Report, rates: Option<&Report>) -> Result<Hardware, String> {
    let mut measured = hardware.clone();
    let ceiling = |what: &str| -> Result<f64, String> {
        let row = ceilings.rows.iter().find(|row| row.first().is_some_and(|cell| cell.starts_with(what)));
        let rate = row.and_then(|row| per_second(row.get(2)?));
        rate.ok_or_else(|| format!("the stage `ceilings` has no rate of `{what}`"))
    };
    measured.matmul_bf16.fraction = (ceiling("product bf16")? / hardware.matmul_bf16.peak_flops).min(1.0);
    measured.matmul_f32.fraction = (ceiling("product f32")? / hardware.matmul_f32.peak_flops).min(1.0);
    measured.memory_fraction = (ceiling("copy")? / hardware.memory_bytes_per_s).min(1.0);
    for row in rates.into_iter().flat_map(|report| &report.rows) {
        // Columns: operation, number, ms, TFLOP/s, share of the peak, TB/s.
        let [operation, _, _, flops, _, bytes] = &row[..] else { continue };
        let rate = if operation.starts_with("attention") { flops } else { bytes };
        let rate = rate.parse::<f64>().ok().filter(|rate| *rate > 0.0);
        if let Some(rate) = rate.filter(|_| !operation.starts_with("matmul") && operation != "all") {
            measured.measured.insert(operation.clone(), rate * 1e12);
        }
    }
    Ok(measured)
}

/// The memory of a context, in the row that `phalanx-gpu libraries` writes.
fn context_bytes(libraries: &Report) -> Option<u64> {
    let row = libraries.rows.iter().find(|row| row.first().is_some_and(|cell| cell == "context"))?;
    let mib: u64 = row.get(1)?.strip_suffix(" MiB")?.parse().ok()?;
    Some(mib << 20).filter(|bytes| *bytes > 0)
}

/// The rate at the beginning of a cell such as `780.1 TFLOP/s, 79 % of 989`, per second.
fn per_second(cell: &str) -> Option<f64> {
    let (number, unit) = cell.split_once(' ')?;
    let number: f64 = number.parse().ok()?;
    (unit.starts_with("TFLOP/s") || unit.starts_with("TB/s")).then_some(number * 1e12)
}

/// Why this machine cannot run a plan for this hardware, in one sentence; `None` if it can.
pub(super) fn obstacle(hardware: &Hardware, n_per_node: u32, memory_bytes: u64) -> Option<String> {
    let cannot = "This machine cannot run this plan:";
    let gpu = match devices::gpu() {
        Ok(gpu) => gpu,
        Err(error) => return Some(format!("{cannot} {error}.")),
    };
    let all = gpu.gpus();
    let Some(first) = all.first() else { return Some(format!("{cannot} it has no GPU.")) };
    if !hardware.is_of(&first.name) {
        return Some(format!("{cannot} its GPU is {}, not {}.", first.name, hardware.name));
    }
    if all.len() < n_per_node as usize {
        return Some(format!("{cannot} it has {} GPUs, and the plan needs {n_per_node} on each machine.", all.len()));
    }
    let least = all.iter().map(|gpu| gpu.memory_bytes as u64).min().unwrap_or(0);
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    (least < memory_bytes).then(|| {
        format!("{cannot} its GPU has {} MiB of memory, and the plan needs {} MiB.", mib(least), mib(memory_bytes))
    })
}
