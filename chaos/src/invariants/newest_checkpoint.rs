//! A world that begins from a checkpoint begins from the newest one that was committed since the job last returned to one, also if
//! whoever has committed it died before a report. Source: `coordinator` COORDINATOR-22.

use super::{Invariant, Observation};
use phalanx_strategies::elastic::identity::{Generation, Step};

/// Remembers the step of the newest checkpoint that was committed.
#[derive(Default)]
pub struct NewestCheckpoint {
    committed: Step,
    lineage: Generation,
}

impl Invariant for NewestCheckpoint {
    fn name(&self) -> &'static str {
        "a world begins from the newest checkpoint"
    }

    fn observe(&mut self, what: &Observation<'_>) -> Result<(), String> {
        match what {
            Observation::CheckpointCommitted(checkpoint) => self.committed = self.committed.max(checkpoint.step),
            Observation::Formed(world_plan) if world_plan.base.lineage > self.lineage => {
                let (step, committed) = (world_plan.base.step, self.committed);
                (self.lineage, self.committed) = (world_plan.base.lineage, step);
                if step < committed {
                    return Err(format!(
                        "{} begins from {step}, but a checkpoint of {committed} is committed",
                        world_plan.generation
                    ));
                }
            }
            _ => {}
        }
        Ok(())
    }
}
