//! The peak rate of this machine's matrix products: the reference for utilisation.

use super::{Compute, Engine, Epilogue, Mat, MatMut, Slice, SliceMut, Storage, matmul, scratch_bytes};
use std::time::{Duration, Instant};

/// Whether products of bf16 operands run on dedicated hardware.
pub fn fast_bf16() -> bool {
    matches!(Engine::pick(Compute::Bf16), Engine::Amx | Engine::Avx512Bf16)
}

/// Name of the selected kernels, for reports.
pub fn engine_name(bf16: bool) -> &'static str {
    match Engine::pick(if bf16 { Compute::Bf16 } else { Compute::F32 }) {
        Engine::Amx => "AMX",
        Engine::Avx512Bf16 => "AVX-512 BF16",
        Engine::Avx512 { .. } => "AVX-512",
        Engine::Avx2 { .. } => "AVX2",
        Engine::Portable { .. } => "gemm crate",
    }
}

/// Best FLOP/s of a few products on the threads of the current pool. Every start measures them, so they take some 20 ms in all; each is
/// short, which leaves a busy machine a quiet moment for one of them.
pub fn peak_flops(bf16: bool) -> f64 {
    const N: usize = 512;
    const ROWS_OF_THREAD: usize = 512;
    const ROWS_MAX: usize = 16384;
    const ROUNDS_MIN: usize = 4;
    const LONG_ENOUGH: Duration = Duration::from_millis(10);
    let compute = if bf16 { Compute::Bf16 } else { Compute::F32 };
    let m = (ROWS_OF_THREAD * rayon::current_num_threads()).min(ROWS_MAX);
    let (a, b) = (vec![0.5f32; m * N], vec![0.25f32; N * N]);
    let mut c = vec![0f32; m * N];
    let mut scratch = vec![0u8; scratch_bytes(compute, m, N, N, Storage::F32)];
    let (begun, mut rounds) = (Instant::now(), Vec::new());
    while rounds.len() < ROUNDS_MIN || begun.elapsed() < LONG_ENOUGH {
        let start = Instant::now();
        let (a, b) = (Mat::new(Slice::F32(&a), N), Mat::new(Slice::F32(&b), N));
        let c = MatMut { data: SliceMut::F32(&mut c), ld: N };
        matmul(compute, m, N, N, a, b, c, Epilogue::default(), &mut scratch);
        rounds.push(start.elapsed().as_secs_f64());
    }
    2.0 * (m * N * N) as f64 / rounds.into_iter().fold(f64::INFINITY, f64::min)
}
