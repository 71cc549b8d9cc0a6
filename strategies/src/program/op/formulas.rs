//! Losses of groups of rows.

use super::adjoints::{Adjoints, Loss, NoAdjoint};
use super::operation::Operation;
use super::signature::Signature;
use crate::program::formula::{Input, Tape};
use crate::program::{DType, Instr, Kind, ValueId};
use std::sync::Arc;

/// `[x [2, R]…, hyper, (given [G]), (sums [M])] -> [sums [M], (dx [2, R]…)]`, f64: evaluates formulas for each group of `group` neighbouring rows, and
/// sums each of them over the groups. The first ones are the parts of the loss; the derivatives of their sum with respect to the sums
/// of operands are written in the same pass, each part times a scalar of the step. A group without a counted token in the first operand is no
/// group: it adds nothing. Formulas may read the sums of earlier ones, `given`.
#[derive(Clone, Debug, PartialEq)]
pub struct Formulas {
    /// The formulas: the first `n_sums` results are summed, the others are the derivatives, operand by operand, row by row of a group.
    pub tape: Arc<Tape>,
    /// Number of formulas.
    pub n_sums: usize,
    /// For each part of the loss, the index of its scale in [`crate::program::Hyper`].
    pub scales: Vec<u32>,
    /// Rows of a group.
    pub group: usize,
    /// Whether this rank adds its groups to the sums, which another rank with the same rows may do instead.
    pub counts: bool,
    /// Sums of earlier formulas are read.
    pub given: bool,
    /// Previous sums are added.
    pub residual: bool,
    /// Operands whose derivatives are written.
    pub gradients: Vec<u32>,
}

impl Formulas {
    /// Number of operands that the formulas read.
    pub fn n_operands(&self, n_reads: usize) -> usize {
        n_reads - self.n_others()
    }

    /// Reads behind these operands.
    fn n_others(&self) -> usize {
        1 + usize::from(self.given) + usize::from(self.residual)
    }
}

impl Operation for Formulas {
    fn name(&self) -> &'static str {
        "formulas"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        let n_operands = s.reads.len().checked_sub(self.n_others()).filter(|n| *n > 0);
        let n_operands = n_operands.ok_or("formulas read at least one operand and the scalars of the step")?;
        s.count(s.reads.len(), 1 + self.gradients.len())?;
        let rows = s.reads[0].n_columns();
        if self.group == 0 || !rows.is_multiple_of(self.group) {
            return Err(format!("{rows} rows cannot be groups of {}", self.group));
        }
        let operands = s.reads[..n_operands].iter().chain(&s.writes[1..]);
        operands.into_iter().try_for_each(|v| s.shape(v, &[2, rows], Some(DType::F64)))?;
        s.hyper(s.reads[n_operands])?;
        let n_given = if self.given { s.reads[n_operands + 1].n_elements() } else { 0 };
        if self.given {
            s.shape(s.reads[n_operands + 1], &[n_given], Some(DType::F64))?;
        }
        let sums = s.reads[n_operands + 1 + usize::from(self.given)..].iter().chain(&s.writes[..1]);
        sums.into_iter().try_for_each(|v| s.shape(v, &[self.n_sums], Some(DType::F64)))?;
        let expected = self.n_sums + self.gradients.len() * self.group;
        if self.tape.results.len() != expected {
            return Err(format!("a tape has {} results, expected {expected}", self.tape.results.len()));
        }
        let n_steps = self.tape.steps.len() as u32;
        let fits = |input: &Input| (input.operand as usize) < n_operands && (input.row as usize) < self.group;
        match self.tape.inputs().find(|input| !fits(input)) {
            Some(input) => Err(format!("a formula reads {input:?}, which is outside its operands and groups")),
            None if self.tape.given().any(|i| i as usize >= n_given) => Err("a formula reads no earlier sum".into()),
            None if self.tape.results.iter().any(|r| *r >= n_steps) => Err("a result is no step".into()),
            None if self.scales.len() > self.n_sums => Err("the loss has more parts than there are formulas".into()),
            None => Ok(()),
        }
    }

    fn in_place_pairs(&self, n_reads: usize) -> Vec<(usize, usize)> {
        self.residual.then_some((n_reads.wrapping_sub(1), 0)).into_iter().collect()
    }

    fn in_training(&self, mut instr: Instr, loss: Loss, adjoints: &mut Adjoints) -> Instr {
        if Some(instr.writes[0]) != loss.value {
            return instr;
        }
        let operands = &instr.reads[..self.n_operands(instr.reads.len())];
        let needed: Vec<(u32, ValueId)> =
            (0..).zip(operands.iter().copied()).filter(|(_, x)| adjoints.needs(*x)).collect();
        let gradients: Vec<u32> = needed.iter().map(|(operand, _)| *operand).collect();
        let mut tape = (*self.tape).clone();
        let row = |operand: u32| (0..self.group as u32).map(move |row| Input { operand, count: false, row });
        tape.differentiate(&self.scales, gradients.iter().copied().flat_map(row));
        for (_, x) in &needed {
            let shape = adjoints.out.value(*x).shape.clone();
            let dx = adjoints.out.add_value("d.rows", &shape, DType::F64, Kind::Activation);
            instr.writes.push(dx);
            adjoints.begin(*x, dx);
        }
        instr.reads.extend(loss.carried);
        let residual = loss.carried.is_some();
        instr.op = Formulas { tape: Arc::new(tape), residual, gradients, ..self.clone() }.into();
        instr
    }

    // The loss writes its own gradient.
    fn backward(&self, _instr: &Instr, _adjoints: &mut Adjoints) -> Result<(), NoAdjoint> {
        Ok(())
    }
}
