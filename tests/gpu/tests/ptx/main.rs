//! Every kernel of the CUDA machine in the interpreter of PTX, against f64: with the launches that the lowering makes, compiled
//! by the real NVRTC, at odd shapes and at the usual head widths. There is no finding of the interpreter, every result is
//! written, no operand is overwritten, and results are within a stated tolerance of their definitions.
//!
//! This takes a minute and a half of one core. `PHALANX_PTX_SWEEP=1` runs every case for two architectures, under two orders of
//! blocks and warps each, in four times as long.

mod compiler;
mod elements;
mod library;
mod programs;
mod reference;
mod simulator;
mod spills;
mod tolerance;

use compiler::Compiler;
use phalanx_cpu::CpuDevice;
use phalanx_cuda::SOURCES;
use phalanx_cuda::work::{KernelLaunch, Work, WorkOfInstr, work_beside_cudnn, work_of};
use phalanx_gpu::case::{Case, Operand, Tolerance};
use phalanx_gpu::cases;
use phalanx_ptxsim::Options;
use phalanx_strategies::program::{Instr, Op, Program, ValueId, op};
use std::collections::BTreeSet;

/// Chooses the longer run.
const SWEEP: &str = "PHALANX_PTX_SWEEP";

/// All cases but those whose results in f32 are not those in f64, because squares overflow.
fn all() -> Vec<Case> {
    let overflows = |case: &Case| case.name.ends_with("of extremes") && case.op.name() == "norm";
    [cases::all(), cases::widths_and_rows()].concat().into_iter().filter(|case| !overflows(case)).collect()
}

fn is_attention(case: &Case) -> bool {
    case.op.name().starts_with("attention")
}

/// The launches of an instruction.
fn launches(program: &Program, instr: &Instr) -> Vec<KernelLaunch> {
    launches_among(work_of(program, instr, |v| (u64::from(v.0) + 1) << 40, 1 << 60))
}

fn launches_among(lowered: WorkOfInstr) -> Vec<KernelLaunch> {
    let launch = |work: Work| if let Work::Launch(launch) = work { Some(launch) } else { None };
    lowered.work.into_iter().filter_map(launch).collect()
}

/// The launches around a call of cuDNN, if it may have a plan for the case.
fn launches_beside_cudnn(case: &Case) -> Vec<KernelLaunch> {
    let (program, ..) = case.program(false);
    let Some(doc_start) = case.reads.get(1) else { return Vec::new() };
    let doc_start: Vec<i32> = doc_start.elements.iter().map(|start| *start as i32).collect();
    let place = |v: ValueId| (u64::from(v.0) + 1) << 40;
    work_beside_cudnn(&program, &program.instrs[0], &doc_start, place, 1 << 60).map_or_else(Vec::new, launches_among)
}

fn launches_of(case: &Case) -> Vec<KernelLaunch> {
    let (program, ..) = case.program(false);
    launches(&program, &program.instrs[0])
}

/// Runs cases, and fails with everything that is wrong.
#[track_caller]
fn check(cases: &[Case]) {
    let is_sweep = std::env::var_os(SWEEP).is_some();
    let runs: &[(&str, u64)] = if is_sweep {
        &[("compute_80", 1), ("compute_80", 2), ("compute_90a", 3), ("compute_90a", 4)]
    } else {
        &[("compute_80", 1)]
    };
    let mut failures = Vec::new();
    for (architecture, seed) in runs {
        let Some(mut compiler) = Compiler::new(architecture, Options { seed: *seed, ..Options::default() }) else {
            return;
        };
        for case in cases {
            failures.extend(failures_of(&mut compiler, case));
        }
        assert!(compiler.n_compiled() > 0, "no kernel was launched");
    }
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
}

/// What is wrong with a case, with and without results in the memory of operands.
fn failures_of(compiler: &mut Compiler, case: &Case) -> Vec<String> {
    let mut failures = Vec::new();
    let expected = reference::reference(case);
    if let Some(run) = simulator::run_beside_cudnn(compiler, case) {
        let differences = tolerance::differences(case, &expected, &run.results, tolerance::of(case));
        let all = [run.findings, differences].concat().into_iter();
        failures.extend(all.map(|failure| format!("{failure}, beside cuDNN")));
    }
    let of_cpu = case.tolerance.is_exact().then(|| case.run(&CpuDevice, false).expect("the CPU runs every case"));
    let can_reuse = !case.op.in_place_pairs(case.reads.len()).is_empty();
    for reuses in [false, true].into_iter().take(1 + usize::from(can_reuse)) {
        let run = simulator::run(compiler, case, reuses);
        failures.extend(run.findings.iter().cloned());
        failures.extend(tolerance::differences(case, &expected, &run.results, tolerance::of(case)));
        if let Some(expected) = &of_cpu {
            let unequal = tolerance::differences(case, expected, &run.results, Tolerance::EXACT);
            failures.extend(unequal.into_iter().map(|difference| format!("{difference}, compared with the CPU")));
        }
    }
    failures.into_iter().map(|failure| format!("{}: {failure}", case.name)).collect()
}

#[test]
fn kernels_of_attention_have_no_finding_and_agree_with_f64() {
    check(&all().into_iter().filter(is_attention).collect::<Vec<_>>());
}

#[test]
fn all_other_kernels_have_no_finding_and_agree_with_f64() {
    check(&all().into_iter().filter(|case| !is_attention(case)).collect::<Vec<_>>());
}

