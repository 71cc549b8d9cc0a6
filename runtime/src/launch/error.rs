//! What can go wrong with starting and watching ranks.

use std::io;

use thiserror::Error;

use super::frame::FrameError;

/// Why ranks could not be started, watched or spoken to.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LaunchError {
    /// The operating system refused.
    #[error("cannot {action}: {reason}")]
    System {
        /// What was tried.
        action: &'static str,
        /// What the operating system said.
        reason: String,
    },
    /// A process could not be started.
    #[error("cannot start rank {rank}: {reason}")]
    Start {
        /// The rank.
        rank: u32,
        /// What the operating system said.
        reason: String,
    },
    /// There is no such rank.
    #[error("there is no rank {rank} among {n_ranks}")]
    NoSuchRank {
        /// The rank.
        rank: u32,
        /// Found length.
        n_ranks: u32,
    },
    /// A rank does not read what it is sent.
    #[error("rank {rank} has not read the {n_bytes} bytes it was sent before")]
    Congested {
        /// The rank.
        rank: u32,
        /// Bytes that wait.
        n_bytes: usize,
    },
    /// A frame cannot be made.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The descriptor that a rank was given is not the socket to its launcher.
    #[error("descriptor {fd} is not the channel to a launcher")]
    NoChannel {
        /// The descriptor.
        fd: i32,
    },
    /// Ranks did not end although they were killed.
    #[error("ranks {ranks:?} were killed and have not ended")]
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
