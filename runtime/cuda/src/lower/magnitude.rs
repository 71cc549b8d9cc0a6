//! Rows of adapted weights with trained lengths.

use super::{Lowering, THREADS, type_name};
use crate::command::{Args, Buffer};
use crate::kernels::{Instance, MAGNITUDE};
use phalanx_strategies::program::{AdaptedRows, Columns};

/// Columns of a block that sums over rows.
const WARP: usize = 32;

impl Lowering {
    /// `[w, a [r, I], b [K, r]] -> [lengths K]`.
    pub(super) fn row_lengths(&mut self, rows: &AdaptedRows) {
        let (w, a, b, lengths) = (self.reads[0], self.reads[1], self.reads[2], self.writes[0]);
        let (name, first) = match rows.trans_b {
            true => ("row_lengths", rows.columns.start * w.cols),
            false => ("column_lengths", rows.columns.start),
        };
        let args = Args::new().ptr(w.elements(first, w.len() - first)).ptr(a).ptr(b).ptr(lengths);
        let args = args.long(w.cols).int(a.cols).int(a.rows).float(rows.factor);
        // Weights are f32; the kernels of products have another element type.
        let kernel = Instance::of(MAGNITUDE, name).with("X", "float");
        self.launch(kernel, [lengths.len() as u32, 1, 1], THREADS, 0, args);
    }

    /// `[x, magnitude, lengths] -> [y]`.
    pub(super) fn magnitude(&mut self, columns: Columns) {
        self.scale_columns(self.reads[0], self.writes[0], columns);
    }

    /// `[x, magnitude, lengths, dy, (dmagnitude0)] -> [dx, dmagnitude]`.
    pub(super) fn magnitude_backward(&mut self, columns: Columns, residual: bool) {
        let (x, lengths, dy, dmagnitude) = (self.reads[0], self.reads[2], self.reads[3], self.writes[1]);
        self.scale_columns(dy, self.writes[0], columns);
        let of_columns = |matrix: Buffer| matrix.elements(columns.start, matrix.len() - columns.start);
        let args = Args::new().ptr(of_columns(x)).ptr(of_columns(dy)).ptr(lengths);
        let args = args.ptr_or_null(residual.then(|| self.reads[4])).ptr(dmagnitude);
        let args = args.long(x.rows).int(x.cols).int(columns.len);
        let kernel = Instance::of(MAGNITUDE, "magnitude_backward").with("X", type_name(x.dtype));
        self.launch(kernel, [columns.len.div_ceil(WARP) as u32, 1, 1], THREADS, 0, args);
    }

    fn scale_columns(&mut self, x: Buffer, y: Buffer, columns: Columns) {
        assert_eq!(x.dtype, y.dtype, "scaled columns are as wide as before");
        let args = Args::new().ptr(x).ptr(self.reads[1]).ptr(self.reads[2]).ptr(y);
        let args = args.long(x.len()).int(x.cols).int(columns.start).int(columns.len);
        self.launch_strided(Instance::of(MAGNITUDE, "scale_columns").with("X", type_name(x.dtype)), x.len(), args);
    }
}
