//! Errors of starting and watching ranks.

use std::io;

use thiserror::Error;

use super::frame::FrameError;

/// Why ranks could not be started, watched or sent a message.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LaunchError {
    /// A system call failed.
    #[error("cannot {action}: {reason}")]
    System {
        /// The action that failed.
        action: &'static str,
        /// The error of the operating system.
        reason: String,
    },
    /// A process could not be started.
    #[error("cannot start rank {rank}: {reason}")]
    Start {
        /// The rank.
        rank: u32,
        /// The error of the operating system.
        reason: String,
    },
    /// The rank does not exist.
    #[error("there is no rank {rank}; the number of ranks is {n_ranks}")]
    NoSuchRank {
        /// The rank.
        rank: u32,
        /// The number of ranks.
        n_ranks: u32,
    },
    /// A rank does not read its messages.
    #[error("rank {rank} does not read its messages; {n_bytes} bytes are waiting")]
    Congested {
        /// The rank.
        rank: u32,
        /// Bytes that are waiting.
        n_bytes: usize,
    },
    /// A value cannot be encoded as a frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// A descriptor in the rank's arguments is not a socket to its launcher.
    #[error("descriptor {fd} is not a channel to a launcher")]
    NoChannel {
        /// The descriptor.
        fd: i32,
    },
    /// Killed ranks did not exit.
    #[error("ranks {ranks:?} were killed but have not exited")]
    StillAlive {
        /// The ranks.
        ranks: Vec<u32>,
    },
}

impl LaunchError {
    pub(super) fn system(action: &'static str, error: &io::Error) -> Self {
        Self::System { action, reason: error.to_string() }
    }
}
