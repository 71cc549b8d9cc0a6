//! Why a mesh does not fit a model or the machines of a job.

use phalanx_device::world::{LOCAL_RANKS_MAX, RANKS_MAX};
use phalanx_strategies::mesh::Mesh;

/// Why a mesh does not fit a model or the machines of a job.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the fields are named for what they are
pub enum FitError {
    /// An axis has no ranks, or the mesh has too many.
    #[error("a mesh has at least one rank on each axis and at most {RANKS_MAX} in total; found {mesh}")]
    Size { mesh: Mesh },
    /// The job was started with fewer rank processes than the mesh has ranks.
    #[error(
        "the mesh {mesh} has {} ranks; the job was started with {n_slots} rank processes, all on this machine",
        mesh.size()
    )]
    Slots { mesh: Mesh, n_slots: u32 },
    /// More ranks than one machine can have.
    #[error("the mesh {mesh} has {} ranks; at most {LOCAL_RANKS_MAX} fit on one machine", mesh.size())]
    Machine { mesh: Mesh },
    /// More ranks than can be measured on one machine.
    #[error("cannot measure {n_ranks} ranks; at most {LOCAL_RANKS_MAX} fit on one machine")]
    Measured { n_ranks: usize },
    /// The nodes cannot have the same number of ranks each.
    #[error(
        "the mesh {mesh} has {} ranks, which {n_nodes} nodes cannot share evenly; exclude nodes with `--spare-nodes`",
        mesh.size()
    )]
    Uneven { mesh: Mesh, n_nodes: usize },
    /// The mesh has axes that would split the one operation of a user-defined model.
    #[error(
        "a user-defined model is one operation, which {mesh} would split; set only `dp_replicate_size` and `dp_shard_size`"
    )]
    UserDefined { mesh: Mesh },
}
