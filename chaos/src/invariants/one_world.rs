//! A term has one coordinator, a generation one world, and both only rise. Source: `succession` L-1, `coordinator` K-1, K-2.

use super::{Invariant, Observation};
use phalanx_strategies::elastic::identity::{Generation, Term};
use phalanx_strategies::elastic::message::Formation;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// See the [module](self).
#[derive(Default)]
pub struct OneWorld {
    terms: BTreeSet<Term>,
    worlds: BTreeMap<Generation, Arc<Formation>>,
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
            Observation::Announced(formation) => {
                let known = self.worlds.entry(formation.generation).or_insert_with(|| Arc::new((*formation).clone()));
                if **known == **formation { Ok(()) } else { Err(format!("{} has two worlds", formation.generation)) }
            }
            _ => Ok(()),
        }
    }
}
