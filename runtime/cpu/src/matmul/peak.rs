//! The peak rate of this machine's matrix products: the reference for utilisation.

use super::{Compute, Engine, Epilogue, Mat, MatMut, Slice, SliceMut, Storage, matmul, scratch_bytes};
use std::time::Instant;

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

/// Best FLOP/s of a few square products on the threads of the current pool; takes tens of milliseconds.
pub fn peak_flops(bf16: bool) -> f64 {
    const N: usize = 1024;
    const ROUNDS: usize = 6;
    let compute = if bf16 { Compute::Bf16 } else { Compute::F32 };
    let a = vec![0.5f32; N * N];
    let b = vec![0.25f32; N * N];
    let mut c = vec![0f32; N * N];
    let mut scratch = vec![0u8; scratch_bytes(compute, N, N, N, Storage::F32)];
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        let (a, b) = (Mat::new(Slice::F32(&a), N), Mat::new(Slice::F32(&b), N));
        let c = MatMut { data: SliceMut::F32(&mut c), ld: N };
        matmul(compute, N, N, N, a, b, c, Epilogue::default(), &mut scratch);
        best = best.min(start.elapsed().as_secs_f64());
    }
    2.0 * (N * N * N) as f64 / best
}
