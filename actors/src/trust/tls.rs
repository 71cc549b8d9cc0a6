//! TLS 1.3 for both sides: mutual, except for a joining machine, which has no certificate yet.

use super::authority::{Authority, COORDINATOR};
use super::credential::Credential;
use super::name::Certified;
use super::{Fingerprint, TrustError, name};
use crate::wire;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, RootCertStore, ServerConfig,
    SignatureScheme,
};
use std::sync::Arc;
use std::time::SystemTime;

/// ALPN protocol of members. It ends with the protocol version.
pub const MEMBER: &[u8] = b"phalanx/9";
/// ALPN protocol of operators, whom also a coordinator that does not lead answers.
pub const OPERATOR: &[u8] = b"phalanx-operator/9";
/// ALPN protocol of joining machines.
pub const JOIN: &[u8] = b"phalanx-join/9";
const _: () = assert!(MEMBER[8] - b'0' == wire::VERSION && JOIN[13] - b'0' == wire::VERSION);
const _: () = assert!(OPERATOR[17] - b'0' == wire::VERSION);

/// The server name of every coordinator.
pub const SERVER_NAME: &str = COORDINATOR;

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn roots(authority: &CertificateDer<'static>) -> Result<Arc<RootCertStore>, TrustError> {
    let mut roots = RootCertStore::empty();
    roots.add(authority.clone()).map_err(|err| TrustError::malformed("an authority", err))?;
    Ok(Arc::new(roots))
}

/// Configuration of a coordinator. It verifies client certificates but does not require them, and accepts expired ones; the
/// listener restricts clients without a certificate to joining, and those with an expired one to renewing it (`TRUST-7`).
///
/// # Errors
/// When the credential is not from the authority.
pub fn coordinator(authority: &Authority, credential: &Credential) -> Result<ServerConfig, TrustError> {
    let malformed = |err: rustls::Error| TrustError::malformed("a coordinator's credential", err);
    let clients = WebPkiClientVerifier::builder_with_provider(roots(authority.certificate())?, provider())
        .allow_unauthenticated()
        .build()
        .map_err(|err| TrustError::malformed("an authority", err))?;
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(malformed)?
        .with_client_cert_verifier(Arc::new(AtAnyTime(clients)))
        .with_single_cert(credential.chain(), credential.private_key())
        .map_err(malformed)?;
    config.alpn_protocols = vec![MEMBER.to_vec(), OPERATOR.to_vec(), JOIN.to_vec()];
    // A resumed session would outlive the certificate of its handshake.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(config)
}

/// Configuration of a member with a credential. A restarting node uses it with [`JOIN`].
///
/// # Errors
/// When the credential is damaged.
pub fn member(credential: &Credential, alpn: &[u8]) -> Result<ClientConfig, TrustError> {
    let malformed = |err: rustls::Error| TrustError::malformed("a credential", err);
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(malformed)?
        .with_root_certificates(roots(credential.authority())?)
        .with_client_auth_cert(credential.chain(), credential.private_key())
        .map_err(malformed)?;
    config.alpn_protocols = vec![alpn.to_vec()];
    config.resumption = Resumption::disabled();
    Ok(config)
}

/// Configuration of a joining machine, which has only the join string (`TRUST-2`).
///
/// # Errors
/// Never with our provider.
pub fn stranger(authority: Fingerprint) -> Result<ClientConfig, TrustError> {
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|err| TrustError::malformed("a TLS configuration", err))?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Pinned { authority, provider: provider() }))
        .with_no_client_auth();
    config.alpn_protocols = vec![JOIN.to_vec()];
    config.resumption = Resumption::disabled();
    Ok(config)
}

/// Verifies the certificate of a client, except for its period: the key proves who the client is, also after a long absence.
#[derive(Debug)]
struct AtAnyTime(Arc<dyn ClientCertVerifier>);

impl ClientCertVerifier for AtAnyTime {
    fn offer_client_auth(&self) -> bool {
        self.0.offer_client_auth()
    }

    fn client_auth_mandatory(&self) -> bool {
        self.0.client_auth_mandatory()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.0.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        let malformed = |_| rustls::Error::InvalidCertificate(CertificateError::BadEncoding);
        let certified = Certified::read(end_entity).map_err(malformed)?;
        let end = certified.not_after.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        self.0.verify_client_cert(end_entity, intermediates, UnixTime::since_unix_epoch(end))
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}

/// Accepts a server with a coordinator's certificate from the authority with this key.
#[derive(Debug)]
struct Pinned {
    authority: Fingerprint,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let unknown = rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer);
        let of_ours = |certificate: &&CertificateDer<'_>| name::public_key(certificate) == Ok(self.authority);
        let authority = intermediates.iter().find(of_ours).ok_or(unknown.clone())?.clone().into_owned();
        let roots = roots(&authority).map_err(|_| unknown.clone())?;
        let verifier =
            WebPkiServerVerifier::builder_with_provider(roots, self.provider.clone()).build().map_err(|_| unknown)?;
        verifier.verify_server_cert(end_entity, &[], server_name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::PeerIncompatible(rustls::PeerIncompatible::Tls12NotOffered))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests;
