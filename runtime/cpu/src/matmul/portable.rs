//! The engine for CPUs without AVX-512: operands widened line by line, products by the `gemm-f32` crate.
//!
//! `gemm-f32` runs on one thread per task, because its own division of work among threads could violate MATMUL-1.

use half::{bf16, f16};

use super::operand::{Epilogue, Storage, TileMut};
use super::tile::{Strip, TileAt};
use phalanx_device::float::Float;

/// Copies one line of `depth` elements, k contiguous.
///
/// # Safety
/// `from` covers one line of `depth`; `to` has space for it.
pub(super) unsafe fn pack(to: *mut f32, from: Strip, depth: usize, round: bool) {
    for p in 0..depth {
        // SAFETY: by the caller.
        unsafe {
            let x = read(from.at(0, p).ptr, from.storage);
            *to.add(p) = if round { <bf16 as Float>::from_f32(x).to_f32() } else { x };
        }
    }
}

/// Initialises the sums of a tile with the bias and, if `accumulate`, C.
///
/// # Safety
/// The tile lies inside `sums`, `c` and the bias, and is the caller's own. `sums` is f32 and may be `c`.
pub(super) unsafe fn start(sums: TileMut, c: TileMut, epilogue: &Epilogue<'_>, at: TileAt) {
    for i in at.row..at.row + at.rows {
        for j in at.col..at.col + at.cols {
            let bias = epilogue.bias.map_or(0.0, |b| b[j]);
            // SAFETY: by the caller.
            unsafe {
                let before = if epilogue.accumulate { read(address(c, i, j), c.storage) } else { 0.0 };
                *address(sums, i, j).cast::<f32>() = before + bias;
            }
        }
    }
}

/// Adds `alpha` times the product of packed lines to the sums of a tile.
///
/// # Safety
/// `a` and `b` are the first packed lines of the tile's rows and columns; the tile lies inside the f32 `sums`.
pub(super) unsafe fn multiply(sums: TileMut, a: *const f32, b: *const f32, depth: usize, alpha: f32, at: TileAt) {
    if depth == 0 {
        return;
    }
    let (ld, line) = (sums.ld as isize, depth as isize);
    // SAFETY: by the caller; the strides belong to row-major sums and k-contiguous lines.
    unsafe {
        gemm_f32::gemm::f32::get_gemm_fn()(
            at.rows,
            at.cols,
            depth,
            address(sums, at.row, at.col).cast::<f32>(),
            1,
            ld,
            true,
            a,
            1,
            line,
            b,
            line,
            1,
            1.0,
            alpha,
            false,
            false,
            false,
            gemm_common::Parallelism::None,
        );
    }
}

/// Rounds the finished sums of a tile into C.
///
/// # Safety
/// The tile lies inside the f32 `sums` and `c`, and is the caller's own.
pub(super) unsafe fn finish(sums: TileMut, c: TileMut, at: TileAt) {
    for i in at.row..at.row + at.rows {
        for j in at.col..at.col + at.cols {
            // SAFETY: by the caller.
            unsafe { write(address(c, i, j), c.storage, *address(sums, i, j).cast::<f32>()) };
        }
    }
}

/// # Safety
/// `(i, j)` lies inside the tile.
unsafe fn address(tile: TileMut, i: usize, j: usize) -> *mut u8 {
    // SAFETY: by the caller.
    unsafe { tile.ptr.add((i * tile.ld + j) * tile.storage.bytes()) }
}

/// # Safety
/// `at` is a readable, aligned element.
unsafe fn read(at: *const u8, storage: Storage) -> f32 {
    // SAFETY: by the caller.
    unsafe {
        match storage {
            Storage::F32 => *at.cast::<f32>(),
            Storage::Bf16 => Float::to_f32(*at.cast::<bf16>()),
            Storage::F16 => Float::to_f32(*at.cast::<f16>()),
        }
    }
}

/// # Safety
/// `at` is a writable, aligned element.
unsafe fn write(at: *mut u8, storage: Storage, x: f32) {
    // SAFETY: by the caller.
    unsafe {
        match storage {
            Storage::F32 => *at.cast::<f32>() = x,
            Storage::Bf16 => *at.cast::<bf16>() = Float::from_f32(x),
            Storage::F16 => *at.cast::<f16>() = Float::from_f32(x),
        }
    }
}
