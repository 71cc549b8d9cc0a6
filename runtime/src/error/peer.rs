//! Invalid messages from other processes of the job: members of this rank's world, or the node of this rank.

use crate::launch::frame::FrameError;
use phalanx_strategies::elastic::recovery::Share;
use phalanx_strategies::elastic::shadow::Shard;

/// An invalid message or model of a process of the job.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the fields are named for what they are
pub enum PeerError {
    /// A message to a member cannot be encoded.
    #[error("cannot encode a message to a member: {0}")]
    Encode(#[source] serde_json::Error),
    /// A member's message cannot be decoded.
    #[error("cannot decode a message from member {member}: {source}")]
    Decode { member: u32, source: serde_json::Error },
    /// A member committed another step than this member computed.
    #[error("member {member} committed step {theirs}, but this member has computed step {here}")]
    Outcome { member: u32, theirs: f64, here: u64 },
    /// Two members computed gradients of different steps.
    #[error("member {member} has gradients of step {theirs}, but this member is at step {here}")]
    Gradients { member: u32, theirs: f64, here: f64 },
    /// A member requested a share that does not exist.
    #[error("member {member} requested an invalid share: {share:?}")]
    Share { member: u32, share: Share },
    /// The queried members do not hold all elements of a shard.
    #[error("no queried peer holds {n_elements} elements of {shard:?}")]
    NotHeld { shard: Shard, n_elements: usize },
    /// Two members sent the same elements.
    #[error("two received boxes of {shard:?} overlap")]
    Overlap { shard: Shard },
    /// A member sent elements that this member did not request.
    #[error("member {member} sent a box that was not requested")]
    NotRequested { member: u32 },
    /// This rank made a model that differs from the job's.
    #[error(
        "this rank's model has other tensors or initial values than the job's; `rank_process_with` must make the same model in every process"
    )]
    OtherModel,
    /// The node closed the channel before it sent the start message.
    #[error("invalid start message for a rank: the node closed the channel")]
    NoStart,
    /// The node's first frame is invalid.
    #[error("invalid start message for a rank: {0}")]
    StartFrame(#[source] FrameError),
    /// The node's first frame cannot be decoded.
    #[error("invalid start message for a rank: {0}")]
    StartMessage(#[source] serde_json::Error),
    /// The node's first message is not the start message.
    #[error("invalid start message for a rank: a desired state arrived before the start message")]
    StartOrder,
}

impl PeerError {
    /// As [`JobError::is_input`](super::JobError::is_input): a successor of this process would fail again.
    pub(super) const fn is_input(&self) -> bool {
        matches!(self, PeerError::OtherModel)
    }
}
