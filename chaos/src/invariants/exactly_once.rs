//! Each microbatch is in each step exactly once. Source: DESIGN, "Elasticity: what is promised", 3.

use super::{Invariant, Observation};

/// Remembers nothing: each step is judged by the microbatches that it reduced.
pub struct ExactlyOnce;

impl Invariant for ExactlyOnce {
    fn name(&self) -> &'static str {
        "data exactly once"
    }

    fn observe(&mut self, what: &Observation<'_>) -> Result<(), String> {
        let Observation::Reduced(runs, n) = what else { return Ok(()) };
        let mut next = 0;
        for run in *runs {
            if run.start != next {
                return Err(format!("microbatches {runs:?} are not 0..{n} once"));
            }
            next = run.end;
        }
        if next == *n { Ok(()) } else { Err(format!("microbatches {runs:?} are not 0..{n} once")) }
    }
}
