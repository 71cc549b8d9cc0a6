//! Rotary embedding.

use super::rows::vector_len;
use super::{Lowering, THREADS, type_name};
use crate::command::Args;
use crate::kernels::{Instance, ROTARY};
use phalanx_strategies::program::Attention;

/// Most heads of a thread, which share the cosines and sines that it reads.
const HEADS: usize = 4;

impl Lowering {
    /// Rotates queries and keys; in place if the memory pass overlaps the two, and then values are not touched.
    pub(super) fn rotary(&mut self, heads: &Attention, inverse: bool) {
        let (x, positions, table, y) = (self.reads[0], self.reads[1], self.reads[2], self.writes[0]);
        assert_eq!(x.dtype, y.dtype, "rotated elements are as wide as before");
        assert!(heads.head_dim.is_multiple_of(2), "head width {} is odd", heads.head_dim);
        let (half, n_rotated) = (heads.head_dim / 2, heads.n_heads + heads.n_kv_heads);
        let vector = vector_len(&[x.dtype], &[half]);
        let head_step = n_rotated.div_ceil(HEADS);
        let kernel = Instance::of(ROTARY, "rotary").with("X", type_name(x.dtype));
        let kernel = kernel.with("V", vector).with("HEADS", HEADS);
        let (cosines, sines) = (table.elements(0, table.len() / 2), table.elements(table.len() / 2, table.len() / 2));
        let args = Args::new().ptr(x).ptr(y).ptr(positions).ptr(cosines).ptr(sines);
        let args = args.int(half).int(n_rotated).int(x.cols).int(head_step);
        let args = args.float(if inverse { -1.0 } else { 1.0 }).long(x.rows);
        let blocks = (x.rows * (half / vector) * head_step).div_ceil(THREADS as usize);
        self.launch(kernel, [blocks as u32, 1, 1], THREADS, 0, args);
    }
}
