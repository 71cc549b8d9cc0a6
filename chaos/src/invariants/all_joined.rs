//! Nobody computes in a world before the devices of all its members are in it: one that is still in an older world may touch
//! memory there that is in use again. Source: `member` B-7.

use super::{Invariant, Observation};
use phalanx_strategies::elastic::identity::{Generation, Worker};
use std::collections::BTreeMap;

/// See the [module](self).
#[derive(Default)]
pub struct AllJoined {
    joined: BTreeMap<Worker, Generation>,
    /// The latest world that was found complete.
    complete: Generation,
}

impl Invariant for AllJoined {
    fn name(&self) -> &'static str {
        "all joined"
    }

    fn observe(&mut self, what: &Observation<'_>) -> Result<(), String> {
        match what {
            Observation::Joined { worker, generation } => {
                self.joined.insert(*worker, *generation);
            }
            Observation::Computes { worker, formation } if formation.generation > self.complete => {
                let is_in = |worker: &Worker| self.joined.get(worker).is_some_and(|at| *at >= formation.generation);
                let learners = formation.learners.iter().map(|learner| &learner.worker);
                if let Some(late) = formation.seats.iter().chain(learners).find(|worker| !is_in(worker)) {
                    return Err(format!("{worker} computes in {}, which {late} has not joined", formation.generation));
                }
                self.complete = formation.generation;
            }
            _ => {}
        }
        Ok(())
    }
}
