//! Log-probabilities of labels, for objectives that compare sequences.

use super::adjoints::{Adjoints, NoAdjoint};
use super::cross_entropy::VocabShard;
use super::operation::Operation;
use super::shares::{Ranks, Region, Unshared};
use super::signature::Signature;
use crate::program::{DType, Instr, ValueId};
use std::ops::Range;

/// `[logits [N, V], labels N, (stats [S, N, 3])] -> [log_probs N, norms N]`, f32, in nats: the log-probability of each label, 0 where
/// there is none, and the logarithm of the sum of the row's exponentials. With `vocab`, the logits are this rank's columns, and `stats`
/// has the [`super::CrossEntropyStats`] of all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogProbs {
    /// This rank's columns.
    pub vocab: Option<VocabShard>,
}

impl Operation for LogProbs {
    fn name(&self) -> &'static str {
        "log_probs"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        s.count(2 + usize::from(self.vocab.is_some()), 2)?;
        let (n, _) = s.matrix(s.reads[0])?;
        s.shape(s.reads[1], &[n], Some(DType::I32))?;
        if let Some(vocab) = self.vocab {
            s.shape(s.reads[2], &[vocab.n_shards, n, 3], Some(DType::F32))?;
        }
        s.writes.iter().try_for_each(|v| s.shape(v, &[n], Some(DType::F32)))
    }

    fn adjoint(&self, instr: &Instr, dy: ValueId, adjoints: &mut Adjoints) -> Result<(), NoAdjoint> {
        let (logits, labels, norms) = (instr.reads[0], instr.reads[1], instr.writes[1]);
        let op = LogProbsBackward { first: self.vocab.map_or(0, |vocab| vocab.first) };
        adjoints.simple(op, logits, vec![logits, labels, norms, dy]);
        Ok(())
    }

    fn reads_logits(&self) -> bool {
        true
    }

    fn wide_operands(&self, _is_wide: bool, n_reads: usize) -> Range<usize> {
        0..n_reads
    }

    fn region(&self, n_columns: usize, ranks: &Ranks) -> Result<Option<Region>, Unshared> {
        let operand = ranks.evenly("tokens of the vocabulary", n_columns)?;
        Ok(Some(Region { operand, result: None, run: 1 }))
    }
}

/// `[logits [N, V], labels N, norms N, d N] -> [dlogits]`: `(onehot(label) - softmax) d`, zero where there is no label, in the element
/// type of the logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogProbsBackward {
    /// Token id of the first column.
    pub first: usize,
}

impl Operation for LogProbsBackward {
    fn name(&self) -> &'static str {
        "log_probs_backward"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        s.count(4, 1)?;
        let (n, _) = s.matrix(s.reads[0])?;
        s.shape(s.reads[1], &[n], Some(DType::I32))?;
        s.reads[2..].iter().try_for_each(|v| s.shape(v, &[n], Some(DType::F32)))?;
        s.like(s.writes[0], s.reads[0])
    }

    fn in_place_pairs(&self, _n_reads: usize) -> Vec<(usize, usize)> {
        vec![(0, 0)]
    }

    fn reads_logits(&self) -> bool {
        true
    }

    fn gradient_of_logits(&self) -> Option<usize> {
        Some(0)
    }
}
