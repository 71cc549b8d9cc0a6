//! Errors about checkpoints; each message is one sentence.

use std::path::PathBuf;

use thiserror::Error;

use super::format::ManifestError;
use super::patience::Failure;

/// Why a checkpoint could not be written, found or read.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CheckpointError {
    /// A file operation failed.
    #[error("cannot {action} {}: {reason}", path.display())]
    Io {
        /// The attempted operation.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The operating system's error.
        reason: String,
    },
    /// The state to save could not be copied from the memory of the device.
    #[error("cannot copy the state of step {step} from the device: {reason}")]
    Copy {
        /// The step whose state was to be saved.
        step: u64,
        /// The device's error.
        reason: String,
    },
    /// The bytes that were written are not those of the state.
    #[error(
        "the copy of `{name}` for the checkpoint of step {step} differs from the state: a bit has flipped in memory"
    )]
    Corrupt {
        /// The tensor.
        name: String,
        /// The step whose state was to be saved.
        step: u64,
    },
    /// An object store did not answer, or refused: the state of its contents is unknown.
    #[error("cannot {action} {}: {reason}", path.display())]
    Unreachable {
        /// The attempted operation.
        action: &'static str,
        /// The URL.
        path: PathBuf,
        /// The error of the store or its client.
        reason: String,
    },
    /// The configured location cannot hold checkpoints.
    #[error("cannot keep checkpoints at {}: {reason}", path.display())]
    InvalidLocation {
        /// The path or URL.
        path: PathBuf,
        /// What is wrong with it, and what is supported.
        reason: String,
    },
    /// The directory's name is not that of a checkpoint.
    #[error("{} is not named like a checkpoint, step-<step>.g<generation>", path.display())]
    BadDirectory {
        /// The directory.
        path: PathBuf,
    },
    /// The save did not finish.
    #[error("{} is not committed: saving it did not finish", path.display())]
    Uncommitted {
        /// The directory.
        path: PathBuf,
    },
    /// A later world has begun.
    #[error("generation {latest} has replaced this world, which is of generation {generation} and saves no more")]
    Superseded {
        /// The generation of the world that saves.
        generation: u64,
        /// The latest generation on record.
        latest: u64,
    },
    /// The checkpoint was saved without a comparison of the copies of its state, and an older one after such a comparison.
    #[error("it was saved unverified; {} was verified", older.display())]
    NotCompared {
        /// The older checkpoint.
        older: PathBuf,
    },
    /// A later run began again, or went back to an earlier checkpoint.
    #[error("it is of a run that was given up")]
    GivenUp,
    /// The commit marker is malformed.
    #[error("{} is damaged: it is not a commit line of this format", path.display())]
    BadCommit {
        /// The marker.
        path: PathBuf,
    },
    /// The manifest or an index differs from the committed one.
    #[error("{} is damaged: its hash is {found}, but {expected} was committed", path.display())]
    ManifestHash {
        /// The manifest or index.
        path: PathBuf,
        /// The hash in the commit marker or the manifest.
        expected: String,
        /// The hash of the file.
        found: String,
    },
    /// The manifest or an index contradicts itself, its marker, its directory or another index.
    #[error("{} does not describe a checkpoint: {reason}", path.display())]
    BadManifest {
        /// The manifest or index, or the directory about to be committed.
        path: PathBuf,
        /// What is wrong.
        reason: ManifestError,
    },
    /// A path that should be a regular file is something else.
    #[error("{} is not a regular file", path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
    /// A file of a committed checkpoint does not exist.
    #[error("{} is missing, although its checkpoint was committed", path.display())]
    MissingFile {
        /// The file.
        path: PathBuf,
    },
    /// A file is shorter or longer than when it was saved.
    #[error("{} is damaged: it has {found} bytes, but {expected} were saved", path.display())]
    FileLength {
        /// The file.
        path: PathBuf,
        /// The length in the manifest.
        expected: u64,
        /// The length found.
        found: u64,
    },
    /// A file exceeds the format's length limit.
    #[error("{} has {found} bytes, more than the {max} allowed", path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
        /// The limit.
        max: u64,
        /// The length found.
        found: u64,
    },
    /// The content of a file differs from what was saved.
    #[error("{} is damaged: bytes {start}..{end} are not those that were saved", path.display())]
    FileHash {
        /// The file.
        path: PathBuf,
        /// First byte of the part whose hash differs.
        start: u64,
        /// Byte after its last.
        end: u64,
    },
    /// The checkpoint has no such tensor or extra file.
    #[error("the checkpoint {} has no `{name}`", path.display())]
    Absent {
        /// The checkpoint.
        path: PathBuf,
        /// The requested name.
        name: String,
    },
    /// The box or the buffer does not fit the tensor; a fault of the calling code.
    #[error("box at {offset:?} of shape {shape:?} in {len} bytes does not fit `{name}` of shape {global:?}")]
    Request {
        /// The tensor.
        name: String,
        /// Its shape.
        global: Vec<usize>,
        /// Where the box starts.
        offset: Vec<usize>,
        /// The shape of the box.
        shape: Vec<usize>,
        /// Bytes of the buffer.
        len: usize,
    },
    /// A piece to be saved contradicts itself or another piece of its tensor; a fault of the calling code.
    #[error("cannot save `{name}`: {reason}")]
    BadPiece {
        /// The tensor or extra file.
        name: String,
        /// What is wrong.
        reason: &'static str,
    },
    /// A writer's index is missing: the writer has not finished, or writes to another disk.
    #[error("writer {writer} of {n_writers} has not written its part of {}", path.display())]
    MissingPart {
        /// The checkpoint.
        path: PathBuf,
        /// The writer.
        writer: u32,
        /// How many writers there are.
        n_writers: u32,
    },
    /// Other writers could not write their parts, so this step has no checkpoint; each of them reports its reason.
    #[error("the save of step {step} was abandoned: {n_failed} other writers failed")]
    OthersFailed {
        /// The step.
        step: u64,
        /// How many failed.
        n_failed: u64,
    },
    /// Writers could not agree whether the checkpoint is complete.
    #[error("writers of the checkpoint of step {step} could not agree: {reason}")]
    Agreement {
        /// The step.
        step: u64,
        /// The error of their exchange.
        reason: String,
    },
}

