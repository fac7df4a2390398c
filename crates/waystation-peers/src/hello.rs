//! The first two messages inside TLS: who has connected and wants what, and whether the server goes on with it.
//!
//! Invariants: their lengths are fixed, so no more is waited for; a message has one form (unused bytes are zero). The
//! magic and the place of the versions stay as they are in all versions. `docs/protocol-peers.md` specifies every byte.

use std::fmt;

use waystation_format::slot::Id;
use waystation_format::{Error, Kind, Result};

/// The version that is spoken here. What agents tell each other inside has changed with it: a release speaks one.
pub const VERSION: u16 = 4;
/// Length of a hello.
pub(crate) const HELLO_BYTES: usize = 576;
/// Length of an answer.
pub(crate) const ANSWER_BYTES: usize = 48;
/// Length of what shows that a side belongs to the job, where its certificate does not.
pub(crate) const MEMBERSHIP_BYTES: usize = 32;

const MAGIC: &[u8; 8] = b"WSTMPEER";
const NAME_FIELD_BYTES: usize = 256;

/// The name of a host or a tool: UTF-8 without control characters, 1 to 255 bytes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name(String);

impl Name {
    /// A name, if it is one.
    pub fn new(name: impl Into<String>) -> Result<Self> {
        let name = name.into();
        let is_name = (1..NAME_FIELD_BYTES).contains(&name.len()) && !name.chars().any(char::is_control);
        if is_name {
            return Ok(Self(name));
        }
        Err(Error::new(Kind::InvalidInput, "a name of a host has 1 to 255 bytes and no control characters"))
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    fn encode(&self) -> [u8; NAME_FIELD_BYTES] {
        let mut field = [0; NAME_FIELD_BYTES];
        field[0] = self.0.len() as u8;
        field[1..=self.0.len()].copy_from_slice(self.0.as_bytes());
        field
    }

    fn decode(field: &[u8]) -> Result<Self> {
        let malformed = || malformed("a name is not one");
        let (&length, rest) = field.split_first().ok_or_else(malformed)?;
        let (name, padding) = rest.split_at_checked(length.into()).ok_or_else(malformed)?;
        if padding.iter().any(|&byte| byte != 0) {
            return Err(malformed());
        }
        std::str::from_utf8(name).ok().and_then(|name| Name::new(name).ok()).ok_or_else(malformed)
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Calls of services.
    Control = 1,
    /// Bytes of slots.
    Bulk = 2,
    /// Blocks of arrays, between hosts of the runtime.
    Blocks = 3,
    /// A host of the runtime speaks to its controller.
    Host = 4,
    /// A program speaks to the controller of the runtime.
    Program = 5,
    /// The launch of one host speaks to that of the first.
    Launch = 6,
}

impl Purpose {
    const ALL: [Purpose; 6] =
        [Purpose::Control, Purpose::Bulk, Purpose::Blocks, Purpose::Host, Purpose::Program, Purpose::Launch];
}

/// What a client says first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    /// The oldest and the newest version that the client speaks.
    pub versions: (u16, u16),
    /// What it wants the connection for.
    pub purpose: Purpose,
    /// The run that it belongs to.
    pub run: Id,
    /// Whether nothing is encrypted from the answer on.
    pub is_plain: bool,
    /// See `Tls::membership`.
    pub membership: [u8; MEMBERSHIP_BYTES],
    /// Who it is.
    pub client: Name,
    /// Whom it wants to speak to.
    pub server: Name,
}

impl Hello {
    /// Its bytes.
    pub fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..10].copy_from_slice(&self.versions.0.to_le_bytes());
        bytes[10..12].copy_from_slice(&self.versions.1.to_le_bytes());
        bytes[12] = self.purpose as u8;
        bytes[13] = self.is_plain.into();
        bytes[16..32].copy_from_slice(&self.run.0);
        bytes[32..64].copy_from_slice(&self.membership);
        bytes[64..320].copy_from_slice(&self.client.encode());
        bytes[320..].copy_from_slice(&self.server.encode());
        bytes
    }

    /// Reads it. Unsupported if it is of another version, whatever else it says.
    pub fn decode(bytes: &[u8; HELLO_BYTES]) -> Result<Self> {
        if &bytes[..8] != MAGIC {
            return Err(malformed("this is no agent of Waystation"));
        }
        let versions = (number(&bytes[8..10]), number(&bytes[10..12]));
        if versions.0 > VERSION || versions.1 < VERSION {
            return Err(other_version(versions.0, versions.1));
        }
        let purpose = Purpose::ALL.into_iter().find(|&purpose| purpose as u8 == bytes[12]);
        let purpose = purpose.ok_or_else(|| malformed("a connection is asked for to an unknown purpose"))?;
        if bytes[13] > 1 || bytes[14..16] != [0; 2] {
            return Err(malformed("bytes are set that mean nothing"));
        }
        let (mut run, mut membership) = ([0; 16], [0; MEMBERSHIP_BYTES]);
        run.copy_from_slice(&bytes[16..32]);
        membership.copy_from_slice(&bytes[32..64]);
        let (client, server) = (Name::decode(&bytes[64..320])?, Name::decode(&bytes[320..])?);
        let is_plain = bytes[13] == 1;
        Ok(Self { versions, purpose, run: Id(run), is_plain, membership, client, server })
    }
}

