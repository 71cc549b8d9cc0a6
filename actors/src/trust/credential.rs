//! A certificate with its private key and its authority: everything that a member needs to authenticate itself and its
//! peers.
//!
//! A credential has two files. Each is replaced atomically, and the key is written only once, so they always match.

use super::TrustError;
use super::keys::{new_key, read_key};
use super::name::Certified;
use super::place::Place;
use crate::wire::{self, Kind, Message};
use rcgen::{CertificateParams, KeyPair, PublicKeyData};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use serde::{Deserialize, Serialize};
use std::fmt;

/// A coordinator's grant to a node, and the file beside the key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// The node's certificate.
    pub certificate: Vec<u8>,
    /// The authority's certificate.
    pub authority: Vec<u8>,
    /// Opaque job information for a joining node.
    pub bootstrap: Vec<u8>,
}

impl Message for Grant {
    const KIND: Kind = Kind::Grant;
}

/// A key, its certificate and the certificate of the authority, which belong together.
#[derive(Clone)]
pub struct Credential {
    key: Vec<u8>,
    certificate: CertificateDer<'static>,
    authority: CertificateDer<'static>,
    certified: Certified,
    bootstrap: Vec<u8>,
}

impl Credential {
    /// Combines a key and its certificate.
    ///
    /// # Errors
    /// When the certificate is for another key, or names no member.
    pub fn new(
        key: Vec<u8>,
        certificate: CertificateDer<'static>,
        authority: CertificateDer<'static>,
    ) -> Result<Credential, TrustError> {
        let certified = Certified::read(&certificate)?;
        if read_key(&key)?.subject_public_key_info() != certified.public_key {
            return Err(TrustError::malformed("a certificate of this key", "found one for another key"));
        }
        Ok(Credential { key, certificate, authority, certified, bootstrap: Vec::new() })
    }

    /// Job information that came with the latest certificate.
    pub fn bootstrap(&self) -> &[u8] {
        &self.bootstrap
    }

    fn of_grant(key: Vec<u8>, grant: Grant) -> Result<Credential, TrustError> {
        let credential = Credential::new(key, grant.certificate.into(), grant.authority.into())?;
        Ok(Credential { bootstrap: grant.bootstrap, ..credential })
    }

    /// Contents of the certificate.
    pub fn certified(&self) -> &Certified {
        &self.certified
    }

    /// The holder's certificate.
    pub fn certificate(&self) -> &CertificateDer<'static> {
        &self.certificate
    }

    /// The authority's certificate.
    pub fn authority(&self) -> &CertificateDer<'static> {
        &self.authority
    }

    /// The same key with a newer certificate.
    ///
    /// # Errors
    /// When the certificate is for another key, or names no member.
    pub fn renewed(&self, grant: Grant) -> Result<Credential, TrustError> {
        Credential::of_grant(self.key.clone(), grant)
    }

    /// The certificate chain for handshakes.
    pub(super) fn chain(&self) -> Vec<CertificateDer<'static>> {
        vec![self.certificate.clone(), self.authority.clone()]
    }

    pub(super) fn private_key(&self) -> PrivateKeyDer<'static> {
        PrivatePkcs8KeyDer::from(self.key.clone()).into()
    }

    /// Saves the credential as `NAME.key` and `NAME.grant`. The key should be there already
    /// ([`Applicant::open`]).
    ///
    /// # Errors
    /// When the files cannot be written.
    pub fn save(&self, place: impl Into<Place>, name: &str) -> Result<(), TrustError> {
        let place = place.into();
        place.create()?;
        let [key, grant] = names(name);
        let (certificate, authority) = (self.certificate.to_vec(), self.authority.to_vec());
        let bytes = wire::encode(&Grant { certificate, authority, bootstrap: self.bootstrap.clone() })
            .map_err(|err| TrustError::malformed("a certificate", err))?;
        place.write(&key, &self.key)?;
        place.write(&grant, &bytes)
    }

    /// Loads a credential saved by [`Credential::save`]; none if there is none.
    ///
    /// # Errors
    /// When other users may read a file (`TRUST-5`), or a file is damaged.
    pub fn load(place: impl Into<Place>, name: &str) -> Result<Option<Credential>, TrustError> {
        let (place, [key, grant]) = (place.into(), names(name));
        let (Some(key), Some(bytes)) = (place.read(&key)?, place.read(&grant)?) else { return Ok(None) };
        let damaged = |why: String| TrustError::Damaged { path: place.path(&grant), why };
        let grant: Grant = wire::decode(&bytes).map_err(|err| damaged(err.to_string()))?;
        let credential = Credential::of_grant(key, grant);
        credential.map(Some).map_err(|err| damaged(err.to_string()))
    }
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credential").field("name", &self.certified.name).finish_non_exhaustive()
    }
}

