//! Whenever members and a checkpoint exist for long enough, steps go on: also if all members of a world are lost, or train where
//! no coordinator hears them. Source: DESIGN, "Elasticity: what is promised", 7; `coordinator` COORDINATOR-19, `quorum` QUORUM-3.

use super::{Invariant, Observation};
use phalanx_strategies::elastic::identity::Step;

/// How long a job without a fault may take for a step. Longer than the patience for lost members, a takeover, and the pauses after
/// crashes and failed starts together.
const LIMIT_MS: u64 = 30_000;

/// Remembers since when a step was possible and none was taken.
#[derive(Default)]
pub struct StepsGoOn {
    /// Since when there has been no step and no fault, while there were enough members.
    since_ms: Option<u64>,
    step: Step,
}

impl Invariant for StepsGoOn {
    fn name(&self) -> &'static str {
        "steps go on"
    }

    fn observe(&mut self, what: &Observation<'_>) -> Result<(), String> {
        match what {
            Observation::Disturbed { .. } | Observation::CoordinationDisturbed { .. } => self.since_ms = None,
            Observation::Looked { at_ms, step, n_ready, n_needed, may_rest } => {
                if *step != self.step || n_ready < n_needed || *may_rest {
                    (self.step, self.since_ms) = (*step, None);
                }
                let since_ms = *self.since_ms.get_or_insert(*at_ms);
                if *at_ms > since_ms + LIMIT_MS {
                    return Err(format!(
                        "no step after {step} for {} ms, although {n_ready} ranks are ready and a world needs {n_needed}",
                        at_ms - since_ms
                    ));
                }
            }
            _ => {}
        }
        Ok(())
    }
}
