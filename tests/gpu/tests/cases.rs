//! Every operation of the CUDA machine against the CPU machine, on the software GPU.

use phalanx_cpu::CpuDevice;
use phalanx_gpu::{cases, open};

#[test]
fn every_operation_agrees_with_the_cpu() {
    let gpu = open::software_gpu().unwrap();
    let only = std::env::args().skip(1).find(|arg| !arg.starts_with('-'));
    let mut failures = Vec::new();

    for case in cases::all().into_iter().filter(|case| only.as_ref().is_none_or(|only| case.name.contains(only))) {
        if let Err(error) = case.compare(&CpuDevice, &gpu) {
            failures.push(format!("{error:#}"));
        }
    }

    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
