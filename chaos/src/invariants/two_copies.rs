//! When all members of a world have their state, each shard is in the memory of two nodes, or of two processes on a single
//! node. Worlds with catching-up members are exempt: these members will hold the second copies.
//! Source: `shadow` SHADOW-1, SHADOW-3.

use super::{Invariant, Observation};
use phalanx_strategies::elastic::identity::{NodeId, Worker};
use std::collections::BTreeSet;

/// Remembers nothing: each world that has healed is judged by its copies of state.
pub struct TwoCopies;

impl Invariant for TwoCopies {
    fn name(&self) -> &'static str {
        "two copies"
    }

    fn observe(&mut self, what: &Observation<'_>) -> Result<(), String> {
        let Observation::Healed(world_plan, copies) = what else { return Ok(()) };
        if !world_plan.catching_up.is_empty() {
            return Ok(());
        }
        let nodes: BTreeSet<NodeId> = world_plan.assignments.iter().map(|worker| worker.member.node).collect();
        let (n_nodes, n_processes) = (nodes.len().min(2), world_plan.assignments.len().min(2));
        let too_few = |on: &[Worker]| {
            let distinct: BTreeSet<NodeId> = on.iter().map(|worker| worker.member.node).collect();
            distinct.len() < n_nodes || on.len() < n_processes
        };
        match copies.iter().find(|(_, on)| too_few(on)) {
            Some((shard, on)) => Err(format!("{}: {shard:?} is only on {on:?}", world_plan.generation)),
            None => Ok(()),
        }
    }
}
