//! The committed step is monotone, and a step has one outcome in a history. Source: `commit`, COMMIT-2 to COMMIT-4.

use super::{Invariant, Observation};
use phalanx_strategies::elastic::identity::{Generation, Step};
use std::collections::BTreeMap;

/// Remembers the committed step, and the outcome of each step.
#[derive(Default)]
pub struct CommittedSteps {
    /// For each step, the world that committed it, and the update.
    committed: BTreeMap<Step, (Generation, u64)>,
    lineage: Generation,
    base: Step,
}

impl Invariant for CommittedSteps {
    fn name(&self) -> &'static str {
        "committed steps"
    }

    fn observe(&mut self, what: &Observation<'_>) -> Result<(), String> {
        match what {
            Observation::Formed(world_plan) => {
                if world_plan.base.lineage != self.lineage {
                    self.lineage = world_plan.base.lineage;
                    self.committed.split_off(&world_plan.base.step.next());
                }
                self.base = world_plan.base.step;
                Ok(())
            }
            Observation::Committed { generation, step, digest, .. }
            | Observation::Decided { generation, step, digest } => {
                let last = self.committed.last_key_value().map_or(Step(0), |(step, _)| *step).max(self.base);
                match self.committed.get(step) {
                    Some(before) if *before != (*generation, *digest) => {
                        Err(format!("{step} is committed in {generation} and in {}", before.0))
                    }
                    None if *step > last.next() => Err(format!("{step} is committed after {last}")),
                    _ => {
                        self.committed.insert(*step, (*generation, *digest));
                        Ok(())
                    }
                }
            }
            _ => Ok(()),
        }
    }
}
