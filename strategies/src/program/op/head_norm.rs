//! Norms of each head of queries and keys.

use super::Attention;
use super::adjoints::{Adjoints, NoAdjoint};
use super::operation::Operation;
use super::shares::{Pieces, Share};
use super::signature::Signature;
use super::width::Width;
use crate::program::{DType, Instr, ValueId};

/// `[qkv, gain_q D, gain_k D] -> [qkv', rstd [N, H + K]]`: RMS norm of each query and key head (Qwen3).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadNorm {
    /// Geometry of the packed heads.
    pub heads: Attention,
    /// Added to the variance.
    pub eps: f32,
}

impl Operation for HeadNorm {
    fn name(&self) -> &'static str {
        "head_norm"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        let heads = &self.heads;
        s.count(3, 2)?;
        let n = heads.check_qkv(s, s.reads[0])?;
        s.reads[1..].iter().try_for_each(|g| s.shape(g, &[heads.head_dim], Some(DType::F32)))?;
        s.same_shape(&[s.reads[0], s.writes[0]])?;
        s.shape(s.writes[1], &[n, heads.n_heads + heads.n_kv_heads], Some(DType::F32))
    }

    fn adjoint(&self, instr: &Instr, dy: ValueId, adjoints: &mut Adjoints) -> Result<(), NoAdjoint> {
        let (qkv, gains, rstd) = (instr.reads[0], &instr.reads[1..3], instr.writes[1]);
        let carried: Vec<ValueId> = gains.iter().filter_map(|g| adjoints.take(*g)).collect();
        let reads = [qkv, gains[0], gains[1], rstd, dy].into_iter().chain(carried.iter().copied()).collect();
        let writes = [qkv, gains[0], gains[1]].map(|v| adjoints.grad_of(v));
        adjoints.emit(HeadNormBackward { heads: self.heads, residual: !carried.is_empty() }, reads, &writes);
        adjoints.give_all(gains, &writes[1..]);
        adjoints.give(qkv, writes[0]);
        Ok(())
    }

    fn width(&self) -> Width {
        Width::Half
    }

    fn heads_mut(&mut self) -> Option<&mut Attention> {
        Some(&mut self.heads)
    }

    fn n_statistics(&self) -> usize {
        self.heads.n_heads + self.heads.n_kv_heads
    }

    fn operands_of(&self, columns: &Pieces) -> Option<Vec<(usize, Share)>> {
        Some(vec![(0, Share::Columns(columns.clone()))])
    }
}

/// `[qkv, gain_q, gain_k, rstd, dqkv', (dgain_q0, dgain_k0)] -> [dqkv, dgain_q, dgain_k]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadNormBackward {
    /// Geometry of the packed heads.
    pub heads: Attention,
    /// Previous gradients are added to those of the gains.
    pub residual: bool,
}

impl Operation for HeadNormBackward {
    fn name(&self) -> &'static str {
        "head_norm_backward"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        let heads = &self.heads;
        s.count(5 + 2 * usize::from(self.residual), 3)?;
        let n = heads.check_qkv(s, s.reads[0])?;
        let gains = [&s.reads[1..3], &s.reads[5..], &s.writes[1..]].concat();
        gains.iter().try_for_each(|g| s.shape(g, &[heads.head_dim], Some(DType::F32)))?;
        s.shape(s.reads[3], &[n, heads.n_heads + heads.n_kv_heads], Some(DType::F32))?;
        s.same_shape(&[s.reads[0], s.reads[4], s.writes[0]])
    }

    fn in_place_pairs(&self, _n_reads: usize) -> Vec<(usize, usize)> {
        if self.residual { vec![(5, 1), (6, 2)] } else { Vec::new() }
    }
}
