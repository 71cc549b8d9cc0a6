//! Matrix products of the CPU machine: `C = alpha · A · B (+ bias) (+ C)` over row-major buffers.
//!
//! Legend: A is `[m, k]`, B is `[k, n]`, C is `[m, n]`; `i`, `j`, `p` index m, n, k; `ld` is the distance in elements
//! between two stored rows.
//!
//! Both operands are packed into panels that the innermost kernel reads front to back, so the three layouts of training
//! (`x Wᵀ`, `dy W`, `dyᵀ x`) take the same time, and each storage type needs only its own load.
//! Source of the scheme: Goto and van de Geijn 2008, Anatomy of High-Performance Matrix Multiplication, §4–5. We differ
//! in packing A and B of a block completely before any product, so that threads share them.
//!
//! Invariants:
//! - MATMUL-1 The bits of C do not depend on the number of threads: only m and n are divided among tasks; the k loop of
//!   an element is divided at fixed positions and runs on one thread at a time.
//! - MATMUL-2 A product reads no element outside the logical operands and writes no element outside the logical C.
//! - MATMUL-3 C narrower than f32 is rounded once; partial sums are f32.
//!
//! Not promised: a product of one row may sum in another order than the same row of a larger product (`one_row`).
//!
//! Map: [`operand`] arguments; `plan` block sizes and scratch; `driver` loops and threads; `tile` what they pass to a kernel; `store` the epilogue;
//! `avx512` and `avx2` f32 panels and kernels; `pairs` bf16 panels, `amx` and `avx512_bf16` their kernels; `lanes` and
//! `lanes8` vector loads and transposes; `portable` the `gemm` crate for every other CPU; `one_row` products of one row,
//! without panels.
// Raw pointers: tiles of C interleave in memory, which slices cannot express, and kernels need intrinsics.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512_bf16;
mod driver;
#[cfg(target_arch = "x86_64")]
pub(crate) mod lanes;
#[cfg(target_arch = "x86_64")]
mod lanes8;
mod one_row;
pub mod operand;
#[cfg(target_arch = "x86_64")]
pub(crate) mod pairs;
mod peak;
mod plan;
mod portable;
#[cfg(target_arch = "x86_64")]
mod store;
#[cfg(test)]
mod tests;
mod tile;

use crate::isa::{Isa, isa};
pub use operand::{Epilogue, Mat, MatMut, Slice, SliceMut, Storage, TileMut, TileRef};
pub use peak::{engine_name, fast_bf16, has_matrix_unit, peak_flops};

/// The precision of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compute {
    /// Operands widened to f32 (exact), products and sums in f32.
    F32,
    /// Operands of every storage type are rounded to bf16 (nearest even) when packed; products are summed in f32.
    /// Subnormal operands may count as zero: the hardware flushes them.
    Bf16,
}

/// The kernels of a product, selected by [`isa`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Engine {
    /// Tile products of bf16 pairs.
    Amx,
    /// Vector products of bf16 pairs.
    Avx512Bf16,
    /// 512-bit f32 kernel; `round` first rounds operands to bf16.
    Avx512 { round: bool },
    /// 256-bit f32 kernel; `round` first rounds operands to bf16.
    Avx2 { round: bool },
    /// The `gemm` crate; `round` first rounds operands to bf16.
    Portable { round: bool },
}

impl Engine {
    fn pick(compute: Compute) -> Engine {
        let round = compute == Compute::Bf16;
        match isa() {
            Isa::Amx if round => Engine::Amx,
            Isa::Avx512Bf16 if round => Engine::Avx512Bf16,
            Isa::Amx | Isa::Avx512Bf16 | Isa::Avx512 => Engine::Avx512 { round },
            Isa::Avx2 => Engine::Avx2 { round },
            Isa::Baseline => Engine::Portable { round },
        }
    }
}

/// Bytes of scratch that [`matmul`] and [`tile_matmul`] need for these sizes, for all layouts, operand storage types
/// and numbers of threads. `c` is the storage of C. The scratch may have any alignment.
pub fn scratch_bytes(compute: Compute, m: usize, n: usize, k: usize, c: Storage) -> usize {
    plan::Plan::new(Engine::pick(compute), m, n, k, c).scratch_bytes()
}

/// Multiplies two matrices on the threads of the current rayon pool: `C = alpha · A · B + bias + (C)`.
///
/// Does not allocate on a CPU with AVX-512 or AVX2 (on other CPUs the `gemm` crate keeps workspaces of its own).
///
/// # Shapes
/// `a: [m, k]`, `b: [k, n]`, `c: [m, n]`, `epilogue.bias: [n]`. An operand with `transposed` is stored with its
/// dimensions exchanged. With `k == 0` the product is zero.
///
/// # Panics
/// If a buffer is too short for its shape and `ld`, `ld` is shorter than a row, the bias is not `[n]`, or the scratch
/// is smaller than [`scratch_bytes`].
pub fn matmul(
    compute: Compute,
    m: usize,
    n: usize,
    k: usize,
    a: Mat<'_>,
    b: Mat<'_>,
    c: MatMut<'_>,
    epilogue: Epilogue<'_>,
    scratch: &mut [u8],
) {
    let engine = Engine::pick(compute);
    let (a, b, c) = (a.checked("a", m, k), b.checked("b", k, n), c.checked("c", m, n));
    // SAFETY: `checked` compared every extent with its slice, and the borrows of a, b and c live until we return;
    // `c` is borrowed mutably, so no other thread touches it.
    unsafe {
        match compute == Compute::F32 && one_row::fits(m, k, a, c) {
            true => one_row::run(n, k, a, b, c, epilogue),
            false => driver::run(engine, driver::Threads::Pool, m, n, k, a, b, c, epilogue, scratch),
        }
    }
}

/// Multiplies two small matrices on the calling thread, for the tiles of attention: operands and result may be column
/// slices of wider buffers whose other columns other threads write.
///
/// # Shapes
/// As for [`matmul`].
///
/// # Panics
/// If the bias is not `[n]` or the scratch is smaller than [`scratch_bytes`].
///
/// # Safety
/// `a` and `b` must be readable and `c` writable over the rows and columns that their sizes and `ld` span; no other
/// thread may write those elements of `a` and `b`, or touch those of `c`, meanwhile; `c` overlaps neither operand.
pub unsafe fn tile_matmul(
    compute: Compute,
    m: usize,
    n: usize,
    k: usize,
    a: TileRef,
    b: TileRef,
    c: TileMut,
    epilogue: Epilogue<'_>,
    scratch: &mut [u8],
) {
    let engine = Engine::pick(compute);
    // SAFETY: the caller keeps this function's contract.
    unsafe { driver::run(engine, driver::Threads::Caller, m, n, k, a, b, c, epilogue, scratch) }
}
