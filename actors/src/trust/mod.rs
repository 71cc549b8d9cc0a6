//! Authentication of the members of a job, and their roles.
//!
//! A job has one certificate authority, created when its first coordinator starts. Every peer on the network presents a
//! certificate of it, and only this certificate decides the peer's permissions. A machine gets its first certificate for a
//! *token*, which the user passes on as part of a join string. The string also names the authority's key, so that both
//! sides authenticate each other before the first byte is sent.
//!
//! Code map:
//! - [`name`]: the holder of a certificate;
//! - [`authority`]: the key of the job; issues certificates; [`credential`]: a certificate with its key;
//!   `keys`: making and reading keys; [`validity`]: the period of a certificate;
//! - [`token`]: a secret and its proof; [`join`]: the join string; [`register`]: the nodes that have joined;
//! - [`tls`]: the configurations of both sides; [`mod@file`]: private files.
//!
//! Invariants:
//! - `TRUST-1` The secret of a token is never sent over the network, only a proof that is valid for one TLS connection.
//! - `TRUST-2` A joining machine sends data only to a server whose authority has the key in the join string.
//! - `TRUST-3` Role, node and boot of a peer come from its certificate. The authority sets them; from a signing request it
//!   takes only the public key.
//! - `TRUST-4` A key that has joined keeps its node id, and each join raises its boot. Both are durable before the node is
//!   admitted.
//! - `TRUST-5` A secret file that all users can read is rejected. Rights of its group are taken back, if it is the user's own.
//! - `TRUST-6` An authority with nodes never gets another key.
//! - `TRUST-7` The key of a node outlives its certificates: with an expired one it can do nothing but renew it. A boot that is
//!   not the latest of its node is not renewed.
//!
//! Deliberately absent: revocation of nodes (a token can be revoked at once; nodes that have joined belong to the job), and
//! passwords.

use std::fmt;
use std::path::PathBuf;

pub mod authority;
pub mod credential;
pub mod file;
pub mod join;
pub(crate) mod keys;
pub mod name;
pub mod place;
pub mod register;
pub mod tls;
pub mod token;
pub mod validity;

/// SHA-256 of a public key in its X.509 form.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub struct Fingerprint(pub [u8; 32]);

impl Fingerprint {
    /// Fingerprint of a public key.
    pub fn of(public_key: &[u8]) -> Fingerprint {
        let digest = ring::digest::digest(&ring::digest::SHA256, public_key);
        Fingerprint(digest.as_ref().try_into().expect("SHA-256 has 32 bytes"))
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&data_encoding::HEXLOWER.encode(&self.0[..8]))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Why keys, certificates or their files cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TrustError {
    /// An operation on a file failed.
    #[error("cannot {action} {path}: {kind}")]
    File {
        /// The operation.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's error.
        kind: std::io::ErrorKind,
    },
    /// Other users may read a secret (`TRUST-5`).
    #[error("expected {path} to be readable only by its owner (mode 600), found mode {mode:o}: run chmod 600 on it")]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// The contents of a file are invalid.
    #[error("{path} is damaged: {why}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The defect.
        why: String,
    },
    /// A key or a certificate is invalid.
    #[error("expected {expected}, but {why}")]
    Malformed {
        /// The expected object.
        expected: &'static str,
        /// The defect.
        why: String,
    },
    /// The key of the authority is missing or damaged (`TRUST-6`).
    #[error(
        "{path} is {found}, but {n_nodes} node(s) have joined with certificates of this key and would accept no coordinator \
         with another one; restore the file, or end the nodes and remove the folder that it was in, and the job begins again \
         from its last checkpoint"
    )]
    LostKey {
        /// The file.
        path: PathBuf,
        /// Number of nodes that have joined.
        n_nodes: usize,
        /// What became of it.
        found: String,
    },
    /// The register is damaged.
    #[error(
        "{path} is damaged: {why}; it lists the nodes that have joined: restore the file, or end the nodes and remove the folder \
         that it is in, and the job begins again from its last checkpoint"
    )]
    LostRegister {
        /// The file.
        path: PathBuf,
        /// The defect.
        why: String,
    },
    /// The store that holds the secrets does not answer.
    #[error(transparent)]
    Store(#[from] crate::store::StoreError),
    /// The system has no random numbers.
    #[error("the operating system provides no random numbers")]
    NoEntropy,
}

impl TrustError {
    fn malformed(expected: &'static str, why: impl fmt::Display) -> TrustError {
        TrustError::Malformed { expected, why: why.to_string() }
    }
}

/// Random bytes from the operating system.
fn random<const N: usize>() -> Result<[u8; N], TrustError> {
    let mut bytes = [0; N];
    ring::rand::SecureRandom::fill(&ring::rand::SystemRandom::new(), &mut bytes).map_err(|_| TrustError::NoEntropy)?;
    Ok(bytes)
}
