//! Softmax cross-entropy over whole rows of logits, and over rows whose columns several ranks share.

use super::{Lowering, THREADS, type_name};
use crate::command::Args;
use crate::kernels::{CROSS_ENTROPY, Instance};
use phalanx_strategies::program::{DType, Hyper, VocabShard};

/// Bytes of a vector.
const VECTOR_BYTES: usize = 16;
/// Vectors of a thread in a pass over a row.
const VECTORS: usize = 4;

impl Lowering {
    /// `[logits, labels, hyper, (stats), (loss0)] -> [loss, (dlogits)]`.
    pub(super) fn cross_entropy(&mut self, residual: bool, gradient: bool, vocab: Option<VocabShard>) {
        let (logits, labels, loss) = (self.reads[0], self.reads[1], self.writes[0]);
        let (n, v) = (labels.len(), logits.cols);
        let scale = self.reads[2].elements(Hyper::LOSS_GRAD_SCALE, 1);
        let carried = residual.then(|| self.reads[self.reads.len() - 1]);
        let dlogits = gradient.then(|| self.writes[1]);
        let losses = self.take(1, n, DType::F64);
        let dtype = logits.dtype;
        match vocab {
            None => {
                let args = Args::new().ptr(logits).ptr(labels).ptr(scale).int(v).ptr(losses).ptr_or_null(dlogits);
                self.launch(kernel("loss_of_rows", dtype), [n as u32, 1, 1], threads_of(v, dtype), 0, args);
            }
            Some(VocabShard { first, n_shards }) => {
                let stats = self.reads[3];
                let args = Args::new().ptr(labels).ptr(stats).int(n_shards).int(n).ptr(losses);
                self.launch_strided(kernel("loss_of_statistics", dtype), n, args);
                if let Some(dlogits) = dlogits {
                    let args = Args::new().ptr(logits).ptr(labels).ptr(scale).ptr(stats);
                    let args = args.int(n_shards).int(n).int(v).int(first).ptr(dlogits);
                    let runs = v.div_ceil(per_thread(dtype) * THREADS as usize) as u32;
                    self.launch(kernel("gradient_of_statistics", dtype), [n as u32, runs, 1], THREADS, 0, args);
                }
            }
        }
        self.sum_values(losses, carried, loss);
    }

    /// `[logits, labels] -> [stats]`.
    pub(super) fn cross_entropy_stats(&mut self, vocab: VocabShard) {
        let (logits, labels, stats) = (self.reads[0], self.reads[1], self.writes[0]);
        let args = Args::new().ptr(logits).ptr(labels).int(logits.cols).int(vocab.first).ptr(stats);
        let grid = [labels.len() as u32, 1, 1];
        let kernel = kernel("statistics_of_rows", logits.dtype);
        self.launch(kernel, grid, threads_of(logits.cols, logits.dtype), 0, args);
    }
}

fn kernel(name: &'static str, logits: DType) -> Instance {
    Instance::of(CROSS_ENTROPY, name).with("X", type_name(logits))
}

/// Elements of a thread in a pass over a row.
pub(super) fn per_thread(logits: DType) -> usize {
    VECTORS * VECTOR_BYTES / logits.size_bytes()
}

/// Threads of a block that works on a row: each has a few vectors, and long rows have as many threads as possible.
pub(super) fn threads_of(v: usize, logits: DType) -> u32 {
    v.div_ceil(per_thread(logits)).next_multiple_of(32).clamp(64, 1024) as u32
}
