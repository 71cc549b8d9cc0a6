//! Why a mesh does not fit a model or the machines of a job.

use phalanx_device::world::{LOCAL_RANKS_MAX, RANKS_MAX};
use phalanx_strategies::mesh::Mesh;

/// Why a mesh does not fit a model or the machines of a job.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the fields are named for what they are
pub enum FitError {
    /// An axis without ranks, or too many ranks altogether.
    #[error("a mesh has at least one rank on each axis and at most {RANKS_MAX}; this is {mesh}")]
    Size { mesh: Mesh },
    /// The job was started with fewer rank processes than the mesh has ranks.
    #[error(
        "the mesh {mesh} has {} ranks; the job was started with {n_slots} rank processes, all on this machine",
        mesh.size()
    )]
    Slots { mesh: Mesh, n_slots: u32 },
    /// More ranks than one machine can have.
    #[error("the mesh {mesh} has {} ranks; at most {LOCAL_RANKS_MAX} fit one machine", mesh.size())]
    Machine { mesh: Mesh },
    /// More ranks than can be measured on one machine.
    #[error("{n_ranks} ranks; at most {LOCAL_RANKS_MAX} fit one machine")]
    Measured { n_ranks: usize },
    /// The nodes cannot have equally many ranks each.
    #[error(
        "the mesh {mesh} has {} ranks, which {n_nodes} nodes cannot share evenly; --spare-nodes takes nodes out",
        mesh.size()
    )]
    Uneven { mesh: Mesh, n_nodes: usize },
    /// Axes that would cut the one operation of a user-defined model.
    #[error(
        "a user-defined model is one operation, which {mesh} would cut; `dp_replicate_size` and `dp_shard_size` fit it"
    )]
    UserDefined { mesh: Mesh },
}
