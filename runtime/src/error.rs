//! Why a job cannot start or continue, with one submodule for each concern.

pub mod command;
pub mod control_plane;
pub mod export;
pub mod fit;
pub mod generate;
pub mod host;
pub mod merge;
pub mod peer;
pub mod plan;

use crate::config::error::ConfigError;
use crate::data::prepare::PrepareError;
use crate::data::shown::ShowError;
use crate::data::token_cache_format::TokenCacheError;
use crate::data::tokenize_error::TokenizeError;
use crate::data::tokenizer_error::TokenizerError;
use crate::error::command::CommandError;
use crate::error::control_plane::ControlPlaneError;
use crate::error::export::ExportError;
use crate::error::fit::FitError;
use crate::error::generate::GenerateError;
use crate::error::host::HostError;
use crate::error::merge::MergeError;
use crate::error::peer::PeerError;
use crate::error::plan::PlanError;
use crate::frontend::UserModelError;
use crate::launch::error::LaunchError;
use crate::shell::quoted;
use crate::units::human_bytes;
use phalanx_cuda::OpenError;
use phalanx_device::groups::GroupError;
use phalanx_device::{AllocError, CollectiveError, ExecError, ThreadError};
use phalanx_storage::checkpoint::error::CheckpointError;
use phalanx_storage::hf::error::HfError;
use phalanx_storage::hub::error::HubError;
use phalanx_strategies::compile::CompileError;
use phalanx_strategies::model::ModelError;
use phalanx_strategies::sampler::SamplerError;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Why a job cannot start or continue. The text is one sentence that names the fault and its location.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // variants that wrap an error are named for it
pub enum JobError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The model's configuration does not fit.
    #[error("{path}: {source}")]
    Model { path: String, source: ModelError },
    #[error(transparent)]
    Hf(#[from] HfError),
    #[error(transparent)]
    Hub(#[from] HubError),
    #[error(transparent)]
    UserModel(#[from] UserModelError),
    #[error(transparent)]
    Data(#[from] PrepareError),
    #[error(transparent)]
    Show(ShowError),
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    #[error(transparent)]
    Sampler(#[from] SamplerError),
    /// The job requests a GPU, and this machine has none that works.
    #[error("no GPU can be used: {0}")]
    Gpu(#[from] OpenError),
    /// The environment limits the CPU's instruction set to an unknown one.
    #[error("{0}")]
    CpuIsa(String),
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// The programs of the ranks do not fit together.
    #[error(transparent)]
    WorldTraces(#[from] phalanx_strategies::world::WorldError),
    #[error(transparent)]
    Alloc(#[from] AllocError),
    #[error(transparent)]
    Thread(#[from] ThreadError),
    #[error(transparent)]
    Exec(#[from] ExecError),
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// A rank process ended without a failure report.
    #[error("{how} {when}; {saved}", saved = match checkpoint {
        Some(path) => format!("the last checkpoint is {}", path.display()),
        None => "this run saved no checkpoint".into(),
    })]
    RankLost { how: String, when: String, checkpoint: Option<PathBuf> },
    /// The failure report of a rank process.
    #[error("{text}")]
    OfRank { rank: u32, text: String, is_input: bool },
    /// A file or directory of the run cannot be used.
    #[error("cannot {action} {path}: {source}", path = path.display())]
    Io { action: &'static str, path: PathBuf, source: std::io::Error },
    /// A checkpoint of another job.
    #[error("checkpoint {path} does not fit this job: {reason}", path = path.display())]
    Mismatch { path: PathBuf, reason: String },
    /// The newest checkpoint is of a run with another model, data, batch or learning rate.
    #[error(
        "checkpoint {path} is of another run; this job has other values of {changed}: keep both by setting another `output_dir`, {}",
        ways_on(path, *has_state), path = path.display()
    )]
    AnotherRun {
        path: PathBuf,
        changed: String,
        /// Whether the checkpoint holds the state that this job needs, so that it may continue from it.
        has_state: bool,
    },
    /// The checkpoint is of a later step than the last one of this job.
    #[error(
        "checkpoint {path} is of step {step}, but this job ends at step {last}: raise `max_steps` or `num_epochs`, set another `output_dir`, or begin again with `--resume_from_checkpoint none`",
        path = path.display()
    )]
    BeyondTheEnd { path: PathBuf, step: u64, last: u64 },
    /// The run of the checkpoint has ended early.
    #[error(
        "the run ended early after step {step}, because {n_worse} evaluations were no better than the best one: its model is in output_dir; raise `early_stopping_patience` to continue, or begin again with `--resume_from_checkpoint none` (checkpoint {path})",
        path = path.display()
    )]
    EndedEarly { path: PathBuf, step: u64, n_worse: u64 },
    /// Loss or gradient is NaN or infinite.
    #[error("step {step}: {what} is not finite, first in {parameter}; weights are those of step {last_good}")]
    NonFinite { step: u64, what: &'static str, parameter: String, last_good: u64 },
    /// Loss or gradient is NaN or infinite, and the next world will repeat the step.
    #[error("{what} of {} is not finite in the first computation", .found.step)]
    NotFiniteOnce { what: &'static str, found: phalanx_strategies::elastic::message::NotFinite },
    /// Copies of the state differ.
    #[error("{0}")]
    Corrupt(Box<phalanx_strategies::elastic::copies::Difference>),
    /// A state that must not become a checkpoint.
    #[error("the state of step {step} is not saved: the weights {parameter} are not finite")]
    UnfitState { step: u64, parameter: String },
    /// The step needs more memory than the machine has.
    #[error(
        "the step needs {} of memory, but this machine has {}; reduce micro_batch_size or sequence_len, or use gradient_checkpointing, bf16 or an adapter (see `phalanx estimate`)",
        human_bytes(*needed), human_bytes(*present)
    )]
    TooLarge { needed: u64, present: u64 },
    /// The GPUs of this machine have no room for the job, or are taken.
    #[error("{0}")]
    NoRoomOnGpu(String),
    /// GPU ranks cannot exchange tensors in the configured way.
    #[error("`gpu_collectives: nccl` cannot be met: {0}")]
    Exchange(String),
    /// The coordinator does not let this node take part.
    #[error("the coordinator refuses this node: {0}")]
    NodeRefused(String),
    /// Too many devices of this node have failed for its ranks to continue.
    #[error(
        "too few GPUs of this machine are left: {0}; the job continues from its last checkpoint when it is started again"
    )]
    DevicesLost(String),
    /// Two jobs would write to one folder.
    #[error("output_dir {path} is in use by another running job; wait for it to end or use another folder", path = path.display())]
    InUse { path: PathBuf },
    /// The folder of a run belongs to somebody else.
    #[error(
        "output_dir {path} cannot be written by this user: {source}; name a folder of your own with `--output_dir`, and to continue from \
         a checkpoint of that run, its folder with `--resume_from_checkpoint`",
        path = path.display()
    )]
    NotWritable { path: PathBuf, source: std::io::Error },
    /// Two jobs would save their checkpoints in one place.
    #[error(
        "the checkpoints in {root} are those of another running job ({holder}): end that job, which frees them within 20 s, or set \
         another checkpoint_dir",
        root = root.display()
    )]
    CheckpointsInUse { root: PathBuf, holder: String },
    /// The place of the checkpoints may not be written.
    #[error("checkpoints cannot be saved in {}: {reason}", root.display())]
    CheckpointsRefused { root: PathBuf, reason: String },
    /// The folder of the checkpoints is a link that leads nowhere.
    #[error("the checkpoints belong in {}, a link to {}, which does not exist: mount that disk, or remove the link", root.display(), target.display())]
    CheckpointsUnmounted { root: PathBuf, target: PathBuf },
    /// Ranks of a job without a coordinator still write to a folder.
    #[error("ranks of an earlier job still run in output_dir {path}; restart its coordinator, or end its nodes, before another job begins", path = path.display())]
    RanksLive { path: PathBuf },
    /// The checkpoints of a node would not be where the job's are.
    #[error(
        "output_dir {path} on this node is not that of job {expected}: the job's number in {mark} is {found}; share output_dir between all machines, or set checkpoint_dir to an object store",
        path = path.display(), mark = mark.display()
    )]
    NotShared { path: PathBuf, expected: u64, mark: PathBuf, found: String },
    /// The folder of checkpoints of a node is not that of the job.
    #[error(
        "checkpoint_dir {path} on this node is not that of the job, which has put its claim there; share it between all machines, or set it to an object store",
        path = path.display()
    )]
    CheckpointsNotShared { path: PathBuf },
    /// A thread of the job panicked; its process continues.
    #[error("a thread of the job panicked: {0}")]
    Panicked(String),
    /// Nothing to resume from.
    #[error("{path} contains no checkpoint that can be resumed{why}", path = path.display())]
    NoCheckpoint { path: PathBuf, why: String },
    /// The checkpoint to resume from may be intact, but cannot be read.
    #[error(
        "{source}; no checkpoint was changed: make it readable, name an older one with `--resume_from_checkpoint PATH`, or begin again with `--resume_from_checkpoint none`"
    )]
    UnreadableCheckpoint { source: CheckpointError },
    /// Checkpoints exist, and all are damaged.
    #[error(
        "none of the {n} checkpoints in {path} is intact; the newest: {source}; restore one, or begin again with `--resume_from_checkpoint none`",
        path = path.display()
    )]
    NoIntactCheckpoint { path: PathBuf, n: usize, source: Box<CheckpointError> },
    /// The state with which a run ended is not where its checkpoints belong.
    #[error(
        "{source}; step {step} is saved in {path} instead: continue from it with `--resume_from_checkpoint {named}` and a \
         `checkpoint_dir` that can be written",
        path = path.display(), named = quoted(path)
    )]
    SavedElsewhere { step: u64, path: PathBuf, source: Box<CheckpointError> },
    /// The state with which a run ended is nowhere.
    #[error("{source}; step {step} cannot be saved in {} either: {here}", path.display())]
    SavedNowhere { step: u64, path: PathBuf, here: String, source: Box<CheckpointError> },
    /// The job failed.
    #[error("the job has failed: {0}")]
    JobFailed(String),
    /// The world of this rank has ended.
    #[error("this world is over: what was done {0}")]
    Superseded(phalanx_strategies::elastic::identity::Stale),
    #[error(transparent)]
    Fit(#[from] FitError),
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    Export(#[from] ExportError),
    #[error(transparent)]
    Generate(#[from] GenerateError),
    #[error(transparent)]
    Merge(#[from] MergeError),
    #[error(transparent)]
    Peer(#[from] PeerError),
    #[error(transparent)]
    Host(#[from] HostError),
    #[error(transparent)]
    ControlPlane(#[from] ControlPlaneError),
    #[error(transparent)]
    Command(#[from] CommandError),
}

/// How a job continues that has other values than the run of a checkpoint.
fn ways_on(path: &Path, has_state: bool) -> String {
    let again = "begin again with `--resume_from_checkpoint none`";
    if has_state {
        format!("{again}, or continue from it all the same with `--resume_from_checkpoint {}`", quoted(path))
    } else {
        format!("or {again}")
    }
}

impl JobError {
    /// Whether the error is only a consequence of another rank's failure.
    pub(crate) const fn is_consequence(&self) -> bool {
        matches!(
            self,
            JobError::Collective(CollectiveError::Aborted { .. })
                | JobError::Checkpoint(CheckpointError::OthersFailed { .. } | CheckpointError::Agreement { .. })
                | JobError::Exec(ExecError::Collective(GroupError::Failed {
                    source: CollectiveError::Aborted { .. },
                    ..
                }))
        )
    }

    /// Whether the error only ends this rank's world: members are lost or leave, and the next world continues from the same
    /// state.
    pub(crate) fn is_of_the_world(&self) -> bool {
        let collective = match self {
            JobError::Superseded(_) | JobError::Exec(ExecError::Left) => return true,
            // A job that has run fits: the memory is a predecessor's, and becomes free.
            error if error.is_memory_of_others() => return true,
            JobError::Checkpoint(
                CheckpointError::OthersFailed { .. }
                | CheckpointError::Agreement { .. }
                | CheckpointError::Superseded { .. },
            ) => return true,
            JobError::Collective(error)
            | JobError::Exec(ExecError::Collective(GroupError::Failed { source: error, .. })) => error,
            _ => return false,
        };
        // Ranks that disagree about a collective would disagree again in the next world.
        !collective.is_refusal() && !matches!(collective, CollectiveError::Mismatch { .. })
    }

    /// Whether a device has enough memory for this rank, but other processes hold it.
    pub(crate) fn is_memory_of_others(&self) -> bool {
        matches!(self, JobError::Alloc(error) if error.source.kind() == ErrorKind::ResourceBusy)
    }

    /// Whether the work was asked to stop.
    pub(crate) fn is_stop(&self) -> bool {
        matches!(self, JobError::Data(PrepareError::Tokenize(TokenizeError::Stopped(_))))
    }

    /// Whether another process in place of this rank's would not have the error, because it prepares the data again.
    pub(crate) fn is_lost_cache(&self) -> bool {
        matches!(self, JobError::Data(PrepareError::Cache(TokenCacheError::Io { action: "read", .. })))
    }

    /// The member that this rank could not reach, if that caused the error.
    pub(crate) fn unreachable(&self) -> Option<u32> {
        match self {
            JobError::Collective(error)
            | JobError::Exec(ExecError::Collective(GroupError::Failed { source: error, .. })) => match error {
                CollectiveError::Unreachable { rank, .. } => Some(*rank),
                CollectiveError::Aborted { lost, .. } => *lost,
                _ => None,
            },
            _ => None,
        }
    }

    /// Whether the user's files, keys or data are at fault, rather than this machine: exit code 2. A loss that is not
    /// finite counts as such a fault, because it comes from the data or the hyperparameters.
    pub fn is_input(&self) -> bool {
        if self.is_of_disk() {
            return false;
        }
        match self {
            JobError::Thread(error) => matches!(error, ThreadError::Device { .. }),
            // The job does not fit: a smaller one would.
            JobError::Alloc(error) => {
                matches!(error.source.kind(), ErrorKind::OutOfMemory | ErrorKind::ResourceBusy)
            }
            JobError::Exec(_) | JobError::Collective(_) => false,
            JobError::WorldTraces(_) | JobError::Launch(_) | JobError::RankLost { .. } => false,
            JobError::Corrupt(_) => false,
            JobError::Checkpoint(error) | JobError::UnreadableCheckpoint { source: error } => !error.is_outage(),
            JobError::NoIntactCheckpoint { source, .. } => !source.is_outage(),
            JobError::Superseded(_) | JobError::JobFailed(_) | JobError::Panicked(_) => false,
            JobError::DevicesLost(_) | JobError::SavedElsewhere { .. } | JobError::SavedNowhere { .. } => false,
            JobError::OfRank { is_input, .. } => *is_input,
            JobError::Command(CommandError::Output(_) | CommandError::Serve(_)) => false,
            JobError::Command(
                CommandError::NoEffect { .. } | CommandError::SameMesh { .. } | CommandError::NotSaved { .. },
            ) => false,
            JobError::Hub(error) => error.is_input(),
            JobError::Peer(error) => error.is_input(),
            JobError::ControlPlane(error) => error.is_input(),
            _ => true,
        }
    }
}

/// What a disk reports that is full, over its quota, defective, read-only after a defect, or away: later it may be better.
const DISK_FAULTS: [i32; 8] = [
    libc::ENOSPC,
    libc::EDQUOT,
    libc::EIO,
    libc::EROFS,
    libc::ESTALE,
    libc::ENOTCONN,
    libc::ETIMEDOUT,
    libc::EHOSTDOWN,
];

impl JobError {
    /// Whether a disk is at fault. The errors of files of several crates keep the text of the system's error, which ends with its
    /// number.
    fn is_of_disk(&self) -> bool {
        let text = chain(self);
        DISK_FAULTS.iter().any(|number| text.contains(&format!("(os error {number})")))
    }
}

/// The text of an error, followed by the causes that the text does not already contain.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::frame::FrameError;
    use phalanx_actors::quic::QuicError;
    use phalanx_actors::store::StoreError;
    use phalanx_actors::trust::TrustError;
    use phalanx_strategies::mesh::Mesh;
    use std::error::Error;

    fn no_json() -> serde_json::Error {
        serde_json::from_str::<u32>("{").unwrap_err()
    }

    #[test]
    fn request_that_cannot_be_met_is_an_input_error() {
        let errors: [JobError; 8] = [
            CommandError::NoRanks.into(),
            ControlPlaneError::NoAddress.into(),
            ExportError::NothingToMerge.into(),
            FitError::Machine { mesh: Mesh::ONE }.into(),
            GenerateError::NoLogits.into(),
            HostError::StartedAsRank.into(),
            PeerError::OtherModel.into(),
            PlanError::NotUserDefined.into(),
        ];

        for error in errors {
            assert!(error.is_input() && !error.is_consequence() && !error.is_of_the_world(), "{error:?}");
        }
    }

    #[test]
    fn full_disk_is_no_input_error() {
        let full = || std::io::Error::from_raw_os_error(libc::ENOSPC);
        let (path, reason) = (PathBuf::from("model"), full().to_string());
        let errors: [JobError; 3] = [
            JobError::Io { action: "write", path: path.clone(), source: full() },
            HfError::Io { action: "write", path: path.clone(), reason: reason.clone() }.into(),
            CheckpointError::Io { action: "write", path: path.clone(), reason }.into(),
        ];

        assert!(errors.iter().all(|error| !error.is_input()));
        let absent = JobError::Io { action: "read", path, source: ErrorKind::NotFound.into() };
        assert!(absent.is_input());
    }

    #[test]
    fn store_that_is_busy_or_silent_is_no_input_error_and_one_that_refuses_is() {
        let lost = || StoreError::Io { path: "s3://b/r".into(), action: "read", message: "status code: 503".into() };
        let of_checkpoints = |reason: &str| -> JobError {
            CheckpointError::Unreachable { action: "read", path: "s3://b/r".into(), reason: reason.into() }.into()
        };
        let errors: [JobError; 4] = [
            ControlPlaneError::Store(lost()).into(),
            ControlPlaneError::Trust(TrustError::Store(lost())).into(),
            ControlPlaneError::Transport(QuicError::Trust(TrustError::Store(lost()))).into(),
            of_checkpoints("Server returned non-2xx status code: 503 Service Unavailable"),
        ];

        assert!(errors.iter().all(|error| !error.is_input()), "{errors:?}");
        assert!(of_checkpoints("Server returned non-2xx status code: 403 Forbidden").is_input());
    }

    #[test]
    fn fault_of_another_process_or_of_the_network_is_no_input_error() {
        let errors: [JobError; 5] = [
            PeerError::NotRequested { member: 1 }.into(),
            PeerError::StartOrder.into(),
            ControlPlaneError::Decode(no_json()).into(),
            ControlPlaneError::cannot("start a thread")(std::io::ErrorKind::OutOfMemory.into()).into(),
            ControlPlaneError::Transport(QuicError::Lost("timed out".into())).into(),
        ];

        for error in errors {
            assert!(!error.is_input(), "{error:?}");
        }
    }

    #[test]
    fn control_plane_error_keeps_its_cause() {
        let source = QuicError::Refused("its term is over".into());

        let error = JobError::from(ControlPlaneError::NoAnswer { output_dir: "/job".into(), source: source.clone() });

        assert_eq!(error.source().and_then(|cause| cause.downcast_ref()), Some(&source));
        let text = "the coordinator of the job in /job does not answer: the coordinator refuses: its term is over";
        assert_eq!(chain(&error), text);
    }

    #[test]
    fn errors_of_other_libraries_are_sources_and_appear_once_in_the_text() {
        let errors: [JobError; 5] = [
            PlanError::Description { origin: "model".into(), source: no_json() }.into(),
            ExportError::Json { file: "config.json".into(), source: no_json() }.into(),
            PeerError::Decode { member: 1, source: no_json() }.into(),
            PeerError::StartMessage(no_json()).into(),
            ControlPlaneError::Decode(no_json()).into(),
        ];

        for error in errors {
            let source = error.source().and_then(|cause| cause.downcast_ref::<serde_json::Error>());
            assert_eq!(source.map(ToString::to_string), Some(no_json().to_string()), "{error:?}");
            assert_eq!(chain(&error).matches(&no_json().to_string()).count(), 1, "{error:?}");
        }
    }

    #[test]
    fn truncated_start_message_names_the_number_of_missing_bytes() {
        let error = JobError::from(PeerError::StartFrame(FrameError::CutShort { missing: 3 }));

        let text = "invalid start message for a rank: the stream ended 3 bytes before the end of a frame";
        assert_eq!(chain(&error), text);
    }
}
