//! While some catch up nobody waits for state: who trains fetches none, and has all that it is to send to them. Who is sent
//! none has all that it is to hold. Source: `learner` E-1, E-2.

use super::{Invariant, Observation};
use phalanx_strategies::elastic::identity::Worker;
use phalanx_strategies::elastic::message::Learner;
use phalanx_strategies::elastic::shadow::Shard;

/// See the [module](self).
pub struct Learners;

impl Invariant for Learners {
    fn name(&self) -> &'static str {
        "learners"
    }

    fn observe(&mut self, what: &Observation<'_>) -> Result<(), String> {
        let Observation::Healed(formation, copies) = what else { return Ok(()) };
        let generation = formation.generation;
        for learner in &formation.learners {
            if let Some(rank) = formation.transfers.iter().position(|transfers| !transfers.is_empty()) {
                return Err(format!("{generation}: rank {rank} fetches state while {} learns", learner.worker));
            }
            for (worker, shard) in holders(learner) {
                let has = copies.iter().any(|(copy, on)| *copy == shard && on.contains(&worker));
                let trains = worker == learner.worker || formation.rank_of(worker).is_some();
                if !has || !trains {
                    return Err(format!("{generation}: {worker} is to have {shard:?} for {}", learner.worker));
                }
            }
        }
        Ok(())
    }
}

/// Who is taken to have what of that which a learner is to hold.
fn holders(learner: &Learner) -> Vec<(Worker, Shard)> {
    if learner.transfers.is_empty() {
        return learner.holds.iter().map(|shard| (learner.worker, *shard)).collect();
    }
    learner.transfers.iter().filter_map(|transfer| transfer.source.sender(transfer.shard)).collect()
}
