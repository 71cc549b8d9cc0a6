//! Rotary position embeddings.

use super::Attention;
use super::adjoints::{Adjoints, NoAdjoint};
use super::operation::Operation;
use super::shares::{Pieces, Share};
use super::signature::Signature;
use super::width::Width;
use crate::program::{DType, Instr, ValueId};

/// `[qkv, positions N, table [2, P, D/2]] -> [qkv']`: rotary embedding of queries and keys.
/// Source: Su et al. 2021 (arXiv:2104.09864), pairs `(i, i + D/2)` as Hugging Face stores them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rotary {
    /// Geometry of the packed heads.
    pub heads: Attention,
    /// Rotate backwards: the adjoint.
    pub inverse: bool,
}

impl Operation for Rotary {
    fn name(&self) -> &'static str {
        if self.inverse { "rotary_backward" } else { "rotary" }
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        s.count(3, 1)?;
        let n = self.heads.check_qkv(s, s.reads[0])?;
        s.shape(s.reads[1], &[n], Some(DType::I32))?;
        let positions = s.reads[2].shape.get(1).copied().unwrap_or(0);
        s.shape(s.reads[2], &[2, positions, self.heads.head_dim / 2], Some(DType::F32))?;
        s.same_shape(&[s.reads[0], s.writes[0]])
    }

    fn in_place_pairs(&self, _n_reads: usize) -> Vec<(usize, usize)> {
        vec![(0, 0)]
    }

    fn adjoint(&self, instr: &Instr, dy: ValueId, adjoints: &mut Adjoints) -> Result<(), NoAdjoint> {
        let op = Rotary { inverse: !self.inverse, ..*self };
        adjoints.simple(op, instr.reads[0], vec![dy, instr.reads[1], instr.reads[2]]);
        Ok(())
    }

    fn width(&self) -> Width {
        Width::Half
    }

    fn heads_mut(&mut self) -> Option<&mut Attention> {
        Some(&mut self.heads)
    }

    fn operands_of(&self, columns: &Pieces) -> Option<Vec<(usize, Share)>> {
        Some(vec![(0, Share::Columns(columns.clone()))])
    }
}
