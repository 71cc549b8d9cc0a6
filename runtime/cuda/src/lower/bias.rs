//! A bias and its gradient.

use super::rows::vector_len;
use super::{Lowering, type_name};
use crate::command::Args;
use crate::kernels::{BIAS, Instance};
use phalanx_strategies::program::{Columns, DType};

/// Warps of a block of the first stage; each has a row.
const WARPS: usize = 8;
/// Blocks that fill the GPU.
const BLOCKS: usize = 1056;

impl Lowering {
    /// `y = x + bias`.
    pub(super) fn add_bias(&mut self) {
        let (x, bias, y) = (self.reads[0], self.reads[1], self.writes[0]);
        assert_eq!(x.dtype, y.dtype, "a biased matrix is as wide as before");
        let vector = vector_len(&[x.dtype], &[x.cols]);
        let kernel = Instance::of(BIAS, "add_bias").with("X", type_name(x.dtype)).with("V", vector);
        let args = Args::new().ptr(x).ptr(bias).ptr(y).int(x.cols).long(x.rows);
        self.launch_columns(kernel, x.rows, x.cols / vector, args);
    }

    /// Sums of columns: blocks sum parts of the rows, a second launch adds the parts.
    pub(super) fn column_sum(&mut self, residual: bool, columns: Option<Columns>) {
        let (dy, db) = (self.reads[0], self.writes[0]);
        let (first, len) = columns.map_or((0, dy.cols), |columns| (columns.start, columns.len));
        let vector = vector_len(&[dy.dtype], &[dy.cols, first, len]);
        let across = len.div_ceil(32 * vector);
        // At least four rows for each warp, so that there are fewer parts than rows to add.
        let down = BLOCKS.div_ceil(across.max(1)).min(dy.rows.div_ceil(4 * WARPS));
        let parts = self.take(down, len, DType::F32);
        let kernel = Instance::of(BIAS, "column_sum").with("X", type_name(dy.dtype)).with("V", vector);
        let used = dy.elements(first, dy.len() - first);
        let args = Args::new().ptr(used).long(dy.cols).ptr(parts).int(len).long(dy.rows);
        self.launch(kernel, [across as u32, down as u32, 1], 32 * WARPS as u32, 0, args);
        self.sum_parts(parts, &[(residual.then(|| self.reads[1]), db)]);
    }
}