/// Why a server does not go on with a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// They have no version in common.
    Version = 1,
    /// The client wants another host.
    Host = 2,
    /// The client is of another run.
    Run = 3,
    /// The client does not know the secret.
    Secret = 4,
    /// There are too many connections.
    Busy = 5,
    /// What the client has sent is no hello.
    Malformed = 6,
    /// The client's certificate is of another host than it says it is.
    Name = 7,
    /// One side would encrypt what follows and the other would not.
    Plain = 8,
    /// The client is not expected: another one of its name lives, say.
    Unexpected = 9,
}

impl Refusal {
    const ALL: [Refusal; 9] = [
        Refusal::Version,
        Refusal::Host,
        Refusal::Run,
        Refusal::Secret,
        Refusal::Busy,
        Refusal::Malformed,
        Refusal::Name,
        Refusal::Plain,
        Refusal::Unexpected,
    ];

    /// The refusal of a status; nothing if the status says to go on.
    pub fn of_status(status: u8) -> Result<Option<Self>> {
        if status == 0 {
            return Ok(None);
        }
        let found = Self::ALL.into_iter().find(|&refusal| refusal as u8 == status);
        found.map(Some).ok_or_else(|| malformed("the answer has an unknown status"))
    }

    /// What it means to the client. Nobody has vouched for it, so it is for people only.
    pub fn error(self) -> Error {
        let (kind, message) = match self {
            Refusal::Version => (Kind::Unsupported, "the other side speaks another version of the protocol"),
            Refusal::Host => {
                (Kind::InvalidInput, "the other side is another host than the one that is wanted")
            }
            Refusal::Run => (Kind::Conflict, "the other side belongs to another run"),
            Refusal::Secret => (Kind::InvalidInput, "the other side has another secret"),
            Refusal::Busy => (Kind::Unavailable, "the other side has too many connections; try again later"),
            Refusal::Malformed => (Kind::Unsupported, "the other side did not understand the first message"),
            Refusal::Name => {
                (Kind::InvalidInput, "the certificate of this side is of another host, says the other side")
            }
            Refusal::Plain => (
                Kind::InvalidInput,
                "the other side was reached by a loopback address at one end alone; connect to it directly",
            ),
            Refusal::Unexpected => (
                Kind::Unavailable,
                "the other side does not expect this one: it was not announced, or another of its name lives",
            ),
        };
        Error::new(kind, message)
    }
}

