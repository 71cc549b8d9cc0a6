//! Attention to keys and values that a cache keeps from run to run. Row `p` of a sequence's cache has the keys and values of
//! its token at position `p`: `[2 K D]`, keys first.

use super::Attention;
use super::cost::{Cost, bytes};
use super::operation::Operation;
use super::signature::Signature;
use crate::program::{DType, Instr, Program};

/// `[qkv, positions N, cache [B P, 2 K D]] -> [o [N, H D], lse [N, H]]`: a token sees the cached keys of its sequence up to
/// its own position, which the cache has too; the keys and values of qkv are not read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CachedAttention {
    /// Geometry of packed qkv, and the mask; `seq_len` tokens of each sequence are operands.
    pub heads: Attention,
    /// Positions `P` of each sequence in the cache.
    pub capacity: usize,
}

impl CachedAttention {
    /// Columns of the cache.
    pub const fn cache_columns(&self) -> usize {
        2 * self.heads.n_kv_heads * self.heads.head_dim
    }

    /// Checks the operands, and returns the number of tokens and the shape of the cache.
    fn check_operands(&self, s: &Signature<'_>) -> Result<(usize, [usize; 2]), String> {
        let n = self.heads.check_qkv(s, s.reads[0])?;
        s.shape(s.reads[1], &[n], Some(DType::I32))?;
        let shape = [n / self.heads.seq_len * self.capacity, self.cache_columns()];
        s.shape(s.reads[2], &shape, Some(s.reads[0].dtype))?;
        Ok((n, shape))
    }

    /// Bytes of the keys and values of `n_keys` tokens for each token that is an operand.
    fn cached_bytes(&self, program: &Program, instr: &Instr, n_keys: f64) -> f64 {
        let qkv = program.value(instr.reads[0]);
        qkv.n_rows() as f64 * n_keys * (self.cache_columns() * qkv.dtype.size_bytes()) as f64
    }
}

impl Operation for CachedAttention {
    fn name(&self) -> &'static str {
        "cached_attention"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        s.count(3, 2)?;
        let (n, _) = self.check_operands(s)?;
        s.shape(s.writes[0], &[n, self.heads.n_heads * self.heads.head_dim], Some(s.reads[0].dtype))?;
        s.shape(s.writes[1], &[n, self.heads.n_heads], Some(DType::F32))
    }

    // A token sees half of the cache on average, or its window.
    fn cost(&self, program: &Program, instr: &Instr) -> Cost {
        let mean_keys = (self.capacity as f64 + 1.0) / 2.0;
        let mean_keys = self.heads.window.map_or(mean_keys, |w| mean_keys.min(w as f64));
        let attention_flops = self.heads.flops(program.value(instr.reads[0]).n_rows(), mean_keys, 2.0);
        let results: f64 = instr.writes.iter().map(|v| bytes(program, *v)).sum();
        let queries = bytes(program, instr.reads[0]) - self.cached_bytes(program, instr, 1.0);
        let streamed = queries + self.cached_bytes(program, instr, mean_keys) + results;
        Cost { attention_flops, ..Cost::streamed(streamed) }
    }
}

/// `[qkv, positions N, cache [B P, 2 K D]] -> [cache]`, for `B` sequences: replaces the keys and values at the positions of
/// the tokens, which differ from each other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CacheWrite(pub CachedAttention);

impl Operation for CacheWrite {
    fn name(&self) -> &'static str {
        "cache_write"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        s.count(3, 1)?;
        let (_, shape) = self.0.check_operands(s)?;
        s.shape(s.writes[0], &shape, Some(s.reads[0].dtype))
    }

    fn in_place_pairs(&self, _n_reads: usize) -> Vec<(usize, usize)> {
        vec![(2, 0)]
    }

    // The keys and values of the tokens, read and written; the other rows of the cache stay where they are.
    fn cost(&self, program: &Program, instr: &Instr) -> Cost {
        Cost::streamed(2.0 * self.0.cached_bytes(program, instr, 1.0))
    }
}
