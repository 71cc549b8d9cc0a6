//! Identities of jobs, nodes and workers, and the counters that order them.
//!
//! Invariants:
//! - `IDENTITY-1` A higher incarnation of a slot is another process; the earlier process is dead.
//! - `IDENTITY-2` The coordinator with the higher term prevails, and so does the world with the higher generation.

use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! counter {
    ($(#[$doc:meta])* $name:ident, $word:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub struct $name(pub u64);

        impl $name {
            /// The next value.
            #[must_use]
            pub const fn next(self) -> $name {
                $name(self.0 + 1)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($word, " {}"), self.0)
            }
        }
    };
}

counter!(
    /// Identity of a job; every message carries it.
    JobId, "job"
);
counter!(
    /// Counts the worlds of a job.
    Generation, "generation"
);
counter!(
    /// Counts the starts of one slot of a node, or of its supervisor. The shell draws the first one of a supervisor from
    /// its clock, so that it also rises when a machine comes back with an empty disk.
    Incarnation, "incarnation"
);
counter!(
    /// Counts the coordinators of a job.
    Term, "term"
);
counter!(
    /// Counts updates of the weights; the state *at* step n has n updates.
    Step, "step"
);

/// A machine with one supervisor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct NodeId(pub u32);

/// A slot for one rank process on a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct MemberId {
    /// The machine.
    pub node: NodeId,
    /// Index of the slot.
    pub slot: u32,
}

/// One rank process. Its successor in the same slot is another worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Worker {
    /// Its slot.
    pub member: MemberId,
    /// Number of the process in that slot.
    pub incarnation: Incarnation,
}

/// Why a message is rejected as stale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Stale {
    /// From another job.
    #[error("belongs to {found}, expected {have}")]
    Job {
        /// Found in the message.
        found: JobId,
        /// Expected by the receiver.
        have: JobId,
    },
    /// From a coordinator that has been succeeded.
    #[error("belongs to {found}, superseded by {have}")]
    Term {
        /// Found in the message.
        found: Term,
        /// Expected by the receiver.
        have: Term,
    },
    /// From a world that has been replaced.
    #[error("belongs to {found}, superseded by {have}")]
    Generation {
        /// Found in the message.
        found: Generation,
        /// Expected by the receiver.
        have: Generation,
    },
    /// From a process that has been succeeded.
    #[error("belongs to {found}, superseded by {have}")]
    Incarnation {
        /// Found in the message.
        found: Incarnation,
        /// Expected by the receiver.
        have: Incarnation,
    },
    /// Overtaken by a later message from the same sender.
    #[error("is message {found}, but message {have} has been handled")]
    Overtaken {
        /// Found in the message.
        found: u64,
        /// The latest one handled.
        have: u64,
    },
}

/// Rejects a message whose counter is below the known one.
pub fn refuse_older<T: Ord + Copy>(found: T, have: T, stale: impl FnOnce(T, T) -> Stale) -> Result<(), Stale> {
    if found < have { Err(stale(found, have)) } else { Ok(()) }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node {}", self.0)
    }
}

impl fmt::Display for MemberId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} slot {}", self.node, self.slot)
    }
}

impl fmt::Display for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.member, self.incarnation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // IDENTITY-1, IDENTITY-2
    #[test]
    fn only_older_terms_are_rejected() {
        let stale = |found, have| Stale::Term { found, have };

        assert!(refuse_older(Term(3), Term(3), stale).is_ok());
        assert!(refuse_older(Term(4), Term(3), stale).is_ok());
        let err = refuse_older(Term(2), Term(3), stale).unwrap_err();
        assert_eq!(err.to_string(), "belongs to term 2, superseded by term 3");
    }
}
