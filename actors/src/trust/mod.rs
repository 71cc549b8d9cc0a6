//! Authentication of the members of a job, and their roles.
//!
//! A job has one certificate authority, made when its first coordinator starts. Everything on the network shows a
//! certificate of it; what the holder may do is read from that certificate and never from what it says. A machine gets
//! its first certificate for a *token*, which it is given on paper as part of a join string; the string also names the
//! authority's key, so that trust goes both ways before the first byte is sent.
//!
//! Code map:
//! - [`name`]: what a certificate says of its holder;
//! - [`authority`]: the key of the job; issues certificates; [`credential`]: a certificate with its key;
//! - [`token`]: a secret and its proof; [`join`]: the join string; [`register`]: the nodes that have joined;
//! - [`tls`]: the configurations of both sides; [`mod@file`]: files that only their owner may read.
//!
//! Invariants:
//! - `TRUST-1` The secret of a token travels on paper only. What travels on the network is a proof that is good for one
//!   TLS connection.
//! - `TRUST-2` Whoever answers to a join string holds the key that the string names, or nothing is sent to it.
//! - `TRUST-3` Role, node and boot of a peer come from its certificate. The authority writes them; of a request it
//!   takes the public key and nothing else.
//! - `TRUST-4` A key that has joined keeps its node id; each join of it raises its boot. Both are durable before the
//!   node is admitted.
//! - `TRUST-5` A secret file that others can read is rejected.
//!
//! Deliberately absent: revocation of certificates (they live a day; a token can be revoked at once), and passwords.

use std::fmt;
use std::path::PathBuf;

pub mod authority;
pub mod credential;
pub mod file;
pub mod join;
pub mod name;
pub mod register;
pub mod tls;
pub mod token;

/// SHA-256 of a public key in its X.509 form.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub struct Fingerprint(pub [u8; 32]);

impl Fingerprint {
    /// Of a public key.
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
    /// The operating system refuses.
    #[error("cannot {action} {path}: {kind}")]
    File {
        /// What was tried.
        action: &'static str,
        /// With what.
        path: PathBuf,
        /// In the system's words.
        kind: std::io::ErrorKind,
    },
    /// Others may read a secret (`TRUST-5`).
    #[error("{path} must be readable by its owner only (mode 600), found mode {mode:o}")]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// A file is not what it should be.
    #[error("{path} is damaged: {why}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// A key or a certificate is not one.
    #[error("expected {expected}, but {why}")]
    Malformed {
        /// What it should be.
        expected: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// The machine gives no random numbers.
    #[error("the operating system gives no random numbers")]
    NoEntropy,
}

impl TrustError {
    fn malformed(expected: &'static str, why: impl fmt::Display) -> TrustError {
        TrustError::Malformed { expected, why: why.to_string() }
    }
}

/// Random bytes of the operating system.
fn random<const N: usize>() -> Result<[u8; N], TrustError> {
    let mut bytes = [0; N];
    ring::rand::SecureRandom::fill(&ring::rand::SystemRandom::new(), &mut bytes).map_err(|_| TrustError::NoEntropy)?;
    Ok(bytes)
}