/// What a server answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    /// Whether the server goes on.
    pub refusal: Option<Refusal>,
    /// See `Tls::membership`.
    pub membership: [u8; MEMBERSHIP_BYTES],
}

impl Answer {
    /// Its bytes.
    pub fn encode(&self) -> [u8; ANSWER_BYTES] {
        let mut bytes = [0; ANSWER_BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
        bytes[10] = self.refusal.map_or(0, |refusal| refusal as u8);
        bytes[16..].copy_from_slice(&self.membership);
        bytes
    }

    /// Reads it.
    pub fn decode(bytes: &[u8; ANSWER_BYTES]) -> Result<Self> {
        if &bytes[..8] != MAGIC {
            return Err(malformed("this is no agent of Waystation"));
        }
        let refusal = Refusal::of_status(bytes[10])?;
        let version = number(&bytes[8..10]);
        if version != VERSION && refusal.is_none() {
            return Err(other_version(version, version));
        }
        if bytes[11..16] != [0; 5] {
            return Err(malformed("bytes are set that mean nothing"));
        }
        let mut membership = [0; MEMBERSHIP_BYTES];
        membership.copy_from_slice(&bytes[16..]);
        Ok(Self { refusal, membership })
    }
}

fn number(bytes: &[u8]) -> u16 {
    bytes.first_chunk().copied().map_or(0, u16::from_le_bytes)
}

fn other_version(oldest: u16, newest: u16) -> Error {
    Error::new(Kind::Unsupported, "the other side speaks another version of the protocol")
        .with("theirs", format!("{oldest} to {newest}"))
        .with("ours", VERSION.to_string())
}

fn malformed(message: &'static str) -> Error {
    Error::new(Kind::Corrupt, message)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hello() -> Hello {
        Hello {
            versions: (1, 5),
            purpose: Purpose::Bulk,
            run: Id([7; 16]),
            is_plain: true,
            membership: [9; MEMBERSHIP_BYTES],
            client: Name::new("host-1").unwrap(),
            server: Name::new("Rechner zwölf").unwrap(),
        }
    }

    #[test]
    fn a_hello_is_what_was_said() {
        assert_eq!(Hello::decode(&hello().encode()).unwrap(), hello());
    }

    #[test]
    fn a_newer_version_is_told_from_damage_whatever_else_it_says() {
        let mut bytes = [0xff; HELLO_BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        assert_eq!(Hello::decode(&bytes).unwrap_err().kind(), Kind::Unsupported);
        bytes[..8].copy_from_slice(b"GET / HT");
        assert_eq!(Hello::decode(&bytes).unwrap_err().kind(), Kind::Corrupt);
    }

    #[test]
    fn names_are_bounded_and_printable() {
        for bad in ["", "a\nb", "\u{7f}", &"x".repeat(256)] {
            assert_eq!(Name::new(bad).unwrap_err().kind(), Kind::InvalidInput);
        }
        assert_eq!(Name::new("x".repeat(255)).unwrap().as_str().len(), 255);
    }

    proptest! {
        #[test]
        fn whatever_is_accepted_has_one_form(
            position in 0..HELLO_BYTES, value in any::<u8>(), other in 0..HELLO_BYTES, byte in any::<u8>()
        ) {
            let mut bytes = hello().encode();
            bytes[position] = value;
            bytes[other] = byte;
            if let Ok(read) = Hello::decode(&bytes) {
                prop_assert_eq!(read.encode(), bytes);
            }
        }

        #[test]
        fn whatever_answer_is_accepted_has_one_form(position in 0..ANSWER_BYTES, value in any::<u8>()) {
            let mut bytes = Answer { refusal: None, membership: [5; MEMBERSHIP_BYTES] }.encode();
            bytes[position] = value;
            if let Some(read) = Answer::decode(&bytes).ok().filter(|_| bytes[8..10] == VERSION.to_le_bytes()) {
                prop_assert_eq!(read.encode(), bytes);
            }
        }
    }
}
