//! The certificate authority of a job: one key, kept in one file.
//!
//! Its own certificate is made anew at each start. That is as good as keeping it: nodes know the authority by its
//! subject and key, which stay.

use super::credential::Credential;
use super::name::{Name, Role};
use super::{Fingerprint, TrustError, file};
use phalanx_strategies::elastic::identity::JobId;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, PublicKeyData, SanType, SerialNumber,
    SubjectPublicKeyInfo,
};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use std::path::Path;
use std::time::{Duration, SystemTime};
use time::OffsetDateTime;

/// The name that a coordinator's certificate carries for TLS, so that no other member can pose as one.
pub(super) const COORDINATOR: &str = "coordinator.phalanx";

const KEY_FILE: &str = "authority.key";

/// From when to when a certificate is good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    /// When it becomes valid.
    pub not_before: SystemTime,
    /// When it expires.
    pub not_after: SystemTime,
}

impl Validity {
    /// How long certificates of nodes live unless told otherwise.
    pub const LIFETIME: Duration = Duration::from_secs(24 * 60 * 60);
    /// How far the clocks of two machines may be apart.
    pub const CLOCK_SKEW_MAX: Duration = Duration::from_secs(5 * 60);

    /// From now on, and a little before: the other machine's clock may be behind.
    pub fn starting(now: SystemTime, lifetime: Duration) -> Validity {
        Validity { not_before: now - Validity::CLOCK_SKEW_MAX, not_after: now + lifetime }
    }
}

/// See the [module](self).
#[derive(Debug)]
pub struct Authority {
    job: JobId,
    certificate: CertificateDer<'static>,
    fingerprint: Fingerprint,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    /// The authority whose key is in a directory; it is made if there is none.
    ///
    /// # Errors
    /// When the directory cannot be used, or others may read the key (`TRUST-5`).
    pub fn open(dir: &Path, job: JobId) -> Result<Authority, TrustError> {
        file::create_dir(dir)?;
        let path = dir.join(KEY_FILE);
        let key = match file::read(&path)? {
            Some(der) => read_key(&der).map_err(|why| TrustError::Damaged { path, why: why.to_string() })?,
            None => {
                let key = new_key()?;
                file::write(&path, key.serialized_der())?;
                tracing::info!(%job, dir = %dir.display(), "made the certificate authority of the job");
                key
            }
        };
        Authority::with_key(job, key)
    }

    fn with_key(job: JobId, key: KeyPair) -> Result<Authority, TrustError> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, format!("phalanx {job}"));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        params.serial_number = Some(SerialNumber::from(1_u64));
        let fingerprint = Fingerprint::of(&key.subject_public_key_info());
        let certificate = params.self_signed(&key).map_err(|err| TrustError::malformed("an authority", err))?;
        Ok(Authority { job, certificate: certificate.der().clone(), fingerprint, issuer: Issuer::new(params, key) })
    }

    /// The job.
    pub fn job(&self) -> JobId {
        self.job
    }

    /// Of its key.
    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    /// Its own certificate.
    pub fn certificate(&self) -> &CertificateDer<'static> {
        &self.certificate
    }

    /// A certificate for a public key in X.509 form (`TRUST-3`).
    ///
    /// # Errors
    /// When the key is none that we know.
    pub fn issue(
        &self,
        public_key: &[u8],
        role: Role,
        validity: Validity,
    ) -> Result<CertificateDer<'static>, TrustError> {
        let malformed = |err| TrustError::malformed("a public key", err);
        let public_key = SubjectPublicKeyInfo::from_der(public_key).map_err(malformed)?;
        let name = Name { job: self.job, role };
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        let uri = name.to_string().try_into().expect("a name is plain ASCII");
        params.subject_alt_names = vec![SanType::URI(uri)];
        if role == Role::Coordinator {
            params.subject_alt_names.push(SanType::DnsName(COORDINATOR.try_into().expect("it is plain ASCII")));
            params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        } else {
            params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        }
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.not_before = OffsetDateTime::from(validity.not_before);
        params.not_after = OffsetDateTime::from(validity.not_after);
        params.serial_number = Some(SerialNumber::from(super::random::<16>()?.to_vec()));
        let certificate = params.signed_by(&public_key, &self.issuer).map_err(malformed)?;
        Ok(certificate.der().clone())
    }

    /// A certificate with a new key, for those who are where the authority is: the coordinator itself and operators.
    ///
    /// # Errors
    /// When there are no random numbers.
    pub fn credential(&self, role: Role, validity: Validity) -> Result<Credential, TrustError> {
        let key = new_key()?;
        let certificate = self.issue(&key.subject_public_key_info(), role, validity)?;
        Credential::new(key.serialized_der().to_vec(), certificate, self.certificate.clone())
    }

    /// A secret that is the same at each start, for one purpose.
    pub fn secret(&self, purpose: &str) -> [u8; 32] {
        let key = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, self.issuer.key().serialized_der());
        let tag = ring::hmac::sign(&key, format!("phalanx {purpose}").as_bytes());
        tag.as_ref().try_into().expect("HMAC-SHA256 has 32 bytes")
    }
}