/// The adjoint of a norm or an activation that writes the operation's results again, given those of the first time.
fn again(case: &Case, results: &[Vec<f64>]) -> Option<Case> {
    let of = |i: usize| Operand::of(&case.writes[i].0, case.writes[i].1, results[i].clone());
    let dy = Operand::random(&case.writes[0].0, case.writes[0].1, 20);
    let (x, params) = (case.reads[0].clone(), &case.reads[1..]);
    let (op, reads) = match case.op {
        Op::Norm(op::Norm { kind, .. }) => {
            let statistics = (1..case.writes.len()).map(of);
            let reads = [x, params[0].clone()].into_iter().chain(statistics).chain([dy]);
            let op = Op::NormBackward(op::NormBackward {
                kind,
                residual_x: false,
                residual_params: false,
                again: true,
                narrow: false,
            });
            (op, reads.chain(params.get(1).cloned()).collect())
        }
        Op::Activation(op::Activation(function)) => {
            (Op::ActivationBackward(op::ActivationBackward { function, again: true }), vec![x, dy])
        }
        _ => return None,
    };
    let adjoint = Case::new(format!("{}, again", case.name), op, reads, case.tolerance);
    let gradients = case.reads.iter().fold(adjoint, |adjoint, read| adjoint.writing(&read.shape, read.dtype));
    Some(gradients.writing(&case.writes[0].0, case.writes[0].1))
}

#[test]
fn results_that_adjoints_write_again_have_the_bits_of_the_first_time() {
    let Some(mut compiler) = Compiler::new("compute_80", Options::default()) else { return };
    let mut n = 0;
    for case in all().into_iter().filter(|case| matches!(case.op, Op::Norm(_) | Op::Activation(_))) {
        let first = simulator::run(&mut compiler, &case, false).results;
        let adjoint = again(&case, &first).expect("norms and activations have such adjoints");
        for reuses in [false, true] {
            let second = simulator::run(&mut compiler, &adjoint, reuses).results;
            let bits = |y: &[f64]| y.iter().map(|x| x.to_bits()).collect::<Vec<u64>>();
            assert_eq!(second.last().map(|y| bits(y)), Some(bits(&first[0])), "{}", adjoint.name);
        }
        n += 1;
    }
    assert!(n > 0, "there are such cases");
}

#[test]
fn instructions_that_share_launches_have_no_finding_and_agree_with_f64() {
    let Some(mut compiler) = Compiler::new("compute_80", Options::default()) else { return };
    for prefixes in [&["adamw from"][..], &["sgd from"], &["lion from"], &["squares of f32, ", "squares of bf16, "]] {
        let is_one = |case: &Case| prefixes.iter().any(|prefix| case.name.starts_with(prefix));
        let cases: Vec<Case> = all().into_iter().filter(is_one).collect();

        let (outcomes, n_launches) = simulator::run_together(&mut compiler, &cases);

        let n_alone: usize = cases.iter().map(|case| launches_of(case).len()).sum();
        assert!(n_launches < n_alone, "{n_launches} launches, and {n_alone} of each instruction alone: {prefixes:?}");
        for (case, outcome) in cases.iter().zip(outcomes) {
            let expected = reference::reference(case);
            let differences = tolerance::differences(case, &expected, &outcome.results, tolerance::of(case));
            let failures = [outcome.findings, differences].concat();
            assert!(failures.is_empty(), "{}: {}", case.name, failures.join("\n"));
        }
    }
}

/// The references themselves, against the CPU machine.
#[test]
fn references_agree_with_the_cpu() {
    let failures = all().into_iter().flat_map(|case| {
        let found = case.run(&CpuDevice, false).expect("the CPU runs every case");
        let differences = tolerance::differences(&case, &reference::reference(&case), &found, tolerance::of(&case));
        differences.into_iter().map(move |difference| format!("{}: {difference}", case.name))
    });
    let failures: Vec<String> = failures.collect();
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
}

/// The names of the kernels of a source.
fn kernels_of(text: &str) -> BTreeSet<String> {
    let name = |definition: &str| {
        let signature = definition.trim_start().trim_start_matches("void").trim_start();
        let bounds_end = |text: &str| text.find(')').map_or(0, |at| at + 1);
        let from = if signature.starts_with("__launch_bounds__") { bounds_end(signature) } else { 0 };
        signature[from..]
            .chars()
            .skip_while(|c| c.is_whitespace())
            .take_while(|c| c.is_alphanumeric() || *c == '_')
            .collect()
    };
    text.split("__global__").skip(1).map(name).collect()
}

/// The source of a kernel that no instruction has: it marks progress between commands (`phalanx-cuda` tests it in steps).
const MARKS: &str = "progress.cu";

#[test]
fn every_kernel_of_every_source_has_a_case() {
    let launches = all().into_iter().flat_map(|case| [launches_of(&case), launches_beside_cudnn(&case)].concat());
    let launched: BTreeSet<(&str, String)> =
        launches.map(|launch| (launch.source.name, launch.kernel.to_owned())).collect();

    let computing = SOURCES.iter().filter(|source| source.name != MARKS);
    let kernels = computing.flat_map(|source| kernels_of(source.text).into_iter().map(|kernel| (source.name, kernel)));
    let kernels: BTreeSet<(&str, String)> = kernels.collect();

    let missing: Vec<_> = kernels.difference(&launched).collect();
    assert!(missing.is_empty(), "kernels without a case: {missing:?}");
    assert!(launched.is_subset(&kernels), "kernels that were not found in their source: {launched:?}");
}
