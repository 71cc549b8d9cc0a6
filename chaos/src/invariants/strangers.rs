//! A message of another job, and one that its receiver knows to be old, changes nothing. Source: `coordinator`
//! COORDINATOR-16, `membership` MEMBERSHIP-1, `supervisor` SUPERVISOR-2, `member` MEMBER-1.

use super::{Invariant, Observation};

/// Remembers nothing: each such message is judged by itself.
pub struct Strangers;

impl Invariant for Strangers {
    fn name(&self) -> &'static str {
        "strangers"
    }

    fn observe(&mut self, what: &Observation<'_>) -> Result<(), String> {
        match what {
            Observation::Stranger { what, has_effect: true } => Err(format!("{what} has an effect")),
            _ => Ok(()),
        }
    }
}
