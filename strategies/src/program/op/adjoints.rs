//! The backward pass as operations append to it: gradients so far, and where they go.
//!
//! No separate instruction sums partial gradients where an adjoint can accumulate: the adjoint takes the partial sum as
//! its residual.

use super::Op;
use crate::program::{DType, Kind, Phase, Program, Site, ValueId};
use std::collections::{BTreeMap, BTreeSet};

/// An operation that only occurs in programs that are already differentiated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NoAdjoint {
    /// Its name.
    pub(crate) op: &'static str,
}

/// The loss of a program, and that of earlier microbatches.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Loss {
    /// The value that is differentiated.
    pub(crate) value: Option<ValueId>,
    /// The sum that it continues.
    pub(crate) carried: Option<ValueId>,
}

/// A program whose backward pass is being appended.
pub(crate) struct Adjoints {
    /// The program.
    pub(crate) out: Program,
    /// Position of the next instructions.
    pub(crate) site: Site,
    /// Values of the forward program that receive a gradient.
    needs: Vec<bool>,
    /// Partial gradient of each value of the forward program.
    grads: Vec<Option<ValueId>>,
    /// Output of an attention part → output and statistics of all parts together.
    pub(super) merged: BTreeMap<ValueId, (ValueId, ValueId)>,
    /// Gradients whose columns are written by the adjoints of products that read these columns.
    pub(super) in_columns: BTreeSet<ValueId>,
    /// Gradients of parameters, one per use from the last use on, if they are kept apart.
    apart: Option<Vec<(ValueId, ValueId)>>,
}

impl Adjoints {
    /// An empty program with the values of `forward`. With `apart`, each use of a parameter has a separate gradient.
    pub(crate) fn of(forward: &Program, needs: &[bool], apart: bool) -> Adjoints {
        Adjoints {
            out: Program { instrs: Vec::new(), ..forward.clone() },
            site: Site { phase: Phase::Backward, block: None, microbatch: 0 },
            needs: needs.to_vec(),
            grads: vec![None; forward.values.len()],
            merged: BTreeMap::new(),
            in_columns: BTreeSet::new(),
            apart: apart.then(Vec::new),
        }
    }

    /// Whether a value of the forward program receives a gradient.
    pub(super) fn needs(&self, v: ValueId) -> bool {
        self.needs[v.0 as usize]
    }

    /// The partial gradient of `v`.
    pub(crate) fn grad(&self, v: ValueId) -> Option<ValueId> {
        self.grads[v.0 as usize]
    }

    /// Begins the gradient of `v` with `g`.
    pub(crate) fn begin(&mut self, v: ValueId, g: ValueId) {
        self.grads[v.0 as usize] = Some(g);
    }

    /// Gradients of parameters that are kept apart, `(parameter, gradient)`: one per use, from the last use on.
    pub(crate) fn take_apart(&mut self) -> Option<Vec<(ValueId, ValueId)>> {
        self.apart.take()
    }

    /// The partial gradient of `v`, which the caller's adjoint continues.
    pub(super) fn take(&mut self, v: ValueId) -> Option<ValueId> {
        self.grads[v.0 as usize].take()
    }

    /// Adds `g` to the gradient of `v`.
    pub(super) fn give(&mut self, v: ValueId, g: ValueId) {
        if !self.needs(v) {
            return;
        }
        let is_param = self.out.value(v).kind == Kind::Parameter;
        if let Some(apart) = self.apart.as_mut().filter(|_| is_param) {
            apart.push((v, g));
            return;
        }
        let sum = match self.take(v) {
            None => g,
            Some(partial) => {
                let sum = self.grad_of(v);
                // Attention parts write f32, so their sum stays f32.
                if [partial, g].iter().any(|x| self.out.value(*x).dtype == DType::F32) {
                    self.set_dtype(sum, DType::F32);
                }
                self.add(partial, g, sum);
                sum
            }
        };
        self.begin(v, sum);
    }

    /// As [`Adjoints::give`], for each of several parameters.
    pub(super) fn give_all(&mut self, params: &[ValueId], grads: &[ValueId]) {
        params.iter().zip(grads).for_each(|(param, grad)| self.give(*param, *grad));
    }

    /// A new value for the gradient of `v`: same shape and element type.
    pub(super) fn grad_of(&mut self, v: ValueId) -> ValueId {
        let value = self.out.value(v).clone();
        let trained = value.kind == Kind::Parameter && self.needs(v);
        let kind = if trained { Kind::Gradient } else { Kind::Activation };
        self.out.add_value(format!("d.{}", value.name), &value.shape, value.dtype, kind)
    }

    /// Stores a gradient in another element type.
    pub(super) fn set_dtype(&mut self, grad: ValueId, dtype: DType) {
        self.out.values[grad.0 as usize].dtype = dtype;
    }

    /// An adjoint with one result, the gradient of `x`.
    pub(super) fn simple(&mut self, op: impl Into<Op>, x: ValueId, reads: Vec<ValueId>) {
        if self.needs(x) {
            let dx = self.grad_of(x);
            self.emit(op, reads, &[dx]);
            self.give(x, dx);
        }
    }

    /// Appends an instruction.
    pub(super) fn emit(&mut self, op: impl Into<Op>, reads: Vec<ValueId>, writes: &[ValueId]) {
        self.out.push(op.into(), reads, writes.to_vec(), self.site);
    }
}
