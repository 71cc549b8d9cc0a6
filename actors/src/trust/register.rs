//! The register of nodes that have joined a job, and of valid join tokens. Durable before the node is admitted
//! (`TRUST-4`).

use super::place::Place;
use super::token::{CHANNEL_BYTES, Proof, Secret, Token, TokenId};
use super::{Fingerprint, TrustError, keys};
use crate::wire::{self, Kind, Message};
use phalanx_strategies::elastic::identity::{Incarnation, NodeId};
use serde::{Deserialize, Serialize};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const FILE: &str = "register";
/// Each join rewrites the register's file; this many nodes take 1 MiB.
const NODES_MAX: usize = 20_000;
const TOKENS_MAX: usize = 1_000;
/// Distance between two boots of a node. A rank's incarnations count up from its supervisor's boot, so this allows a
/// million restarts of one rank.
const BOOT_STRIDE: u64 = 1 << 20;

/// The admitted nodes and the tokens that still admit some, as they are in the file.
#[derive(Debug)]
pub struct Register {
    place: Place,
    state: State,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct State {
    tokens: Vec<Terms>,
    /// Nodes by id.
    nodes: Vec<Entry>,
}

/// A token, its remaining uses and its expiry.
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
    /// The token does not exist, or was revoked.
    #[error("token {0} is unknown")]
    UnknownToken(TokenId),
    /// The machine does not have the secret, or replays a proof of another connection.
    #[error("the proof for token {0} is wrong")]
    WrongProof(TokenId),
    /// The token has expired.
    #[error("token {0} has expired")]
    Expired(TokenId),
    /// Other machines have used up the token.
    #[error("token {0} has no uses left")]
    UsedUp(TokenId),
    /// The signing request is invalid.
    #[error("{0}")]
    Request(TrustError),
    /// The machine has a certificate but is not registered: the register is an older copy.
    #[error("{0} has a certificate but is not in the register with this key")]
    UnknownNode(NodeId),
    /// The node has started again with the same key.
    #[error(
        "{node} has started again with the same key (its later boot is {later}, this one {boot}); each node needs a folder of \
         its own"
    )]
    Displaced {
        /// The node.
        node: NodeId,
        /// Its later boot.
        later: Incarnation,
        /// The rejected boot.
        boot: Incarnation,
    },
    /// The machine asks to rejoin without a certificate.
    #[error("it asks to rejoin without a certificate")]
    NoCertificate,
    /// The number of nodes has reached its limit.
    #[error("the limit of {NODES_MAX} nodes is reached")]
    Full,
    /// The admission cannot be made durable, so it has no effect.
    #[error("cannot write the register: {0}")]
    NotDurable(TrustError),
}

/// An application with a join token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Application {
    /// Id of the token.
    pub token: TokenId,
    /// Proof of the token's secret.
    pub proof: Proof,
    /// Proof of the private key.
    pub signing_request: Vec<u8>,
}

impl Register {
    /// Opens the register at a place; it is empty if there is none.
    ///
    /// # Errors
    /// When the file cannot be used, or other users may read it (`TRUST-5`).
    pub fn open(place: impl Into<Place>) -> Result<Register, TrustError> {
        let place = place.into();
        place.create()?;
        let state = match place.read(FILE)? {
            Some(bytes) => wire::decode(&bytes)
                .map_err(|err| TrustError::LostRegister { path: place.path(FILE), why: err.to_string() })?,
            None => State::default(),
        };
        Ok(Register { place, state })
    }

    /// Number of nodes that have ever joined.
    pub fn n_nodes(&self) -> usize {
        self.state.nodes.len()
    }

    /// Creates a token for a number of machines and a duration. Removes expired tokens.
    ///
    /// # Errors
    /// When the token cannot be made durable; it is then invalid.
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

    /// Revokes a token; nodes that have joined with it stay.
    ///
    /// # Errors
    /// When the revocation cannot be made durable; the token then stays valid.
    pub fn revoke(&mut self, token: TokenId) -> Result<(), TrustError> {
        let mut state = self.state.clone();
        state.tokens.retain(|terms| terms.id != token);
        self.replace(state)
    }

