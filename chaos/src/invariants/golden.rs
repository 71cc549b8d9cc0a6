//! The state of each rank at each step equals the golden run's; in fast mode, the result of the committed updates.
//! Source: DESIGN, "Elasticity: what is promised", 2.
//!
//! A flipped bit makes all states of its lineage wrong, until a world begins from a checkpoint that was saved before it.
//!
//! A state is a chain of hashes over the updates; each of its pieces is the chain mixed with the piece's name.

use super::{Invariant, Observation};
use crate::state;
use phalanx_strategies::elastic::identity::{Generation, Step};
use phalanx_strategies::elastic::message::WorldPlan;

/// Remembers what the state is at each step of the lineage that counts.
pub struct Golden {
    reproducible: bool,
    lineage: Generation,
    /// Chain at each step of the current lineage.
    chain: Vec<u64>,
    /// The step after which a bit flipped, and whether another world has begun with that state.
    flipped: Option<(Step, bool)>,
}

impl Golden {
    /// In reproducible mode, updates depend only on the step.
    pub fn new(reproducible: bool) -> Golden {
        Golden { reproducible, lineage: Generation(0), chain: vec![state::INITIAL], flipped: None }
    }
}

impl Golden {
    fn begin(&mut self, world_plan: &WorldPlan) -> Result<(), String> {
        let base = world_plan.base;
        if base.lineage == self.lineage {
            self.flipped.iter_mut().for_each(|(_, spreads)| *spreads = true);
            return Ok(());
        }
        self.lineage = base.lineage;
        self.chain.truncate(base.step.0 as usize + 1);
        // State of the same step may have been saved after the flip, once another world had begun with it.
        self.flipped.take_if(|(step, spreads)| base.step < *step || base.step == *step && !*spreads);
        match self.flipped {
            Some((step, false)) => {
                Err(format!("{} begins from {}, saved after a bit flipped at {step}", world_plan.generation, base.step))
            }
            _ => Ok(()),
        }
    }
}

impl Invariant for Golden {
    fn name(&self) -> &'static str {
        "golden state"
    }

    fn observe(&mut self, what: &Observation<'_>) -> Result<(), String> {
        match what {
            Observation::Formed(world_plan) => return self.begin(world_plan),
            Observation::Flipped { step, .. } => self.flipped = Some((*step, false)),
            Observation::Committed { step, digest, .. } | Observation::Decided { step, digest, .. } => {
                if self.reproducible && self.flipped.is_none() && *digest != state::golden_digest(*step) {
                    return Err(format!("the update of {step} differs from the golden run"));
                }
                if self.chain.len() == step.0 as usize {
                    self.chain.push(state::advance(self.chain[step.0 as usize - 1], *digest));
                }
            }
            // Ignores workers of an abandoned lineage, which have not received the new world.
            Observation::State { worker, version, atoms }
                if version.lineage == self.lineage && self.flipped.is_none() =>
            {
                let Some(chain) = self.chain.get(version.step.0 as usize) else {
                    return Err(format!("{worker} is at {}, which no member has committed", version.step));
                };
                if let Some((atom, _)) = atoms.iter().find(|(atom, value)| *value != state::value(*chain, *atom)) {
                    return Err(format!("{worker} at {} has a wrong state (piece {atom})", version.step));
                }
            }
            _ => {}
        }
        Ok(())
    }
}
