//! Join strings, addresses, names, certificates, signing requests, keys.

use super::Target;
use phalanx_actors::fuzzing::{join_word, key_material};
use phalanx_actors::trust::authority::Authority;
use phalanx_actors::trust::credential::Applicant;
use phalanx_actors::trust::join::{JoinString, parse_addresses};
use phalanx_actors::trust::name::{Certified, Name, Role};
use phalanx_actors::trust::validity::Validity;
use phalanx_strategies::elastic::identity::{Incarnation, JobId, NodeId};
use std::time::SystemTime;

pub(super) const TARGET: Target = Target { name: "trust", run, seeds };

/// Bytes of a join string before its addresses.
const JOIN_BYTES: usize = 56;

/// Values survive writing and reading; a name has one spelling; a certificate names one holder.
fn run(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    check_join(&text);
    if let Some((body, addresses)) = bytes.split_first_chunk::<JOIN_BYTES>() {
        check_join(&join_word(body, &String::from_utf8_lossy(addresses)));
    }
    for address in parse_addresses(&text).into_iter().flatten() {
        assert_eq!(address.to_string().parse(), Ok(address));
    }
    if let Ok(name) = text.parse::<Name>() {
        assert_eq!(name.to_string(), text);
    }
    if let Ok(certified) = Certified::read(&bytes.to_vec().into()) {
        assert_eq!(certified.name.to_string().parse(), Ok(certified.name));
    }
    let _ = key_material(bytes);
}

fn check_join(word: &str) {
    if let Ok(join) = word.parse::<JoinString>() {
        assert_eq!(join.to_string().parse(), Ok(join));
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let authority = Authority::open(dir.path(), JobId(7)).expect("an authority");
    let validity = Validity::starting(SystemTime::now(), Validity::LIFETIME);
    let applicant = Applicant::open(dir.path(), "node").expect("a key");
    let roles = [Role::Coordinator, Role::Operator, Role::Node { node: NodeId(3), boot: Incarnation(9) }];
    let certificates = roles.map(|role| authority.issue(&applicant.public_key(), role, validity).expect("a valid key"));
    let addresses = "10.0.0.1:7447,[fd00::1]:7447,head-0.cluster:1";
    let texts = [addresses.to_owned(), join_word(&[7; JOIN_BYTES], addresses)];
    let names = roles.map(|role| Name { job: JobId(7), role }.to_string());
    let key = std::fs::read(dir.path().join("node.key")).expect("the key was stored");
    let mut seeds: Vec<Vec<u8>> = texts.into_iter().chain(names).map(String::into_bytes).collect();
    seeds.extend(certificates.iter().map(|certificate| certificate.to_vec()));
    seeds.extend([applicant.signing_request().expect("random numbers"), applicant.public_key(), key]);
    seeds.push([&[7; JOIN_BYTES], addresses.as_bytes()].concat());
    seeds
}
