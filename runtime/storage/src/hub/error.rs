//! Why a repository of the Hub cannot be used.

use std::path::{Path, PathBuf};

use thiserror::Error;

use super::name::{Kind, RepoName};
use crate::certificates::WAY_OUT;

/// Why a repository of the Hub cannot be used.
#[allow(missing_docs, reason = "each variant's message says what its fields are")]
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum HubError {
    /// The repository is neither a path nor in the cache.
    #[error(
        "{} {name} is neither a path here nor in the cache of the Hub at {}; download it with `{}`",
        kind.word(), cache.display(), command(*kind, name, revision)
    )]
    NotCached { kind: Kind, name: RepoName, revision: String, cache: PathBuf },
    /// The network must not be asked, and the cache does not have the repository.
    #[error(
        "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set, and the cache of the Hub at {} has no {} {name} with the revision \
         {revision}; unset the variable to download it",
        cache.display(), kind.word()
    )]
    Offline { kind: Kind, name: RepoName, revision: String, cache: PathBuf },
    /// The Hub does not give the repository.
    #[error(
        "the Hub has no {} {name} with the revision {revision}, or it is not public (status {status}); {}",
        kind.word(), way_out(*kind, *has_token)
    )]
    Refused { kind: Kind, name: RepoName, revision: String, status: u16, has_token: bool },
    /// The Hub cannot be reached, or fails.
    #[error("{endpoint} cannot be read: {reason}; run the command again to continue")]
    Network { endpoint: String, reason: String },
    /// Nobody whom this machine trusts has signed the certificate of the server.
    #[error("{endpoint} cannot be trusted: {reason}; {WAY_OUT}")]
    Untrusted { endpoint: String, reason: String },
    /// The list of files is not what the Hub gives.
    #[error("the list of files of the Hub cannot be used: {reason}")]
    Listing { reason: String },
    /// A file has other bytes than the list says.
    #[error("{} does not have the hash that the Hub gives for it; run the command again", file.display())]
    Damaged { file: PathBuf },
    /// Nothing may be uploaded without a token.
    #[error("the Hub takes {name} only with a token that may write: set HF_TOKEN, or run `hf auth login`")]
    NoToken { name: RepoName },
    /// The network must not be asked.
    #[error("HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set, so {name} cannot be uploaded; unset the variable")]
    PushOffline { name: RepoName },
    /// The Hub does not let the owner of the token write.
    #[error(
        "the Hub does not take {name} on the branch {revision} (status {status}); check the name, that the branch is there, and that the \
         token may write to it"
    )]
    NotWritable { name: RepoName, revision: String, status: u16 },
    /// The Hub answers otherwise than its protocol says.
    #[error("the Hub's answer to an upload cannot be used: {reason}")]
    Answer { reason: String },
    /// A folder has no file.
    #[error("{} has no files to upload", folder.display())]
    NothingToPush { folder: PathBuf },
    /// The name of a file cannot be a name on the Hub.
    #[error("the name of {} is not UTF-8, as names on the Hub are", path.display())]
    FileName { path: PathBuf },
    /// No revision has such a name.
    #[error("the revision {revision:?} cannot be the name of a branch, a tag or a commit")]
    Revision { revision: String },
    /// The cache cannot be written.
    #[error("cannot {action} {}: {reason}", path.display())]
    Io { action: &'static str, path: PathBuf, reason: String },
}

impl HubError {
    pub(super) fn io(action: &'static str, path: &Path, error: &std::io::Error) -> Self {
        Self::Io { action, path: path.to_owned(), reason: error.to_string() }
    }

    /// Whether what the user asked for is at fault, rather than the network or this machine.
    pub fn is_input(&self) -> bool {
        !matches!(
            self,
            Self::Network { .. }
                | Self::Untrusted { .. }
                | Self::Io { .. }
                | Self::Damaged { .. }
                | Self::Listing { .. }
                | Self::Answer { .. }
        )
    }
}

fn way_out(kind: Kind, has_token: bool) -> &'static str {
    match (kind, has_token) {
        (_, true) => "check the name, and on its page whether your account has access",
        (Kind::Model, false) => "check the name, use `--dataset` for a data set, or set HF_TOKEN",
        (Kind::Dataset, false) => "check the name, or set HF_TOKEN",
    }
}

/// The command that downloads a repository.
fn command(kind: Kind, name: &RepoName, revision: &str) -> String {
    let flag = match kind {
        Kind::Model => "",
        Kind::Dataset => "--dataset ",
    };
    let revision = if revision == crate::hub::name::MAIN { String::new() } else { format!(" --revision {revision}") };
    format!("phalanx fetch {flag}{name}{revision}")
}
