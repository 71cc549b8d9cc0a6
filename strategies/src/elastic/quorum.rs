//! May a new world replace the last one; and if not, why not yet.
//!
//! Invariants:
//! - `Q-1` A new world is formed only if the last one can commit nothing more: a member has left it (a step needs every
//!   vote), or all are certainly dead, or nobody was ever told to train in it.
//! - `Q-2` "Not yet" is a value with a sentence for people.

use super::commit::Promise;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

/// What is known of a member of the last world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seat {
    /// It has left that world and says how far it was.
    Left(Promise),
    /// Its supervisor, or the successor of that, says that the process is gone.
    Dead,
    /// Nobody knows: it may be training.
    Unheard,
}

/// Why no world is formed yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Blocked {
    /// The last world may go on without us: of its members none has left and some were not heard of.
    LastWorldMayLive {
        /// How many were not heard of.
        unheard: usize,
    },
    /// Not enough members for any mesh that the policy allows.
    TooFew {
        /// Members that there are.
        have: usize,
        /// Members of the smallest mesh.
        need: usize,
    },
    /// A smaller mesh could be formed, but replacements are waited for.
    Replacements {
        /// Members that there are.
        have: usize,
        /// Members of the mesh that is wanted.
        want: usize,
        /// For how much longer.
        remaining: Duration,
    },
    /// A world runs, but not the one that is wanted: there are not enough members for that.
    Wanted {
        /// Members that there are.
        have: usize,
        /// Members of the mesh that is wanted.
        want: usize,
    },
    /// State that no reachable memory has may come back with a node that was not heard of.
    StateElsewhere {
        /// How many shards.
        n_shards: usize,
        /// For how much longer it is waited for, before it is read from disk.
        remaining: Duration,
    },
}

/// Checks `Q-1`.
///
/// # Errors
/// [`Blocked::LastWorldMayLive`].
pub fn may_follow(seats: &[Seat]) -> Result<(), Blocked> {
    let unheard = seats.iter().filter(|seat| **seat == Seat::Unheard).count();
    let left = seats.iter().any(|seat| matches!(seat, Seat::Left(_)));
    if left || unheard == 0 { Ok(()) } else { Err(Blocked::LastWorldMayLive { unheard }) }
}

impl fmt::Display for Blocked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Blocked::LastWorldMayLive { unheard } => {
                write!(f, "no member has left the last world and {unheard} were not heard of: it may still train")
            }
            Blocked::TooFew { have, need } => write!(f, "there are {have} members, the smallest mesh needs {need}"),
            Blocked::Replacements { have, want, remaining } => {
                write!(f, "there are {have} of {want} members; replacements are waited for, {remaining:?} more")
            }
            Blocked::Wanted { have, want } => {
                write!(f, "the mesh that is wanted needs {want} members, there are {have}")
            }
            Blocked::StateElsewhere { n_shards, remaining } => write!(
                f,
                "{n_shards} shards are in no memory that can be reached; nodes that were not heard of are waited for, \
                 {remaining:?} more"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEFT: Seat =
        Seat::Left(Promise { entered: super::super::identity::Generation(1), applied: None, voted: None });

    //
    #[test]
    fn one_that_left_or_the_death_of_all_ends_a_world() {
        assert!(may_follow(&[LEFT, Seat::Unheard, Seat::Dead]).is_ok());
        assert!(may_follow(&[Seat::Dead, Seat::Dead]).is_ok());
        assert!(may_follow(&[]).is_ok());
    }

    //
    #[test]
    fn a_world_that_may_live_is_not_replaced() {
        let err = may_follow(&[Seat::Dead, Seat::Unheard]).unwrap_err();

        assert_eq!(err, Blocked::LastWorldMayLive { unheard: 1 });
        assert!(err.to_string().contains("may still train"), "{err}");
    }
}
