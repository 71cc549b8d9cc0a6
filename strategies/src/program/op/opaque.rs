//! User-defined models.

use super::adjoints::{Adjoints, Loss, NoAdjoint};
use super::operation::Operation;
use super::shares::{Ranks, Region, Unshared};
use super::signature::Signature;
use crate::program::{DType, Instr, Value};

/// `[inputs…, params…, hyper, (loss0, grads0…)] -> [loss, (grads…)]`: a user-defined model, which writes its loss
/// together with the gradients of all its parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Opaque {
    /// Which of the job's user-defined models.
    pub model: u32,
    /// Inputs among the reads.
    pub n_inputs: usize,
    /// Parameters among the reads; all of them trained.
    pub n_params: usize,
    /// Previous sums are added.
    pub residual: bool,
    /// The gradients are written; not in evaluation.
    pub gradient: bool,
}

impl Opaque {
    fn n_grads(&self) -> usize {
        if self.gradient { self.n_params } else { 0 }
    }
}

impl Operation for Opaque {
    fn name(&self) -> &'static str {
        "opaque"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        let fixed = self.n_inputs + self.n_params + 1;
        let n_grads = self.n_grads();
        s.count(fixed + usize::from(self.residual) * (1 + n_grads), 1 + n_grads)?;
        s.hyper(s.reads[fixed - 1])?;
        s.scalar(s.writes[0])?;
        let params = &s.reads[self.n_inputs..fixed - 1];
        let same = |g: &Value, p: &Value| s.shape(g, &p.shape, Some(DType::F32));
        params.iter().zip(&s.writes[1..]).try_for_each(|(p, g)| same(g, p))?;
        if self.residual {
            s.scalar(s.reads[fixed])?;
            params.iter().zip(&s.reads[fixed + 1..]).try_for_each(|(p, g)| same(g, p))?;
        }
        Ok(())
    }

    fn in_place_pairs(&self, _n_reads: usize) -> Vec<(usize, usize)> {
        if !self.residual {
            return Vec::new();
        }
        let first = self.n_inputs + self.n_params + 1;
        (0..=self.n_grads()).map(|i| (first + i, i)).collect()
    }

    fn in_training(&self, mut instr: Instr, loss: Loss, adjoints: &mut Adjoints) -> Instr {
        let params = instr.reads[self.n_inputs..self.n_inputs + self.n_params].to_vec();
        instr.op = Opaque { residual: loss.carried.is_some(), gradient: true, ..*self }.into();
        instr.reads.extend(loss.carried);
        for param in params {
            // With a carried loss every parameter carries a gradient too; without one, none does.
            instr.reads.extend(adjoints.take(param));
            let grad = adjoints.grad_of(param);
            instr.writes.push(grad);
            adjoints.give(param, grad);
        }
        instr
    }

    // It writes the gradients itself.
    fn backward(&self, _instr: &Instr, _adjoints: &mut Adjoints) -> Result<(), NoAdjoint> {
        Ok(())
    }

    fn region(&self, _n_columns: usize, _ranks: &Ranks) -> Result<Option<Region>, Unshared> {
        Err(Unshared::Never("the model is user-defined"))
    }
}
