//! Requests of a command line that cannot be met.

use crate::launch::environment::EnvironmentError;
use phalanx_actors::trust::join::JoinStringError;
use phalanx_strategies::plan::hardware::{Hardware, HardwareError};
use std::net::SocketAddr;
use std::path::PathBuf;

/// A request of a command line that cannot be met.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the fields are named for what they are
pub enum CommandError {
    /// An argument after the file that is not a key.
    #[error("`{word}` is not an override; write `--key value`")]
    NoOverride { word: String },
    /// A folder in the place of a job's file.
    #[error(
        "{dir} has no checkpoint that tells the data to evaluate on; name the file of a job, as in `phalanx eval my.yaml --model \
         {dir}`", dir = dir.display()
    )]
    NoJobIn { dir: PathBuf },
    /// A key or flag without a value.
    #[error("`{word}` needs a value")]
    NoValue { word: String },
    /// `phalanx fetch` of something that is no name.
    #[error(
        "{name:?} is no name of a model or data set on the Hub, such as HuggingFaceTB/SmolLM2-135M, and no job's YAML file"
    )]
    NoHubName { name: String },
    /// A folder to upload is no model.
    #[error("{} has no config.json or adapter_config.json, so it is no model to upload; the model of a run is `model` in its output_dir", dir.display())]
    NothingToPush { dir: PathBuf },
    /// A flag that takes a number above 0 is 0.
    #[error("`{flag}` is 0, but must be at least 1")]
    Zero { flag: &'static str },
    /// A request to a job without nodes.
    #[error(
        "the request is recorded, but no node is connected to the coordinator, so nothing has happened; it takes effect once \
         nodes return"
    )]
    NoNodes,
    /// A request that has no effect as things are.
    #[error("the request is recorded, but has no effect now: {why}")]
    NoEffect { why: String },
    /// A mesh is requested that trains already.
    #[error("the job trains on {mesh} already; name the size of an axis that changes, such as --dp_shard_size")]
    SameMesh { mesh: String },
    /// A requested checkpoint could not be saved.
    #[error("{what}; training goes on")]
    NotSaved { what: String },
    /// `phalanx serve` where other machines reach it, without a key.
    #[error(
        "other machines can reach {address}: put the key that requests need into a file and name it with --api-key-file, or listen on 127.0.0.1"
    )]
    OpenToAll { address: SocketAddr },
    /// A file without a key.
    #[error("--api-key-file: {} has no key; it holds one of at least {least} characters, without blanks", path.display())]
    Key { path: PathBuf, least: usize },
    /// The address of `phalanx serve` cannot be used.
    #[error("cannot listen on {address}: {source}")]
    Listen { address: SocketAddr, source: std::io::Error },
    /// The HTTP side of `phalanx serve` has ended by itself.
    #[error("cannot serve requests: {0}")]
    Serve(#[source] std::io::Error),
    /// `phalanx node --ranks 0`.
    #[error("`--ranks` is 0, but must be at least 1")]
    NoRanks,
    /// A text is not a join string.
    #[error("{origin}: {source}")]
    Join { origin: String, source: JoinStringError },
    /// `phalanx node` without a join string.
    #[error(
        "a node needs the join string that `phalanx coordinator` prints: give it as --join, in a file as --join-file, or in the variable PHALANX_JOIN"
    )]
    NoJoin,
    /// The value of `--advertise` is not a list of addresses.
    #[error("--advertise: {0}")]
    Advertise(#[source] JoinStringError),
    /// The variables of Slurm or torchrun do not give the position of this process.
    #[error(transparent)]
    Environment(#[from] EnvironmentError),
    /// The plan of faults in the environment is invalid.
    #[error("{0}")]
    Planted(String),
    /// Spare nodes without a launcher that starts several nodes.
    #[error("`--spare-nodes` requires `--slurm` or `--torchrun`")]
    SpareNodesAlone,
    /// All nodes are spare nodes.
    #[error("`--spare-nodes` is {n_spares}, but there are {n_nodes} nodes; at least one node must train")]
    SpareNodes { n_spares: u32, n_nodes: u32 },
    /// `phalanx init` does not overwrite a file.
    #[error("{} already exists; remove it or choose another file", path.display())]
    Exists { path: PathBuf },
    /// An unknown dataset type.
    #[error("unknown dataset type `{found}`; expected completion, alpaca, chat_template, sharegpt or preference")]
    DatasetType { found: String },
    /// An unknown aim of the training.
    #[error("unknown goal `{found}`; expected full or lora")]
    Goal { found: String },
    /// A number of ranks that is none.
    #[error("`{found}` is no number of ranks; expected a whole number of at least 1")]
    Ranks { found: String },
    /// Unknown hardware.
    #[error("`--gpu` is `{found}`, but must be one of {}", Hardware::NAMES.join(", "))]
    Gpu { found: String },
    /// A file of measurements without any.
    #[error("--measured: {} has no results of `phalanx-gpu`: {reason}", path.display())]
    Measured { path: PathBuf, reason: String },
    /// Measurements of another GPU.
    #[error("--measured: {} has measurements of {found}, which is not {gpu}", path.display())]
    MeasuredOther { path: PathBuf, found: String, gpu: String },
    /// An invalid description of hardware.
    #[error(transparent)]
    Hardware(#[from] HardwareError),
    /// More ranks than a plan can have.
    #[error("cannot plan {n_ranks} ranks; the maximum is {n_ranks_max}")]
    TooManyRanks { n_ranks: usize, n_ranks_max: usize },
    /// Every arrangement was rejected, most of them for the reason in `refusal`.
    #[error("no arrangement of {n_ranks} ranks trains this job{}", refusal.as_ref().map_or(String::new(), |why| format!(": {why}")))]
    NoArrangement { n_ranks: usize, refusal: Option<String> },
    /// `phalanx plan` with a model that is one operation.
    #[error("`phalanx plan` does not support user-defined models")]
    NothingToArrange,
    /// `phalanx estimate` with a model that is one operation.
    #[error("`phalanx estimate` does not support user-defined models")]
    NoEstimate,
    /// The output of `--json` cannot be encoded.
    #[error(transparent)]
    Encode(serde_json::Error),
    /// The operating system does not report its memory and processors.
    #[error("cannot read the memory and processors of this machine: {0}")]
    System(#[source] sysinfo::Error),
    /// A question that no model could read.
    #[error("the question on standard input has more than {bytes_max} bytes; ask a shorter one")]
    LongQuestion { bytes_max: u64 },
    /// The input cannot be read.
    #[error("cannot read standard input: {0}")]
    Input(#[source] std::io::Error),
    /// The output cannot be written, although somebody reads it.
    #[error("cannot write to standard output: {0}")]
    Output(#[source] std::io::Error),
    /// The coordinator rejected the request with this reason.
    #[error("{reason}")]
    Refused { reason: String },
    /// A request to a job that is over or was killed.
    #[error("{what}")]
    NotRunning { what: String },
    /// The coordinator sent another kind of answer.
    #[error("the coordinator sent no status")]
    NoStatus,
    /// A node that the job does not have.
    #[error("the job has no node {node}; its nodes are {}", nodes.iter().map(u32::to_string).collect::<Vec<_>>().join(", "))]
    UnknownNode { node: u32, nodes: Vec<u32> },
}
