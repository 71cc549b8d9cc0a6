//! A checkpoint, as the coordinator knows it.

use crate::elastic::identity::{Generation, Step};
use crate::elastic::shadow::Shard;
use serde::{Deserialize, Serialize};

/// A checkpoint. The default one is the initial weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Checkpoint {
    /// The world that wrote it.
    pub generation: Generation,
    /// The step of its state.
    pub step: Step,
}

/// A durable part of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// The checkpoint.
    pub of: Checkpoint,
    /// The shard in this part.
    pub shard: Shard,
}
