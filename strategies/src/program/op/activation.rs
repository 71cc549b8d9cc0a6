//! Non-linearities of the feed-forward part.

use super::Op;
use super::adjoints::{Adjoints, NoAdjoint};
use super::operation::Operation;
use super::recomputation::Recomputation;
use super::shares::{Piece, Ranks, Region, Unshared};
use super::signature::Signature;
use super::width::Width;
use crate::program::{Instr, ValueId};

/// Non-linearity of the feed-forward part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ActivationFn {
    /// `silu(gate) * up` on `[N, 2 F]`, gate first. Source: Shazeer 2020 (arXiv:2002.05202).
    SwiGlu,
    /// GELU in its tanh form. Source: Hendrycks and Gimpel 2016 (arXiv:1606.08415).
    GeluTanh,
}

impl ActivationFn {
    /// Shape of the result for the first operand.
    fn activated(self, s: &Signature<'_>) -> Result<[usize; 2], String> {
        let (n, c) = s.matrix(s.reads[0])?;
        match self {
            ActivationFn::GeluTanh => Ok([n, c]),
            ActivationFn::SwiGlu if c % 2 == 0 => Ok([n, c / 2]),
            ActivationFn::SwiGlu => Err(format!("gate and up need an even number of columns, found {c}")),
        }
    }
}

/// `[x] -> [y]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Activation(pub ActivationFn);

impl Operation for Activation {
    fn name(&self) -> &'static str {
        "activation"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        s.count(1, 1)?;
        s.shape(s.writes[0], &self.0.activated(s)?, None)
    }

    fn adjoint(&self, instr: &Instr, dy: ValueId, adjoints: &mut Adjoints) -> Result<(), NoAdjoint> {
        let op = ActivationBackward { function: self.0, again: false };
        adjoints.simple(op, instr.reads[0], vec![instr.reads[0], dy]);
        Ok(())
    }

    fn width(&self) -> Width {
        Width::Half
    }

    fn region(&self, n_columns: usize, ranks: &Ranks) -> Result<Option<Region>, Unshared> {
        let what = "feed-forward columns";
        let (operand, result) = match self.0 {
            ActivationFn::GeluTanh => (ranks.evenly(what, n_columns)?, ranks.evenly(what, n_columns)?),
            ActivationFn::SwiGlu => {
                let width = n_columns / 2;
                let gate = ranks.evenly(what, width)?;
                let up = gate.iter().map(|p| Piece { range: p.range.start + width..p.range.end + width, ..*p });
                (gate.iter().cloned().chain(up).collect(), gate)
            }
        };
        Ok(Some(Region { operand, result: Some(result), run: 1 }))
    }

    fn recomputation(&self) -> Recomputation {
        Recomputation::Cheap
    }

    fn is_written_again(&self) -> bool {
        true
    }
}

/// `[x, dy] -> [dx, (y)]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ActivationBackward {
    /// The activation.
    pub function: ActivationFn,
    /// The result `y` of the activation is written again, with the same bits, in the element type of `dy`.
    pub again: bool,
}

impl Operation for ActivationBackward {
    fn name(&self) -> &'static str {
        "activation_backward"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        s.count(2, 1 + usize::from(self.again))?;
        let narrow = self.function.activated(s)?;
        s.shape(s.reads[1], &narrow, None)?;
        s.shape(s.writes[0], &s.reads[0].shape, None)?;
        s.writes.get(1).map_or(Ok(()), |y| s.shape(y, &narrow, Some(s.reads[1].dtype)))
    }

    fn in_place_pairs(&self, _n_reads: usize) -> Vec<(usize, usize)> {
        match (self.again, self.function) {
            (true, _) => vec![(0, 0), (1, 1)],
            (false, ActivationFn::SwiGlu) => vec![(0, 0)],
            (false, ActivationFn::GeluTanh) => Vec::new(),
        }
    }

    fn writing_again(&self, adjoint: &Instr, recomputed: &Instr) -> Option<(ValueId, Op)> {
        let is_same =
            recomputed.op == Op::Activation(Activation(self.function)) && adjoint.reads[0] == recomputed.reads[0];
        (is_same && !self.again).then(|| (adjoint.reads[1], ActivationBackward { again: true, ..*self }.into()))
    }
}
