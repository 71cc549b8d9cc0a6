//! What the rest of the compiler asks an operation.

use super::Op;
use super::adjoints::{Adjoints, Loss, NoAdjoint};
use super::attention_shape::Attention;
use super::cost::{Cost, touched_bytes};
use super::recomputation::Recomputation;
use super::shares::{Pieces, Ranks, Reading, Region, Share, Unshared};
use super::signature::Signature;
use super::weight_use::WeightUse;
use super::width::Width;
use crate::program::{DType, Instr, Program, ValueId};
use std::ops::Range;

/// The properties of one operation. The defaults are those of an operation that streams its operands through the device once, and that
/// occurs only in programs that are already differentiated.
pub(crate) trait Operation {
    /// Name in error messages, traces and tables.
    fn name(&self) -> &'static str;

    /// Checks the number, the shapes and the element types of operands and results.
    ///
    /// # Errors
    /// What is wrong, and what was expected.
    fn check(&self, s: &Signature<'_>) -> Result<(), String>;

    /// Pairs `(read, write)` of operand positions that may be the same memory: the operation reads each element before
    /// it writes it, so a result may overwrite an operand that is no longer needed.
    fn in_place_pairs(&self, _n_reads: usize) -> Vec<(usize, usize)> {
        Vec::new()
    }

    /// Element type in which the operation multiplies matrices, if it does.
    fn compute(&self) -> Option<DType> {
        None
    }

    /// Arithmetic and memory traffic of an instruction with this operation.
    fn cost(&self, program: &Program, instr: &Instr) -> Cost {
        Cost::streamed(touched_bytes(program, instr))
    }

    /// Element types of the results under mixed precision.
    fn width(&self) -> Width {
        Width::Unchanged
    }

    /// Operands that stay f32 under mixed precision; `is_wide` if a result does.
    fn wide_operands(&self, _is_wide: bool, _n_reads: usize) -> Range<usize> {
        0..0
    }

    /// Whether the first operand has the logits, which may be in half width.
    fn reads_logits(&self) -> bool {
        false
    }

    /// The position of the result that is the gradient of the logits, in their element type.
    fn gradient_of_logits(&self) -> Option<usize> {
        None
    }

    /// The position of the operand that is a weight, and how the operation reads it.
    fn weight(&self) -> Option<(usize, WeightUse)> {
        None
    }

    /// Whether an operand may be a weight in two parts; see [`Program::split`].
    fn reads_split(&self, _operand: usize) -> bool {
        false
    }

    /// The geometry of packed heads. Tensor-parallel ranks divide the heads, context-parallel ranks the tokens.
    fn heads_mut(&mut self) -> Option<&mut Attention> {
        None
    }

    /// Columns of the second result, which has statistics of each head.
    fn n_statistics(&self) -> usize {
        0
    }

    /// The tensor-parallel region that ends at this operation, if it works on heads, on columns or on the vocabulary: its first operand
    /// has this number of columns.
    ///
    /// # Errors
    /// If the ranks cannot share the operation.
    fn region(&self, _n_columns: usize, _ranks: &Ranks) -> Result<Option<Region>, Unshared> {
        Ok(None)
    }

    /// What a rank needs of each operand, by position, to compute these columns of the result; `None` if it cannot compute some.
    fn operands_of(&self, _columns: &Pieces) -> Option<Vec<(usize, Share)>> {
        None
    }

    /// What follows where a rank has only some columns of the first operand; `None` if it needs them all.
    fn of_some_columns(&self) -> Option<Reading> {
        None
    }

    /// What it costs to compute the first result again in the backward pass.
    fn recomputation(&self) -> Recomputation {
        Recomputation::Ordinary
    }

    /// Whether the adjoint can write the first result again: see [`Operation::writing_again`].
    fn is_written_again(&self) -> bool {
        false
    }

    /// If this operation of the instruction `adjoint` is the adjoint of `recomputed`: the gradient of the first result that it reads, and
    /// the operation that also writes that result, and then reads the third operand of `recomputed`, if there is one.
    fn writing_again(&self, _adjoint: &Instr, _recomputed: &Instr) -> Option<(ValueId, Op)> {
        None
    }

    /// The instruction as it runs in training: a loss continues that of earlier microbatches, and writes its gradient.
    fn in_training(&self, instr: Instr, _loss: Loss, _adjoints: &mut Adjoints) -> Instr {
        instr
    }

    /// Appends the adjoint of an instruction whose first result has the gradient `dy`.
    ///
    /// # Errors
    /// If the operation has no adjoint.
    fn adjoint(&self, _instr: &Instr, _dy: ValueId, _adjoints: &mut Adjoints) -> Result<(), NoAdjoint> {
        Err(NoAdjoint { op: self.name() })
    }

    /// Appends the adjoint of an instruction, if a trained parameter influences the loss through it.
    ///
    /// # Errors
    /// If the operation has no adjoint.
    fn backward(&self, instr: &Instr, adjoints: &mut Adjoints) -> Result<(), NoAdjoint> {
        match adjoints.take(instr.writes[0]) {
            Some(dy) => self.adjoint(instr, dy, adjoints),
            None => Ok(()),
        }
    }
}

impl Op {
    /// Name in error messages, traces and tables.
    pub fn name(&self) -> &'static str {
        self.operation().name()
    }

    /// Pairs `(read, write)` of operand positions that may be the same memory: the operation reads each element before
    /// it writes it, so a result may overwrite an operand that is no longer needed.
    pub fn in_place_pairs(&self, n_reads: usize) -> Vec<(usize, usize)> {
        self.operation().in_place_pairs(n_reads)
    }

    /// Element type in which the operation multiplies matrices, if it does.
    pub fn compute(&self) -> Option<DType> {
        self.operation().compute()
    }
}
