//! Attention between the tokens of context-parallel ranks.

use super::Attention;
use super::adjoints::{Adjoints, NoAdjoint};
use super::cost::{Cost, touched_bytes};
use super::operation::Operation;
use super::recomputation::Recomputation;
use super::signature::Signature;
use super::width::Width;
use crate::program::{DType, Instr, Program, ValueId};

/// `[x [N, A + B]] -> [left [N, A], right [N, B]]`: separates queries from keys and values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SplitColumns;

impl Operation for SplitColumns {
    fn name(&self) -> &'static str {
        "split_columns"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        s.split(s.reads.first(), s.writes)
    }

    /// Joins the gradient of the left part with that of the right part.
    fn adjoint(&self, instr: &Instr, dleft: ValueId, adjoints: &mut Adjoints) -> Result<(), NoAdjoint> {
        if let Some(dright) = adjoints.take(instr.writes[1]) {
            adjoints.simple(JoinColumns, instr.reads[0], vec![dleft, dright]);
        }
        Ok(())
    }

    fn width(&self) -> Width {
        Width::OfOperands
    }
}

/// `[left [N, A], right [N, B]] -> [x [N, A + B]]`: the adjoint of [`SplitColumns`]; converts element types.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct JoinColumns;

impl Operation for JoinColumns {
    fn name(&self) -> &'static str {
        "join_columns"
    }

    // Gradients of attention parts, which are f32.
    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        s.split(s.writes.first(), s.reads)?;
        s.reads.iter().try_for_each(|part| s.shape(part, &part.shape, Some(DType::F32)))
    }
}

/// `[q [N, H D], kv [B N, 2 K D], doc_start N, (o0, lse0)] -> [o [N, H D] f32, lse [N, H]]`: attention of the queries
/// of one context-parallel rank to the keys and values of `B` ranks, merged with earlier parts.
/// Source: Liu et al. 2023, ring attention (arXiv:2310.01889).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionPart {
    /// Heads and mask; `seq_len` counts the tokens that one rank has of a row.
    pub heads: Attention,
    /// Context-parallel ranks.
    pub n_ranks: usize,
    /// Rank of the queries.
    pub q_rank: usize,
    /// First rank of the keys and values: `n_kv_ranks` ranks from this one on, in order.
    pub kv_rank: usize,
    /// Number of ranks whose keys and values are operands.
    pub n_kv_ranks: usize,
    /// Output and statistics of other parts are merged in.
    pub carried: bool,
}

impl AttentionPart {
    /// Checks queries, keys and values, and returns the number of tokens.
    fn check_operands(&self, s: &Signature<'_>) -> Result<usize, String> {
        let a = &self.heads;
        let (n, _) = s.matrix(s.reads[0])?;
        if a.seq_len == 0 || !n.is_multiple_of(a.seq_len) {
            return Err(format!("{n} tokens are not a multiple of seq_len {}", a.seq_len));
        }
        if self.q_rank >= self.n_ranks || self.kv_rank + self.n_kv_ranks > self.n_ranks {
            return Err(format!("there are {} context-parallel ranks", self.n_ranks));
        }
        s.shape(s.reads[0], &[n, a.n_heads * a.head_dim], None)?;
        s.shape(s.reads[1], &[self.n_kv_ranks * n, 2 * a.n_kv_heads * a.head_dim], None)?;
        s.shape(s.reads[2], &[n], Some(DType::I32))?;
        Ok(n)
    }

    /// A query sees the keys at earlier positions. Each rank has two chunks, one from either end of the row, so the queries of
    /// a rank see half of the keys of every rank: half of all pairs for each pair of ranks.
    /// Source: zigzag order, as in Llama 3 (Dubey et al. 2024, §3.3.2, arXiv:2407.21783).
    fn cost_of(&self, n_products: f64, program: &Program, instr: &Instr) -> Cost {
        let mean_keys = (self.n_kv_ranks * self.heads.seq_len) as f64 / 2.0;
        let mean_keys = self.heads.window.map_or(mean_keys, |w| mean_keys.min(w as f64));
        let attention_flops = self.heads.flops(program.value(instr.reads[0]).n_rows(), mean_keys, n_products);
        Cost { attention_flops, ..Cost::streamed(touched_bytes(program, instr)) }
    }
}

