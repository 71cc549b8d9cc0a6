//! Another coordinator takes over only if the leader or the store was disturbed; clocks of other rates, within their bound, and
//! another time of day are no reason. Source: `succession` SUCCESSION-2, `timing` TIMING-2.

use super::{Invariant, Observation};
use phalanx_strategies::elastic::identity::Term;

/// Remembers the latest term, and whether anything disturbed its leader or the store.
#[derive(Default)]
pub struct Leases {
    latest: Term,
    disturbed: bool,
    n_lasting: u32,
}

impl Invariant for Leases {
    fn name(&self) -> &'static str {
        "leases"
    }

    fn observe(&mut self, what: &Observation<'_>) -> Result<(), String> {
        match what {
            Observation::CoordinationDisturbed { lasts } => {
                self.disturbed = true;
                self.n_lasting += u32::from(*lasts);
            }
            Observation::CoordinationUndisturbed => self.n_lasting -= 1,
            // A candidate that was paused may learn late that it has led.
            Observation::Leads(term) if *term > self.latest => {
                let before = std::mem::replace(&mut self.latest, *term);
                let was_disturbed = std::mem::replace(&mut self.disturbed, self.n_lasting > 0);
                if before > Term(0) && !was_disturbed {
                    return Err(format!("{term} follows {before}, whose coordinator was not disturbed"));
                }
            }
            _ => {}
        }
        Ok(())
    }
}
