//! No message of an old term or generation has an effect. Source: `supervisor` SUPERVISOR-2, `member` MEMBER-1.

use super::{Invariant, Observation};
use phalanx_strategies::elastic::identity::{NodeId, Term};
use std::collections::BTreeMap;

/// Remembers the latest term that each node follows.
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
                    return Err(format!("{node} accepts {desired_state:?} after {before:?}"));
                }
                Ok(())
            }
            Observation::Evicted { node, term } if self.terms.get(node).is_some_and(|latest| term < latest) => {
                Err(format!("{node} kills a worker on the desired state of {term}, an older term"))
            }
            Observation::Committed { worker, generation, latest, step, .. }
            | Observation::Voted { worker, generation, latest, step }
                if generation != latest =>
            {
                Err(format!("{worker} accepts {step} of {generation} after it received {latest}"))
            }
            _ => Ok(()),
        }
    }
}
