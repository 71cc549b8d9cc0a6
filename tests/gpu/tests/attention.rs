//! Attention through cuDNN and through the kernels of the CUDA machine, on the software GPU.

use phalanx_cpu::CpuDevice;
use phalanx_cuda::{AttentionChoice, CudaDevice};
use phalanx_gpu::case::Case;
use phalanx_gpu::{cases, open, step};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Attention over whole rows, of a type and of widths for which cuDNN has engines: rows, windows, documents of many tokens and
/// of one, query heads that share keys.
fn supported() -> Vec<Case> {
    let is_supported = |case: &Case| {
        let whole = ["attention bf16, ", "attention backward bf16, "].iter().any(|kind| case.name.starts_with(kind));
        whole && ["heads of 64,", "heads of 128,"].iter().any(|width| case.name.contains(width))
    };
    cases::all().into_iter().filter(is_supported).collect()
}

fn failures(gpu: &CudaDevice, cases: &[Case]) -> Vec<String> {
    cases.iter().filter_map(|case| case.compare(&CpuDevice, gpu).err().map(|error| format!("{error:#}"))).collect()
}

/// Compares the cases on a GPU with the CPU; returns how many graphs cuDNN has executed.
fn executions(attention: AttentionChoice, cases: &[Case]) -> u64 {
    let gpu = open::software_gpu().unwrap().with_attention(attention).unwrap();
    let before = open::stat("executions").unwrap();
    let failures = failures(&gpu, cases);
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    open::stat("executions").unwrap() - before
}

/// Tests of this file change settings of the process and read its counters.
fn alone() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn attention_through_cudnn_agrees_with_the_cpu() {
    let _alone = alone();
    let cases = supported();

    let n = executions(AttentionChoice::Cudnn, &cases);

    // Each case runs twice: see `Case::compare`.
    assert!(cases.len() >= 12, "{}", cases.len());
    assert_eq!(n, 2 * cases.len() as u64);
}

#[test]
fn attention_without_cudnn_agrees_with_the_cpu() {
    let _alone = alone();

    let n = executions(AttentionChoice::Own, &supported());

    assert_eq!(n, 0);
}

#[test]
fn attention_for_which_cudnn_has_no_engine_runs_through_own_kernels() {
    let _alone = alone();
    let cases: Vec<Case> = supported().into_iter().filter(|case| case.name.contains("131")).collect();
    open::set("SOFTGPU_CUDNN_REFUSE", "backward").unwrap();

    let n = executions(AttentionChoice::Cudnn, &cases);

    open::set("SOFTGPU_CUDNN_REFUSE", "").unwrap();
    assert_eq!((cases.len(), n), (2, 2), "forward runs through cuDNN, twice; backward does not");
}

/// Engines that add up gradients in any order have other bits under another seed.
#[test]
fn reproducible_steps_have_the_same_bits_under_every_order_of_sums() {
    let _alone = alone();
    let gpu = open::software_gpu().unwrap().with_attention(AttentionChoice::Cudnn).unwrap();
    let mut case = step::all().into_iter().find(|case| case.name == "llama in bf16").unwrap();
    // Rows of three blocks of keys, whose sums depend on their order.
    (case.batch.seq_len, case.document, case.model.max_positions) = (80, 80, 80);
    let train = |case: &step::StepCase| {
        let before = open::stat("executions").unwrap();
        let seeds = 1..=4;
        let run = |seed: u32| {
            open::set("SOFTGPU_SEED", &seed.to_string()).unwrap();
            case.run(&gpu, 2).unwrap()
        };
        let runs: Vec<step::Trained> = seeds.map(run).collect();
        assert!(open::stat("executions").unwrap() > before, "attention runs through cuDNN");
        runs.iter().all(|trained| *trained == runs[0])
    };

    assert!(!train(&case), "the order of sums is left open");
    case.spec.parallel.logical_shards = Some(case.spec.n_microbatches);
    assert!(train(&case));
}