/// What a failed read shows about the checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadFailure {
    /// There is no checkpoint: saving it did not finish.
    Unfinished,
    /// The content was read and is not what was saved, or the store answered that a file does not exist.
    Damaged,
    /// The content was not read, or this build cannot judge it; the checkpoint may be intact.
    Unreadable,
}

impl CheckpointError {
    /// What this error of a read shows about the checkpoint. Only evidence counts as damage: a refused or failed system
    /// call, a silent store and a format of a later build are none.
    pub const fn read_failure(&self) -> ReadFailure {
        match self {
            Self::Uncommitted { .. } | Self::NotCompared { .. } | Self::GivenUp => ReadFailure::Unfinished,
            Self::BadManifest { reason: ManifestError::Format(_), .. } => ReadFailure::Unreadable,
            Self::BadCommit { .. }
            | Self::ManifestHash { .. }
            | Self::BadManifest { .. }
            | Self::MissingFile { .. }
            | Self::FileLength { .. }
            | Self::TooLong { .. }
            | Self::FileHash { .. }
            | Self::Absent { .. } => ReadFailure::Damaged,
            Self::Io { .. }
            | Self::Unreachable { .. }
            | Self::InvalidLocation { .. }
            | Self::BadDirectory { .. }
            | Self::NotAFile { .. }
            | Self::Request { .. }
            | Self::BadPiece { .. }
            | Self::MissingPart { .. }
            | Self::OthersFailed { .. }
            | Self::Superseded { .. }
            | Self::Copy { .. }
            | Self::Corrupt { .. }
            | Self::Agreement { .. } => ReadFailure::Unreadable,
        }
    }

    /// Whether an object store was busy, silent or out of reach, and has not refused the request.
    pub fn is_outage(&self) -> bool {
        matches!(self, Self::Unreachable { reason, .. } if Failure::of_text(reason) == Failure::Temporary)
    }

    pub(super) fn io(action: &'static str, path: impl Into<PathBuf>, error: &std::io::Error) -> Self {
        let (path, reason) = (path.into(), error.to_string());
        match error.kind() {
            std::io::ErrorKind::NotConnected => Self::Unreachable { action, path, reason },
            _ => Self::Io { action, path, reason },
        }
    }
}

/// The text of an error on one line, shortened: clients quote whole server responses.
pub(super) fn one_line(error: &dyn std::error::Error) -> String {
    let text: Vec<String> = error.to_string().split_whitespace().map(str::to_owned).collect();
    text.join(" ").trim_end_matches('.').chars().take(500).collect()
}
