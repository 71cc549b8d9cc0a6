//! Attention within the tokens of a rank.

use super::adjoints::{Adjoints, NoAdjoint};
use super::attention_shape::Attention;
use super::cost::{Cost, touched_bytes};
use super::operation::Operation;
use super::recomputation::Recomputation;
use super::shares::{Piece, Ranks, Region, Unshared, heads_fit};
use super::signature::Signature;
use super::width::Width;
use crate::program::{DType, Instr, Program, Value, ValueId};

impl Attention {
    /// Checks a packed qkv, and returns its tokens.
    pub(super) fn check_qkv(&self, s: &Signature<'_>, value: &Value) -> Result<usize, String> {
        let n = value.n_rows();
        if self.seq_len == 0 || !n.is_multiple_of(self.seq_len) {
            return Err(format!("{n} tokens are not a multiple of seq_len {}", self.seq_len));
        }
        if self.n_kv_heads == 0 || !self.n_heads.is_multiple_of(self.n_kv_heads) {
            return Err(format!("{} heads are not a multiple of {} kv heads", self.n_heads, self.n_kv_heads));
        }
        s.shape(value, &[n, self.qkv_columns()], None).map(|()| n)
    }

    /// Operations of `n_products` products of queries and keys, where a token sees `mean_keys` on average.
    pub(super) fn flops(&self, n_tokens: usize, mean_keys: f64, n_products: f64) -> f64 {
        n_products * 2.0 * n_tokens as f64 * mean_keys * (self.n_heads * self.head_dim) as f64
    }

    fn cost_of(&self, n_products: f64, program: &Program, instr: &Instr) -> Cost {
        let seen = self.window.unwrap_or(self.seq_len).min(self.seq_len) as f64;
        // A full causal row sees half of the sequence on average, a windowed one its window.
        let mean_keys = if seen < self.seq_len as f64 { seen } else { (self.seq_len as f64 + 1.0) / 2.0 };
        let n_tokens = program.value(instr.reads[0]).n_rows();
        let attention_flops = self.flops(n_tokens, mean_keys, n_products);
        Cost { attention_flops, ..Cost::streamed(touched_bytes(program, instr)) }
    }
}

impl Operation for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        s.count(2, 2)?;
        let n = self.check_qkv(s, s.reads[0])?;
        s.shape(s.reads[1], &[n], Some(DType::I32))?;
        s.shape(s.writes[0], &[n, self.n_heads * self.head_dim], Some(s.reads[0].dtype))?;
        s.shape(s.writes[1], &[n, self.n_heads], Some(DType::F32))
    }

    // The scores, and their product with the values.
    fn cost(&self, program: &Program, instr: &Instr) -> Cost {
        self.cost_of(2.0, program, instr)
    }

    fn adjoint(&self, instr: &Instr, dy: ValueId, adjoints: &mut Adjoints) -> Result<(), NoAdjoint> {
        let reads = vec![instr.reads[0], instr.reads[1], instr.writes[0], instr.writes[1], dy];
        adjoints.simple(AttentionBackward(*self), instr.reads[0], reads);
        Ok(())
    }

    fn width(&self) -> Width {
        Width::Half
    }

    fn heads_mut(&mut self) -> Option<&mut Attention> {
        Some(self)
    }

    fn n_statistics(&self) -> usize {
        self.n_heads
    }

    /// Heads of queries are shared, and those of keys and values; with more ranks than these, neighbours hold the same one.
    fn region(&self, _n_columns: usize, ranks: &Ranks) -> Result<Option<Region>, Unshared> {
        let (h, k, d, Ranks { tp, me }) = (self.n_heads, self.n_kv_heads, self.head_dim, *ranks);
        if !heads_fit(h, k, tp) {
            let fits = (1..=h).filter(|tp| heads_fit(h, k, *tp)).collect();
            return Err(Unshared::Heads { n_heads: h, n_kv_heads: k, fits });
        }
        let run = (tp / k).max(1);
        let n_kv = (k / tp).max(1);
        let (q, kv) = (me * (h / tp), me / run * n_kv);
        let piece = |first: usize, n: usize, copied: bool| Piece { range: first * d..(first + n) * d, copied };
        let q = piece(q, h / tp, false);
        let copied = run > 1;
        let qkv = vec![q.clone(), piece(h + kv, n_kv, copied), piece(h + k + kv, n_kv, copied)];
        Ok(Some(Region { operand: qkv, result: Some(vec![q]), run }))
    }

    fn recomputation(&self) -> Recomputation {
        Recomputation::Costly
    }
}

/// `[qkv, doc_start, o, lse, do] -> [dqkv]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionBackward(pub Attention);

impl Operation for AttentionBackward {
    fn name(&self) -> &'static str {
        "attention_backward"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        let AttentionBackward(a) = self;
        s.count(5, 1)?;
        let n = a.check_qkv(s, s.reads[0])?;
        let dtype = Some(s.reads[0].dtype);
        s.shape(s.reads[1], &[n], Some(DType::I32))?;
        s.shape(s.reads[2], &[n, a.n_heads * a.head_dim], dtype)?;
        s.shape(s.reads[3], &[n, a.n_heads], Some(DType::F32))?;
        s.shape(s.reads[4], &[n, a.n_heads * a.head_dim], dtype)?;
        s.shape(s.writes[0], &[n, a.qkv_columns()], dtype)
    }

    // It computes the scores again, and four more products.
    fn cost(&self, program: &Program, instr: &Instr) -> Cost {
        self.0.cost_of(5.0, program, instr)
    }
}
