//! The join string: one word with which a machine becomes a node, such as
//! `phx1.mfrggzdfmztwq2lk…@10.0.0.1:7447,10.0.0.2:7447`.
//!
//! The part before the `@` holds, in base32: the fingerprint of the authority, the token's id and secret, and four bytes
//! of SHA-256 over these, to distinguish a copying mistake from an expired token. The addresses of coordinators follow, and,
//! after another `@`, the folder or URL in which the active coordinator publishes its address, if it has another one by then.

use super::Fingerprint;
use super::token::{Secret, Token, TokenId};
use data_encoding::{Encoding, Specification};
use std::fmt;
use std::str::FromStr;
use std::sync::LazyLock;

const PREFIX: &str = "phx1.";
pub(crate) const BODY_BYTES: usize = 32 + 8 + 16;
const CHECK_BYTES: usize = 4;
/// Base32 has five bits per character.
const ENCODED_CHARS: usize = (BODY_BYTES + CHECK_BYTES) * 8 / 5;
const ADDRESSES_MAX: usize = 16;

/// Where the coordinator is, how it is recognised, and the secret that admits a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JoinString {
    /// Fingerprint of the authority's key.
    pub authority: Fingerprint,
    /// The join token.
    pub token: Token,
    /// Addresses of possible coordinators; at least one.
    pub addresses: Vec<Address>,
    /// The folder or URL in which the active coordinator publishes its address.
    pub published: Option<String>,
}

/// Address of a possible coordinator. Each attempt resolves its host name again, since a coordinator may move.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address {
    /// A host name or an IP address; IPv6 without brackets.
    pub host: String,
    /// UDP port.
    pub port: u16,
}

/// Why a text is not a join string.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JoinStringError {
    /// The prefix is missing.
    #[error("expected a join string that begins with {PREFIX}, found {found:?}")]
    Prefix {
        /// The beginning of the text.
        found: String,
    },
    /// The addresses are missing.
    #[error("expected an @ and addresses after the secret part of a join string, found none")]
    NoAddresses,
    /// Characters are missing or were added.
    #[error("expected {ENCODED_CHARS} characters in the secret part of a join string, found {found}")]
    Length {
        /// Number of characters.
        found: usize,
    },
    /// A character is not of the alphabet.
    #[error(
        "expected only a-z and 2-7 in the secret part of a join string, found another character at position {position}"
    )]
    Character {
        /// Position within the secret part, from one.
        position: usize,
    },
    /// A character was changed.
    #[error("the secret part of a join string does not match its checksum; copy it again")]
    Check,
    /// An address is invalid.
    #[error("expected an address such as 10.0.0.1:7447, found {found:?}")]
    Address {
        /// The text.
        found: String,
    },
    /// There are too many addresses.
    #[error("expected at most {ADDRESSES_MAX} addresses, found {found}")]
    TooMany {
        /// Number of addresses.
        found: usize,
    },
}

static BASE32: LazyLock<Encoding> = LazyLock::new(|| {
    let mut specification = Specification::new();
    specification.symbols.push_str("abcdefghijklmnopqrstuvwxyz234567");
    specification.encoding().expect("the alphabet has 32 symbols")
});

impl fmt::Display for JoinString {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let body = [self.authority.0.as_slice(), &self.token.id.0, &self.token.secret.0].concat();
        let addresses: Vec<String> = self.addresses.iter().map(Address::to_string).collect();
        let published = self.published.iter().map(|location| format!("@{location}"));
        f.write_str(&word(&body, &(addresses.join(",") + &published.collect::<String>())))
    }
}

/// The join string with this body and these addresses.
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
        let (addresses, published) = match addresses.split_once('@') {
            Some((addresses, published)) => (addresses, Some(published.to_owned())),
            None => (addresses, None),
        };
        Ok(JoinString { authority, token, addresses: parse_addresses(addresses)?, published })
    }
}

/// Parses addresses separated by commas; at least one.
///
/// # Errors
/// For the first invalid address, or too many addresses.
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
            published: None,
        }
    }

    #[test]
    fn join_string_round_trips() {
        let word = example().to_string();

        assert_eq!(word.parse(), Ok(example()));
        assert!(word.ends_with("@10.0.0.1:7447,[fd00::1]:7447,head-0.cluster:1"), "{word}");
        let found_again = JoinString { published: Some("s3://bucket/run/control".into()), ..example() };
        assert_eq!(found_again.to_string(), word + "@s3://bucket/run/control");
        assert_eq!(found_again.to_string().parse(), Ok(found_again));
    }

    #[test]
    fn join_string_is_one_shell_word() {
        let join = JoinString { addresses: vec!["head:7447".parse().unwrap()], ..example() };

        let special = |c: char| !(c.is_ascii_alphanumeric() || ".@:,-_".contains(c));
        assert!(!join.to_string().contains(special), "{join}");
    }

    #[test]
    fn error_names_each_mistake_in_a_join_string() {
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
    fn damaged_join_string_never_changes_the_token() {
        let word = example().to_string().into_bytes();

        let n_bad = crate::fuzz::cases(100_000, &[word], |case, bytes| {
            let join = String::from_utf8_lossy(bytes).parse::<JoinString>();
            // The checksum detects every change of the secret part.
            assert!(join.as_ref().is_ok_and(|join| join.token == example().token) || join.is_err(), "{case:?}");
            join.is_ok()
        });

        assert!(n_bad > 0);
    }
}
