//! Why a coordinator, a node or an operator's request does not come about.

use phalanx_actors::control::RunError;
use phalanx_actors::quic::QuicError;
use phalanx_actors::store::StoreError;
use phalanx_actors::trust::TrustError;
use phalanx_actors::trust::join::JoinStringError;
use phalanx_actors::wire::WireError;
use std::path::PathBuf;
use std::time::Duration;

/// Why a coordinator, a node or an operator's request does not come about.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the fields are named for what they are
pub enum ControlPlaneError {
    /// The job's lease or record cannot be read or written.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Keys, certificates or private files cannot be used.
    #[error(transparent)]
    Trust(#[from] TrustError),
    /// The transport between coordinator, nodes and operators does not start, or the other side refuses.
    #[error(transparent)]
    Transport(#[from] QuicError),
    /// The control thread has ended.
    #[error(transparent)]
    Run(#[from] RunError),
    /// A request or its answer is not a message.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// A join string or a list of addresses is not one.
    #[error(transparent)]
    JoinString(#[from] JoinStringError),
    /// The operating system has no thread, event loop or socket left.
    #[error("cannot {action}: {source}")]
    System { action: &'static str, source: std::io::Error },
    /// What the coordinator tells each node has no JSON form.
    #[error(transparent)]
    Encode(serde_json::Error),
    /// What the coordinator told this node is not what a node is told.
    #[error("cannot decode the coordinator's message: {0}")]
    Decode(#[source] serde_json::Error),
    /// The coordinator certified this node as something else.
    #[error("the certificate from the coordinator is not a node certificate")]
    NotANode,
    /// No address of this machine that others could reach.
    #[error("cannot find an address at which other nodes reach this one; set --advertise")]
    NoAddress,
    /// The file with the number of the job holds something else.
    #[error("{} does not hold the number of a job; remove it to begin a new job", path.display())]
    JobFile { path: PathBuf },
    /// A folder in which no job was coordinated.
    #[error("{} contains no coordinated job", output_dir.display())]
    NoJob { output_dir: PathBuf },
    /// The coordinator of a job has ended or cannot be reached.
    #[error("the coordinator of the job in {} does not answer: {source}", output_dir.display())]
    NoAnswer { output_dir: PathBuf, source: QuicError },
    /// The first node wrote no join string.
    #[error(
        "{} has not come in {} s: node 0 on {head} does not coordinate, or output_dir is not shared with it",
        path.display(), patience.as_secs()
    )]
    NobodyLeads { path: PathBuf, patience: Duration, head: String },
    /// The name of the first node cannot be resolved.
    #[error("node 0, `{head}`, has no address: {source}")]
    Resolve { head: String, source: std::io::Error },
    /// The name of the first node means no address.
    #[error("node 0, `{head}`, has no address")]
    NoHeadAddress { head: String },
}

impl ControlPlaneError {
    /// What the operating system did not do.
    pub(crate) const fn cannot(action: &'static str) -> impl FnOnce(std::io::Error) -> ControlPlaneError {
        move |source| ControlPlaneError::System { action, source }
    }
}
