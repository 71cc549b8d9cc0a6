//! Why a program cannot start the job that it embeds.

use phalanx_actors::trust::join::JoinStringError;
use std::path::PathBuf;

/// Why a program cannot start the job that it embeds.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the fields are named for what they are
pub enum HostError {
    /// A job of several machines was started on one.
    #[error(
        "`nnodes` is {n_nodes}, but the job was started on one machine; use `phalanx train --slurm` or `--torchrun`, or `phalanx coordinator` and `phalanx node`"
    )]
    SeveralMachines { n_nodes: usize },
    /// The rank processes cannot make the host program's model.
    #[error(
        "the job's model is written in Rust, but its rank processes cannot make it; begin `main` with `phalanx::rank_process_with`, or train on threads with `Job::start`"
    )]
    RanksWithoutModel,
    /// A model of the host program cannot train on other machines.
    #[error("a model written in Rust cannot train on other machines; it exists in this process only")]
    MachinesWithoutModel,
    /// The addresses for other machines are invalid.
    #[error("Machines::advertise: {0}")]
    Advertise(#[source] JoinStringError),
    /// The host program was started as a rank and did not become one.
    #[error(
        "this process was started as a rank, but its `main` does not begin with `phalanx::rank_process()`; it would start itself recursively"
    )]
    StartedAsRank,
    /// The rank program does not exist.
    #[error("the rank program {} is not a file", path.display())]
    NoProgram { path: PathBuf },
}
