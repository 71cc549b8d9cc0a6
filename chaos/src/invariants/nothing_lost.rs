//! No committed step is lost as long as at most one node has been disturbed since all members last had their state, in a world that
//! is not replaced on record. State whose copies differ is lost since the checkpoint; until all members have the state that was read
//! from it, nothing is promised about its later steps. Source: DESIGN, "Elasticity: what is promised", 1; `coordinator`
//! COORDINATOR-17.

use super::{Invariant, Observation};
use phalanx_strategies::elastic::identity::{Generation, NodeId, Step};
use phalanx_strategies::elastic::message::Ending;
use std::collections::BTreeSet;

/// Remembers the last committed step, and the nodes that were disturbed since all members had their state.
#[derive(Default)]
pub struct NothingLost {
    committed: Step,
    lineage: Generation,
    /// Copies of the state of this lineage differed, so that it is not used.
    corrupt: Generation,
    /// The latest generation on record. Older worlds have been given up, also for reasons that have passed.
    recorded: Generation,
    disturbed: BTreeSet<NodeId>,
    lasting: Vec<NodeId>,
    /// Number of nodes of the last world in which all members had their state.
    n_nodes: usize,
}

impl NothingLost {
    fn promises(&self) -> bool {
        let is_corrupt = self.corrupt > Generation(0) && self.lineage <= self.corrupt;
        self.n_nodes > 1 && self.disturbed.len() <= 1 && !is_corrupt
    }
}

impl Invariant for NothingLost {
    fn name(&self) -> &'static str {
        "nothing committed is lost"
    }

    fn observe(&mut self, what: &Observation<'_>) -> Result<(), String> {
        match what {
            Observation::Committed { step, .. } => self.committed = self.committed.max(*step),
            Observation::Disturbed { node, lasts } => {
                self.disturbed.insert(*node);
                if *lasts {
                    self.lasting.push(*node);
                }
            }
            // Its process is replaced.
            Observation::Named { worker, .. } => {
                self.disturbed.insert(worker.member.node);
            }
            Observation::Undisturbed(node) => {
                if let Some(i) = self.lasting.iter().position(|other| other == node) {
                    self.lasting.remove(i);
                }
            }
            // Catching-up members have no state yet.
            Observation::Healed(world_plan, _)
                if world_plan.catching_up.is_empty() && world_plan.generation >= self.recorded =>
            {
                self.disturbed = self.lasting.iter().copied().collect();
                let nodes: BTreeSet<NodeId> = world_plan.assignments.iter().map(|worker| worker.member.node).collect();
                self.n_nodes = nodes.len();
            }
            // The coordinator replaces the process before the difference is on record.
            Observation::Differs { generation, .. } => self.corrupt = self.corrupt.max(*generation),
            Observation::Persisted(record) => {
                self.corrupt = self.corrupt.max(record.corrupt);
                self.recorded = self.recorded.max(record.generation);
                if matches!(record.ending, Some(Ending::Failed(_)))
                    && record.checkpoint.step < self.committed
                    && self.promises()
                {
                    return Err(format!("the job ends with {}, expected {}", record.checkpoint.step, self.committed));
                }
            }
            Observation::Formed(world_plan) => {
                let step = world_plan.base.step;
                let promised = self.promises();
                let lost = step < self.committed;
                let disturbed: Vec<String> = self.disturbed.iter().map(NodeId::to_string).collect();
                if lost && (promised || world_plan.base.lineage == self.lineage) {
                    let committed = self.committed;
                    return Err(format!(
                        "{} begins from {step}, expected {committed}; disturbed nodes: {disturbed:?}",
                        world_plan.generation
                    ));
                }
                if world_plan.base.lineage != self.lineage {
                    // State from a checkpoint: until all members have it, its later steps may be in the memory of one of them.
                    self.n_nodes = 0;
                }
                (self.committed, self.lineage) = (step, world_plan.base.lineage);
            }
            _ => {}
        }
        Ok(())
    }
}
