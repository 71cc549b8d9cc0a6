//! Why a coordinator, a node or an operator's request fails.

use phalanx_actors::control::RunError;
use phalanx_actors::quic::QuicError;
use phalanx_actors::store::StoreError;
use phalanx_actors::trust::TrustError;
use phalanx_actors::trust::join::JoinStringError;
use phalanx_actors::wire::WireError;
use phalanx_strategies::elastic::message::Ending;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// Why a coordinator, a node or an operator's request fails.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the fields are named for what they are
pub enum ControlPlaneError {
    /// The job's lease or record cannot be read or written.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Keys, certificates or private files cannot be used.
    #[error(transparent)]
    Trust(#[from] TrustError),
    /// The transport between coordinator, nodes and operators cannot start, or the peer refuses the connection.
    #[error(transparent)]
    Transport(#[from] QuicError),
    /// The control thread has ended.
    #[error(transparent)]
    Run(#[from] RunError),
    /// A request or an answer cannot be encoded or decoded.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// A join string or a list of addresses is invalid.
    #[error(transparent)]
    JoinString(#[from] JoinStringError),
    /// The operating system refused a thread, event loop or socket.
    #[error("cannot {action}: {source}")]
    System { action: &'static str, source: std::io::Error },
    /// The coordinator's message to each node cannot be encoded.
    #[error(transparent)]
    Encode(serde_json::Error),
    /// The coordinator's message to this node cannot be decoded.
    #[error("cannot decode the coordinator's message: {0}")]
    Decode(#[source] serde_json::Error),
    /// The coordinator's certificate is not for a node.
    #[error("the certificate from the coordinator is not a node certificate")]
    NotANode,
    /// The configuration is not that of the job that another coordinator leads.
    #[error(
        "the configuration differs from that of the running job, {}: {changed}; a coordinator needs the same one, because the job \
         keeps it until it ends",
        path.display()
    )]
    OtherConfiguration { path: PathBuf, changed: String },
    /// The configuration of the job that another coordinator leads cannot be read.
    #[error(
        "{} cannot be read as a configuration, and a coordinator needs that of the running job; if this one has it, remove the file",
        path.display()
    )]
    UnreadableConfiguration { path: PathBuf },
    /// A file through which operators reach the coordinator is damaged.
    #[error("{} is damaged: {why}; the coordinator of the job writes it anew when it starts", path.display())]
    DamagedEntry { path: PathBuf, why: String },
    /// The folder of a node cannot be locked.
    #[error("cannot open {}: {source}", path.display())]
    NodeFolder { path: PathBuf, source: std::io::Error },
    /// Two running nodes would have one key.
    #[error(
        "another running node uses the folder {}; each node needs its own: set `--dir` to another folder",
        path.display()
    )]
    NodeFolderInUse { path: PathBuf },
    /// This machine has no address that other nodes could reach.
    #[error("cannot find an address at which other nodes reach this one; set `--advertise`")]
    NoAddress,
    /// The coordinator listens at all addresses of a machine without a default route.
    #[error("`--listen {listens}` names no address at which nodes reach this machine; add `--advertise HOST:PORT`")]
    NoAdvertise { listens: SocketAddr },
    /// The file for the job number contains something else.
    #[error(
        "{} does not contain a job number; end the nodes of the job and remove the file, and a new job continues from the newest \
         checkpoint",
        path.display()
    )]
    JobFile { path: PathBuf },
    /// The folder is not the output folder of a coordinated job.
    #[error("{} contains no coordinated job", output_dir.display())]
    NoJob { output_dir: PathBuf },
    /// The folder was copied, and its job is elsewhere.
    #[error("{} is a copy of {}, where the job is: name that folder", output_dir.display(), original.display())]
    Copied { output_dir: PathBuf, original: PathBuf },
    /// The job has no coordinator yet.
    #[error("the job in {} prepares its data; it answers once that is done", output_dir.display())]
    Preparing { output_dir: PathBuf },
    /// The coordinator of a job has ended or cannot be reached.
    #[error("the coordinator of the job in {} does not answer: {source}", output_dir.display())]
    NoAnswer { output_dir: PathBuf, source: QuicError },
    /// A node is to join a job that has ended.
    #[error("the job of {place} has ended, {}, so that no node can join it any more", how(ending))]
    JobOver { place: String, ending: Ending },
    /// Node 0 did not write a join string in time.
    #[error(
        "{} did not appear within {} s; node 0 on {head} does not coordinate the job, or it does not share output_dir with this node",
        path.display(), patience.as_secs()
    )]
    NoJoinString { path: PathBuf, patience: Duration, head: String },
    /// The host name of node 0 cannot be resolved.
    #[error("cannot resolve node 0, `{head}`: {source}")]
    Resolve { head: String, source: std::io::Error },
    /// The host name of node 0 resolves to no address.
    #[error("cannot resolve node 0, `{head}`: it has no address")]
    NoHeadAddress { head: String },
}

fn how(ending: &Ending) -> String {
    match ending {
        Ending::Finished => "well".into(),
        Ending::Failed(why) => format!("with a failure ({why})"),
    }
}

impl ControlPlaneError {
    /// As [`JobError::is_input`](super::JobError::is_input): an address, a folder, a token or a private file of the user is at
    /// fault, rather than the network, the disk or another process.
    pub(super) const fn is_input(&self) -> bool {
        if let Some(error) = self.of_store() {
            return matches!(error, StoreError::Damaged { .. });
        }
        match self {
            ControlPlaneError::Transport(error) => {
                matches!(
                    error,
                    QuicError::Bind { .. }
                        | QuicError::Trust(_)
                        | QuicError::Timing(_)
                        | QuicError::Refused(_)
                        | QuicError::RefusedForGood(_)
                        | QuicError::Expired(_)
                )
            }
            ControlPlaneError::Trust(_) | ControlPlaneError::JoinString(_) => true,
            ControlPlaneError::NodeFolder { .. } | ControlPlaneError::NodeFolderInUse { .. } => true,
            ControlPlaneError::NoAdvertise { .. } | ControlPlaneError::OtherConfiguration { .. } => true,
            ControlPlaneError::UnreadableConfiguration { .. } | ControlPlaneError::DamagedEntry { .. } => true,
            ControlPlaneError::NoAddress | ControlPlaneError::JobFile { .. } | ControlPlaneError::NoJob { .. } => true,
            ControlPlaneError::Copied { .. } => true,
            ControlPlaneError::Resolve { .. } | ControlPlaneError::NoHeadAddress { .. } => true,
            // The user named a job that nobody coordinates.
            ControlPlaneError::NoAnswer { .. } | ControlPlaneError::NoJoinString { .. } => true,
            _ => false,
        }
    }

    /// The error of the job's store, if it is the cause: of the lease and the record, or of keys and certificates there.
    pub(crate) const fn of_store(&self) -> Option<&StoreError> {
        match self {
            ControlPlaneError::Store(error)
            | ControlPlaneError::Trust(TrustError::Store(error))
            | ControlPlaneError::Transport(QuicError::Trust(TrustError::Store(error))) => Some(error),
            _ => None,
        }
    }

    /// Wraps an error of the operating system with the action that failed.
    pub(crate) const fn cannot(action: &'static str) -> impl FnOnce(std::io::Error) -> ControlPlaneError {
        move |source| ControlPlaneError::System { action, source }
    }
}
