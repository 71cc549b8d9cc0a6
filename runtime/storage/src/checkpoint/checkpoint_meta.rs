//! What a checkpoint states about itself, besides its tensors.

use std::collections::BTreeMap;

/// Job, step and mesh of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointMeta {
    /// The job's name.
    pub job: String,
    /// Steps that were completed.
    pub step: u64,
    /// The generation that saves; if directories of this step exist, the save uses the generation after the newest.
    pub generation: u64,
    /// Sizes of the mesh's axes by name.
    pub mesh: BTreeMap<String, u64>,
    /// Whether all of the state had other copies, which agreed with it.
    pub verified: bool,
    /// Whether no copy of the state differed from another one.
    pub compared: bool,
}
