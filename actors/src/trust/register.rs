//! The register of nodes that have joined a job, and of valid join tokens. Durable before the node is admitted
//! (`TRUST-4`).

use super::token::{CHANNEL_BYTES, Proof, Secret, Token, TokenId};
use super::{Fingerprint, TrustError, authority, file};
use crate::wire::{self, Kind, Message};
use phalanx_strategies::elastic::identity::{Incarnation, NodeId};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const FILE: &str = "register";
/// A register is one file, rewritten at each join; this many lines take 1 MiB.
const NODES_MAX: usize = 20_000;
const TOKENS_MAX: usize = 1_000;
/// A rank's incarnations count on from the boot of its supervisor, so boots keep a distance that no supervisor can
/// use up: a million restarts of one rank.
const BOOT_STRIDE: u64 = 1 << 20;

/// See the [module](self).
#[derive(Debug)]
pub struct Register {
    path: PathBuf,
    state: State,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct State {
    tokens: Vec<Terms>,
    /// A node's id is its position.
    nodes: Vec<Entry>,
}

/// A token and how often and until when it is good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Terms {
    id: TokenId,
    secret: Secret,
    expires: SystemTime,
    uses_left: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    key: Fingerprint,
    boot: Incarnation,
}

impl Message for State {
    const KIND: Kind = Kind::Register;
}

/// A node's identity after admission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeIdentity {
    /// Id of the node.
    pub node: NodeId,
    /// Incarnation of its supervisor.
    pub boot: Incarnation,
}

/// Why a machine is not admitted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// There is no such token, or no longer.
    #[error("token {0} is unknown")]
    UnknownToken(TokenId),
    /// It does not know the secret, or repeats what was said on another connection.
    #[error("the proof for token {0} is wrong")]
    WrongProof(TokenId),
    /// It comes too late.
    #[error("token {0} has expired")]
    Expired(TokenId),
    /// Others came first.
    #[error("token {0} has no uses left")]
    UsedUp(TokenId),
    /// Its request is not one.
    #[error("{0}")]
    Request(TrustError),
    /// It has a certificate that is in no register: the register is an older copy.
    #[error("{0} has a certificate but is not in the register with this key")]
    UnknownNode(NodeId),
    /// It claims to be a node without a valid certificate.
    #[error("it asks to rejoin without a certificate")]
    NoCertificate,
    /// There are enough.
    #[error("{NODES_MAX} nodes have joined, which is the limit")]
    Full,
    /// The outcome could not be made durable, so there is none.
    #[error("the register cannot be written: {0}")]
    NotDurable(TrustError),
}

/// An application with a join token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Application {
    /// Which token.
    pub token: TokenId,
    /// Proof of the token's secret.
    pub proof: Proof,
    /// Proof of the private key.
    pub signing_request: Vec<u8>,
}

impl Register {
    /// The register in a directory; an empty one if there is none.
    ///
    /// # Errors
    /// When the file cannot be used, or others may read it (`TRUST-5`).
    pub fn open(dir: &Path) -> Result<Register, TrustError> {
        file::create_dir(dir)?;
        let path = dir.join(FILE);
        let state = match file::read(&path)? {
            Some(bytes) => {
                wire::decode(&bytes).map_err(|err| TrustError::Damaged { path: path.clone(), why: err.to_string() })?
            }
            None => State::default(),
        };
        Ok(Register { path, state })
    }

    /// Creates a token for a number of machines and a duration. Expired ones are forgotten.
    ///
    /// # Errors
    /// When it cannot be made durable; it is not good then.
    pub fn mint(&mut self, now: SystemTime, lifetime: Duration, uses: u32) -> Result<Token, TrustError> {
        let token = Token::new()?;
        let mut state = self.state.clone();
        state.tokens.retain(|terms| now < terms.expires);
        if state.tokens.len() >= TOKENS_MAX {
            state.tokens.remove(0);
        }
        state.tokens.push(Terms { id: token.id, secret: token.secret, expires: now + lifetime, uses_left: uses });
        self.replace(state)?;
        Ok(token)
    }

    /// Forgets a token; who has joined with it stays.
    ///
    /// # Errors
    /// When it cannot be made durable; the token is still good then.
    pub fn revoke(&mut self, token: TokenId) -> Result<(), TrustError> {
        let mut state = self.state.clone();
        state.tokens.retain(|terms| terms.id != token);
        self.replace(state)
    }

