//! The certificate authority of a job: one key, kept in one file.
//!
//! Each start creates a new certificate of the authority itself. This is safe because nodes identify the authority by its
//! subject and key, which do not change.

use super::credential::Credential;
use super::keys::{new_key, read_key};
use super::name::{Name, Role};
use super::place::Place;
use super::register::Register;
use super::validity::Validity;
use super::{Fingerprint, TrustError};
use phalanx_strategies::elastic::identity::JobId;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, PublicKeyData, SanType, SerialNumber, SubjectPublicKeyInfo,
};
use rustls::pki_types::CertificateDer;
use time::OffsetDateTime;

/// The name that a coordinator's certificate carries for TLS, so that no other member can pose as one.
pub(super) const COORDINATOR: &str = "coordinator.phalanx";

const KEY_FILE: &str = "authority.key";

/// The job's key, and the certificate that this start has made for it.
#[derive(Debug)]
pub struct Authority {
    job: JobId,
    certificate: CertificateDer<'static>,
    fingerprint: Fingerprint,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    /// Opens the authority whose key is at a place, or creates it.
    ///
    /// # Errors
    /// When the place cannot be used, others may read the key (`TRUST-5`), or the key is missing or damaged although nodes have
    /// joined with it (`TRUST-6`).
    pub fn open(place: impl Into<Place>, job: JobId) -> Result<Authority, TrustError> {
        let place = place.into();
        place.create()?;
        let path = place.path(KEY_FILE);
        let read = place.read(KEY_FILE)?.map(|der| read_key(&der).map_err(|why| format!("damaged ({why})")));
        let key = match read.unwrap_or_else(|| Err("missing".to_owned())) {
            Ok(key) => key,
            Err(found) => {
                let n_nodes = Register::open(&place)?.n_nodes();
                if n_nodes > 0 {
                    return Err(TrustError::LostKey { path, n_nodes, found });
                }
                let key = new_key()?;
                place.write(KEY_FILE, key.serialized_der())?;
                tracing::info!(%job, key = %path.display(), "created the certificate authority of the job");
                key
            }
        };
        Authority::with_key(job, key)
    }

    fn with_key(job: JobId, key: KeyPair) -> Result<Authority, TrustError> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        // The same for all jobs of a key: a member of an earlier job must understand that it is rejected for its job.
        params.distinguished_name.push(DnType::CommonName, "phalanx");
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

    /// Fingerprint of the authority's key.
    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    /// Certificate of the authority.
    pub fn certificate(&self) -> &CertificateDer<'static> {
        &self.certificate
    }

    /// Issues a certificate for a public key in X.509 form (`TRUST-3`).
    ///
    /// # Errors
    /// When the format or the algorithm of the key is not supported.
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
            params.subject_alt_names.push(SanType::DnsName(COORDINATOR.try_into().expect("the name is plain ASCII")));
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

    /// Issues a certificate with a new key, for holders on the authority's machine: the coordinator and operators.
    ///
    /// # Errors
    /// When the system has no random numbers.
    pub fn credential(&self, role: Role, validity: Validity) -> Result<Credential, TrustError> {
        let key = new_key()?;
        let certificate = self.issue(&key.subject_public_key_info(), role, validity)?;
        Credential::new(key.serialized_der().to_vec(), certificate, self.certificate.clone())
    }

    /// A secret for one purpose, the same at each start.
    pub fn secret(&self, purpose: &str) -> [u8; 32] {
        let key = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, self.issuer.key().serialized_der());
        let tag = ring::hmac::sign(&key, format!("phalanx {purpose}").as_bytes());
        tag.as_ref().try_into().expect("HMAC-SHA256 has 32 bytes")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trust::keys::requested_key;
    use crate::trust::name::Certified;
    use phalanx_strategies::elastic::identity::{Incarnation, NodeId};
    use std::time::{Duration, SystemTime};

    const NODE: Role = Role::Node { node: NodeId(3), boot: Incarnation(9) };

    fn validity() -> Validity {
        Validity::starting(SystemTime::now(), Validity::LIFETIME)
    }

    #[test]
    fn authority_is_the_same_after_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let first = Authority::open(dir.path(), JobId(7)).unwrap();

        let second = Authority::open(dir.path(), JobId(7)).unwrap();

        assert_eq!(first.fingerprint(), second.fingerprint());
        assert_eq!(first.secret("reset"), second.secret("reset"));
        assert_ne!(first.secret("reset"), first.secret("other"));
    }

    #[test]
    fn certificate_is_due_after_two_thirds_of_its_lifetime_and_after_the_clock_was_set_back() {
        let (now, hour) = (SystemTime::now(), Duration::from_secs(3600));
        let validity = Validity::starting(now, Validity::LIFETIME);

        let due = |at: SystemTime| validity.is_due(at);

        assert_eq!([due(now), due(now + 15 * hour), due(now + 16 * hour)], [false, false, true]);
        // A clock that jumps by an hour, in either direction, leaves the certificate valid.
        assert_eq!([due(now - hour), due(now + hour)], [true, false]);
        assert!(validity.not_before < now - hour && now + hour < validity.not_after);
        // A machine that was suspended for 26 hours.
        assert!(due(now + 26 * hour));
    }

    // TRUST-3
    #[test]
    fn certificate_names_its_holder_and_its_end() {
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
    fn names_in_a_signing_request_are_ignored() {
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
    fn signing_request_with_a_wrong_signature_is_refused() {
        let key = new_key().unwrap();
        let mut csr = CertificateParams::default().serialize_request(&key).unwrap().der().to_vec();
        let last = csr.len() - 1;
        csr[last] ^= 1;

        assert!(requested_key(&csr).is_err());
        assert!(requested_key(b"garbage").is_err());
    }

    // TRUST-6
    #[test]
    fn damaged_key_is_replaced_as_long_as_no_node_has_joined() {
        let dir = tempfile::tempdir().unwrap();
        let first = Authority::open(dir.path(), JobId(7)).unwrap();
        crate::trust::file::write(&dir.path().join(KEY_FILE), b"").unwrap();

        let second = Authority::open(dir.path(), JobId(7)).unwrap();

        assert_ne!(second.fingerprint(), first.fingerprint());
    }

    // WIRE-1
    #[test]
    fn damaged_certificates_and_requests_never_change_the_key() {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::open(dir.path(), JobId(7)).unwrap();
        let credential = authority.credential(NODE, validity()).unwrap();
        let certificate = credential.certificate().to_vec();
        let request = CertificateParams::default().serialize_request(&new_key().unwrap()).unwrap().der().to_vec();

        let n_bad = crate::fuzz::cases(100_000, &[certificate], |_, der| Certified::read(&der.into()).is_ok());
        assert!(n_bad > 0);
        // Some bytes around the signed part may change; the key may not.
        let key = requested_key(&request).unwrap();
        let n_bad = crate::fuzz::cases(20_000, &[request], |case, der| {
            let asked = requested_key(der);
            assert!(asked.as_ref().is_ok_and(|asked| *asked == key) || asked.is_err(), "{case:?}");
            asked.is_ok()
        });
        assert!(n_bad > 0);
    }
}
