//! Tables of vectors, by token. Shapes: `N` tokens, `V` rows of the table, `C` columns.

use super::adjoints::{Adjoints, NoAdjoint};
use super::operation::Operation;
use super::signature::Signature;
use super::weight_use::WeightUse;
use crate::program::{DType, Instr, Packing, ValueId};
use std::ops::Range;

/// `[ids N, table [V, C], (residual [N, C])] -> [x [N, C]]`: rows of the table, which holds the ids from `first` on;
/// other ids have rows of zeros. The table may be packed as bf16: `[V, C / 2]` words.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Embedding {
    /// A residual is added.
    pub residual: bool,
    /// Id of the first row of the table.
    pub first: usize,
}

impl Operation for Embedding {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        s.count(2 + usize::from(self.residual), 1)?;
        let (_, stored) = s.matrix(s.reads[1])?;
        // A frozen table may be packed as bf16.
        let c = if s.reads[1].dtype == DType::I32 { Packing::Bf16.weights(stored) } else { stored };
        let n = s.reads[0].n_elements();
        s.shape(s.reads[0], &[n], Some(DType::I32))?;
        s.shape(s.writes[0], &[n, c], None)?;
        s.reads.get(2).map_or(Ok(()), |r| s.shape(r, &[n, c], None))
    }

    fn in_place_pairs(&self, _n_reads: usize) -> Vec<(usize, usize)> {
        if self.residual { vec![(2, 0)] } else { Vec::new() }
    }

    fn adjoint(&self, instr: &Instr, dy: ValueId, adjoints: &mut Adjoints) -> Result<(), NoAdjoint> {
        let (ids, table) = (instr.reads[0], instr.reads[1]);
        if self.residual {
            adjoints.give(instr.reads[2], dy);
        }
        if adjoints.needs(table) {
            let carried = adjoints.take(table);
            let reads = [ids, dy].into_iter().chain(carried).collect();
            let dtable = adjoints.grad_of(table);
            let op = EmbeddingBackward { residual: carried.is_some(), first: self.first };
            adjoints.emit(op, reads, &[dtable]);
            adjoints.give(table, dtable);
        }
        Ok(())
    }

    // The residual is that of the stream.
    fn wide_operands(&self, _is_wide: bool, n_reads: usize) -> Range<usize> {
        0..n_reads
    }

    fn weight(&self) -> Option<(usize, WeightUse)> {
        Some((1, WeightUse::Table))
    }

    fn reads_split(&self, operand: usize) -> bool {
        operand == 1
    }
}

/// `[ids N, dx [N, C], (residual [V, C])] -> [dtable [V, C]]`: rows summed by id.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EmbeddingBackward {
    /// A residual is added.
    pub residual: bool,
    /// Id of the first row of the table.
    pub first: usize,
}

impl Operation for EmbeddingBackward {
    fn name(&self) -> &'static str {
        "embedding_backward"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        s.count(2 + usize::from(self.residual), 1)?;
        let (n, c) = s.matrix(s.reads[1])?;
        s.shape(s.reads[0], &[n], Some(DType::I32))?;
        let (v, _) = s.matrix(s.writes[0])?;
        s.shape(s.writes[0], &[v, c], Some(DType::F32))?;
        s.reads.get(2).map_or(Ok(()), |r| s.shape(r, &[v, c], Some(DType::F32)))
    }

    fn in_place_pairs(&self, _n_reads: usize) -> Vec<(usize, usize)> {
        if self.residual { vec![(2, 0)] } else { Vec::new() }
    }
}
