//! What a coordinator tells each node that joins.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// What every node is told with its certificate.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Welcome {
    /// The whole configuration, overrides applied.
    pub(crate) yaml: String,
    /// What all ranks of the job know and nobody else does.
    pub(crate) secret: Vec<u8>,
    /// Where the checkpoint lies from which the job begins, if there is one.
    pub(crate) start_from: Option<(u64, PathBuf)>,
}