/// A key without a certificate. The key identifies a node, so it outlives all the node's certificates.
pub struct Applicant {
    key: KeyPair,
}

impl Applicant {
    /// Opens the key `NAME.key`, or creates and saves it, so that a machine stays the same node if it
    /// crashes during a join. Nobody can use a damaged key: a new one replaces it, and the machine is another node.
    ///
    /// # Errors
    /// When other users may read the file (`TRUST-5`), or it cannot be read or written.
    pub fn open(place: impl Into<Place>, name: &str) -> Result<Applicant, TrustError> {
        let (place, [file, _]) = (place.into(), names(name));
        place.create()?;
        let damaged =
            |why: &TrustError| tracing::warn!(path = %place.path(&file).display(), %why, "replacing a damaged key");
        let kept = place.read(&file)?.and_then(|der| read_key(&der).inspect_err(damaged).ok());
        let key = match kept {
            Some(key) => key,
            None => {
                let key = new_key()?;
                place.write(&file, key.serialized_der())?;
                key
            }
        };
        Ok(Applicant { key })
    }

    /// The public key in X.509 form.
    pub fn public_key(&self) -> Vec<u8> {
        self.key.subject_public_key_info()
    }

    /// A signing request, which proves possession of the private key and requests no names (`TRUST-3`).
    ///
    /// # Errors
    /// When the system has no random numbers.
    pub fn signing_request(&self) -> Result<Vec<u8>, TrustError> {
        let request = CertificateParams::default().serialize_request(&self.key).map_err(|_| TrustError::NoEntropy)?;
        Ok(request.der().to_vec())
    }

    /// Combines the key with a grant.
    ///
    /// # Errors
    /// When the certificate is for another key, or names no member.
    pub fn granted(&self, grant: Grant) -> Result<Credential, TrustError> {
        Credential::of_grant(self.key.serialized_der().to_vec(), grant)
    }
}

fn names(name: &str) -> [String; 2] {
    [format!("{name}.key"), format!("{name}.grant")]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trust::authority::Authority;
    use crate::trust::name::Role;
    use crate::trust::validity::Validity;
    use phalanx_strategies::elastic::identity::JobId;
    use std::path::Path;
    use std::time::SystemTime;

    fn operator(dir: &Path) -> Credential {
        let authority = Authority::open(dir, JobId(7)).unwrap();
        let validity = Validity::starting(SystemTime::now(), Validity::LIFETIME);
        authority.credential(Role::Operator, validity).unwrap()
    }

    #[test]
    fn credential_is_the_same_after_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let credential = operator(dir.path());

        credential.save(dir.path(), "operator").unwrap();
        let loaded = Credential::load(dir.path(), "operator").unwrap().unwrap();

        assert_eq!(loaded.certified(), credential.certified());
        assert_eq!(loaded.key, credential.key);
    }

    #[test]
    fn certificate_of_another_key_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (one, other) = (operator(dir.path()), operator(dir.path()));

        let err = Credential::new(one.key, other.certificate, other.authority).unwrap_err();

        assert_eq!(err.to_string(), "expected a certificate of this key, but found one for another key");
    }

    #[test]
    fn applicant_keeps_its_key() {
        let dir = tempfile::tempdir().unwrap();

        let first = Applicant::open(dir.path(), "node").unwrap();
        let second = Applicant::open(dir.path(), "node").unwrap();

        assert_eq!(first.public_key(), second.public_key());
    }

    #[test]
    fn applicant_with_a_damaged_key_gets_a_new_one() {
        let dir = tempfile::tempdir().unwrap();
        let first = Applicant::open(dir.path(), "node").unwrap();
        crate::trust::file::write(&dir.path().join("node.key"), &[0; 40]).unwrap();

        let second = Applicant::open(dir.path(), "node").unwrap();

        assert_ne!(first.public_key(), second.public_key());
        assert_eq!(second.public_key(), Applicant::open(dir.path(), "node").unwrap().public_key());
    }

    #[test]
    fn credential_does_not_print_its_key() {
        let dir = tempfile::tempdir().unwrap();

        let printed = format!("{:?}", operator(dir.path()));

        assert_eq!(printed, "Credential { name: Name { job: JobId(7), role: Operator }, .. }");
    }

    // WIRE-1
    #[test]
    fn damaged_grants_are_rejected_or_decode_to_valid_grants() {
        let grant = Grant { certificate: vec![0x30; 60], authority: vec![0x31; 60], bootstrap: vec![0x32; 9] };

        crate::fuzz::damage(&[grant], 100_000);
    }
}
