//! A term has one coordinator, a generation has one world, and both only increase. Source: `succession` SUCCESSION-1,
//! `coordinator` COORDINATOR-1, COORDINATOR-2.

use super::{Invariant, Observation};
use phalanx_strategies::elastic::identity::{Generation, Term};
use phalanx_strategies::elastic::message::WorldPlan;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Remembers the coordinator of each term and the world of each generation.
#[derive(Default)]
pub struct OneWorld {
    terms: BTreeSet<Term>,
    worlds: BTreeMap<Generation, Arc<WorldPlan>>,
    latest: (Term, Generation),
}

impl Invariant for OneWorld {
    fn name(&self) -> &'static str {
        "one world"
    }

    fn observe(&mut self, what: &Observation<'_>) -> Result<(), String> {
        match what {
            Observation::Leads(term) if !self.terms.insert(*term) => Err(format!("{term} has two coordinators")),
            Observation::Persisted(record) => {
                let found = (record.term, record.generation);
                if found.0 < self.latest.0 || found.1 < self.latest.1 {
                    let (term, generation) = self.latest;
                    return Err(format!("{}, {} is written after {term}, {generation}", found.0, found.1));
                }
                self.latest = found;
                Ok(())
            }
            Observation::Announced(world_plan) => {
                let known = self.worlds.entry(world_plan.generation).or_insert_with(|| Arc::new((*world_plan).clone()));
                if **known == **world_plan { Ok(()) } else { Err(format!("{} has two worlds", world_plan.generation)) }
            }
            _ => Ok(()),
        }
    }
}
