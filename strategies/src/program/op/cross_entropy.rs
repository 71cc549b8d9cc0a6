//! The loss of language models.

use super::adjoints::{Adjoints, Loss, NoAdjoint};
use super::operation::Operation;
use super::shares::{Ranks, Region, Unshared};
use super::signature::Signature;
use crate::program::{DType, Instr, Kind};
use std::ops::Range;

/// Columns of the logits that one tensor-parallel rank has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct VocabShard {
    /// Token id of the first column.
    pub first: usize,
    /// Ranks that share the vocabulary.
    pub n_shards: usize,
}

/// `[logits [N, V], labels N, hyper, (stats [S, N, 3]), (loss0)] -> [loss, (dlogits)]`: summed negative
/// log-likelihood, and its gradient times [`crate::program::Hyper::LOSS_GRAD_SCALE`] in the same pass, in the element type of the
/// logits. With `vocab`, the logits are this rank's columns, and `stats` has the [`CrossEntropyStats`] of all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CrossEntropy {
    /// A previous sum is added to the loss.
    pub residual: bool,
    /// The gradient is written.
    pub gradient: bool,
    /// This rank's columns.
    pub vocab: Option<VocabShard>,
}

impl Operation for CrossEntropy {
    fn name(&self) -> &'static str {
        "cross_entropy"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        let stats = usize::from(self.vocab.is_some());
        s.count(3 + stats + usize::from(self.residual), 1 + usize::from(self.gradient))?;
        let (n, v) = s.matrix(s.reads[0])?;
        s.shape(s.reads[1], &[n], Some(DType::I32))?;
        s.hyper(s.reads[2])?;
        if let Some(vocab) = self.vocab {
            s.shape(s.reads[3], &[vocab.n_shards, n, 3], Some(DType::F32))?;
        }
        s.reads[3 + stats..].iter().try_for_each(|l| s.scalar(l))?;
        s.scalar(s.writes[0])?;
        s.writes[1..].iter().try_for_each(|d| s.shape(d, &[n, v], Some(s.reads[0].dtype)))
    }

    fn in_place_pairs(&self, n_reads: usize) -> Vec<(usize, usize)> {
        let loss = self.residual.then_some((n_reads.wrapping_sub(1), 0));
        self.gradient.then_some((0, 1)).into_iter().chain(loss).collect()
    }

    fn in_training(&self, mut instr: Instr, loss: Loss, adjoints: &mut Adjoints) -> Instr {
        if Some(instr.writes[0]) != loss.value {
            return instr;
        }
        let logits = instr.reads[0];
        let gradient = adjoints.needs(logits);
        instr.op = CrossEntropy { residual: loss.carried.is_some(), gradient, vocab: self.vocab }.into();
        instr.reads.extend(loss.carried);
        if gradient {
            let shape = adjoints.out.value(logits).shape.clone();
            let dlogits = adjoints.out.add_value("d.logits", &shape, DType::F32, Kind::Activation);
            instr.writes.push(dlogits);
            adjoints.begin(logits, dlogits);
        }
        instr
    }

    // The loss writes its own gradient.
    fn backward(&self, _instr: &Instr, _adjoints: &mut Adjoints) -> Result<(), NoAdjoint> {
        Ok(())
    }

    fn reads_logits(&self) -> bool {
        true
    }

    fn gradient_of_logits(&self) -> Option<usize> {
        self.gradient.then_some(1)
    }

    fn wide_operands(&self, _is_wide: bool, n_reads: usize) -> Range<usize> {
        0..n_reads
    }

    fn region(&self, n_columns: usize, ranks: &Ranks) -> Result<Option<Region>, Unshared> {
        let operand = ranks.evenly("tokens of the vocabulary", n_columns)?;
        Ok(Some(Region { operand, result: None, run: 1 }))
    }
}

/// `[logits [N, v], labels N] -> [stats [1, N, 3]]`: for each row the largest logit, the sum of the exponentials
/// relative to it, and the logit of the label if this rank has it. Source: Shoeybi et al. 2019, §3 (arXiv:1909.08053).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CrossEntropyStats(pub VocabShard);

impl Operation for CrossEntropyStats {
    fn name(&self) -> &'static str {
        "cross_entropy_stats"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        s.count(2, 1)?;
        let (n, _) = s.matrix(s.reads[0])?;
        s.shape(s.reads[1], &[n], Some(DType::I32))?;
        s.shape(s.writes[0], &[1, n, 3], Some(DType::F32))
    }

    // The loss writes the gradient.
    fn backward(&self, _instr: &Instr, _adjoints: &mut Adjoints) -> Result<(), NoAdjoint> {
        Ok(())
    }

    fn reads_logits(&self) -> bool {
        true
    }

    fn wide_operands(&self, _is_wide: bool, n_reads: usize) -> Range<usize> {
        0..n_reads
    }
}
