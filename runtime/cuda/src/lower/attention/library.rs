//! Attention through cuDNN, and what this crate's kernels do around it.

use super::super::{Lowering, THREADS, type_name};
use super::packed;
use crate::command::{Args, Buffer, Command};
use crate::cudnn::{Call, DOCUMENT_TOKENS, Direction, Shape, TensorId};
use crate::kernels::{ATTENTION_DOCUMENTS, Instance};
use phalanx_strategies::program::{Attention, DType};

/// Lengths and places of documents.
#[derive(Clone, Copy, Debug)]
struct Documents {
    lengths: Buffer,
    in_packed: Buffer,
    in_outputs: Buffer,
    in_statistics: Buffer,
}

impl Lowering {
    /// `[qkv, doc_start] -> [o, lse]`.
    pub(super) fn forward_by_library(&mut self, a: &Attention, shape: Shape) {
        let (qkv, doc_start, o, lse) = (self.reads[0], self.reads[1], self.writes[0], self.writes[1]);
        let [q, k, v] = packed(a, qkv);
        let mut tensors = vec![(TensorId::Q, q), (TensorId::K, k), (TensorId::V, v), (TensorId::O, o)];
        if shape.has_documents {
            tensors.push((TensorId::Lse, lse));
            self.documents(a, doc_start, &shape, &mut tensors);
            self.call(a, shape, Direction::Forward, &tensors);
            let args = Args::new().ptr(qkv).ptr(doc_start).ptr(o).ptr(lse);
            let args = args.int(qkv.rows).int(a.seq_len).int(a.n_heads).int(a.n_kv_heads).float(a.scale);
            self.warps(kernel(a, &shape, "attention_singles"), qkv.rows * a.n_heads, args);
        } else {
            let of_rows = self.take(lse.rows, lse.cols, DType::F32);
            tensors.push((TensorId::Lse, of_rows));
            self.call(a, shape, Direction::Forward, &tensors);
            let args = Args::new().ptr(of_rows).ptr(lse).int(qkv.rows).int(a.seq_len).int(a.n_heads);
            self.launch_strided(kernel(a, &shape, "attention_statistics_from_rows"), lse.len(), args);
        }
    }

    /// `[qkv, doc_start, o, lse, do] -> [dqkv]`.
    pub(super) fn backward_by_library(&mut self, a: &Attention, shape: Shape) {
        let (qkv, doc_start, o) = (self.reads[0], self.reads[1], self.reads[2]);
        let (lse, dout, dqkv) = (self.reads[3], self.reads[4], self.writes[0]);
        let ([q, k, v], [dq, dk, dv]) = (packed(a, qkv), packed(a, dqkv));
        let operands = [(TensorId::Q, q), (TensorId::K, k), (TensorId::V, v), (TensorId::O, o), (TensorId::DO, dout)];
        let gradients = [(TensorId::DQ, dq), (TensorId::DK, dk), (TensorId::DV, dv)];
        let mut tensors: Vec<(TensorId, Buffer)> = operands.into_iter().chain(gradients).collect();
        let n_places = places(&shape, qkv.rows);
        tensors.push((TensorId::Delta, self.take(n_places, a.n_heads, DType::F32)));
        if !shape.is_deterministic {
            tensors.push((TensorId::DQSums, self.take(n_places, a.n_heads * a.head_dim, DType::F32)));
        }
        if shape.has_documents {
            tensors.push((TensorId::Lse, lse));
            self.documents(a, doc_start, &shape, &mut tensors);
            self.call(a, shape, Direction::Backward, &tensors);
            let args = Args::new().ptr(dout).ptr(doc_start).ptr(dqkv);
            let args = args.int(qkv.rows).int(a.seq_len).int(a.n_heads).int(a.n_kv_heads);
            self.warps(kernel(a, &shape, "attention_singles_backward"), qkv.rows * a.n_kv_heads, args);
        } else {
            let of_rows = self.take(lse.rows, lse.cols, DType::F32);
            tensors.push((TensorId::Lse, of_rows));
            let args = Args::new().ptr(lse).ptr(of_rows).int(qkv.rows).int(a.seq_len).int(a.n_heads);
            self.launch_strided(kernel(a, &shape, "attention_statistics_to_rows"), lse.len(), args);
            self.call(a, shape, Direction::Backward, &tensors);
        }
    }

