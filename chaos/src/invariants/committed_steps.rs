//! The committed step is monotone, and a step has one outcome in a history. Source: `commit`, C-2 to C-4.

use super::{Invariant, Observation};
use phalanx_strategies::elastic::identity::{Generation, Step};
use std::collections::BTreeMap;

/// See the [module](self).
#[derive(Default)]
pub struct CommittedSteps {
    /// Step → the world in which it was learnt and the update.
    learnt: BTreeMap<Step, (Generation, u64)>,
    lineage: Generation,
    base: Step,
}

impl Invariant for CommittedSteps {
    fn name(&self) -> &'static str {
        "committed steps"
    }

    fn observe(&mut self, what: &Observation<'_>) -> Result<(), String> {
        match what {
            Observation::Formed(formation) => {
                if formation.base.lineage != self.lineage {
                    self.lineage = formation.base.lineage;
                    self.learnt.split_off(&formation.base.step.next());
                }
                self.base = formation.base.step;
                Ok(())
            }
            Observation::Learnt { generation, step, digest, .. }
            | Observation::Decided { generation, step, digest } => {
                let last = self.learnt.last_key_value().map_or(Step(0), |(step, _)| *step).max(self.base);
                match self.learnt.get(step) {
                    Some(before) if *before != (*generation, *digest) => {
                        Err(format!("{step} of {generation} is committed, and so is that of {}", before.0))
                    }
                    None if *step > last.next() => Err(format!("{step} is committed after {last}")),
                    _ => {
                        self.learnt.insert(*step, (*generation, *digest));
                        Ok(())
                    }
                }
            }
            _ => Ok(()),
        }
    }
}