    /// Admits a machine with a token, and returns its identity and public key. `channel` is the keying material exported
    /// by its TLS connection. A key that has joined before stays the same node, at no use of the token (`TRUST-4`).
    ///
    /// # Errors
    /// When the machine is rejected; the register is unchanged.
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
        let public_key = keys::requested_key(&application.signing_request).map_err(Refused::Request)?;
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

    /// Readmits a restarted node with a valid certificate.
    ///
    /// # Errors
    /// When the node is rejected; the register is unchanged.
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

    /// Checks that this boot of a node may go on, with a new certificate.
    ///
    /// # Errors
    /// When the node is rejected, or has started again since.
    pub fn confirm(&self, identity: NodeIdentity, key: Fingerprint) -> Result<(), Refused> {
        let NodeIdentity { node, boot } = identity;
        match self.state.nodes.get(node.0 as usize) {
            Some(entry) if entry.key != key => Err(Refused::UnknownNode(node)),
            None => Err(Refused::UnknownNode(node)),
            Some(entry) if entry.boot > boot => Err(Refused::Displaced { node, later: entry.boot, boot }),
            Some(_) => Ok(()),
        }
    }

    fn replace(&mut self, state: State) -> Result<(), TrustError> {
        let bytes = wire::encode(&state).map_err(|err| TrustError::malformed("a register", err))?;
        self.place.write(FILE, &bytes)?;
        self.state = state;
        Ok(())
    }
}

impl State {
    /// Raises the boot of a node (`TRUST-4`). The clock covers a register restored from an older copy; since it may be
    /// wrong, boots rise without it, too.
    fn start(&mut self, now: SystemTime, position: usize) -> NodeIdentity {
        let millis = now.duration_since(UNIX_EPOCH).map_or(0, |t| u64::try_from(t.as_millis()).unwrap_or(0));
        let entry = &mut self.nodes[position];
        entry.boot = Incarnation(millis.max(entry.boot.0 + BOOT_STRIDE));
        NodeIdentity { node: NodeId(u32::try_from(position).expect("NODES_MAX fits u32")), boot: entry.boot }
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

    /// Decodes a register and encodes it again.
    pub(crate) fn again(frame: &[u8]) -> Option<Vec<u8>> {
        let state: State = wire::decode(frame).ok()?;
        Some(wire::encode(&state).expect("a decoded register can be encoded"))
    }

    /// The file of a register with tokens and nodes.
    pub(crate) fn example() -> Vec<u8> {
        let Token { id, secret } = Token::new().expect("the system has random numbers");
        let terms = Terms { id, secret, expires: UNIX_EPOCH + Duration::from_secs(3600), uses_left: 3 };
        let entry = Entry { key: Fingerprint([255; 32]), boot: Incarnation(1 << 41) };
        wire::encode(&State { tokens: vec![terms], nodes: vec![entry; 2] }).expect("the register is short")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trust::credential::Applicant;
    use std::path::Path;

    const HOUR: Duration = Duration::from_secs(3600);
    const CHANNEL: [u8; CHANNEL_BYTES] = [9; CHANNEL_BYTES];

    fn application(dir: &Path, token: Token) -> Application {
        let signing_request = Applicant::open(dir, "node").unwrap().signing_request().unwrap();
        let proof = Proof::new(&token.secret, &CHANNEL, &signing_request);
        Application { token: token.id, proof, signing_request }
    }

    // TRUST-4
    #[test]
    fn key_keeps_its_node_id_and_its_boot_rises_when_the_clock_goes_back() {
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
    fn token_admits_only_its_number_of_machines() {
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
    fn refusal_has_its_reason_and_leaves_the_register_unchanged() {
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
    fn register_of_the_maximum_size_fits_its_file() {
        let entry = Entry { key: Fingerprint([255; 32]), boot: Incarnation(u64::MAX) };
        let state = State { tokens: Vec::new(), nodes: vec![entry; NODES_MAX] };

        let bytes = wire::encode(&state).unwrap();

        assert_eq!(wire::decode(&bytes), Ok(state));
    }

    // WIRE-1
    #[test]
    fn damaged_registers_are_rejected_or_decode_to_valid_registers() {
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
