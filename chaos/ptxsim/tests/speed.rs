//! Speed of the interpreter, printed for the README. Fails only if it is so slow that tests of kernels would take minutes.

mod support;

use phalanx_ptxsim::{Arg, Device};
use std::time::Instant;
use support::{assert_clean, bf16s, compile, f32s, numbers};

/// Far below the speed of an idle core: many programs may run beside.
const LANE_INSTRUCTIONS_PER_SECOND_MIN: f64 = 1e6;

#[test]
fn kernels_run_at_tens_of_millions_of_lane_instructions_per_second() {
    let Some(module) = compile("train.cu", &["--gpu-architecture=compute_80"]) else { return };
    let mut device = Device::new();
    let (rows, n) = (64usize, 4099usize);
    let (x, gain) = (f32s(&mut device, &numbers(rows * n, 1)), f32s(&mut device, &numbers(n, 2)));
    let (y, rstd) = (device.alloc(rows * n * 2), device.alloc(rows * 4));
    let norm = [Arg::Ptr(x), Arg::Ptr(gain), Arg::Ptr(y), Arg::Ptr(rstd), Arg::I32(n as i32), Arg::F32(1e-5)];
    let (m, k) = (256usize, 512usize);
    let (a, b) = (bf16s(&mut device, &numbers(m * k, 3)), bf16s(&mut device, &numbers(m * k, 4)));
    let c = device.alloc(m * m * 4);
    let product = [Arg::Ptr(a), Arg::Ptr(b), Arg::Ptr(c), Arg::I32(m as i32), Arg::I32(m as i32), Arg::I32(k as i32)];
    let cases = [
        ("rms_norm", [rows as u32, 1, 1], 256, 0, norm),
        ("product_nt", [m as u32 / 64, m as u32 / 64, 1], 128, 2 * 128 * 40 * 2, product),
    ];
    for (name, grid, threads, shared, args) in cases {
        let kernel = module.kernel(name).unwrap();

        let start = Instant::now();
        let run = kernel.launch(&mut device, grid, [threads, 1, 1], shared, &args).unwrap();
        let rate = run.n_lane_instructions as f64 / start.elapsed().as_secs_f64();

        assert_clean(&run.findings);
        println!("{name}: {:.1} M lane-instructions at {:.1} M/s", run.n_lane_instructions as f64 / 1e6, rate / 1e6);
        assert!(rate > LANE_INSTRUCTIONS_PER_SECOND_MIN, "{name}: {rate}");
    }
}
