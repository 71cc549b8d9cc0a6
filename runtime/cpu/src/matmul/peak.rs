//! The peak rate of this machine's matrix products: the reference for utilisation.

use super::{Compute, Engine, Epilogue, Storage, TileMut, TileRef, scratch_bytes, tile_matmul};
use memmap2::MmapMut;
use std::time::{Duration, Instant};

/// Whether products of bf16 operands run on dedicated hardware.
pub fn fast_bf16() -> bool {
    matches!(Engine::pick(Compute::Bf16), Engine::Amx | Engine::Avx512Bf16)
}

/// Whether products of bf16 operands run on a matrix unit.
pub fn has_matrix_unit() -> bool {
    Engine::pick(Compute::Bf16) == Engine::Amx
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

/// FLOP/s of the threads of the current pool: the sum of each one's best short product, all at once. Every start measures them, so they
/// take some 10 ms for each precision. A thread that shares its core with another one for the first milliseconds, as threads that have
/// just begun may, has an undisturbed product all the same; a product of all threads would not.
pub fn peak_flops(bf16: bool) -> f64 {
    rayon::broadcast(|_| peak_of_thread(bf16)).into_iter().sum()
}

fn peak_of_thread(bf16: bool) -> f64 {
    const N: usize = 512;
    const ROUNDS_MIN: usize = 4;
    const LONG_ENOUGH: Duration = Duration::from_millis(10);
    let compute = if bf16 { Compute::Bf16 } else { Compute::F32 };
    // A mapping of its own: the allocator would keep this memory for the whole run, beside the layout that `estimate` tells.
    let scratch_bytes = scratch_bytes(compute, N, N, N, Storage::F32);
    let bytes = 3 * N * N * size_of::<f32>() + scratch_bytes;
    let mut memory = MmapMut::map_anon(bytes).expect("a process that trains has memory for one small product");
    let (matrices, scratch) = memory.split_at_mut(3 * N * N * size_of::<f32>());
    let (matrices, _) = matrices.as_chunks_mut::<{ size_of::<f32>() }>();
    let (operands, c) = matrices.split_at_mut(2 * N * N);
    operands.fill(0.5f32.to_ne_bytes());
    let (a, b) = operands.split_at(N * N);
    let (begun, mut rounds) = (Instant::now(), Vec::new());
    while rounds.len() < ROUNDS_MIN || begun.elapsed() < LONG_ENOUGH {
        let start = Instant::now();
        let (a, b) = (TileRef::new(a.as_ptr().cast::<f32>(), N), TileRef::new(b.as_ptr().cast::<f32>(), N));
        let c = TileMut::new(c.as_mut_ptr().cast::<f32>(), N);
        // SAFETY: all three are `N x N` numbers of this thread's own mapping, which begins at a page and is thus aligned.
        unsafe { tile_matmul(compute, N, N, N, a, b, c, Epilogue::default(), scratch) };
        rounds.push(start.elapsed().as_secs_f64());
    }
    2.0 * (N * N * N) as f64 / rounds.into_iter().fold(f64::INFINITY, f64::min)
}
