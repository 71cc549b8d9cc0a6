//! Operations of programs in which several ranks share a model.

use super::buffer::Buffer;
use super::operands::{MAX_OPERANDS, Operands, copy, f32s, heads_of};
use super::sum_plan::SumPlan;
use crate::kernels::attention_part::Indexes;
use crate::kernels::attention_shape::PartShape;
use crate::kernels::copy::copy_columns;
use crate::kernels::{attention_part, cross_entropy_part, elementwise};
use half::{bf16, f16};
use phalanx_device::float::Float;
use phalanx_strategies::passes::context_parallel::chunks;
use phalanx_strategies::program::{AttentionPart, DType, VocabShard};

/// # Safety
/// All functions here: the operands belong to a verified instruction, with the aliasing of [`super`].
impl Operands<'_> {
    pub(super) unsafe fn cross_entropy_stats(&mut self, vocab: VocabShard) {
        // SAFETY: the statistics do not overlap the logits and labels, which are only read (`Op::in_place_pairs` names
        // no pair).
        unsafe {
            let (logits, labels) = (self.reads[0], self.reads[1].slice());
            let stats = self.writes[0].slice_mut();
            let wide = if logits.dtype == DType::F32 { logits.slice() } else { self.converted_logits() };
            cross_entropy_part::cross_entropy_stats(wide, labels, logits.cols, vocab.first, stats);
        }
    }

    pub(super) unsafe fn split_columns(&mut self) {
        // SAFETY: the two results and the operand do not overlap, so each written slice is the only slice of its
        // buffer.
        unsafe {
            let (x, parts) = (self.reads[0], [self.writes[0], self.writes[1]]);
            let mut first = 0;
            for part in parts {
                match x.dtype.size_bytes() {
                    2 => copy_columns::<u16>((x.slice(), x.cols, first), (part.slice_mut(), part.cols, 0), part.cols),
                    _ => copy_columns::<f32>((x.slice(), x.cols, first), (part.slice_mut(), part.cols, 0), part.cols),
                }
                first += part.cols;
            }
        }
    }

    /// The parts are f32 gradients for every storage type of the whole.
    pub(super) unsafe fn join_columns(&mut self) {
        // SAFETY: neither part overlaps the whole; the loop holds one mutable slice of the whole at a time.
        unsafe {
            let x = self.writes[0];
            let mut first = 0;
            for part in [self.reads[0], self.reads[1]] {
                match (part.dtype, x.dtype) {
                    (DType::F32, DType::F32) => {
                        copy_columns::<f32>((part.slice(), part.cols, 0), (x.slice_mut(), x.cols, first), part.cols);
                    }
                    (_, DType::Bf16) => write_columns::<bf16>(part.slice(), part.cols, x.slice_mut(), x.cols, first),
                    _ => write_columns::<f16>(part.slice(), part.cols, x.slice_mut(), x.cols, first),
                }
                first += part.cols;
            }
        }
    }

    /// Runs attention to the keys of each rank in turn.
    pub(super) unsafe fn attention_part<T: Float>(&mut self, part: &AttentionPart) {
        // SAFETY: `o` and `lse` may be the carried operands (3 and 4), which are not read after `copy`; no others
        // overlap.
        unsafe {
            let (o, lse) = (self.writes[0], self.writes[1]);
            if part.carried {
                copy(self.reads[3], o);
                copy(self.reads[4], lse);
            }
            let (q, kv, doc_start) = (self.reads[0], self.reads[1], self.reads[2].slice::<i32>());
            let (queries, keys, scratch) = indexes(self.scratch, q.rows);
            fill_index(part, part.q_rank, queries);
            for i in 0..part.n_kv_ranks {
                fill_index(part, part.kv_rank + i, keys);
                let kv = &kv.slice::<T>()[i * q.rows * kv.cols..(i + 1) * q.rows * kv.cols];
                let indexes = Indexes { queries, keys, doc_start };
                let carry = part.carried || i > 0;
                let (o, lse) = (o.slice_mut(), lse.slice_mut());
                attention_part::attention_part(
                    &shape_of_part(part),
                    q.slice::<T>(),
                    kv,
                    indexes,
                    carry,
                    o,
                    lse,
                    scratch,
                );
            }
        }
    }

    pub(super) unsafe fn attention_part_backward<T: Float>(&mut self, part: &AttentionPart, q0: bool, kv0: bool) {
        // SAFETY: `dq` and `dkv` may be the carried operands, which are not read after `start_from`; no others overlap.
        unsafe {
            let (dq, dkv) = (self.writes[0], self.writes[1]);
            start_from(q0.then(|| self.reads[6]), dq);
            start_from(kv0.then(|| self.reads[6 + usize::from(q0)]), dkv);
            let (q, kv, doc_start) = (self.reads[0], self.reads[1], self.reads[2].slice::<i32>());
            let known = (self.reads[3].slice(), self.reads[4].slice(), self.reads[5].slice());
            let (queries, keys, scratch) = indexes(self.scratch, q.rows);
            fill_index(part, part.q_rank, queries);
            for i in 0..part.n_kv_ranks {
                fill_index(part, part.kv_rank + i, keys);
                let here = i * q.rows * kv.cols..(i + 1) * q.rows * kv.cols;
                let (kv, dkv) = (&kv.slice::<T>()[here.clone()], &mut dkv.slice_mut::<f32>()[here]);
                let indexes = Indexes { queries, keys, doc_start };
                let (q, dq) = (q.slice::<T>(), dq.slice_mut());
                attention_part::attention_part_backward(&shape_of_part(part), q, kv, indexes, known, dq, dkv, scratch);
            }
        }
    }

    pub(super) unsafe fn add_bias<Y: Float>(&mut self) {
        // SAFETY: the result may be operand 0, which is not read after `copy`; the bias does not overlap it.
        unsafe {
            let (x, bias, y) = (self.reads[0], self.reads[1].slice::<f32>(), self.writes[0]);
            copy(x, y);
            elementwise::add_bias_assign::<Y, f32>(y.slice_mut(), bias);
        }
    }

    /// Sums the nodes of all ranks along the tree; an operand holds one node of each rank, by rank.
    pub(super) unsafe fn tree_sum(&mut self, plan: &SumPlan) {
        let mut nodes: [&[f32]; MAX_OPERANDS] = [&[]; MAX_OPERANDS];
        // SAFETY: the sum overlaps no operand, and operands are only read (`Op::in_place_pairs` names no pair).
        unsafe {
            nodes.iter_mut().zip(self.reads).for_each(|(node, read)| *node = read.slice::<f32>());
            plan.sum(&nodes[..self.reads.len()], self.writes[0].slice_mut::<f32>());
        }
    }

    pub(super) unsafe fn slice(&mut self, start: usize) {
        // SAFETY: the result does not overlap the operand (`Op::in_place_pairs` names no pair).
        unsafe {
            let to = self.writes[0];
            copy(self.reads[0].elements(start, to.len()), to);
        }
    }

    pub(super) unsafe fn paste(&mut self, start: usize) {
        // SAFETY: the result may be operand 0, which is not read after `copy`; the part does not overlap it.
        unsafe {
            copy(self.reads[0], self.writes[0]);
            let part = self.reads[1];
            copy(part, self.writes[0].elements(start, part.len()));
        }
    }
}

