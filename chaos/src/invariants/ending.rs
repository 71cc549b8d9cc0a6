//! A finished job has a checkpoint of its last committed step and all requested checkpoints, and makes no further
//! progress; only a stopped job that has lost its last steps fails. Source: `coordinator` COORDINATOR-7, `member` MEMBER-5.

use super::{Invariant, Observation};
use phalanx_strategies::elastic::identity::Step;
use phalanx_strategies::elastic::message;

/// Remembers the last committed step, and whether the job has ended.
#[derive(Default)]
pub struct Ending {
    committed: Step,
    ended: bool,
}

impl Invariant for Ending {
    fn name(&self) -> &'static str {
        "ending"
    }

    fn observe(&mut self, what: &Observation<'_>) -> Result<(), String> {
        match what {
            Observation::Formed(_) if self.ended => Err(String::from("a world is formed after the job's end")),
            // A member that catches up may learn of the last step after the job's end.
            Observation::Committed { step, .. } if self.ended && *step > self.committed => {
                Err(format!("{step} is committed after the job's end at {}", self.committed))
            }
            Observation::Formed(world_plan) => {
                self.committed = world_plan.base.step;
                Ok(())
            }
            Observation::Committed { step, .. } => {
                self.committed = self.committed.max(*step);
                Ok(())
            }
            Observation::Persisted(record) if record.ending == Some(message::Ending::Finished) => {
                self.ended = true;
                let (saved, committed) = (record.checkpoint.step, self.committed);
                if saved != committed {
                    Err(format!("the job ends with a checkpoint of {saved}, {committed} was committed"))
                } else if record.n_saves < record.requests.save {
                    Err(format!("{} checkpoints were requested, {} are complete", record.requests.save, record.n_saves))
                } else {
                    Ok(())
                }
            }
            // The last steps of a stopped job may be lost, as `nothing_lost` checks.
            Observation::Persisted(record)
                if record.ending.is_some() && record.requests.stop && record.checkpoint.step < self.committed =>
            {
                self.ended = true;
                Ok(())
            }
            Observation::Persisted(record) if record.ending.is_some() => Err(format!("{:?}", record.ending)),
            _ => Ok(()),
        }
    }
}
