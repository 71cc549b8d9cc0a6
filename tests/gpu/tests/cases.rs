//! Every operation of the CUDA machine against the CPU machine, on the software GPU.

use phalanx_cpu::CpuDevice;
use phalanx_gpu::{cases, open};

#[test]
fn every_operation_agrees_with_the_cpu() {
    let gpu = open::software_gpu().unwrap();
    let mut failures = Vec::new();

    for case in cases::all() {
        if let Err(error) = case.compare(&CpuDevice, &gpu) {
            failures.push(format!("{error:#}"));
        }
    }

    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