    /// Finds the documents of the batch.
    fn documents(&mut self, a: &Attention, doc_start: Buffer, shape: &Shape, tensors: &mut Vec<(TensorId, Buffer)>) {
        let n = shape.batch;
        // As many as any batch has, so that scratch does not depend on it.
        let n_max = documents_max(doc_start.rows * doc_start.cols);
        let mut list = |n: usize, words: usize| self.take(n, words, DType::I32);
        let (lengths, in_packed) = (list(n_max, 1), list(n_max + 1, 2));
        let (in_outputs, in_statistics) = (list(n_max + 1, 2), list(n_max + 1, 2));
        let found = Documents { lengths, in_packed, in_outputs, in_statistics };
        let args = Args::new().ptr(doc_start).ptr(found.lengths).ptr(found.in_packed).ptr(found.in_outputs);
        let args = args.ptr(found.in_statistics).int(doc_start.rows * doc_start.cols).int(a.seq_len).int(n);
        let args = args.int(a.qkv_columns()).int(a.n_heads);
        self.launch(kernel(a, shape, "attention_documents"), [1, 1, 1], 1024, 0, args);
        tensors.extend([
            (TensorId::QueryLengths, found.lengths),
            (TensorId::KeyLengths, found.lengths),
            (TensorId::PackedOffsets, found.in_packed),
            (TensorId::OutputOffsets, found.in_outputs),
            (TensorId::LseOffsets, found.in_statistics),
        ]);
    }

    fn call(&mut self, a: &Attention, shape: Shape, direction: Direction, tensors: &[(TensorId, Buffer)]) {
        let n_tokens = self.reads[0].rows;
        let largest = Shape { batch: documents_max(n_tokens), ..shape };
        let bytes = if shape.has_documents {
            // The bound grows with rows and with their tokens.
            let heads = Attention { seq_len: DOCUMENT_TOKENS * n_tokens, ..*a };
            let of_tokens = Shape { batch: 1, heads, ..shape }.workspace_bytes(direction);
            let heads = Attention { seq_len: 0, ..*a };
            of_tokens + Shape { heads, ..largest }.workspace_bytes(direction)
        } else {
            shape.workspace_bytes(direction)
        };
        let workspace = self.take(1, bytes.div_ceil(size_of::<f32>()), DType::F32).address;
        let tensors = tensors.iter().map(|(id, buffer)| (*id, buffer.address)).collect();
        self.push(Command::Attention(Call { shape, direction, tensors, workspace }));
    }

    /// Launches a kernel on `n` warps.
    fn warps(&mut self, kernel: Instance, n: usize, args: Args) {
        let blocks = (n * 32).div_ceil(THREADS as usize);
        self.launch(kernel, [blocks as u32, 1, 1], THREADS, 0, args);
    }
}

fn kernel(a: &Attention, shape: &Shape, name: &'static str) -> Instance {
    Instance::of(ATTENTION_DOCUMENTS, name).with("X", type_name(shape.dtype)).with("HEAD_DIM", a.head_dim)
}

/// Tokens of tensors in scratch, where documents are as long as the longest.
fn places(shape: &Shape, n_tokens: usize) -> usize {
    if shape.has_documents { DOCUMENT_TOKENS * n_tokens } else { n_tokens }
}

/// Most documents of a batch: each has at least two tokens, and their number is rounded up.
fn documents_max(n_tokens: usize) -> usize {
    n_tokens
}
