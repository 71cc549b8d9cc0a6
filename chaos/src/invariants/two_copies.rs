//! When a world on several nodes is whole, each shard is in the memory of two of them. Source: `shadow` H-1.

use super::{Invariant, Observation};
use phalanx_strategies::elastic::identity::NodeId;
use std::collections::BTreeSet;

/// See the [module](self).
pub struct TwoCopies;

impl Invariant for TwoCopies {
    fn name(&self) -> &'static str {
        "two copies"
    }

    fn observe(&mut self, what: &Observation<'_>) -> Result<(), String> {
        let Observation::Healed(formation, copies) = what else { return Ok(()) };
        let nodes: BTreeSet<NodeId> = formation.seats.iter().map(|worker| worker.member.node).collect();
        match copies.iter().find(|(_, on)| on.len() < nodes.len().min(2)) {
            Some((shard, on)) => Err(format!("{}: {shard:?} is on {on:?} only", formation.generation)),
            None => Ok(()),
        }
    }
}
