//! How ranks end, and which of them is to blame.

use std::fmt;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use super::frame::FrameError;

/// The exit code of a rank that stopped because another rank was lost; `EX_TEMPFAIL` of `sysexits.h`. It is never the root
/// cause while there is another.
pub const EXIT_PEER_LOST: i32 = 75;

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// By itself, with this code.
    Code(i32),
    /// By this signal.
    Signal(i32),
}

/// What a rank did wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cause {
    /// It ended, and not with code 0.
    Ended(Ending),
    /// What it said was not a frame; it was killed.
    Garbled(FrameError),
}

/// The first rank that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The rank.
    pub rank: u32,
    /// What it did.
    pub cause: Cause,
}

/// How much a failure explains: a later one replaces an earlier one only if it explains more and both came at once, or the
/// earlier one was a consequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Weight {
    Consequence,
    Code,
    Signal,
}

impl Ending {
    pub(super) fn of(status: ExitStatus) -> Self {
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Code(code),
            (None, signal) => Self::Signal(signal.unwrap_or(0)),
        }
    }
}

impl Failure {
    /// The failure that an ending is, if it is one.
    pub(super) fn of(rank: u32, ending: Ending) -> Option<Self> {
        (ending != Ending::Code(0)).then_some(Self { rank, cause: Cause::Ended(ending) })
    }

    pub(super) fn weight(&self) -> Weight {
        match self.cause {
            Cause::Ended(Ending::Code(EXIT_PEER_LOST)) => Weight::Consequence,
            Cause::Ended(Ending::Code(_)) => Weight::Code,
            // Peers of a rank that was killed end with a code of their own making, perhaps before we look.
            Cause::Ended(Ending::Signal(_)) | Cause::Garbled(_) => Weight::Signal,
        }
    }
}

/// The better explanation of the two: `known` was seen before all of `new`, which were seen at once.
pub(super) fn root_cause(known: Option<Failure>, new: Vec<Failure>) -> Option<Failure> {
    let heaviest = new.into_iter().max_by_key(|failure| (failure.weight(), std::cmp::Reverse(failure.rank)));
    match (known, heaviest) {
        (Some(known), Some(new)) if known.weight() == Weight::Consequence && new.weight() > known.weight() => Some(new),
        (Some(known), _) => Some(known),
        (None, new) => new,
    }
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::Code(code) => return write!(f, "ended with code {code}"),
            Self::Signal(libc::SIGKILL) => " (SIGKILL: killed by somebody, or by the system for want of memory)",
            Self::Signal(libc::SIGSEGV) => " (SIGSEGV)",
            Self::Signal(libc::SIGBUS) => " (SIGBUS)",
            Self::Signal(libc::SIGABRT) => " (SIGABRT: it panicked or aborted)",
            Self::Signal(libc::SIGTERM) => " (SIGTERM)",
            Self::Signal(libc::SIGINT) => " (SIGINT)",
            Self::Signal(libc::SIGILL) => " (SIGILL)",
            Self::Signal(libc::SIGFPE) => " (SIGFPE)",
            Self::Signal(_) => "",
        };
        let Self::Signal(signal) = self else { return Ok(()) };
        write!(f, "was ended by signal {signal}{name}")
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.cause {
            Cause::Ended(ending) => write!(f, "rank {} {ending}", self.rank),
            Cause::Garbled(error) => write!(f, "rank {} was stopped: {error}", self.rank),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(rank: u32, code: i32) -> Failure {
        Failure { rank, cause: Cause::Ended(Ending::Code(code)) }
    }

    #[test]
    fn the_first_failure_stands_against_whatever_comes_later() {
        let killed = Failure { rank: 2, cause: Cause::Ended(Ending::Signal(9)) };

        assert_eq!(root_cause(Some(code(1, 1)), vec![killed]), Some(code(1, 1)));
        assert_eq!(root_cause(Some(code(1, 1)), vec![]), Some(code(1, 1)));
    }

    #[test]
    fn of_failures_seen_at_once_a_signal_explains_most_and_a_lost_peer_least() {
        let killed = Failure { rank: 2, cause: Cause::Ended(Ending::Signal(9)) };

        assert_eq!(root_cause(None, vec![code(0, 1), killed.clone(), code(3, 1)]), Some(killed));
        assert_eq!(root_cause(None, vec![code(0, EXIT_PEER_LOST), code(3, 1), code(4, 1)]), Some(code(3, 1)));
    }

    #[test]
    fn a_lost_peer_is_replaced_by_the_rank_that_was_lost() {
        let consequence = Some(code(0, EXIT_PEER_LOST));

        assert_eq!(root_cause(consequence.clone(), vec![code(1, 3)]), Some(code(1, 3)));
        assert_eq!(root_cause(consequence.clone(), vec![code(1, EXIT_PEER_LOST)]), consequence);
    }

    #[test]
    fn a_failure_is_one_sentence() {
        let killed = Failure { rank: 2, cause: Cause::Ended(Ending::Signal(9)) };

        assert_eq!(code(1, 3).to_string(), "rank 1 ended with code 3");
        assert!(killed.to_string().starts_with("rank 2 was ended by signal 9 (SIGKILL"));
    }
}
