//! Embedding and its adjoint.

use super::elementwise::width_of;
use super::{Lowering, type_name};
use crate::command::{Args, Buffer};
use crate::kernels::{EMBEDDING, Instance};
use phalanx_strategies::program::DType;

/// Tokens of a block that orders tokens.
const TOKENS: usize = 64;
/// Columns of a block that sums rows, and columns of one of its threads.
const COLUMNS: usize = 1024;
const THREAD_COLUMNS: usize = 4;

impl Lowering {
    /// `[ids, table, (residual)] -> [x]`. With `is_part`, other ranks have the ids that the table has not.
    ///
    /// An id of no rank, for which the CPU panics, gives a row of NaN: the loss shows it, and the step is skipped.
    pub(super) fn embedding(&mut self, residual: bool, first: usize, is_part: bool) {
        let (ids, table, x) = (self.reads[0], self.reads[1], self.writes[0]);
        let residual = residual.then(|| self.reads[2]);
        assert!(residual.is_none_or(|r| r.dtype == x.dtype), "a residual has the element type of the result");
        let absent = if first > 0 || is_part { 0.0 } else { f32::NAN };
        let n_vectors = x.len() / width_of(x.cols);
        let args = Args::new().ptr(ids).ptr(table).ptr_or_null(residual).ptr(x);
        let args = args.int(x.cols).int(first).int(table.rows).float(absent).int(n_vectors);
        let name = match table.dtype {
            // Words of two bf16 numbers each.
            DType::I32 => "embedding_of_bf16",
            _ if self.is_split => "embedding_of_split",
            _ => "embedding",
        };
        self.launch_strided(kernel(name, x), n_vectors, args);
    }

    /// `[ids, dx, (residual)] -> [dtable]`: rows are summed by id in the order of tokens, as on the CPU.
    pub(super) fn embedding_backward(&mut self, residual: bool, first: usize) {
        let (ids, dx, dtable) = (self.reads[0], self.reads[1], self.writes[0]);
        if residual {
            self.copy(self.reads[2], dtable);
        } else {
            self.zero(dtable);
        }
        let (n, cols) = (ids.len(), dtable.cols);
        // Pairs of an id and a token.
        let sorted = self.take(n, 2, DType::I32);
        let args = Args::new().ptr(ids).int(n).ptr(sorted);
        self.launch(kernel("order_tokens", dx), [n.div_ceil(TOKENS) as u32, 1, 1], 256, 0, args);
        let args = Args::new().ptr(sorted).ptr(dx).ptr(dtable).int(n).int(cols).int(first).int(dtable.rows);
        let grid = [n as u32, cols.div_ceil(COLUMNS) as u32, 1];
        let threads = cols.div_ceil(THREAD_COLUMNS).next_multiple_of(32).min(COLUMNS / THREAD_COLUMNS) as u32;
        self.launch(kernel("embedding_backward", dx), grid, threads, 0, args.int(usize::from(residual)));
    }
}

fn kernel(name: &'static str, activations: Buffer) -> Instance {
    Instance::of(EMBEDDING, name).with("Y", type_name(activations.dtype))
}
