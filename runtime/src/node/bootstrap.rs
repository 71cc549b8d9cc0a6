//! What a coordinator tells each node that joins.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Job information that a node receives with its certificate.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct JobBootstrap {
    /// The whole configuration, overrides applied.
    pub(crate) yaml: String,
    /// Shared secret of all ranks of the job.
    pub(crate) secret: Vec<u8>,
    /// Where the checkpoint lies from which the job begins, if there is one.
    pub(crate) start_from: Option<(u64, PathBuf)>,
}