    /// Takes in a machine with a token. `channel` is what its TLS connection exports. A key that has joined before is
    /// the same node and uses up nothing (`TRUST-4`). Returns its public key, too.
    ///
    /// # Errors
    /// When it is refused; nothing has changed.
    pub fn admit(
        &mut self,
        now: SystemTime,
        application: &Application,
        channel: &[u8; CHANNEL_BYTES],
    ) -> Result<(NodeIdentity, Vec<u8>), Refused> {
        let id = application.token;
        let mut state = self.state.clone();
        let Some(terms) = state.tokens.iter_mut().find(|terms| terms.id == id) else {
            return Err(Refused::UnknownToken(id));
        };
        if !application.proof.is_of(&terms.secret, channel, &application.signing_request) {
            return Err(Refused::WrongProof(id));
        }
        if now >= terms.expires {
            return Err(Refused::Expired(id));
        }
        let public_key = authority::requested_key(&application.signing_request).map_err(Refused::Request)?;
        let key = Fingerprint::of(&public_key);
        let known = state.nodes.iter().position(|entry| entry.key == key);
        let position = match known {
            Some(position) => position,
            None if terms.uses_left == 0 => return Err(Refused::UsedUp(id)),
            None if state.nodes.len() >= NODES_MAX => return Err(Refused::Full),
            None => {
                terms.uses_left -= 1;
                state.nodes.push(Entry { key, boot: Incarnation(0) });
                state.nodes.len() - 1
            }
        };
        let identity = state.start(now, position);
        self.replace(state).map_err(Refused::NotDurable)?;
        Ok((identity, public_key))
    }

    /// Lets a node that has a valid certificate start again.
    ///
    /// # Errors
    /// When it is refused; nothing has changed.
    pub fn readmit(&mut self, now: SystemTime, node: NodeId, key: Fingerprint) -> Result<NodeIdentity, Refused> {
        let mut state = self.state.clone();
        let position = node.0 as usize;
        if state.nodes.get(position).is_none_or(|entry| entry.key != key) {
            return Err(Refused::UnknownNode(node));
        }
        let identity = state.start(now, position);
        self.replace(state).map_err(Refused::NotDurable)?;
        Ok(identity)
    }

    fn replace(&mut self, state: State) -> Result<(), TrustError> {
        let bytes = wire::encode(&state).map_err(|err| TrustError::malformed("a register", err))?;
        file::write(&self.path, &bytes)?;
        self.state = state;
        Ok(())
    }
}

impl State {
    /// `TRUST-4`. The clock helps a register that was restored from an older copy; it may be wrong, so boots rise
    /// without it.
    fn start(&mut self, now: SystemTime, position: usize) -> NodeIdentity {
        let millis = now.duration_since(UNIX_EPOCH).map_or(0, |t| u64::try_from(t.as_millis()).unwrap_or(0));
        let entry = &mut self.nodes[position];
        entry.boot = Incarnation(millis.max(entry.boot.0 + BOOT_STRIDE));
        NodeIdentity { node: NodeId(u32::try_from(position).expect("NODES_MAX is less")), boot: entry.boot }
    }
}

