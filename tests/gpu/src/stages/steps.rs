//! Whole steps of small models against the CPU.

use super::Report;
use crate::step;
use anyhow::Result;
use phalanx_cpu::CpuDevice;
use phalanx_cuda::CudaDevice;

pub(super) fn run(gpu: &CudaDevice, is_asked: impl Fn(&str) -> bool) -> Result<Report> {
    let mut report = Report::new(&gpu.gpus()[0].name, &["step", "outcome"]);
    for case in step::all().into_iter().filter(|case| is_asked(&case.name)) {
        let outcome = case.compare(&CpuDevice, gpu, 3);
        report.row(&[&case.name, &if outcome.is_ok() { "as on the CPU" } else { "differs" }]);
        report.check(outcome);
    }
    Ok(report)
}
