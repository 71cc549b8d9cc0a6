//! Why a program that embeds a job cannot start it as asked.

use phalanx_actors::trust::join::JoinStringError;
use std::path::PathBuf;

/// Why a program that embeds a job cannot start it as asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the fields are named for what they are
pub enum HostError {
    /// A job of several machines, started on one.
    #[error(
        "nnodes is {n_nodes}, and this is one machine; several are started by `phalanx train --slurm` or `--torchrun`, or by `phalanx coordinator` and `phalanx node`"
    )]
    SeveralMachines { n_nodes: usize },
    /// A model of this program, in rank processes that do not make it.
    #[error(
        "the job's model is written in Rust, and its rank processes do not make it; a `main` that begins with `phalanx::rank_process_with` lets them, and `Job::start` trains it on threads"
    )]
    RanksWithoutModel,
    /// A model of this program, on other machines.
    #[error("a model written in Rust is in this process only, not on other machines")]
    MachinesWithoutModel,
    /// Addresses for other machines that are none.
    #[error("Machines::advertise: {0}")]
    Advertise(#[source] JoinStringError),
    /// A program that does not notice that it is to be a rank.
    #[error(
        "this process was started as a rank and does not begin with `phalanx::rank_process()`, so it would start itself again and again"
    )]
    StartedAsRank,
    /// The program of ranks does not exist.
    #[error("the program of ranks, {}, is not a file", path.display())]
    NoProgram { path: PathBuf },
}
