//! The libraries and the GPU.

use super::Report;
use anyhow::Result;
use phalanx_cuda::CudaDevice;
use phalanx_device::Device;

pub(super) fn run(gpu: &CudaDevice) -> Result<Report> {
    let mut report = Report::new(&gpu.gpus()[0].name, &["what", "found"]);
    for (name, path) in gpu.libraries()? {
        report.row(&[&name, &path.display()]);
    }
    let cudnn = gpu.cudnn().map_or_else(|missing| missing.to_string(), |file| file.display().to_string());
    report.row(&[&"cuDNN", &cudnn]);
    for (i, info) in gpu.gpus().iter().enumerate() {
        let (major, minor) = info.capability;
        let gib = info.memory_bytes as f64 / (1u64 << 30) as f64;
        report.row(&[&format!("GPU {i}"), &format!("{}, {gib:.1} GiB, compute capability {major}.{minor}", info.name)]);
    }
    // As NVML counts it: without a context the driver tells nothing.
    let used_bytes = || gpu.health().first().map_or(0, |health| health.used_bytes);
    let before = used_bytes();
    report.check(gpu.probe().map_err(Into::into));
    report.row(&[&"context", &format!("{} MiB", used_bytes().saturating_sub(before) >> 20)]);
    Ok(report)
}
