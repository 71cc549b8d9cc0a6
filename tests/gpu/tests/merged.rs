//! Instructions that share launches on the CUDA machine, on the software GPU: the bits of the CPU, or of a launch each.

use phalanx_cpu::CpuDevice;
use phalanx_device::groups::Groups;
use phalanx_device::{Backing, Device};
use phalanx_gpu::open;
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::optimizer::{AdamW, Lion, OptimizerSpec, Sgd};
use phalanx_strategies::passes::commit::StepPhases;
use phalanx_strategies::passes::memory::memory;
use phalanx_strategies::program::blocks::Blocks;
use phalanx_strategies::program::tiles::Tiles;
use phalanx_strategies::program::{Binding, DType, Hyper, Kind, Op, Phase, Program, Role, Site, Update, ValueId, op};

const SITE: Site = Site { phase: Phase::Optimizer, block: None, microbatch: 0 };

/// More runs than one launch has room for, of lengths from one element to several blocks.
fn lengths() -> Vec<usize> {
    (0..130).map(|i| [1, 3, 4, 33, 1024, 1025, 4099, 9000][i % 8] + i / 8).collect()
}

/// Runs a program of these instructions as one run; returns the elements of `results`.
fn run(device: &dyn Device, p: &Program, n_instrs: usize, results: &[ValueId]) -> Vec<Vec<f64>> {
    let mut program = p.clone();
    program.instrs.truncate(n_instrs);
    let layout = memory(&program, device.target());
    let c = Compiled::new(program, layout, StepPhases { apply: 0, gather: 0, end: n_instrs });
    let run = || {
        let mut machine = device.machine(&[&c], &Backing::default()).unwrap();
        for (i, value) in
            c.program.values.iter().enumerate().filter(|(_, value)| !matches!(value.kind, Kind::Output | Kind::View(_)))
        {
            let element = |j: usize| ((i * 31 + j * 17) % 1009) as f64 / 1009.0 + 1e-3;
            let v = ValueId(i as u32);
            match value.dtype {
                DType::F64 => {
                    machine.write(&c, v, 0, &(0..value.n_elements()).map(element).collect::<Vec<f64>>());
                }
                _ => {
                    let elements: Vec<f32> = (0..value.n_elements()).map(|j| element(j) as f32).collect();
                    machine.write(&c, v, 0, &elements);
                }
            }
        }
        machine.run_all(&c, &mut Groups::none()).unwrap();
        machine.settle().unwrap();
        let read = |v: &ValueId| match c.program.value(*v).dtype {
            DType::F64 => machine.read::<f64>(&c, *v),
            _ => machine.read::<f32>(&c, *v).into_iter().map(f64::from).collect(),
        };
        results.iter().map(read).collect()
    };
    device.on_device_thread(1, run).unwrap()
}

#[test]
fn merged_updates_have_the_bits_of_the_cpu() {
    let gpu = open::software_gpu().unwrap();
    for rule in [
        OptimizerSpec::AdamW(AdamW { weight_decay: 0.1, ..AdamW::default() }),
        OptimizerSpec::Sgd(Sgd { momentum: 0.9, weight_decay: 0.1 }),
        OptimizerSpec::Lion(Lion { beta1: 0.9, beta2: 0.99, weight_decay: 0.1 }),
    ] {
        let mut p = Program::default();
        let hyper = p.add_value("hyper", &[Hyper::LEN], DType::F64, Kind::Constant);
        let coefficient = p.add_value("coefficient", &[], DType::F64, Kind::Constant);
        let (mut state, mut split) = (Vec::new(), Vec::new());
        for (i, n) in lengths().into_iter().enumerate() {
            // Some runs begin within their parameter, and a third has no weight decay.
            let first = [0, 4, 7][i % 3];
            let param = p.add_value(format!("p{i}"), &[first + n], DType::F32, Kind::Parameter);
            let mut own = vec![param];
            own.extend(
                (0..rule.n_state_of_elements())
                    .map(|s| p.add_value(format!("s{s}.{i}"), &[n], DType::F32, Kind::OptimizerState)),
            );
            let grad = p.add_value(format!("g{i}"), &[n], DType::F32, Kind::Constant);
            if i % 5 == 0 {
                split.push(param);
            }
            let rule = if i % 3 == 2 { rule.without_decay() } else { rule };
            let (tiles, blocks) = (Tiles::default(), Blocks::default());
            let update = Update { rule, rate: Hyper::LEARNING_RATE, first, n_dims: 1, n_rounds: 0, tiles, blocks };
            let reads = own.iter().copied().chain([grad, hyper, coefficient]).collect();
            p.push(Op::Update(update), reads, own.clone(), SITE);
            state.extend(own);
        }

        let expected = run(&CpuDevice, &p, p.instrs.len(), &state);
        // A fifth of the parameters are split weights on the GPU.
        split.into_iter().for_each(|param| {
            p.split(param);
        });
        let found = run(&gpu, &p, p.instrs.len(), &state);

        assert!(expected == found, "{}", rule.name());
    }
}

#[test]
fn merged_sums_of_squares_have_the_bits_of_a_launch_each() {
    let gpu = open::software_gpu().unwrap();
    let mut p = Program::default();
    // The widest one gives the scratch that all others share; types alternate, and some runs begin within their gradient.
    let lengths: Vec<usize> = std::iter::once(300_000).chain(lengths().into_iter().map(|n| 5 * n)).collect();
    let mut sums = Vec::new();
    for (i, n) in lengths.into_iter().enumerate() {
        let first = [0, 3][i % 2];
        let grad = p.add_value(format!("g{i}"), &[first + n], DType::F32, Kind::Constant);
        sums.push(p.add_value(format!("s{i}"), &[], DType::F64, Kind::Output));
        // Read by the host, so that later sums do not get its memory.
        p.bindings.push(Binding::new(Role::GradSumSquares, sums[i]));
        p.push(Op::SumSquares(op::SumSquares { elements: Some((first, n)) }), vec![grad], vec![sums[i]], SITE);
    }

    let together = run(&gpu, &p, p.instrs.len(), &sums);

    for i in [0, 1, 2, 7, 8, 64, 119, 120, 121, 130] {
        let mut alone = p.clone();
        alone.instrs.swap(0, i);
        assert_eq!(run(&gpu, &alone, 1, &[sums[i]])[0], together[i], "sum {i}");
    }
}
