use super::*;
use crate::trust::name::Role;
use crate::trust::validity::Validity;
use phalanx_strategies::elastic::identity::{Incarnation, JobId, NodeId};
use rustls::{AlertDescription, ClientConnection, ServerConnection};
use std::time::{Duration, SystemTime};

const NODE: Role = Role::Node { node: NodeId(0), boot: Incarnation(1) };
const HOUR: Duration = Duration::from_secs(3600);

struct Job {
    authority: Authority,
    _dir: tempfile::TempDir,
}

impl Job {
    fn new() -> Job {
        let dir = tempfile::tempdir().unwrap();
        Job { authority: Authority::open(dir.path(), JobId(7)).unwrap(), _dir: dir }
    }

    fn credential(&self, role: Role) -> Credential {
        self.authority.credential(role, Validity::starting(SystemTime::now(), HOUR)).unwrap()
    }

    fn expired(&self, role: Role) -> Credential {
        let validity = Validity::starting(SystemTime::now() - 2 * HOUR, HOUR);
        self.authority.credential(role, validity).unwrap()
    }
}

/// Runs a handshake in memory.
fn handshake(server: ServerConfig, client: ClientConfig) -> Result<(), rustls::Error> {
    let mut server = ServerConnection::new(Arc::new(server)).unwrap();
    let mut client = ClientConnection::new(Arc::new(client), SERVER_NAME.try_into().unwrap()).unwrap();
    for _ in 0..4 {
        let mut bytes = Vec::new();
        while client.wants_write() {
            client.write_tls(&mut bytes).unwrap();
        }
        server.read_tls(&mut bytes.as_slice()).unwrap();
        server.process_new_packets()?;
        let mut bytes = Vec::new();
        while server.wants_write() {
            server.write_tls(&mut bytes).unwrap();
        }
        client.read_tls(&mut bytes.as_slice()).unwrap();
        client.process_new_packets()?;
    }
    assert!(!client.is_handshaking() && !server.is_handshaking());
    Ok(())
}

#[test]
fn node_and_its_coordinator_complete_their_handshake() {
    let job = Job::new();
    let server = coordinator(&job.authority, &job.credential(Role::Coordinator)).unwrap();

    assert_eq!(handshake(server, member(&job.credential(NODE), MEMBER).unwrap()), Ok(()));
}

// TRUST-2
#[test]
fn joining_machine_accepts_only_a_coordinator_of_the_pinned_authority() {
    let (job, other) = (Job::new(), Job::new());
    let server = || coordinator(&job.authority, &job.credential(Role::Coordinator)).unwrap();

    assert_eq!(handshake(server(), stranger(job.authority.fingerprint()).unwrap()), Ok(()));
    let err = handshake(server(), stranger(other.authority.fingerprint()).unwrap()).unwrap_err();
    assert_eq!(err, rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer));
}

// TRUST-2
#[test]
fn foreign_certificate_beside_the_pinned_authority_is_refused() {
    let (job, foreign) = (Job::new(), Job::new());
    let leaf = foreign.credential(Role::Coordinator);
    // The authority's certificate is public: an impostor can present it, too.
    let grant = crate::trust::credential::Grant {
        certificate: leaf.chain()[0].to_vec(),
        authority: job.authority.certificate().to_vec(),
        bootstrap: vec![],
    };
    let impostor = coordinator(&job.authority, &leaf.renewed(grant).unwrap()).unwrap();

    assert!(handshake(impostor, stranger(job.authority.fingerprint()).unwrap()).is_err());
}

// TRUST-3
#[test]
fn node_cannot_pose_as_the_coordinator() {
    let job = Job::new();
    let impostor = || coordinator(&job.authority, &job.credential(NODE)).unwrap();

    assert!(handshake(impostor(), member(&job.credential(NODE), MEMBER).unwrap()).is_err());
    assert!(handshake(impostor(), stranger(job.authority.fingerprint()).unwrap()).is_err());
}

#[test]
fn foreign_certificates_and_expired_ones_of_the_server_are_refused() {
    let (job, foreign) = (Job::new(), Job::new());
    let server = || coordinator(&job.authority, &job.credential(Role::Coordinator)).unwrap();
    // The foreign node trusts this job's authority, so that only the server rejects.
    for leaf in [foreign.credential(NODE), foreign.expired(NODE)] {
        let grant = crate::trust::credential::Grant {
            certificate: leaf.chain()[0].to_vec(),
            authority: job.authority.certificate().to_vec(),
            bootstrap: vec![],
        };
        let err = handshake(server(), member(&leaf.renewed(grant).unwrap(), MEMBER).unwrap()).unwrap_err();
        assert!(matches!(err, rustls::Error::InvalidCertificate(_)), "{err}");
    }
    // The listener judges the time of a client's certificate (`TRUST-7`).
    assert!(handshake(server(), member(&job.expired(NODE), MEMBER).unwrap()).is_ok());
    let expired = coordinator(&job.authority, &job.expired(Role::Coordinator)).unwrap();
    let err = handshake(expired, member(&job.credential(NODE), MEMBER).unwrap()).unwrap_err();
    assert!(format!("{err:?}").contains("Expired"), "{err:?}");
}

#[test]
fn handshake_fails_with_another_protocol_version() {
    let job = Job::new();
    let server = coordinator(&job.authority, &job.credential(Role::Coordinator)).unwrap();

    let err = handshake(server, member(&job.credential(NODE), b"phalanx/1").unwrap()).unwrap_err();

    let alert = AlertDescription::NoApplicationProtocol;
    assert!(matches!(err, rustls::Error::NoApplicationProtocol) || err == rustls::Error::AlertReceived(alert), "{err}");
}
