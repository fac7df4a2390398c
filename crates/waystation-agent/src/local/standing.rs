//! What a process and the agent of its host say to each other where agents of several hosts keep a program's state
//! together: how things stand, and which program begins.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::message::At;

/// One start of the user's program: who saves what.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Beginning {
    /// The token of this start: nanoseconds since 1970. The greatest is the newest.
    pub program: u64,
    /// What the program saves, told from other sequences of the run.
    pub sequence: HexNumber,
    /// For each of its processes the name of the host on which it runs.
    pub owners: Vec<String>,
}

/// How things stand between the agents, as one of them knows it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Standing {
    /// The epoch that was promised; 0 if there is none.
    pub epoch: u64,
    /// The token of the program that the orders are for; 0 if there are none.
    pub program: u64,
    /// Whether the orders of the promised epoch are here: the program may go on.
    pub is_training: bool,
    /// Whether versions of the epoch are taken.
    pub is_open: bool,
    /// What the epoch began with; null if it began from nothing.
    pub base: Option<Base>,
    /// The commits that are kept.
    pub commits: Vec<At>,
    /// Versions that programs began with in vain too often.
    pub doubted: Vec<At>,
    /// The newest commit, if it could not be restored and is newer than the base.
    pub lost: Option<At>,
    /// For each shard the names of the hosts that keep it, its owner's first.
    pub holders: Vec<Vec<String>>,
    /// All hosts.
    pub hosts: Vec<HostStanding>,
}

/// A version that an epoch began with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Base {
    /// Its epoch.
    pub epoch: u64,
    /// Its step.
    pub step: u64,
    /// How many shards it has.
    pub shard_count: u32,
    /// What it is a version of.
    pub sequence: HexNumber,
}

/// Another host, or this one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostStanding {
    /// Its name.
    pub name: String,
    /// Whether its agent was heard of lately.
    pub is_heard: bool,
}

/// A number as 16 hex digits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HexNumber(pub u64);

impl Serialize for HexNumber {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{:016x}", self.0))
    }
}

impl<'de> Deserialize<'de> for HexNumber {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let is_form = text.len() == 16 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        let number = u64::from_str_radix(&text, 16).ok().filter(|_| is_form);
        number.map(Self).ok_or_else(|| serde::de::Error::custom("a number of 16 hex digits is wanted"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::message::Request;

    #[test]
    fn a_beginning_has_the_form_that_is_specified() {
        let text = r#"{"begin":{"program":7,"sequence":"00000000000000ff","owners":["a","b"]}}"#;
        let owners = vec!["a".to_owned(), "b".to_owned()];
        let request = Request::Begin(Beginning { program: 7, sequence: HexNumber(255), owners });
        assert_eq!(serde_json::to_string(&request).unwrap(), text);
        assert_eq!(serde_json::from_str::<Request>(text).unwrap(), request);
        for number in ["ff", "00000000000000FF", "+0000000000000ff", "00000000000000ff0", ""] {
            assert!(serde_json::from_str::<HexNumber>(&format!("\"{number}\"")).is_err(), "{number}");
        }
    }
}
