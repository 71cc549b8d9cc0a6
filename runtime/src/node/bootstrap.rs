//! The coordinator's message to each node that joins.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Job information that a node receives with its certificate.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct JobBootstrap {
    /// The whole configuration, with overrides applied.
    pub(crate) yaml: String,
    /// Shared secret of all ranks of the job.
    pub(crate) secret: Vec<u8>,
    /// Step and folder of the checkpoint from which the job starts, if any.
    pub(crate) start_from: Option<(u64, PathBuf)>,
    /// The token of the job's claim on the place of its checkpoints, if it has one.
    pub(crate) claim: Option<u64>,
}
