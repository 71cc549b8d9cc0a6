//! RMS norm and layer norm.

use super::rows::{blocks_for, threads_of_row, vector_len};
use super::{Lowering, type_name};
use crate::command::Args;
use crate::kernels::{Instance, NORM, NORM_BACKWARD};
use phalanx_strategies::program::{DType, NormKind};

/// Longest row for which each thread holds [`FEW`] elements.
const SHORT: usize = 4096;
/// Elements of a thread in short rows: small enough that a multiprocessor holds 1024 threads of the backward pass.
const FEW: usize = 8;
/// Elements of a thread in longer rows.
const MANY: usize = 16;
/// Most threads of a block.
const THREADS_MAX: usize = 1024;
/// Most threads of a block of the backward pass, which needs more registers.
const THREADS_MAX_BACKWARD: usize = 512;

/// How a row is divided.
struct Division {
    vector: usize,
    /// Vectors of each thread; `None` if the row is too long for registers.
    items: Option<usize>,
    threads: usize,
}

/// Divides rows of `cols` elements among threads, which hold up to [`MANY`] elements each in rows of at most `long`.
fn divide(cols: usize, dtypes: [DType; 2], long: usize, threads_max: usize) -> Division {
    let vector = vector_len(&dtypes, &[cols]);
    let elements = match cols {
        0..=SHORT => Some(FEW),
        // Single elements need an address each, and with 16 of them the registers do not suffice.
        _ if cols <= long && vector >= 4 => Some(MANY),
        _ => None,
    };
    let items = elements.map(|elements| elements / vector);
    let threads = threads_of_row(cols.div_ceil(elements.unwrap_or(vector)), threads_max);
    Division { vector, items, threads }
}

impl Division {
    fn instance(&self, kernel: Instance, kind: NormKind, dtypes: [DType; 2]) -> Instance {
        let layer = usize::from(kind == NormKind::Layer);
        let typed = kernel.with("X", type_name(dtypes[0])).with("Y", type_name(dtypes[1]));
        typed.with("V", self.vector).with("ITEMS", self.items.unwrap_or(1)).with("LAYER", layer)
    }
}

impl Lowering {
    /// One block per row.
    pub(super) fn norm(&mut self, kind: NormKind, eps: f32) {
        let is_layer = kind == NormKind::Layer;
        let (x, y) = (self.reads[0], self.writes[0]);
        let (bias, mean) = (is_layer.then(|| self.reads[2]), is_layer.then(|| self.writes[2]));
        let dtypes = [x.dtype, y.dtype];
        let division = divide(x.cols, dtypes, MANY * THREADS_MAX, THREADS_MAX);
        let name = if division.items.is_some() { "norm_rows" } else { "norm_long" };
        let kernel = division.instance(Instance::of(NORM, name), kind, dtypes);
        let args = Args::new().ptr(x).ptr(self.reads[1]).ptr_or_null(bias).ptr(y).ptr(self.writes[1]).ptr_or_null(mean);
        self.launch(kernel, [x.rows as u32, 1, 1], division.threads as u32, 0, args.int(x.cols).float(eps));
    }

    /// Blocks run over rows and keep their share of the parameters' gradients; a second launch adds the shares.
    pub(super) fn norm_backward(
        &mut self,
        kind: NormKind,
        residual_x: bool,
        residual_params: bool,
        again: bool,
        narrow: bool,
    ) {
        let is_layer = kind == NormKind::Layer;
        let n_stats = if is_layer { 2 } else { 1 };
        let (x, dy, dx) = (self.reads[0], self.reads[2 + n_stats], self.writes[0]);
        assert_eq!(x.dtype, dx.dtype, "the gradient of x is as wide as x");
        let mut carried = self.reads[3 + n_stats..].iter().copied();
        let mut next = |wanted: bool| wanted.then(|| carried.next().expect("the verifier counts operands"));
        let dx0 = next(residual_x);
        let sums: Vec<_> = self.writes[1..1 + n_stats].iter().map(|sum| (next(residual_params), *sum)).collect();
        let (bias, y) = (next(again && is_layer), again.then(|| self.writes[1 + n_stats]));
        let narrow = narrow.then(|| self.writes[self.writes.len() - 1]);

        let dtypes = [x.dtype, dy.dtype];
        // With 16 elements each of x, dy and two sums, the layer norm runs out of registers.
        let long = if is_layer { SHORT } else { MANY * THREADS_MAX_BACKWARD };
        let division = divide(x.cols, dtypes, long, THREADS_MAX_BACKWARD);
        let name = if division.items.is_some() { "norm_backward" } else { "norm_backward_long" };
        let kernel = division.instance(Instance::of(NORM_BACKWARD, name), kind, dtypes);
        let kernel = kernel.with("AGAIN", usize::from(again)).with("NARROW", usize::from(narrow.is_some()));
        let blocks = blocks_for(x.rows, division.threads, 1024);
        let parts = self.take(blocks, n_stats * x.cols, DType::F32);
        if division.items.is_none() {
            self.zero(parts);
        }
        let mean = is_layer.then(|| self.reads[3]);
        let args = Args::new().ptr(x).ptr(self.reads[1]).ptr(self.reads[2]).ptr_or_null(mean).ptr(dy);
        let args = args.ptr_or_null(dx0).ptr(dx).ptr_or_null(narrow).ptr_or_null(bias).ptr_or_null(y);
        let args = args.ptr(parts).int(x.cols).long(x.rows);
        self.launch(kernel, [blocks as u32, 1, 1], division.threads as u32, 0, args);
        self.sum_parts(parts, &sums);
    }
}
