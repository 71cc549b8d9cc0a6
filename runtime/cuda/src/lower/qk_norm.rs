//! Norm over all queries and over all keys of a token.

use super::rows::{blocks_for, threads_of_row, vector_len};
use super::{Lowering, type_name};
use crate::command::Args;
use crate::kernels::{Instance, QK_NORM};
use phalanx_strategies::program::{DType, QkColumns, QkNorm};

/// Most threads of a block that sums over a row.
const THREADS_MAX: usize = 512;
/// Elements of each thread in the backward pass, whose share of the gains' gradients it keeps in registers.
const ELEMENTS: usize = 16;

fn instance(name: &'static str, columns: &QkColumns, dtype: DType) -> (Instance, usize) {
    let vector = vector_len(&[dtype], &[columns.q, columns.k]);
    let typed = Instance::of(QK_NORM, name).with("X", type_name(dtype));
    (typed.with("V", vector).with("ITEMS", ELEMENTS / vector), vector)
}

impl Lowering {
    /// One block per token.
    pub(super) fn qk_squares(&mut self, columns: &QkColumns) {
        let (qkv, squares) = (self.reads[0], self.writes[0]);
        let (kernel, vector) = instance("qk_squares", columns, qkv.dtype);
        let threads = threads_of_row((columns.q + columns.k) / vector, THREADS_MAX);
        let args = Args::new().ptr(qkv).ptr(squares).int(columns.q).int(columns.k);
        self.launch(kernel, [qkv.rows as u32, 1, 1], threads as u32, 0, args);
    }

    /// Adds the gradient that comes from the squares.
    pub(super) fn qk_squares_backward(&mut self, columns: &QkColumns, residual: bool) {
        let qkv = self.reads[0];
        let (kernel, vector) = instance("qk_squares_backward", columns, qkv.dtype);
        let args = Args::new().ptr(qkv).ptr(self.reads[1]).ptr_or_null(residual.then(|| self.reads[2]));
        let args = args.ptr(self.writes[0]).int(columns.q).int(columns.k).long(qkv.rows);
        self.launch_columns(kernel, qkv.rows, qkv.cols / vector, args);
    }

    /// Elementwise, for given squares.
    pub(super) fn qk_norm(&mut self, norm: &QkNorm) {
        let (qkv, QkColumns { q, k }) = (self.reads[0], norm.columns);
        let (kernel, vector) = instance("qk_norm", &norm.columns, qkv.dtype);
        let args = Args::new().ptr(qkv).ptr(self.reads[1]).ptr(self.reads[2]).ptr(self.reads[3]).ptr(self.writes[0]);
        let args = args.int(q).int(k).float(norm.summed.q as f32).float(norm.summed.k as f32).float(norm.eps);
        self.launch_columns(kernel, qkv.rows, qkv.cols / vector, args.long(qkv.rows));
    }

    /// Blocks run over tokens and keep their share of the gains' gradients. Rows that are too long for one block's registers
    /// take several launches, one after the other, each for a run of columns.
    pub(super) fn qk_norm_backward(&mut self, norm: &QkNorm, residual: bool) {
        let (qkv, QkColumns { q, k }) = (self.reads[0], norm.columns);
        let [dqkv, dsquares, dgain_q, dgain_k] = [0, 1, 2, 3].map(|i| self.writes[i]);
        let (kernel, _) = instance("qk_norm_backward", &norm.columns, qkv.dtype);
        let threads = threads_of_row((q + k).div_ceil(ELEMENTS), THREADS_MAX);
        let blocks = blocks_for(qkv.rows, threads, 1024);
        let parts = self.take(blocks, q + k, DType::F32);
        for first in (0..q + k).step_by(threads * ELEMENTS) {
            let end = (first + threads * ELEMENTS).min(q + k);
            let operands = Args::new().ptr(qkv).ptr(self.reads[1]).ptr(self.reads[2]).ptr(self.reads[3]);
            let args = operands.ptr(self.reads[4]).ptr(dqkv).ptr(dsquares).ptr(parts);
            let args = args.int(q).int(k).int(first).int(end);
            let args = args.float(norm.summed.q as f32).float(norm.summed.k as f32).float(norm.eps).long(qkv.rows);
            self.launch(kernel.clone(), [blocks as u32, 1, 1], threads as u32, 0, args);
        }
        let base = |i: usize| residual.then(|| self.reads[i]);
        self.sum_parts(parts, &[(base(5), dgain_q), (base(6), dgain_k)]);
    }
}
