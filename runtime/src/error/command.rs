//! What a command line asks for that cannot be done.

use crate::launch::environment::EnvironmentError;
use phalanx_actors::trust::join::JoinStringError;
use phalanx_strategies::plan::hardware::{Hardware, HardwareError};
use std::path::PathBuf;

/// What a command line asks for that cannot be done.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the fields are named for what they are
pub enum CommandError {
    /// A word behind the file that is no key.
    #[error("`{word}`: an override is written `--key value`")]
    NoOverride { word: String },
    /// A flag of ours among the keys.
    #[error("`{word}`: goes before the YAML file; what follows that are its keys")]
    FlagAfterFile { word: String },
    /// A key or flag without a value.
    #[error("`{word}`: a value is missing")]
    NoValue { word: String },
    /// A flag that takes a number.
    #[error("`{flag}`: `{value}` is not a number")]
    NotANumber { flag: String, value: String },
    /// A flag that takes a number above 0.
    #[error("`{flag}` is 0; at least 1 is needed")]
    Zero { flag: &'static str },
    /// `phalanx node --ranks 0`.
    #[error("--ranks is 0; a node has at least one rank")]
    NoRanks,
    /// The value of `--join` is no join string.
    #[error("--join: {0}")]
    Join(#[source] JoinStringError),
    /// The value of `--advertise` is no list of addresses.
    #[error("--advertise: {0}")]
    Advertise(#[source] JoinStringError),
    /// The variables of Slurm or torchrun do not say where this process stands.
    #[error(transparent)]
    Environment(#[from] EnvironmentError),
    /// Spare nodes, of a job that knows no nodes.
    #[error("--spare-nodes needs --slurm or --torchrun, which tell of nodes")]
    SpareNodesAlone,
    /// Only spare nodes.
    #[error("--spare-nodes is {n_spares}, and there are {n_nodes} nodes; at least one has to train")]
    SpareNodes { n_spares: u32, n_nodes: u32 },
    /// `phalanx init` overwrites nothing.
    #[error("{} exists; name another file or remove it first", path.display())]
    Exists { path: PathBuf },
    /// No type of dataset.
    #[error("`{found}` is no type of dataset; completion, alpaca and chat_template are")]
    DatasetType { found: String },
    /// No hardware that is described.
    #[error("`--gpu`: `{found}` is not known; there are {}", Hardware::NAMES.join(", "))]
    Gpu { found: String },
    /// A description of hardware that cannot be meant.
    #[error(transparent)]
    Hardware(#[from] HardwareError),
    /// More ranks than a plan can have.
    #[error("{n_ranks} ranks are more than the {n_ranks_max} that can be planned")]
    TooManyRanks { n_ranks: usize, n_ranks_max: usize },
    /// Every arrangement was refused, most of them for the reason in `refusal`.
    #[error("no arrangement of {n_ranks} ranks trains this job{}", refusal.as_ref().map_or(String::new(), |why| format!(": {why}")))]
    NoArrangement { n_ranks: usize, refusal: Option<String> },
    /// `phalanx plan` of a model that is one operation.
    #[error("a user-defined model has nothing to arrange")]
    NothingToArrange,
    /// `phalanx estimate` of a model that is one operation.
    #[error("a user-defined model has no estimate")]
    NoEstimate,
    /// What `--json` prints has no JSON form.
    #[error(transparent)]
    Encode(serde_json::Error),
    /// The operating system does not tell of its memory and processors.
    #[error("cannot ask the system: {0}")]
    System(#[source] sysinfo::Error),
    /// The coordinator does not do what it was asked; `reason` is its answer.
    #[error("{reason}")]
    Refused { reason: String },
    /// The coordinator answers another question.
    #[error("the coordinator sent no status")]
    NoStatus,
    /// A node that is not of the job.
    #[error("the job has no node {node}; it has {}", nodes.iter().map(u32::to_string).collect::<Vec<_>>().join(", "))]
    UnknownNode { node: u32, nodes: Vec<u32> },
}
