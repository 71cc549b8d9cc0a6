//! Decides whether a new world may replace the last one, and if not, why.
//!
//! Invariants:
//! - `QUORUM-1` A new world continues from the state of the last one only if that can commit nothing more: a member has left it
//!   (a step needs every vote), all its members are known to be dead, or the decision to train never became durable.
//! - `QUORUM-2` "Not yet" is a value that formats as a sentence.
//! - `QUORUM-3` A world of which no member has left for the whole patience is abandoned: the next world continues from the newest
//!   checkpoint on record, and nothing that the abandoned world may still commit is ever used. Its members may train on where
//!   the coordinator cannot reach them; two worlds then run, but only one of them writes the history of the job:
//!   1. The next world's generation is durable before it is announced (`COORDINATOR-1`). A member that hears of it leaves the
//!      abandoned world and votes in it no more (`COMMIT-1`), and no other process ever gets a vote in it.
//!   2. The next world begins a new lineage (`COMMIT-4`). State of the abandoned world is of an older lineage, so a member that
//!      returns with it holds nothing that any later world asks for.
//!   3. Parts of checkpoints of the abandoned generation complete no checkpoint (`SNAPSHOT-2`, `SNAPSHOT-3`), and its ranks
//!      commit none: they compare their generation with the record first (`CHECKPOINT-8`).
//! - `QUORUM-4` A node that the operator has declared gone counts as dead in all its processes up to then. If it returns with one
//!   of them, it is refused; a later start of it is another node for this purpose.

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
        /// Time until the world is abandoned (`QUORUM-3`).
        remaining: Duration,
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
    /// The last world is not on record: which members had a rank is known from their reports only.
    Unrecorded {
        /// Time that all members have to report.
        remaining: Duration,
    },
    /// The last worlds failed one after the other, and the next one is formed after a pause.
    Crashes {
        /// Number of worlds in a row that failed without a step.
        n_crashes: u32,
        /// Remaining time of the pause.
        remaining: Duration,
    },
    /// The next world begins from a checkpoint, and the store has not yet answered which one is the newest.
    Listing,
}

/// Why the last world may be followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Follows {
    /// It can commit nothing more (`QUORUM-1`).
    Over,
    /// It is abandoned (`QUORUM-3`).
    Abandoned,
}

/// Patience that never ends, as a number of years that no job waits.
pub const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Checks `QUORUM-1` and `QUORUM-3`, after a wait of `waited` for any member to leave the last world.
///
/// # Errors
/// [`Blocked::LastWorldMayLive`].
pub fn may_follow(liveness: &[Liveness], waited: Duration, patience: Duration) -> Result<Follows, Blocked> {
    let unheard = liveness.iter().filter(|liveness| **liveness == Liveness::Unheard).count();
    let left = liveness.iter().any(|liveness| matches!(liveness, Liveness::Left(_)));
    match patience.saturating_sub(waited) {
        _ if left || unheard == 0 => Ok(Follows::Over),
        Duration::ZERO => Ok(Follows::Abandoned),
        remaining => Err(Blocked::LastWorldMayLive { unheard, remaining }),
    }
}

impl Blocked {
    /// Time until the coordinator does something else than wait for members; `None` if only a change of the members helps.
    pub fn remaining(&self) -> Option<Duration> {
        match self {
            Blocked::LastWorldMayLive { remaining, .. }
            | Blocked::Replacements { remaining, .. }
            | Blocked::StateElsewhere { remaining, .. }
            | Blocked::Unrecorded { remaining }
            | Blocked::Crashes { remaining, .. } => Some(*remaining).filter(|remaining| *remaining < FOREVER / 2),
            Blocked::TooFew { .. } | Blocked::Wanted { .. } | Blocked::Listing => None,
        }
    }
}

impl fmt::Display for Blocked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Blocked::LastWorldMayLive { unheard, .. } => {
                write!(f, "no member has left the last world and {unheard} have not reported: it may still train; ")?;
                match self.remaining() {
                    Some(remaining) => {
                        write!(f, "in {} s the job continues from its newest checkpoint without them", seconds(remaining))
                    }
                    None => f.write_str(
                        "with `elastic.replace_patience: none` the job waits for them until `phalanx drain --gone` declares \
                         their nodes gone",
                    ),
                }
            }
            Blocked::TooFew { have, need } => write!(f, "there are {have} members, but the smallest mesh needs {need}"),
            Blocked::Replacements { have, want, .. } => {
                write!(f, "{have} of {want} members are present; waiting ")?;
                match self.remaining() {
                    Some(remaining) => write!(f, "up to {} s for replacements", seconds(remaining)),
                    None => {
                        f.write_str("for replacements, until `phalanx drain --gone` declares the missing nodes gone")
                    }
                }
            }
            Blocked::Unrecorded { remaining } => write!(
                f,
                "the last world is not on record; waiting up to {} s for reports of its members",
                seconds(*remaining)
            ),
            Blocked::Crashes { n_crashes, remaining } => write!(
                f,
                "{n_crashes} worlds in a row failed before a step; the next one is formed in {} s",
                seconds(*remaining)
            ),
            Blocked::Wanted { have, want } => {
                write!(f, "the requested mesh needs {want} members, {have} are present")
            }
            Blocked::Listing => f.write_str("looking for the newest checkpoint, from which the job continues"),
            Blocked::StateElsewhere { n_shards, remaining } => write!(
                f,
                "{n_shards} shards are in no reachable memory; waiting for nodes that have not reported, {} s more",
                seconds(*remaining)
            ),
        }
    }
}

/// Whole seconds, rounded up.
fn seconds(duration: Duration) -> u64 {
    duration.as_millis().div_ceil(1000) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(30);

    const LEFT: Liveness =
        Liveness::Left(CommitState { entered: super::super::identity::Generation(1), applied: None, voted: None });

    // QUORUM-1
    #[test]
    fn world_ends_when_one_member_left_or_all_are_dead() {
        let follows = |liveness: &[Liveness]| may_follow(liveness, Duration::ZERO, PATIENCE);

        assert_eq!(follows(&[LEFT, Liveness::Unheard, Liveness::Dead]), Ok(Follows::Over));
        assert_eq!(follows(&[Liveness::Dead, Liveness::Dead]), Ok(Follows::Over));
        assert_eq!(follows(&[]), Ok(Follows::Over));
    }

    // QUORUM-1, QUORUM-2
    #[test]
    fn world_that_may_still_train_is_not_replaced() {
        let second = Duration::from_secs(1);
        let err = may_follow(&[Liveness::Dead, Liveness::Unheard], second, PATIENCE).unwrap_err();

        assert_eq!(err, Blocked::LastWorldMayLive { unheard: 1, remaining: 29 * second });
        assert!(err.to_string().contains("may still train; in 29 s"), "{err}");
    }

    // QUORUM-3
    #[test]
    fn world_that_no_member_leaves_is_abandoned_after_the_patience_if_it_ends() {
        let all_silent = [Liveness::Unheard, Liveness::Unheard];

        assert_eq!(may_follow(&all_silent, PATIENCE, PATIENCE), Ok(Follows::Abandoned));
        assert_eq!(may_follow(&[LEFT, Liveness::Unheard], PATIENCE, PATIENCE), Ok(Follows::Over));
        let err = may_follow(&all_silent, PATIENCE, FOREVER).unwrap_err();
        assert_eq!(err.remaining(), None);
        assert!(err.to_string().contains("drain --gone"), "{err}");
    }
}
