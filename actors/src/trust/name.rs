//! The holder of a certificate, as a URI such as `phalanx://7/node/3/boot/12`.

use super::validity::Validity;
use super::{Fingerprint, TrustError};
use phalanx_strategies::elastic::identity::{Incarnation, JobId, NodeId};
use rustls::pki_types::CertificateDer;
use std::fmt;
use std::str::FromStr;
use std::time::{Duration, SystemTime};
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

/// The holder of a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name {
    /// The holder's job.
    pub job: JobId,
    /// The holder's role in the job.
    pub role: Role,
}

/// The role of a certificate's holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// Sends desired states.
    Coordinator,
    /// Sends requests: status, drain, resize, save, stop.
    Operator,
    /// Sends reports and receives desired states.
    Node {
        /// Id of the node.
        node: NodeId,
        /// Incarnation of its supervisor.
        boot: Incarnation,
    },
}

/// Contents of a certificate. TLS has verified that the certificate is genuine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certified {
    /// The holder.
    pub name: Name,
    /// The holder's public key in X.509 form.
    pub public_key: Vec<u8>,
    /// When the certificate becomes valid.
    pub not_before: SystemTime,
    /// When the certificate expires.
    pub not_after: SystemTime,
}

impl Certified {
    /// Reads a certificate.
    ///
    /// # Errors
    /// When the bytes are not a certificate, or it does not name exactly one holder.
    pub fn read(certificate: &CertificateDer<'_>) -> Result<Certified, TrustError> {
        const WHAT: &str = "a certificate of a member of a job";
        let (_, x509) = X509Certificate::from_der(certificate).map_err(|err| TrustError::malformed(WHAT, err))?;
        let names = x509.subject_alternative_name().map_err(|err| TrustError::malformed(WHAT, err))?;
        let names = names.map(|names| names.value.general_names.as_slice()).unwrap_or_default();
        let mut uris = names.iter().filter_map(|name| if let GeneralName::URI(uri) = name { Some(*uri) } else { None });
        let (Some(uri), None) = (uris.next(), uris.next()) else {
            return Err(TrustError::malformed(WHAT, "it does not have exactly one URI"));
        };
        let time = |t: i64| SystemTime::UNIX_EPOCH + Duration::from_secs(t.max(0).unsigned_abs());
        Ok(Certified {
            name: uri.parse()?,
            public_key: x509.public_key().raw.to_vec(),
            not_before: time(x509.validity().not_before.timestamp()),
            not_after: time(x509.validity().not_after.timestamp()),
        })
    }

    /// Validity period of the certificate.
    pub fn validity(&self) -> Validity {
        Validity { not_before: self.not_before, not_after: self.not_after }
    }

    /// Fingerprint of the holder's key.
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint::of(&self.public_key)
    }
}

/// Fingerprint of the public key in a certificate.
pub(crate) fn public_key(certificate: &CertificateDer<'_>) -> Result<Fingerprint, TrustError> {
    let (_, x509) =
        X509Certificate::from_der(certificate).map_err(|err| TrustError::malformed("a certificate", err))?;
    Ok(Fingerprint::of(x509.public_key().raw))
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "phalanx://{}/", self.job.0)?;
        match self.role {
            Role::Coordinator => f.write_str("coordinator"),
            Role::Operator => f.write_str("operator"),
            Role::Node { node, boot } => write!(f, "node/{}/boot/{}", node.0, boot.0),
        }
    }
}

impl FromStr for Name {
    type Err = TrustError;

    fn from_str(uri: &str) -> Result<Name, TrustError> {
        let parsed = parse(uri).filter(|name| name.to_string() == uri);
        parsed.ok_or_else(|| TrustError::malformed("a name such as phalanx://7/node/3/boot/12", format!("found {uri}")))
    }
}

fn parse(uri: &str) -> Option<Name> {
    let (job, role) = uri.strip_prefix("phalanx://")?.split_once('/')?;
    let role = match *role.split('/').collect::<Vec<_>>() {
        ["coordinator"] => Role::Coordinator,
        ["operator"] => Role::Operator,
        ["node", node, "boot", boot] => {
            Role::Node { node: NodeId(node.parse().ok()?), boot: Incarnation(boot.parse().ok()?) }
        }
        _ => return None,
    };
    Some(Name { job: JobId(job.parse().ok()?), role })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_round_trips() {
        let roles = [
            Role::Coordinator,
            Role::Operator,
            Role::Node { node: NodeId(u32::MAX), boot: Incarnation(u64::MAX) },
            Role::Node { node: NodeId(0), boot: Incarnation(0) },
        ];
        for role in roles {
            let name = Name { job: JobId(7), role };

            assert_eq!(name.to_string().parse(), Ok(name));
        }
    }

    #[test]
    fn name_has_one_spelling() {
        for uri in [
            "phalanx://07/operator",
            "phalanx://+7/operator",
            "phalanx://7/operator/",
            "phalanx://7/Operator",
            "phalanx://7/node/3",
            "phalanx://7/node/-3/boot/1",
            "phalanx://7/node/4294967296/boot/1",
            "spiffe://7/operator",
            "",
        ] {
            assert!(uri.parse::<Name>().is_err(), "{uri}");
        }
    }
}