impl Operation for AttentionPart {
    fn name(&self) -> &'static str {
        "attention_part"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        s.count(3 + 2 * usize::from(self.carried), 2)?;
        let n = self.check_operands(s)?;
        let (o, lse) = ([n, self.heads.n_heads * self.heads.head_dim], [n, self.heads.n_heads]);
        let pairs = [s.writes, &s.reads[3..]].concat();
        pairs.chunks(2).try_for_each(|pair| {
            s.shape(pair[0], &o, Some(DType::F32))?;
            s.shape(pair[1], &lse, Some(DType::F32))
        })
    }

    fn in_place_pairs(&self, _n_reads: usize) -> Vec<(usize, usize)> {
        if self.carried { vec![(3, 0), (4, 1)] } else { Vec::new() }
    }

    // The scores, and their product with the values.
    fn cost(&self, program: &Program, instr: &Instr) -> Cost {
        self.cost_of(2.0, program, instr)
    }

    /// The adjoint of each part needs only the merged output of all parts, so the parts are independent of each other: the
    /// gradient of a part's carried input equals the gradient of its output.
    fn adjoint(&self, instr: &Instr, dy: ValueId, adjoints: &mut Adjoints) -> Result<(), NoAdjoint> {
        let (q, kv) = (instr.reads[0], instr.reads[1]);
        let all = adjoints.merged.get(&instr.writes[0]).copied().unwrap_or((instr.writes[0], instr.writes[1]));
        if self.carried {
            adjoints.merged.insert(instr.reads[3], all);
            adjoints.give(instr.reads[3], dy);
        }
        let (dq0, dkv0) = (adjoints.take(q), adjoints.take(kv));
        let op = AttentionPartBackward { part: *self, carried_q: dq0.is_some(), carried_kv: dkv0.is_some() };
        let reads = [q, kv, instr.reads[2], all.0, all.1, dy].into_iter().chain(dq0).chain(dkv0).collect();
        let grads = [q, kv].map(|v| {
            let dv = adjoints.grad_of(v);
            // Parts are summed: a half-width sum would lose the terms of the last parts.
            adjoints.set_dtype(dv, DType::F32);
            dv
        });
        adjoints.emit(op, reads, &grads);
        adjoints.give(q, grads[0]);
        adjoints.give(kv, grads[1]);
        Ok(())
    }

    fn recomputation(&self) -> Recomputation {
        Recomputation::Costly
    }
}

/// `[q, kv, doc_start, o, lse, do, (dq0, dkv0)] -> [dq f32, dkv f32]`, where `o` and `lse` cover all parts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionPartBackward {
    /// The part.
    pub part: AttentionPart,
    /// `dq0` is read and added to.
    pub carried_q: bool,
    /// `dkv0` is read and added to.
    pub carried_kv: bool,
}

impl Operation for AttentionPartBackward {
    fn name(&self) -> &'static str {
        "attention_part_backward"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        let (part, q) = (&self.part, usize::from(self.carried_q));
        s.count(6 + q + usize::from(self.carried_kv), 2)?;
        let n = part.check_operands(s)?;
        let o = [n, part.heads.n_heads * part.heads.head_dim];
        s.shape(s.reads[3], &o, Some(DType::F32))?;
        s.shape(s.reads[4], &[n, part.heads.n_heads], Some(DType::F32))?;
        s.shape(s.reads[5], &o, Some(DType::F32))?;
        let dq = s.reads[6..].iter().take(q).chain(&s.writes[..1]);
        dq.into_iter().try_for_each(|v| s.shape(v, &o, Some(DType::F32)))?;
        let dkv = s.reads[6 + q..].iter().chain(&s.writes[1..]);
        dkv.into_iter().try_for_each(|v| s.shape(v, &s.reads[1].shape, Some(DType::F32)))
    }

    fn in_place_pairs(&self, _n_reads: usize) -> Vec<(usize, usize)> {
        let q = self.carried_q.then_some((6, 0));
        q.into_iter().chain(self.carried_kv.then_some((6 + usize::from(self.carried_q), 1))).collect()
    }

    // It computes the scores again, and four more products.
    fn cost(&self, program: &Program, instr: &Instr) -> Cost {
        self.part.cost_of(5.0, program, instr)
    }
}
