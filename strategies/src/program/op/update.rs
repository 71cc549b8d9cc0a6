//! Updates of parameters.

use super::operation::Operation;
use super::signature::Signature;
use crate::optimizer::{Extent, OptimizerSpec};
use crate::program::blocks::Blocks;
use crate::program::tiles::Tiles;
use crate::program::{DType, Value};

/// `[p, state…, g, sums…, hyper, coefficient] -> [p, state…]`: the update of an optimizer, where `state` and `g` may
/// cover a run of the elements of `p`; see [`crate::optimizer`].
#[derive(Clone, Debug, PartialEq)]
pub struct Update {
    /// The update rule.
    pub rule: OptimizerSpec,
    /// Position of the learning rate in [`crate::program::Hyper`].
    pub rate: usize,
    /// First element of the parameter that is updated.
    pub first: usize,
    /// Dims of the parameter.
    pub n_dims: usize,
    /// Rounds of the rule's sums that are operands; an update reads them all.
    pub n_rounds: usize,
    /// Rows and columns of the gradient's elements, if the rule needs them.
    pub tiles: Tiles,
    /// How the state of the gradient's elements is stored, if in blocks.
    pub blocks: Blocks,
}

/// Operands of an [`Update`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UpdateOperands<'a, T> {
    /// The parameter.
    pub param: &'a T,
    /// State of the optimizer, in the order of [`OptimizerSpec::state`].
    pub state: &'a [T],
    /// The reduced gradient.
    pub grad: &'a T,
    /// Sums over whole tensors, in the order of [`OptimizerSpec::sums`].
    pub sums: &'a [T],
    /// The scalars of the step.
    pub hyper: &'a T,
    /// The factor of the gradient.
    pub coefficient: &'a T,
}

impl Update {
    /// Tensors of the optimizer's state.
    pub fn n_state(&self) -> usize {
        self.rule.state(self.n_dims).len()
    }

    /// Sums among the operands.
    pub fn n_sums(&self) -> usize {
        self.rule.sums(self.n_dims)[..self.n_rounds].iter().map(|round| round.len()).sum()
    }

    /// Number of operands.
    pub fn n_reads(&self) -> usize {
        self.n_state() + self.n_sums() + 4
    }

    /// Splits a list of operands.
    ///
    /// # Panics
    /// If its length is not [`Update::n_reads`].
    pub fn operands<'a, T>(&self, reads: &'a [T]) -> UpdateOperands<'a, T> {
        let (param, rest) = reads.split_first().expect("an update begins with its parameter");
        let (state, rest) = rest.split_at(self.n_state());
        let [grad, sums @ .., hyper, coefficient] = rest else {
            panic!("{} operands, expected {}", reads.len(), self.n_reads())
        };
        assert_eq!(sums.len(), self.n_sums(), "{} operands, expected {}", reads.len(), self.n_reads());
        UpdateOperands { param, state, grad, sums, hyper, coefficient }
    }
}

impl Update {
    fn check_operands(&self, s: &Signature<'_>) -> Result<(), String> {
        let UpdateOperands { param, state, grad, sums, hyper, coefficient } = self.operands(s.reads);
        let n = grad.n_elements();
        s.run(param, self.first, n)?;
        for v in [param, grad] {
            s.shape(v, &v.shape, Some(DType::F32))?;
        }
        for tile in &self.tiles.tiles {
            let stack = self.tiles.tensors.get(tile.tensor).ok_or("a tile refers to a missing tensor")?;
            let is_inside = tile.matrix < stack.n_matrices
                && tile.row + tile.n_rows <= stack.n_rows
                && tile.column + tile.n_columns <= stack.n_columns
                && (tile.n_rows == 0 || tile.row_at(tile.n_rows - 1).end <= n);
            if !is_inside {
                return Err(format!("{tile:?} does not lie in {n} elements of {stack:?}"));
            }
        }
        let n_in_blocks = if self.rule.has_blocks() { n } else { 0 };
        if self.blocks.n_elements() != n_in_blocks {
            return Err(format!("blocks of {} elements, expected {n_in_blocks}", self.blocks.n_elements()));
        }
        self.check_values(s, state, self.rule.state(self.n_dims).iter().map(|tensor| tensor.extent))?;
        let rounds = self.rule.sums(self.n_dims)[..self.n_rounds].iter();
        self.check_values(s, sums, rounds.flat_map(|round| round.iter().copied()))?;
        s.hyper(hyper)?;
        s.scalar(coefficient)
    }

    /// Checks values of an optimizer, one for each of these extents.
    fn check_values(
        &self,
        s: &Signature<'_>,
        values: &[&Value],
        extents: impl Iterator<Item = Extent>,
    ) -> Result<(), String> {
        let UpdateOperands { grad, .. } = self.operands(s.reads);
        for (v, extent) in values.iter().zip(extents) {
            let (n, dtype) = match extent {
                Extent::Elements => (grad.n_elements(), DType::F32),
                Extent::Blocks => (self.blocks.n_words(), DType::I32),
                extent => (self.tiles.n_values(extent), DType::F32),
            };
            s.shape(v, &v.shape, Some(dtype))?;
            if v.n_elements() != n {
                return Err(format!("`{}` has {} elements, expected {n}", v.name, v.n_elements()));
            }
        }
        Ok(())
    }
}

impl Operation for Update {
    fn name(&self) -> &'static str {
        self.rule.name()
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        let all = self.rule.sums(self.n_dims).len();
        if self.n_rounds != all {
            return Err(format!("found {} rounds of sums, expected {all}", self.n_rounds));
        }
        s.count(self.n_reads(), 1 + self.n_state())?;
        self.check_operands(s)?;
        s.writes.iter().zip(s.reads).try_for_each(|(w, r)| s.like(w, r))
    }

    fn in_place_pairs(&self, _n_reads: usize) -> Vec<(usize, usize)> {
        (0..=self.n_state()).map(|i| (i, i)).collect()
    }

    fn reads_split(&self, _operand: usize) -> bool {
        true
    }
}

/// `[p, state…, g, sums…, hyper, coefficient] -> [sums…]`: the next round of the sums over whole tensors that an update
/// needs, over this rank's elements; see [`crate::passes::tensor_sums`].
#[derive(Clone, Debug, PartialEq)]
pub struct UpdateSums(pub Update);

impl Operation for UpdateSums {
    fn name(&self) -> &'static str {
        "update_sums"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        let UpdateSums(update) = self;
        let rounds = update.rule.sums(update.n_dims);
        let Some(next) = rounds.get(update.n_rounds) else {
            return Err(format!("no sums follow {} rounds", update.n_rounds));
        };
        s.count(update.n_reads(), next.len())?;
        update.check_operands(s)?;
        update.check_values(s, s.writes, next.iter().copied())
    }
}
