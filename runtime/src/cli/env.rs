//! `phalanx env`.

use super::version::Build;
use super::{say, say_json};
use crate::config::precision::DeviceChoice;
use crate::devices::{self, GpuInfo};
use crate::error::JobError;
use crate::error::command::CommandError;
use crate::memory_limit;
use crate::units::human_bytes;
use serde_json::json;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Print the facts as a JSON object.
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args, build: Build) -> Result<(), JobError> {
    let system = sysinfo::System::new();
    let mut system = system.map_err(CommandError::System)?;
    system.refresh_memory();
    system.refresh_cpu_all();
    let device = devices::of(DeviceChoice::Auto)?;
    let n_threads = device.available_threads();
    let peaks = || (device.peak_flops(false), device.peak_flops(true));
    let (f32_peak, bf16_peak) = device.on_device_thread(n_threads, peaks)?;
    let cpu = system.cpus().first().map_or(String::new(), |c| c.brand().trim().to_string());
    let (gpus, no_gpu, cudnn) = match devices::gpu() {
        Ok(gpu) => {
            let attention = |reason| format!("{reason}; attention runs through the kernels of Phalanx");
            let cudnn = gpu.cudnn().map_or_else(attention, |path| path.display().to_string());
            (gpu.gpus().iter().map(described).collect(), None, Some(cudnn))
        }
        Err(reason) => (Vec::new(), Some(reason.to_string()), None),
    };
    let facts = json!({
        "phalanx": build.to_string(),
        "os": sysinfo::System::long_os_version().unwrap_or_default(),
        "kernel": sysinfo::System::kernel_version().unwrap_or_default(),
        "arch": std::env::consts::ARCH,
        "cpu": cpu,
        "device": device.name(),
        "threads": n_threads,
        "memory_bytes": memory_limit::usable(system.total_memory()),
        "memory_available_bytes": memory_limit::usable(system.available_memory()),
        "cpu_isa": devices::cpu_isa().name(),
        "f32_products": device.engine(false),
        "bf16_products": device.engine(true),
        "bf16_fast": device.has_fast_bf16(),
        "f32_gflops": (f32_peak / 1e9).round(),
        "bf16_gflops": (bf16_peak / 1e9).round(),
        "gpus": gpus,
        "no_gpu": no_gpu,
        "cudnn": cudnn,
    });
    if args.json {
        say_json(&facts, false);
        return Ok(());
    }
    say("Paste this into a bug report:");
    for (key, value) in facts.as_object().into_iter().flatten() {
        let value = match (key.ends_with("_bytes"), value) {
            (true, v) => human_bytes(v.as_u64().unwrap_or(0)),
            (_, serde_json::Value::String(s)) => s.clone(),
            (_, serde_json::Value::Null) => continue,
            (_, serde_json::Value::Array(of)) => of.iter().filter_map(|x| x.as_str()).collect::<Vec<_>>().join("; "),
            (_, v) => v.to_string(),
        };
        say(format_args!("- {key}: {value}"));
    }
    Ok(())
}

fn described(gpu: &GpuInfo) -> String {
    let (major, minor) = gpu.capability;
    format!("{}, {}, compute capability {major}.{minor}", gpu.name, human_bytes(gpu.memory_bytes as u64))
}
