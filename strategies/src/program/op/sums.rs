//! Sums of losses, of squares and of gradients, in orders that the numbers of ranks do not change.

use super::operation::Operation;
use super::signature::Signature;
use crate::program::DType;

/// `[s…] -> [s]`: sum of f64 elements in order; zero if there are none. With a vector of `m` elements as the result, operands are runs of
/// `m` elements, and the runs are summed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sum;

impl Operation for Sum {
    fn name(&self) -> &'static str {
        "sum"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        s.count(s.reads.len(), 1)?;
        s.reads.iter().try_for_each(|v| s.shape(v, &v.shape, Some(DType::F64)))?;
        s.shape(s.writes[0], &s.writes[0].shape, Some(DType::F64))?;
        let run = s.writes[0].n_elements();
        match s.reads.iter().find(|v| run == 0 || !v.n_elements().is_multiple_of(run)) {
            Some(v) => Err(format!("`{}` has {} elements, expected runs of {run}", v.name, v.n_elements())),
            None => Ok(()),
        }
    }
}

/// `[s…] -> [v]`: f64 scalars, or vectors of one length, at their positions in a vector of zeros.
#[derive(Clone, Debug, PartialEq)]
pub struct Assemble {
    /// Position of each, in scalars or vectors.
    pub places: Vec<usize>,
}

impl Operation for Assemble {
    fn name(&self) -> &'static str {
        "assemble"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        let vector = s.writes.first().ok_or("an assembled vector is written")?;
        s.count(self.places.len(), 1)?;
        s.shape(vector, &[vector.n_elements()], Some(DType::F64))?;
        let Some(first) = s.reads.first() else { return Ok(()) };
        s.reads.iter().try_for_each(|v| s.shape(v, &first.shape, Some(DType::F64)))?;
        match self.places.iter().find(|at| (**at + 1) * first.n_elements() > vector.n_elements()) {
            Some(at) => Err(format!("position {at} is outside a vector of {}", vector.n_elements())),
            None => Ok(()),
        }
    }
}

/// `[nodes…] -> [sum]`: part of a gradient, summed along the fixed tree over the microbatches of all ranks. The `k`-th
/// operand has this part of the `k`-th node of each rank in turn; see [`crate::passes::reproducible`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TreeSum {
    /// Microbatches.
    pub n_leaves: usize,
    /// Ranks that share them.
    pub n_ranks: usize,
}

impl Operation for TreeSum {
    fn name(&self) -> &'static str {
        "tree_sum"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        s.count(s.reads.len().max(1), 1)?;
        let part = s.writes[0].n_elements();
        s.reads.iter().try_for_each(|v| s.shape(v, &[self.n_ranks * part], Some(DType::F32)))
    }
}

/// `[g] -> [s]`: sum of squares of each run of `block` elements, f64.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SumSquaresBlocks {
    /// Elements of a run; the last may be shorter.
    pub block: usize,
}

impl Operation for SumSquaresBlocks {
    fn name(&self) -> &'static str {
        "sum_squares_blocks"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        s.count(1, 1)?;
        s.shape(s.writes[0], &[s.reads[0].n_elements().div_ceil(self.block)], Some(DType::F64))
    }
}

/// `[g] -> [s]`: sum of squares, f64 scalar.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SumSquares {
    /// Only these elements, first and number.
    pub elements: Option<(usize, usize)>,
}

impl Operation for SumSquares {
    fn name(&self) -> &'static str {
        "sum_squares"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        s.count(1, 1)?;
        let (first, len) = self.elements.unwrap_or((0, s.reads[0].n_elements()));
        s.run(s.reads[0], first, len)?;
        s.scalar(s.writes[0])
    }
}

/// `[s…, hyper] -> [norm, coefficient]`: L2 norm of the unscaled gradient and the factor that clips it.
/// A non-finite norm gives a NaN coefficient, for which the optimizer changes nothing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClipCoefficient {
    /// Largest norm that is not clipped.
    pub max_norm: Option<f64>,
}

impl Operation for ClipCoefficient {
    fn name(&self) -> &'static str {
        "clip_coefficient"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        s.count(s.reads.len().max(1), 2)?;
        let (hyper, sums) = s.reads.split_last().ok_or("no operands")?;
        s.hyper(hyper)?;
        sums.iter().try_for_each(|v| s.shape(v, &v.shape, Some(DType::F64)))?;
        s.writes.iter().try_for_each(|v| s.scalar(v))
    }
}
