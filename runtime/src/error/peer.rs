//! What another process of the job sent that does not fit: a member of this rank's world, or the node of this rank.

use crate::launch::frame::FrameError;
use phalanx_strategies::elastic::recovery::Share;
use phalanx_strategies::elastic::shadow::Shard;

/// What another process of the job sent that does not fit.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the fields are named for what they are
pub enum PeerError {
    /// A message to a member has no JSON form.
    #[error("a message is no JSON: {0}")]
    Encode(#[source] serde_json::Error),
    /// A member's message is not one.
    #[error("member {member} sent what is no message: {source}")]
    Decode { member: u32, source: serde_json::Error },
    /// Two members completed different steps.
    #[error("member {member} says that step {theirs} counts, and this one is at {here}")]
    Outcome { member: u32, theirs: f64, here: u64 },
    /// Two members computed gradients of different steps.
    #[error("member {member} has the gradients of step {theirs}, and this one is at {here}")]
    Gradients { member: u32, theirs: f64, here: f64 },
    /// A part that no division into parts has.
    #[error("member {member} requested an invalid share: {share:?}")]
    Share { member: u32, share: Share },
    /// The members that were asked do not hold all of a shard.
    #[error("no queried peer holds {n_elements} elements of {shard:?}")]
    NotHeld { shard: Shard, n_elements: usize },
    /// Two members sent the same elements.
    #[error("two boxes of {shard:?} overlap")]
    Overlap { shard: Shard },
    /// A member sent elements that nobody asked it for.
    #[error("member {member} sent a box that was not requested")]
    NotRequested { member: u32 },
    /// The program of this rank made another model than the program of the job.
    #[error(
        "the model that this rank made has other tensors or first values than the job's; `rank_process_with` must make the same in every process"
    )]
    OtherModel,
    /// The node went away before it had told this rank what to do.
    #[error("invalid start message for a rank: the node closed the channel")]
    NoStart,
    /// The node's first frame is not one.
    #[error("invalid start message for a rank: {0}")]
    StartFrame(#[source] FrameError),
    /// The node's first frame is not a message.
    #[error("invalid start message for a rank: {0}")]
    StartMessage(#[source] serde_json::Error),
    /// The node's first message is another one.
    #[error("invalid start message for a rank: a desired state arrived before the start message")]
    StartOrder,
}
