//! How kernels over the rows of a matrix are launched. All choices depend on shapes alone: the order of sums, and with it the
//! bits of results, must not depend on the GPU.

use super::Lowering;
use crate::command::{Args, Buffer};
use crate::kernels::{Instance, SUM_PARTS};
use phalanx_strategies::program::DType;

/// Multiprocessors for which grids are sized: those of an H100.
const MULTIPROCESSORS: usize = 132;
/// Threads that a multiprocessor can hold.
const THREADS_OF_MULTIPROCESSOR: usize = 2048;
/// Bytes of the widest transaction of a thread.
const VECTOR_BYTES: usize = 16;

/// Neighbouring elements that a thread moves at once: as many as 16 bytes hold of the widest type, if they divide all strides.
pub(super) fn vector_len(dtypes: &[DType], strides: &[usize]) -> usize {
    let widest = dtypes.iter().map(|dtype| dtype.size_bytes()).max().unwrap_or(VECTOR_BYTES);
    let mut len = VECTOR_BYTES / widest;
    while strides.iter().any(|stride| !stride.is_multiple_of(len)) {
        len /= 2;
    }
    len
}

/// Threads of a block that has a row of `n_vectors`, or a part of it: whole warps, at most `max`.
pub(super) fn threads_of_row(n_vectors: usize, max: usize) -> usize {
    n_vectors.next_multiple_of(32).clamp(32, max)
}

/// Blocks that fill the GPU if a multiprocessor holds `threads_held` threads; at most `n_tasks`.
pub(super) fn blocks_for(n_tasks: usize, threads: usize, threads_held: usize) -> usize {
    // Beyond eight small blocks, more of them only make the second stage of sums longer.
    (MULTIPROCESSORS * (threads_held / threads).clamp(1, 8)).min(n_tasks)
}

impl Lowering {
    /// Launches a kernel whose threads keep their columns while they run over rows: x counts runs of columns, y runs of rows.
    pub(super) fn launch_columns(&mut self, kernel: Instance, rows: usize, n_vectors: usize, args: Args) {
        let threads = threads_of_row(n_vectors, 256);
        let across = n_vectors.div_ceil(threads);
        let filling = MULTIPROCESSORS * THREADS_OF_MULTIPROCESSOR / threads;
        let down = filling.div_ceil(across.max(1)).min(rows);
        self.launch(kernel, [across as u32, down as u32, 1], threads as u32, 0, args);
    }

    /// Second stage of sums over rows: adds the rows of `parts`, whose first columns belong to the first of `sums` and whose
    /// others to the second. A sum is `(base, result)`.
    pub(super) fn sum_parts(&mut self, parts: Buffer, sums: &[(Option<Buffer>, Buffer)]) {
        let (first, second) = match sums {
            [first] => (first, None),
            [first, second] => (first, Some(second)),
            _ => panic!("one or two sums, found {}", sums.len()),
        };
        let args = Args::new().ptr(parts).int(parts.rows).ptr_or_null(first.0).ptr(first.1).int(first.1.len());
        let result = second.map(|sum| sum.1);
        let args = args.ptr_or_null(second.and_then(|sum| sum.0)).ptr_or_null(result);
        let args = args.int(result.map_or(0, |result| result.len()));
        let blocks = parts.cols.div_ceil(32);
        self.launch(Instance::of(SUM_PARTS, "sum_parts"), [blocks as u32, 1, 1], 1024, 0, args);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_have_at_most_16_bytes_and_divide_every_stride() {
        assert_eq!(vector_len(&[DType::F32], &[64]), 4);
        assert_eq!(vector_len(&[DType::Bf16, DType::F16], &[64, 72]), 8);
        assert_eq!(vector_len(&[DType::Bf16, DType::F32], &[64]), 4);
        assert_eq!(vector_len(&[DType::Bf16], &[64, 36]), 4);
        assert_eq!(vector_len(&[DType::Bf16], &[64, 0]), 8);
        assert_eq!(vector_len(&[DType::F32], &[64, 7]), 1);
    }
}