/// Initialises a sum: with an earlier sum, or with zeros.
///
/// # Safety
/// As [`copy`].
unsafe fn start_from(carried: Option<Buffer>, to: Buffer) {
    // SAFETY: the caller's contract.
    unsafe {
        match carried {
            Some(carried) => copy(carried, to),
            None => to.slice_mut::<f32>().fill(0.0),
        }
    }
}

pub(super) const fn shape_of_part(part: &AttentionPart) -> PartShape {
    let (heads, n) = (heads_of(&part.heads), part.heads.seq_len);
    PartShape { heads, n_queries: n, n_keys: n, window: part.heads.window, scale: part.heads.scale }
}

/// Bytes of scratch for the token indexes of attention to a part, besides the kernel's own scratch.
pub(super) const fn index_bytes(n_tokens: usize) -> usize {
    (2 * n_tokens * size_of::<i32>()).next_multiple_of(64)
}

/// Divides the scratch into indexes of queries, indexes of keys, and the kernel's scratch.
fn indexes(scratch: &mut [u8], n: usize) -> (&mut [i32], &mut [i32], &mut [f32]) {
    let (front, rest) = scratch.split_at_mut(index_bytes(n));
    let (queries, keys) = bytemuck::cast_slice_mut(front).split_at_mut(n);
    (queries, &mut keys[..n], f32s(rest))
}

/// Fills in the index of each token of a context-parallel rank in its row.
fn fill_index(part: &AttentionPart, rank: usize, index: &mut [i32]) {
    let n = part.heads.seq_len;
    for row in index.chunks_exact_mut(n) {
        let runs = chunks(n * part.n_ranks, part.n_ranks, rank);
        row.iter_mut().zip(runs.into_iter().flatten()).for_each(|(to, at)| *to = at as i32);
    }
}

/// Rounds columns to `T` and writes them into a wider matrix.
fn write_columns<T: Float>(from: &[f32], from_columns: usize, to: &mut [T], to_columns: usize, first: usize) {
    for (to, from) in to.chunks_exact_mut(to_columns).zip(from.chunks_exact(from_columns)) {
        for (to, from) in to[first..].iter_mut().zip(from) {
            *to = T::from_f32(*from);
        }
    }
}
