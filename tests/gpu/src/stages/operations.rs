//! Every operation against the CPU.

use super::Report;
use crate::cases;
use anyhow::Result;
use phalanx_cpu::CpuDevice;
use phalanx_cuda::CudaDevice;

pub(super) fn run(gpu: &CudaDevice, is_asked: impl Fn(&str) -> bool, one_of_each: bool) -> Result<Report> {
    let mut report = Report::new(&gpu.gpus()[0].name, &["operation", "cases", "worst difference / tolerance"]);
    let mut by_op: Vec<(&'static str, usize, f64)> = Vec::new();
    for case in cases::all().into_iter().filter(|case| is_asked(case.op.name())) {
        if one_of_each && by_op.iter().any(|(op, ..)| *op == case.op.name()) {
            continue;
        }
        let outcome = case.compare(&CpuDevice, gpu);
        let worst = outcome.as_ref().map_or(f64::INFINITY, |worst| *worst);
        match by_op.iter_mut().find(|(op, ..)| *op == case.op.name()) {
            Some((_, n, of_op)) => (*n, *of_op) = (*n + 1, of_op.max(worst)),
            None => by_op.push((case.op.name(), 1, worst)),
        }
        report.check(outcome.map(drop));
    }
    for (op, n, worst) in by_op {
        report.row(&[&op, &n, &format!("{worst:.3}")]);
    }
    Ok(report)
}
