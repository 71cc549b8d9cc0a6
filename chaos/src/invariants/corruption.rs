//! A flipped bit is found by the next comparison of copies, the rank that has it is named and no other one, and no alarm comes
//! without a flip. After the difference is on record, no world uses memory of that lineage. Source: `copies` COPIES-2,
//! `dispute` DISPUTE-1, `coordinator` COORDINATOR-17.
//!
//! A world that begins before the flip is found may copy it to other ranks; from then on, copies prove nothing about it.

use super::{Invariant, Observation};
use phalanx_strategies::elastic::identity::{Generation, Step, Worker};
use std::collections::BTreeSet;

/// Follows each flipped bit until a comparison names the rank that has it.
#[derive(Default)]
pub struct Corruption {
    /// Steps between comparisons.
    every: u64,
    flip: Option<Flip>,
    /// All workers that had flipped bits, and whether any bit was copied to other ranks.
    flipped: BTreeSet<Worker>,
    any_spread: bool,
    /// Memory of this lineage is not used.
    corrupt: Generation,
    /// The generation that last began from a checkpoint. Older worlds are abandoned, and may find flips in their memory.
    lineage: Generation,
}

struct Flip {
    worker: Worker,
    generation: Generation,
    step: Step,
    n_independent: usize,
    /// Whether another world has begun with it.
    spreads: bool,
    is_found: bool,
}

impl Corruption {
    pub fn new(every: u64) -> Corruption {
        Corruption { every, ..Corruption::default() }
    }
}

impl Invariant for Corruption {
    fn name(&self) -> &'static str {
        "corruption"
    }

    fn observe(&mut self, what: &Observation<'_>) -> Result<(), String> {
        match what {
            Observation::Flipped { worker, generation, step, n_independent } => {
                let (worker, generation, step, n_independent) = (*worker, *generation, *step, *n_independent);
                self.flipped.insert(worker);
                self.flip = Some(Flip { worker, generation, step, n_independent, spreads: false, is_found: false });
            }
            Observation::Committed { generation, step, .. } => {
                let missed = |flip: &&Flip| {
                    flip.generation == *generation && !flip.is_found && step.0 > flip.step.0 + self.every
                };
                if let Some(Flip { worker, step: at, .. }) = self.flip.as_ref().filter(missed) {
                    return Err(format!("{step} is committed, and the flip on {worker} after {at} is not found"));
                }
            }
            Observation::Differs { generation, .. } if *generation < self.lineage => {}
            Observation::Differs { step, suspects, .. } => {
                let Some(flip) = &mut self.flip else { return Err(format!("false alarm after {step}")) };
                flip.is_found = true;
                let may_be_unnamed = flip.spreads || flip.n_independent < 3;
                if **suspects != [flip.worker] && !(suspects.is_empty() && may_be_unnamed) {
                    return Err(format!("{suspects:?} are suspected after {step}, not {}", flip.worker));
                }
            }
            Observation::Named { worker, step } if !self.any_spread && !self.flipped.contains(worker) => {
                return Err(format!("the repeated {step} names {worker}, which had no flip"));
            }
            Observation::Persisted(record) => self.corrupt = self.corrupt.max(record.corrupt),
            Observation::Formed(world_plan) => {
                let base = world_plan.base;
                self.lineage = base.lineage;
                if self.corrupt > Generation(0) && base.lineage <= self.corrupt {
                    return Err(format!("{} uses memory of {}, which is corrupt", world_plan.generation, base.lineage));
                }
                let is_new = base.lineage == world_plan.generation;
                let is_before = |flip: &Flip| base.step < flip.step || base.step == flip.step && !flip.spreads;
                self.flip.take_if(|flip| is_new && is_before(flip));
                if let Some(flip) = &mut self.flip {
                    (flip.spreads, self.any_spread) = (true, true);
                }
            }
            _ => {}
        }
        Ok(())
    }
}
