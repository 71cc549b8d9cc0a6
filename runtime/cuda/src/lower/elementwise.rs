//! Elementwise operations.

use super::{BLOCKS_MAX, Lowering, THREADS, type_name};
use crate::command::{Args, Buffer};
use crate::kernels::{CAST, ELEMENTWISE, Instance};
use phalanx_strategies::program::Dropout;

/// Elements of a thread at a time, in kernels that work element by element.
pub(super) const WIDTH: usize = 8;
/// Conversions of one launch.
const CASTS: usize = 32;

impl Lowering {
    /// Converts elements.
    pub(super) fn cast(&mut self, x: Buffer, y: Buffer) {
        if x.dtype == y.dtype {
            return self.copy(x, y);
        }
        let kernel = Instance::of(CAST, "cast").with("X", type_name(x.dtype)).with("Y", type_name(y.dtype));
        let blocks = x.len().div_ceil(WIDTH * THREADS as usize).min(BLOCKS_MAX);
        let args = Args::of_run(&[x.address, y.address, x.len() as u64], blocks, CASTS);
        self.launch(kernel, [blocks as u32, 1, 1], THREADS, 0, args);
    }

    /// `y = x + row`; `x` and `y` may be the same memory.
    pub(super) fn add_row(&mut self, row: Buffer, x: Buffer, y: Buffer) {
        let kernel = Instance::of(ELEMENTWISE, "add_row").with("X", type_name(x.dtype)).with("Y", type_name(y.dtype));
        // Vectors are counted in 32 bits, in which remainders are fast.
        let n_vectors = y.len() / width_of(y.cols);
        self.launch_strided(kernel, n_vectors, Args::new().ptr(row).ptr(x).ptr(y).int(y.cols).int(n_vectors));
    }

    /// `[a, b] -> [a + b]`.
    pub(super) fn add(&mut self) {
        let (a, b, y) = (self.reads[0], self.reads[1], self.writes[0]);
        let kernel = Instance::of(ELEMENTWISE, "add")
            .with("X", type_name(a.dtype))
            .with("Y", type_name(y.dtype))
            .with("Z", type_name(b.dtype));
        self.launch_vectors(kernel, y.len(), Args::new().ptr(a).ptr(b).ptr(y).long(y.len()));
    }

    /// `[x] -> [factor x]`.
    pub(super) fn scale(&mut self, factor: f32) {
        let (x, y) = (self.reads[0], self.writes[0]);
        let kernel = Instance::of(ELEMENTWISE, "scale").with("X", type_name(x.dtype)).with("Y", type_name(y.dtype));
        self.launch_vectors(kernel, y.len(), Args::new().ptr(x).ptr(y).float(factor).long(y.len()));
    }

    /// `[x [N, C], keys N] -> [y]`.
    pub(super) fn dropout(&mut self, dropout: &Dropout) {
        let (x, keys, y) = (self.reads[0], self.reads[1], self.writes[0]);
        let kernel = Instance::of(ELEMENTWISE, "dropout").with("X", type_name(x.dtype)).with("Y", type_name(y.dtype));
        let args = Args::new().ptr(x).ptr(keys).ptr(y).int(y.cols).long(y.len());
        let args = args.bits(dropout.threshold()).float(dropout.factor());
        self.launch_strided(kernel, y.len(), args.bits(dropout.stream).bits(dropout.first_column as u32));
    }

    /// `[x] -> [x[start..start + len]]`.
    pub(super) fn slice(&mut self, start: usize) {
        let (x, part) = (self.reads[0], self.writes[0]);
        self.copy(x.elements(start, part.len()), part);
    }

    /// `[x, part] -> [x with the part from element start on]`.
    pub(super) fn paste(&mut self, start: usize) {
        let (x, part, y) = (self.reads[0], self.reads[1], self.writes[0]);
        self.copy(x, y);
        self.copy(part, y.elements(start, part.len()));
    }

    /// Launches a kernel whose threads run over groups of [`WIDTH`] of `n` elements with a stride, and then over the rest.
    pub(super) fn launch_vectors(&mut self, kernel: Instance, n: usize, args: Args) {
        self.launch_strided(kernel, n.div_ceil(WIDTH), args);
    }
}

/// Elements of a thread at a time, in kernels that work on rows of this many columns: rows begin at a multiple of 16 bytes only
/// if the columns do.
pub(super) const fn width_of(cols: usize) -> usize {
    if cols.is_multiple_of(WIDTH) { WIDTH } else { 1 }
}
