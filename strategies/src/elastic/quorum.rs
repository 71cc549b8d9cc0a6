//! Decides whether a new world may replace the last one, and if not, why.
//!
//! Invariants:
//! - `QUORUM-1` A new world is formed only if the last one can commit nothing more: a member has left it (a step needs
//!   every vote), all its members are known to be dead, or the decision to train never became durable.
//! - `QUORUM-2` "Not yet" is a value that formats as a sentence.

use super::commit::CommitState;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

/// Status of a member of the last world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Liveness {
    /// It has left that world, with this commit state.
    Left(CommitState),
    /// Its supervisor, or a later incarnation of it, reports that the process is gone.
    Dead,
    /// Unknown: it may be training.
    Unheard,
}

/// Why no world is formed yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Blocked {
    /// The last world may still train: no member has left it, and some have not reported.
    LastWorldMayLive {
        /// Members that have not reported.
        unheard: usize,
    },
    /// Not enough members for any mesh that the policy allows.
    TooFew {
        /// Members that are present.
        have: usize,
        /// Members of the smallest mesh.
        need: usize,
    },
    /// A smaller mesh could be formed, but the coordinator waits for replacements.
    Replacements {
        /// Members that are present.
        have: usize,
        /// Members of the wanted mesh.
        want: usize,
        /// Remaining time.
        remaining: Duration,
    },
    /// The running world is not the requested one, for which there are too few members.
    Wanted {
        /// Members that are present.
        have: usize,
        /// Members of the wanted mesh.
        want: usize,
    },
    /// No reachable member holds some shards, but a silent node may return with them.
    StateElsewhere {
        /// Number of those shards.
        n_shards: usize,
        /// Remaining time before they are read from disk.
        remaining: Duration,
    },
}

/// Checks `QUORUM-1`.
///
/// # Errors
/// [`Blocked::LastWorldMayLive`].
pub fn may_follow(liveness: &[Liveness]) -> Result<(), Blocked> {
    let unheard = liveness.iter().filter(|liveness| **liveness == Liveness::Unheard).count();
    let left = liveness.iter().any(|liveness| matches!(liveness, Liveness::Left(_)));
    if left || unheard == 0 { Ok(()) } else { Err(Blocked::LastWorldMayLive { unheard }) }
}

impl fmt::Display for Blocked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Blocked::LastWorldMayLive { unheard } => {
                write!(f, "no member has left the last world and {unheard} have not reported: it may still train")
            }
            Blocked::TooFew { have, need } => write!(f, "there are {have} members, but the smallest mesh needs {need}"),
            Blocked::Replacements { have, want, remaining } => {
                write!(f, "{have} of {want} members are present; waiting up to {remaining:?} for replacements")
            }
            Blocked::Wanted { have, want } => {
                write!(f, "the requested mesh needs {want} members, {have} are present")
            }
            Blocked::StateElsewhere { n_shards, remaining } => write!(
                f,
                "{n_shards} shards are in no reachable memory; waiting for nodes that have not reported, \
                 {remaining:?} more"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEFT: Liveness =
        Liveness::Left(CommitState { entered: super::super::identity::Generation(1), applied: None, voted: None });

    // QUORUM-1
    #[test]
    fn world_ends_when_one_member_left_or_all_are_dead() {
        assert!(may_follow(&[LEFT, Liveness::Unheard, Liveness::Dead]).is_ok());
        assert!(may_follow(&[Liveness::Dead, Liveness::Dead]).is_ok());
        assert!(may_follow(&[]).is_ok());
    }

    // QUORUM-1, QUORUM-2
    #[test]
    fn world_that_may_still_train_is_not_replaced() {
        let err = may_follow(&[Liveness::Dead, Liveness::Unheard]).unwrap_err();

        assert_eq!(err, Blocked::LastWorldMayLive { unheard: 1 });
        assert!(err.to_string().contains("may still train"), "{err}");
    }
}
