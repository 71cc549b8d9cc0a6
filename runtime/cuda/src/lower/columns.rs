//! Columns of a matrix, apart and together.

use super::rows::vector_len;
use super::{Lowering, type_name};
use crate::command::{Args, Buffer};
use crate::kernels::{COLUMNS, Instance};

impl Lowering {
    /// `x` to `left` and `right`.
    pub(super) fn split_columns(&mut self) {
        let (x, left, right) = (self.reads[0], self.writes[0], self.writes[1]);
        self.move_columns("split_columns", x, [left, right], Args::new().ptr(x).ptr(left).ptr(right));
    }

    /// `left` and `right` to `x`; converts.
    pub(super) fn join_columns(&mut self) {
        let (left, right, x) = (self.reads[0], self.reads[1], self.writes[0]);
        self.move_columns("join_columns", x, [left, right], Args::new().ptr(left).ptr(right).ptr(x));
    }

    fn move_columns(&mut self, name: &'static str, x: Buffer, [left, right]: [Buffer; 2], args: Args) {
        assert_eq!(left.dtype, right.dtype, "both parts have one element type");
        let vector = vector_len(&[x.dtype, left.dtype], &[left.cols, right.cols]);
        let kernel = Instance::of(COLUMNS, name).with("X", type_name(x.dtype)).with("P", type_name(left.dtype));
        let args = args.int(left.cols).int(right.cols).long(x.rows);
        self.launch_columns(kernel.with("V", vector), x.rows, x.cols / vector, args);
    }
}