/// A new key pair.
///
/// # Errors
/// When there are no random numbers.
pub(super) fn new_key() -> Result<KeyPair, TrustError> {
    KeyPair::generate().map_err(|_| TrustError::NoEntropy)
}

pub(crate) fn read_key(der: &[u8]) -> Result<KeyPair, TrustError> {
    KeyPair::from_pkcs8_der_and_sign_algo(&PrivatePkcs8KeyDer::from(der), &rcgen::PKCS_ECDSA_P256_SHA256)
        .map_err(|err| TrustError::malformed("a P-256 key", err))
}

/// The public key of a signing request, once it is shown that its sender has the private one.
///
/// # Errors
/// When it is no signing request, or its signature is not by its key.
pub(crate) fn requested_key(csr: &[u8]) -> Result<Vec<u8>, TrustError> {
    let request = CertificateSigningRequestParams::from_der(&csr.into())
        .map_err(|err| TrustError::malformed("a certificate signing request", err))?;
    Ok(request.public_key.subject_public_key_info())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trust::name::Certified;
    use phalanx_strategies::elastic::identity::{Incarnation, NodeId};

    const NODE: Role = Role::Node { node: NodeId(3), boot: Incarnation(9) };

    fn validity() -> Validity {
        Validity::starting(SystemTime::now(), Validity::LIFETIME)
    }

    #[test]
    fn an_authority_is_the_same_after_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let first = Authority::open(dir.path(), JobId(7)).unwrap();

        let second = Authority::open(dir.path(), JobId(7)).unwrap();

        assert_eq!(first.fingerprint(), second.fingerprint());
        assert_eq!(first.secret("reset"), second.secret("reset"));
        assert_ne!(first.secret("reset"), first.secret("other"));
    }

    // TRUST-3
    #[test]
    fn a_certificate_names_its_holder_and_ends() {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::open(dir.path(), JobId(7)).unwrap();
        let key = new_key().unwrap();
        let validity = validity();

        let certificate = authority.issue(&key.subject_public_key_info(), NODE, validity).unwrap();

        let certified = Certified::read(&certificate).unwrap();
        assert_eq!(certified.name, Name { job: JobId(7), role: NODE });
        assert_eq!(certified.public_key, key.subject_public_key_info());
        assert!(validity.not_after.duration_since(certified.not_after).unwrap() < Duration::from_secs(1));
    }

    // TRUST-3
    #[test]
    fn names_that_a_request_asks_for_are_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::open(dir.path(), JobId(7)).unwrap();
        let key = new_key().unwrap();
        let mut params = CertificateParams::new(vec![COORDINATOR.to_owned()]).unwrap();
        params.subject_alt_names.push(SanType::URI("phalanx://7/operator".try_into().unwrap()));
        let csr = params.serialize_request(&key).unwrap();

        let asked = requested_key(csr.der()).unwrap();
        let certificate = authority.issue(&asked, NODE, validity()).unwrap();

        assert_eq!(Certified::read(&certificate).unwrap().name.role, NODE);
        assert!(!certificate.windows(COORDINATOR.len()).any(|bytes| bytes == COORDINATOR.as_bytes()));
    }

    #[test]
    fn a_request_that_its_key_did_not_sign_is_refused() {
        let key = new_key().unwrap();
        let mut csr = CertificateParams::default().serialize_request(&key).unwrap().der().to_vec();
        let last = csr.len() - 1;
        csr[last] ^= 1;

        assert!(requested_key(&csr).is_err());
        assert!(requested_key(b"garbage").is_err());
    }

    #[test]
    fn a_damaged_key_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        file::write(&dir.path().join(KEY_FILE), b"not a key").unwrap();

        let err = Authority::open(dir.path(), JobId(7)).unwrap_err();

        assert!(err.to_string().contains(KEY_FILE), "{err}");
    }

    // WIRE-1
    #[test]
    fn damaged_certificates_and_requests_do_no_harm() {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::open(dir.path(), JobId(7)).unwrap();
        let credential = authority.credential(NODE, validity()).unwrap();
        let certificate = credential.certificate().to_vec();
        let request = CertificateParams::default().serialize_request(&new_key().unwrap()).unwrap().der().to_vec();

        let n_bad = crate::fuzz::cases(100_000, &[certificate], |_, der| Certified::read(&der.into()).is_ok());
        assert!(n_bad > 0);
        // Some bytes around what is signed can be changed; the key cannot.
        let key = requested_key(&request).unwrap();
        let n_bad = crate::fuzz::cases(20_000, &[request], |case, der| {
            let asked = requested_key(der);
            assert!(asked.as_ref().is_ok_and(|asked| *asked == key) || asked.is_err(), "{case:?}");
            asked.is_ok()
        });
        assert!(n_bad > 0);
    }
}
