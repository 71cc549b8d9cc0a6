//! The join string: one word that a machine needs to become a node, such as
//! `phx1.mfrggzdfmztwq2lk…@10.0.0.1:7447,10.0.0.2:7447`.
//!
//! Before the `@` are, in base32: the fingerprint of the authority, the token's id and secret, and four bytes of
//! SHA-256 over these, so that a slip of the pen is told from a token that has expired. After it, where coordinators
//! may be.

use super::Fingerprint;
use super::token::{Secret, Token, TokenId};
use data_encoding::{Encoding, Specification};
use std::fmt;
use std::str::FromStr;
use std::sync::LazyLock;

const PREFIX: &str = "phx1.";
pub(crate) const BODY_BYTES: usize = 32 + 8 + 16;
const CHECK_BYTES: usize = 4;
/// Base32 has five bits a character.
const ENCODED_CHARS: usize = (BODY_BYTES + CHECK_BYTES) * 8 / 5;
const ADDRESSES_MAX: usize = 16;

/// See the [module](self).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JoinString {
    /// Of the authority's key.
    pub authority: Fingerprint,
    /// What to join with.
    pub token: Token,
    /// Where coordinators may be; at least one.
    pub addresses: Vec<Address>,
}

/// Where a coordinator may be. Names are looked up at each attempt: a coordinator may move.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address {
    /// A name or a number; IPv6 without brackets.
    pub host: String,
    /// UDP port.
    pub port: u16,
}

/// Why a word is no join string.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JoinStringError {
    /// It is something else.
    #[error("a join string begins with {PREFIX}, found {found:?}")]
    Prefix {
        /// How it begins.
        found: String,
    },
    /// It was cut off, or is only the secret part.
    #[error("a join string has an @ and addresses after its secret part, found none")]
    NoAddresses,
    /// Something is missing or was added.
    #[error("the secret part of a join string has {ENCODED_CHARS} characters, found {found}")]
    Length {
        /// How many it has.
        found: usize,
    },
    /// A character that cannot occur.
    #[error(
        "the secret part of a join string has the letters a-z and the digits 2-7 only; character {position} is not"
    )]
    Character {
        /// Counted from one, within the secret part.
        position: usize,
    },
    /// Some character is another one.
    #[error("the secret part of a join string does not match its check digits; it was not copied faithfully")]
    Check,
    /// An address is not one.
    #[error("expected an address such as 10.0.0.1:7447, found {found:?}")]
    Address {
        /// The text.
        found: String,
    },
    /// Maximum number of addresses.
    #[error("expected at most {ADDRESSES_MAX} addresses, found {found}")]
    TooMany {
        /// How many.
        found: usize,
    },
}

static BASE32: LazyLock<Encoding> = LazyLock::new(|| {
    let mut specification = Specification::new();
    specification.symbols.push_str("abcdefghijklmnopqrstuvwxyz234567");
    specification.encoding().expect("it has 32 symbols")
});

impl fmt::Display for JoinString {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let body = [self.authority.0.as_slice(), &self.token.id.0, &self.token.secret.0].concat();
        let addresses: Vec<String> = self.addresses.iter().map(Address::to_string).collect();
        f.write_str(&word(&body, &addresses.join(",")))
    }
}

/// The join string with these bytes and addresses.
pub(crate) fn word(body: &[u8], addresses: &str) -> String {
    format!("{PREFIX}{}@{addresses}", BASE32.encode(&[body, &check(body)].concat()))
}

impl FromStr for JoinString {
    type Err = JoinStringError;

    fn from_str(word: &str) -> Result<JoinString, JoinStringError> {
        let word = word.trim();
        let Some(rest) = word.strip_prefix(PREFIX) else {
            return Err(JoinStringError::Prefix { found: word.chars().take(PREFIX.len()).collect() });
        };
        let (secret, addresses) = rest.split_once('@').ok_or(JoinStringError::NoAddresses)?;
        let found = secret.chars().count();
        if found != ENCODED_CHARS {
            return Err(JoinStringError::Length { found });
        }
        let bytes = BASE32
            .decode(secret.as_bytes())
            .map_err(|err| JoinStringError::Character { position: err.position + 1 })?;
        let (body, found) = bytes.split_at(BODY_BYTES);
        if check(body) != found {
            return Err(JoinStringError::Check);
        }
        let (authority, token) = body.split_at(32);
        let (id, secret) = token.split_at(8);
        let token = Token {
            id: TokenId(id.try_into().expect("it was cut to eight")),
            secret: Secret(secret.try_into().expect("it was cut to sixteen")),
        };
        let authority = Fingerprint(authority.try_into().expect("it was cut to 32"));
        Ok(JoinString { authority, token, addresses: parse_addresses(addresses)? })
    }
}

