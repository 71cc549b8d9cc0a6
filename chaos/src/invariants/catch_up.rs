//! While members catch up, no training member fetches state, and each sender holds all state that it sends to them. A
//! catching-up member without transfers already has its whole state. Source: `catch_up` CATCH-UP-1, CATCH-UP-2.

use super::{Invariant, Observation};
use phalanx_strategies::elastic::identity::Worker;
use phalanx_strategies::elastic::message::CatchUp;
use phalanx_strategies::elastic::shadow::Shard;

/// Remembers nothing: each world that has healed is judged by its plan and its copies of state.
pub struct CatchingUp;

impl Invariant for CatchingUp {
    fn name(&self) -> &'static str {
        "catching up"
    }

    fn observe(&mut self, what: &Observation<'_>) -> Result<(), String> {
        let Observation::Healed(world_plan, copies) = what else { return Ok(()) };
        let generation = world_plan.generation;
        for catch_up in &world_plan.catching_up {
            if let Some(rank) = world_plan.transfers.iter().position(|transfers| !transfers.is_empty()) {
                return Err(format!("{generation}: rank {rank} fetches state while {} catches up", catch_up.worker));
            }
            for (worker, shard) in holders(catch_up) {
                let has = copies.iter().any(|(copy, on)| *copy == shard && on.contains(&worker));
                let trains = worker == catch_up.worker || world_plan.rank_of(worker).is_some();
                if !has || !trains {
                    return Err(format!("{generation}: {worker} is no source of {shard:?} for {}", catch_up.worker));
                }
            }
        }
        Ok(())
    }
}

/// The holders of a catching-up member's state.
fn holders(catch_up: &CatchUp) -> Vec<(Worker, Shard)> {
    if catch_up.transfers.is_empty() {
        return catch_up.holds.iter().map(|shard| (catch_up.worker, *shard)).collect();
    }
    catch_up.transfers.iter().filter_map(|transfer| transfer.source.sender(transfer.shard)).collect()
}
