//! What slots call a version of a shard, and what the protocol calls it.
//!
//! A shard is `<sequence>/<number>-of-<count>`, the sequence in 16 hex digits; an epoch is one number for slots and
//! trainers, two for the protocol. What has another name is nothing that the protocol knows of.

use waystation_format::slot::{self, Header, Id, Sums};

use crate::protocol::names::{Digest, Epoch, Key, SealedCopy, Version};

/// What the name of a shard says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Of which it is.
    pub sequence: u64,
    /// Which of them.
    pub number: u32,
    /// How many there are.
    pub count: u32,
}

impl Shard {
    /// What a name says, if it is one.
    pub fn parse(name: &str) -> Option<Self> {
        let (sequence, place) = name.split_once('/')?;
        let (number, count) = place.split_once("-of-")?;
        let shard = Self {
            sequence: u64::from_str_radix(sequence, 16).ok()?,
            number: number.parse().ok()?,
            count: count.parse().ok()?,
        };
        (shard.number < shard.count && shard.name() == name).then_some(shard)
    }

    /// Its name.
    pub fn name(&self) -> String {
        format!("{:016x}/{}-of-{}", self.sequence, self.number, self.count)
    }

    /// What is said of a copy with this digest.
    pub fn copy(&self, digest: u64) -> SealedCopy {
        SealedCopy { digest: Digest(digest), shard_count: self.count, sequence: self.sequence }
    }

    /// Of a version, as the protocol names it.
    pub fn key(&self, version: slot::Version) -> Key {
        let epoch = Epoch::of_packed(version.epoch);
        Key { version: Version { epoch, step: version.step }, shard: self.number }
    }
}

/// A version as slots name it.
pub fn slot_version(version: Version) -> slot::Version {
    slot::Version { epoch: version.epoch.packed(), step: version.step }
}

/// A version of a shard as slots name it.
pub fn slot_key(run: Id, key: Key, copy: SealedCopy) -> slot::Key {
    let shard = Shard { sequence: copy.sequence, number: key.shard, count: copy.shard_count };
    slot::Key { run, shard: shard.name(), version: slot_version(key.version) }
}

/// What a slot holds, if it is sealed and has a name that the protocol knows.
pub fn copy_in(header: &Header) -> Option<(Key, SealedCopy)> {
    let (tenant, Sums { digest, .. }) = (header.state.tenant()?, header.state.sums()?);
    let shard = Shard::parse(&tenant.key.shard)?;
    Some((shard.key(tenant.key.version), shard.copy(digest)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_keys_say_the_same() {
        let name = "00000000000000ff/2-of-3";
        let shard = Shard::parse(name).unwrap();
        assert_eq!((shard, shard.name()), (Shard { sequence: 255, number: 2, count: 3 }, name.to_owned()));
        let version = slot::Version { epoch: (5 << 32) | 7, step: 9 };
        let key = shard.key(version);
        assert_eq!((key.version.epoch, key.shard), (Epoch { number: 5, controller: 7 }, 2));
        let run = Id([1; 16]);
        assert_eq!(slot_key(run, key, shard.copy(4)), slot::Key { run, shard: name.to_owned(), version });
        for other in [
            "ff/2-of-3",
            "00000000000000FF/2-of-3",
            "00000000000000ff/3-of-3",
            "00000000000000ff/02-of-3",
            "a",
            "",
        ] {
            assert_eq!(Shard::parse(other), None, "{other}");
        }
    }
}