/// Addresses separated by commas; at least one.
///
/// # Errors
/// The first one that is none.
pub fn parse_addresses(text: &str) -> Result<Vec<Address>, JoinStringError> {
    let found = text.split(',').count();
    if found > ADDRESSES_MAX {
        return Err(JoinStringError::TooMany { found });
    }
    text.split(',').map(str::parse).collect()
}

fn check(body: &[u8]) -> [u8; CHECK_BYTES] {
    let digest = ring::digest::digest(&ring::digest::SHA256, body);
    digest.as_ref()[..CHECK_BYTES].try_into().expect("it was cut to four")
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

impl FromStr for Address {
    type Err = JoinStringError;

    fn from_str(text: &str) -> Result<Address, JoinStringError> {
        let wrong = || JoinStringError::Address { found: text.to_owned() };
        let (host, port) = text.rsplit_once(':').ok_or_else(wrong)?;
        let host = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
            Some(ip) => ip.parse::<std::net::Ipv6Addr>().map(|ip| ip.to_string()).map_err(|_| wrong())?,
            None => host.to_owned(),
        };
        let named = host.bytes().all(|b| b.is_ascii_alphanumeric() || b".-_:".contains(&b));
        let port = port.parse::<u16>().ok().filter(|port| *port > 0).ok_or_else(wrong)?;
        if host.is_empty() || !named || (host.contains(':') && !text.starts_with('[')) {
            return Err(wrong());
        }
        Ok(Address { host, port })
    }
}

impl From<std::net::SocketAddr> for Address {
    fn from(address: std::net::SocketAddr) -> Address {
        Address { host: address.ip().to_string(), port: address.port() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> JoinString {
        JoinString {
            authority: Fingerprint([1; 32]),
            token: Token { id: TokenId([2; 8]), secret: Secret([3; 16]) },
            addresses: ["10.0.0.1:7447", "[fd00::1]:7447", "head-0.cluster:1"].map(|a| a.parse().unwrap()).to_vec(),
        }
    }

    #[test]
    fn a_join_string_is_read_as_it_is_written() {
        let word = example().to_string();

        assert_eq!(word.parse(), Ok(example()));
        assert!(word.ends_with("@10.0.0.1:7447,[fd00::1]:7447,head-0.cluster:1"), "{word}");
    }

    #[test]
    fn a_join_string_is_one_word_for_a_shell() {
        let join = JoinString { addresses: vec!["head:7447".parse().unwrap()], ..example() };

        let special = |c: char| !(c.is_ascii_alphanumeric() || ".@:,-_".contains(c));
        assert!(!join.to_string().contains(special), "{join}");
    }

    #[test]
    fn each_mistake_in_a_join_string_is_named() {
        let word = example().to_string();
        let err = |word: &str| word.parse::<JoinString>().unwrap_err();

        assert_eq!(err("K10abc"), JoinStringError::Prefix { found: "K10ab".into() });
        assert_eq!(err(word.split('@').next().unwrap()), JoinStringError::NoAddresses);
        assert_eq!(err(&word.replace("phx1.", "phx1.a")), JoinStringError::Length { found: 97 });
        let mut wrong = word.clone().into_bytes();
        wrong[9] = b'1';
        assert_eq!(err(std::str::from_utf8(&wrong).unwrap()), JoinStringError::Character { position: 5 });
        wrong[9] = if word.as_bytes()[9] == b'a' { b'b' } else { b'a' };
        assert_eq!(err(std::str::from_utf8(&wrong).unwrap()), JoinStringError::Check);
        assert_eq!(err(&word.replace(":7447,[", ",[")), JoinStringError::Address { found: "10.0.0.1".into() });
        assert_eq!(err(&format!("{word}{}", ",a:1".repeat(14))), JoinStringError::TooMany { found: 17 });
    }

    #[test]
    fn invalid_address_is_refused() {
        for text in ["", ":1", "a:", "a:0", "a:65536", "a:x", "fd00::1:7447", "[a]:1", "a b:1", "a;b:1"] {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_damaged_join_string_does_no_harm() {
        let word = example().to_string().into_bytes();

        let n_bad = crate::fuzz::cases(100_000, &[word], |case, bytes| {
            let join = String::from_utf8_lossy(bytes).parse::<JoinString>();
            // Whoever it was that changed it, the secret part was not changed.
            assert!(join.as_ref().is_ok_and(|join| join.token == example().token) || join.is_err(), "{case:?}");
            join.is_ok()
        });

        assert!(n_bad > 0);
    }
}
