//! No member computes in a world before the devices of all its members have joined it: a device in an older world may
//! still access recycled memory. Source: `member` MEMBER-7.

use super::{Invariant, Observation};
use phalanx_strategies::elastic::identity::{Generation, Worker};
use std::collections::BTreeMap;

/// Remembers which world each worker's device has joined.
#[derive(Default)]
pub struct AllJoined {
    joined: BTreeMap<Worker, Generation>,
    /// The latest world with all members joined.
    complete: Generation,
}

impl Invariant for AllJoined {
    fn name(&self) -> &'static str {
        "all joined"
    }

    fn observe(&mut self, what: &Observation<'_>) -> Result<(), String> {
        match what {
            Observation::JoinedWorld { worker, generation } => {
                self.joined.insert(*worker, *generation);
            }
            Observation::Computes { worker, world_plan } if world_plan.generation > self.complete => {
                let is_in = |worker: &Worker| self.joined.get(worker).is_some_and(|at| *at >= world_plan.generation);
                let catching_up = world_plan.catching_up.iter().map(|catch_up| &catch_up.worker);
                if let Some(late) = world_plan.assignments.iter().chain(catching_up).find(|worker| !is_in(worker)) {
                    return Err(format!("{worker} computes in {}, which {late} has not joined", world_plan.generation));
                }
                self.complete = world_plan.generation;
            }
            _ => {}
        }
        Ok(())
    }
}
