//! All members of all worlds train on the same data, also those that catch up or only send state.
//! Source: `coordinator` COORDINATOR-15.

use super::{Invariant, Observation};
use phalanx_strategies::elastic::identity::{Incarnation, NodeId};
use std::collections::BTreeMap;

/// Remembers the data that each node started with, and that of the job.
#[derive(Default)]
pub struct SameInputs {
    /// The data set of each start of a node.
    started: BTreeMap<(NodeId, Incarnation), u64>,
    /// That of the job, once a world was announced.
    of_job: Option<u64>,
}

impl Invariant for SameInputs {
    fn name(&self) -> &'static str {
        "same inputs"
    }

    fn observe(&mut self, what: &Observation<'_>) -> Result<(), String> {
        match what {
            Observation::NodeStarted { node, boot, data_set } => {
                self.started.insert((*node, *boot), *data_set);
            }
            Observation::Announced(world_plan) => {
                for worker in world_plan.members() {
                    let node = worker.member.node;
                    let starts = self.started.range((node, Incarnation(0))..=(node, worker.incarnation));
                    let Some((_, found)) = starts.last() else { continue };
                    let expected = *self.of_job.get_or_insert(*found);
                    if *found != expected {
                        let generation = world_plan.generation;
                        return Err(format!("{worker} of {generation} has data set {found}, the job {expected}"));
                    }
                }
            }
            _ => {}
        }
        Ok(())
    }
}
