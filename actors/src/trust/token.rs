//! Join tokens, and proofs of their secrets that do not reveal them.

use super::{TrustError, random};
use ring::hmac;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Length of a TLS connection's exported keying material, which is unique to the connection.
pub const CHANNEL_BYTES: usize = 32;
/// Label of the export (RFC 8446 §7.5).
pub const CHANNEL_LABEL: &[u8] = b"EXPERIMENTAL phalanx join";

/// Id of a token; not secret.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TokenId(pub [u8; 8]);

/// The secret of a token (`TRUST-1`).
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Secret(pub(super) [u8; 16]);

/// A token as part of a join string.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token {
    /// Id of the token.
    pub id: TokenId,
    /// Secret of the token.
    pub secret: Secret,
}

impl Token {
    /// A new token.
    ///
    /// # Errors
    /// When the system has no random numbers.
    pub fn new() -> Result<Token, TrustError> {
        Ok(Token { id: TokenId(random()?), secret: Secret(random()?) })
    }
}

/// Proves possession of a secret, for one TLS connection and one signing request (`TRUST-1`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Proof([u8; 32]);

impl Proof {
    /// Creates a proof. `channel` is the TLS connection's exported keying material.
    pub fn new(secret: &Secret, channel: &[u8; CHANNEL_BYTES], signing_request: &[u8]) -> Proof {
        let tag = hmac::sign(&secret.key(), &statement(channel, signing_request));
        Proof(tag.as_ref().try_into().expect("HMAC-SHA256 has 32 bytes"))
    }

    /// Whether the proof is valid. Runs in constant time.
    pub fn is_of(&self, secret: &Secret, channel: &[u8; CHANNEL_BYTES], signing_request: &[u8]) -> bool {
        hmac::verify(&secret.key(), &statement(channel, signing_request), &self.0).is_ok()
    }
}

/// The bytes to sign. They are unambiguous because the first two parts have fixed lengths.
fn statement(channel: &[u8; CHANNEL_BYTES], signing_request: &[u8]) -> Vec<u8> {
    [b"phalanx join 1".as_slice(), channel, signing_request].concat()
}

impl Secret {
    fn key(&self) -> hmac::Key {
        hmac::Key::new(hmac::HMAC_SHA256, &self.0)
    }
}

impl fmt::Display for TokenId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&data_encoding::HEXLOWER.encode(&self.0))
    }
}

impl fmt::Debug for TokenId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // TRUST-1
    #[test]
    fn proof_is_valid_for_one_secret_one_connection_and_one_request() {
        let token = Token::new().unwrap();
        let proof = Proof::new(&token.secret, &[1; 32], b"request");

        assert!(proof.is_of(&token.secret, &[1; 32], b"request"));
        assert!(!proof.is_of(&Token::new().unwrap().secret, &[1; 32], b"request"));
        assert!(!proof.is_of(&token.secret, &[2; 32], b"request"));
        assert!(!proof.is_of(&token.secret, &[1; 32], b"another"));
    }

    #[test]
    fn token_does_not_print_its_secret() {
        let token = Token { id: TokenId([0xab; 8]), secret: Secret([7; 16]) };

        assert_eq!(format!("{token:?}"), "Token { id: abababababababab, secret: (secret) }");
    }
}