/// For fuzz targets.
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing {
    use super::{Entry, State, Terms};
    use crate::trust::Fingerprint;
    use crate::trust::token::Token;
    use crate::wire;
    use phalanx_strategies::elastic::identity::Incarnation;
    use std::time::{Duration, UNIX_EPOCH};

    /// A register, decoded and encoded.
    pub(crate) fn again(frame: &[u8]) -> Option<Vec<u8>> {
        let state: State = wire::decode(frame).ok()?;
        Some(wire::encode(&state).expect("what was decoded can be written"))
    }

    /// The file of a register with all that it can have.
    pub(crate) fn example() -> Vec<u8> {
        let Token { id, secret } = Token::new().expect("there are random numbers");
        let terms = Terms { id, secret, expires: UNIX_EPOCH + Duration::from_secs(3600), uses_left: 3 };
        let entry = Entry { key: Fingerprint([255; 32]), boot: Incarnation(1 << 41) };
        wire::encode(&State { tokens: vec![terms], nodes: vec![entry; 2] }).expect("it is short")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trust::credential::Applicant;

    const HOUR: Duration = Duration::from_secs(3600);
    const CHANNEL: [u8; CHANNEL_BYTES] = [9; CHANNEL_BYTES];

    fn application(dir: &Path, token: Token) -> Application {
        let signing_request = Applicant::open(dir, "node").unwrap().signing_request().unwrap();
        let proof = Proof::new(&token.secret, &CHANNEL, &signing_request);
        Application { token: token.id, proof, signing_request }
    }

    // TRUST-4
    #[test]
    fn a_key_keeps_its_node_id_and_its_boot_rises_also_over_a_restart_with_a_clock_that_went_back() {
        let (dir, node) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let now = SystemTime::now();
        let mut register = Register::open(dir.path()).unwrap();
        let token = register.mint(now, HOUR, 1).unwrap();
        let (first, _) = register.admit(now, &application(node.path(), token), &CHANNEL).unwrap();

        let mut register = Register::open(dir.path()).unwrap();
        let (second, key) = register.admit(now - HOUR, &application(node.path(), token), &CHANNEL).unwrap();
        let third = register.readmit(now - HOUR, second.node, Fingerprint::of(&key)).unwrap();

        assert_eq!((first.node, second.node, third.node), (NodeId(0), NodeId(0), NodeId(0)));
        assert!(first.boot.0 + BOOT_STRIDE <= second.boot.0 && second.boot.0 + BOOT_STRIDE <= third.boot.0);
    }

    #[test]
    fn a_token_is_good_for_as_many_machines_as_it_says() {
        let dir = tempfile::tempdir().unwrap();
        let machines = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let now = SystemTime::now();
        let mut register = Register::open(dir.path()).unwrap();
        let token = register.mint(now, HOUR, 2).unwrap();

        let outcomes = machines.each_ref().map(|machine| {
            register.admit(now, &application(machine.path(), token), &CHANNEL).map(|(identity, _)| identity.node)
        });

        assert_eq!(outcomes, [Ok(NodeId(0)), Ok(NodeId(1)), Err(Refused::UsedUp(token.id))]);
    }

    #[test]
    fn each_refusal_says_why_and_changes_nothing() {
        let (dir, node) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let now = SystemTime::now();
        let mut register = Register::open(dir.path()).unwrap();
        let token = register.mint(now, HOUR, 1).unwrap();
        let before = std::fs::read(dir.path().join(FILE)).unwrap();
        let good = application(node.path(), token);
        let stranger = Token::new().unwrap();
        let wrong = Token { id: token.id, ..stranger };

        let mut refusal =
            |now, application: &Application, channel| register.admit(now, application, channel).unwrap_err();
        assert_eq!(refusal(now + HOUR, &good, &CHANNEL), Refused::Expired(token.id));
        assert_eq!(refusal(now, &good, &[8; CHANNEL_BYTES]), Refused::WrongProof(token.id));
        assert_eq!(refusal(now, &application(node.path(), wrong), &CHANNEL), Refused::WrongProof(token.id));
        assert_eq!(refusal(now, &application(node.path(), stranger), &CHANNEL), Refused::UnknownToken(stranger.id));
        assert_eq!(register.readmit(now, NodeId(0), Fingerprint([0; 32])), Err(Refused::UnknownNode(NodeId(0))));
        register.revoke(token.id).unwrap();
        assert_eq!(register.admit(now, &good, &CHANNEL).unwrap_err(), Refused::UnknownToken(token.id));

        assert_eq!(before, {
            let mut again = Register::open(dir.path()).unwrap();
            again.state.tokens = wire::decode::<State>(&before).unwrap().tokens;
            wire::encode(&again.state).unwrap()
        });
    }

    #[test]
    fn a_register_of_the_most_nodes_fits_its_file() {
        let entry = Entry { key: Fingerprint([255; 32]), boot: Incarnation(u64::MAX) };
        let state = State { tokens: Vec::new(), nodes: vec![entry; NODES_MAX] };

        let bytes = wire::encode(&state).unwrap();

        assert_eq!(wire::decode(&bytes), Ok(state));
    }

    // WIRE-1
    #[test]
    fn a_damaged_register_does_no_harm() {
        let terms = Terms {
            id: TokenId([1; 8]),
            secret: Token::new().unwrap().secret,
            expires: UNIX_EPOCH + HOUR,
            uses_left: 3,
        };
        let entry = Entry { key: Fingerprint([255; 32]), boot: Incarnation(1 << 41) };

        crate::fuzz::damage(&[State { tokens: vec![terms], nodes: vec![entry; 3] }, State::default()], 100_000);
    }
}
