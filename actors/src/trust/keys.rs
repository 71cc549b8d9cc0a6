//! Keys of certificates: new ones, stored ones, and those of requests.

use crate::trust::TrustError;
use rcgen::{CertificateSigningRequestParams, KeyPair, PublicKeyData};
use rustls::pki_types::PrivatePkcs8KeyDer;

/// A new key pair.
///
/// # Errors
/// When the system has no random numbers.
pub(super) fn new_key() -> Result<KeyPair, TrustError> {
    KeyPair::generate().map_err(|_| TrustError::NoEntropy)
}

pub(crate) fn read_key(der: &[u8]) -> Result<KeyPair, TrustError> {
    KeyPair::from_pkcs8_der_and_sign_algo(&PrivatePkcs8KeyDer::from(der), &rcgen::PKCS_ECDSA_P256_SHA256)
        .map_err(|err| TrustError::malformed("a P-256 key", err))
}

/// Verifies the signature of a signing request and returns its public key.
///
/// # Errors
/// When the bytes are not a signing request, or the signature is not by its key.
pub(crate) fn requested_key(csr: &[u8]) -> Result<Vec<u8>, TrustError> {
    let request = CertificateSigningRequestParams::from_der(&csr.into())
        .map_err(|err| TrustError::malformed("a certificate signing request", err))?;
    Ok(request.public_key.subject_public_key_info())
}
