//! Runs of the elements of a value.

use super::cost::{Cost, bytes};
use super::operation::Operation;
use super::signature::Signature;
use crate::program::{Instr, Program};

/// `[x] -> [y [len]]`: elements `start..start + len`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slice {
    /// First element.
    pub start: usize,
}

impl Operation for Slice {
    fn name(&self) -> &'static str {
        "slice"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        s.count(1, 1)?;
        s.run(s.reads[0], self.start, s.writes[0].n_elements())?;
        s.shape(s.writes[0], &s.writes[0].shape, Some(s.reads[0].dtype))
    }

    // The other elements stay where they are.
    fn cost(&self, program: &Program, instr: &Instr) -> Cost {
        Cost::streamed(2.0 * bytes(program, instr.writes[0]))
    }
}

/// `[x, part [len]] -> [x]`: `x` with elements `start..start + len` replaced.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Paste {
    /// First element.
    pub start: usize,
}

impl Operation for Paste {
    fn name(&self) -> &'static str {
        "paste"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        s.count(2, 1)?;
        s.run(s.reads[0], self.start, s.reads[1].n_elements())?;
        s.shape(s.reads[1], &s.reads[1].shape, Some(s.reads[0].dtype))?;
        s.same_shape(&[s.reads[0], s.writes[0]])
    }

    fn in_place_pairs(&self, _n_reads: usize) -> Vec<(usize, usize)> {
        vec![(0, 0)]
    }

    // The other elements stay where they are.
    fn cost(&self, program: &Program, instr: &Instr) -> Cost {
        Cost::streamed(2.0 * bytes(program, instr.reads[1]))
    }
}
