//! Times of single instructions.

use anyhow::Result;
use half::bf16;
use phalanx_cuda::CudaDevice;
use phalanx_device::e4m3;
use phalanx_device::groups::Groups;
use phalanx_device::{Backing, Device, Machine, Run};
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::passes::commit::StepPhases;
use phalanx_strategies::passes::memory::memory;
use phalanx_strategies::program::{DType, Kind, Op, Phase, Program, Site, ValueId};
use phalanx_strategies::rng::CounterRng;

/// Dims and element type of a value.
#[derive(Clone, Debug)]
pub struct Shape {
    dims: Vec<usize>,
    dtype: DType,
}

impl Shape {
    /// A value of these dims.
    pub fn new(dims: &[usize], dtype: DType) -> Shape {
        Shape { dims: dims.to_vec(), dtype }
    }
}

/// Runs before the first measured one: clocks rise, and caches fill.
const N_WARM: usize = 3;
/// Measured runs.
const N_RUNS: usize = 10;

/// Whether this is the software GPU, whose times mean nothing.
pub fn is_software(gpu: &CudaDevice) -> bool {
    gpu.gpus()[0].name.contains("softgpu")
}

/// Median time of an instruction over random numbers, in seconds: zeros cost less power, so products over them are faster.
///
/// # Errors
/// What the device reports.
pub fn seconds(gpu: &CudaDevice, op: &Op, reads: &[Shape], writes: &[Shape]) -> Result<f64> {
    let mut p = Program::default();
    let add = |p: &mut Program, name: &str, shape: &Shape, kind| p.add_value(name, &shape.dims, shape.dtype, kind);
    let reads: Vec<ValueId> = reads.iter().map(|shape| add(&mut p, "read", shape, Kind::Constant)).collect();
    let writes: Vec<ValueId> = writes.iter().map(|shape| add(&mut p, "write", shape, Kind::Output)).collect();
    p.push(op.clone(), reads.clone(), writes, Site { phase: Phase::Forward, block: None, microbatch: 0 });
    let layout = memory(&p, gpu.target());
    let c = Compiled::new(p, layout, StepPhases { apply: 0, gather: 0, end: 1 });
    (gpu as &dyn Device).on_device_thread(1, || {
        let mut machine = gpu.machine(&[&c], &Backing::default())?;
        reads.iter().for_each(|v| put_random(&mut *machine, &c, *v));
        let (mut timings, mut groups) = (Vec::new(), Groups::none());
        for _ in 0..N_WARM + N_RUNS {
            machine.run(&c, 0..1, &mut Run { timings: Some(&mut timings), ..Run::with(&mut groups) })?;
        }
        let mut seconds: Vec<f64> = timings[N_WARM..].iter().map(std::time::Duration::as_secs_f64).collect();
        seconds.sort_by(f64::total_cmp);
        Ok(seconds[N_RUNS / 2])
    })?
}

/// Fills an operand with uniform numbers between -1 and 1.
fn put_random(machine: &mut dyn Machine, c: &Compiled, v: ValueId) {
    let (stream, value) = (CounterRng::new(u64::from(v.0)), c.program.value(v));
    let numbers = (0..value.n_elements()).map(|i| (stream.bits(i as u64) as u32 as i32) as f32 * 2f32.powi(-31));
    match value.dtype {
        DType::Bf16 => machine.write(c, v, 0, &numbers.map(bf16::from_f32).collect::<Vec<_>>()),
        DType::F32 => machine.write(c, v, 0, &numbers.collect::<Vec<_>>()),
        DType::E4m3 => machine.write(c, v, 0, &numbers.map(e4m3::encode).collect::<Vec<_>>()),
        dtype => unreachable!("nothing of type {dtype} is measured"),
    }
}
