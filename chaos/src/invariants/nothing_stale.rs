//! Nothing of an old term or generation has an effect. Source: `supervisor` SUPERVISOR-2, `member` MEMBER-1.

use super::{Invariant, Observation};
use phalanx_strategies::elastic::identity::{NodeId, Term};
use std::collections::BTreeMap;

/// See the [module](self).
#[derive(Default)]
pub struct NothingStale {
    terms: BTreeMap<NodeId, Term>,
}

impl Invariant for NothingStale {
    fn name(&self) -> &'static str {
        "nothing stale"
    }

    fn observe(&mut self, what: &Observation<'_>) -> Result<(), String> {
        match what {
            Observation::DesiredStateTaken { node, before, desired_state } => {
                self.terms.insert(*node, desired_state.term);
                if desired_state.term < before.term || desired_state.generation < before.generation {
                    return Err(format!("{node} takes up {desired_state:?} after {before:?}"));
                }
                Ok(())
            }
            Observation::Evicted { node, term } if self.terms.get(node).is_some_and(|latest| term < latest) => {
                Err(format!("{node} kills a worker on the order of {term}"))
            }
            Observation::Committed { worker, generation, told, step, .. }
            | Observation::Voted { worker, generation, told, step }
                if generation != told =>
            {
                Err(format!("{worker} accepts {step} of {generation} after it was told of {told}"))
            }
            _ => Ok(()),
        }
    }
}
