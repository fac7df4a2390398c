//! What the protocol speaks of: agents, programs, epochs, versions, shards and their copies.
//!
//! All machines of one protocol serve one run; whoever carries messages keeps runs apart.

use serde::{Deserialize, Serialize};
use waystation_format::checksum::Crc64;

/// One agent, and the host that it runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct AgentId(pub u16);

/// A term of one controller. Ordered by number; the controller's own number, which no other has ever had, makes epochs
/// unique, so that no two controllers are ever in the same one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Epoch {
    /// Higher fences lower.
    pub number: u32,
    /// Who is in charge.
    pub controller: u32,
}

impl Epoch {
    /// As slots and trainers have it, in the same order.
    pub fn packed(self) -> u64 {
        u64::from(self.number) << 32 | u64::from(self.controller)
    }

    /// The epoch that is packed so.
    pub fn of_packed(packed: u64) -> Self {
        Self { number: (packed >> 32) as u32, controller: packed as u32 }
    }
}

/// One start of the user's program: processes that end together, and of which each saves one shard.
///
/// Ordered by token, so the greatest is the newest start.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Program {
    /// Of every later start of the run it is greater.
    pub token: u64,
    /// The sequence of checkpoints that it goes on with: it begins with no version of another.
    pub sequence: u64,
    /// For each shard the agent on whose host it is saved.
    pub owners: Vec<AgentId>,
}

impl Program {
    /// Whether it has processes, all of them on hosts of so many agents.
    pub fn fits(&self, agents: usize) -> bool {
        !self.owners.is_empty() && self.owners.iter().all(|owner| usize::from(owner.0) < agents)
    }
}

/// A step as the trainers of one program saved it in one epoch: an epoch is of one program. A later epoch's version is newer, whatever its step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Version {
    /// In which it was saved.
    pub epoch: Epoch,
    /// That it holds.
    pub step: u64,
}

/// One shard of a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Key {
    /// Of which it is a part.
    pub version: Version,
    /// Its number: that of the process that saved it.
    pub shard: u32,
}

/// The checksum of a shard's bytes, or of a manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Digest(pub u64);

/// A copy in a sealed slot, as the slot's header describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SealedCopy {
    /// Of the bytes.
    pub digest: Digest,
    /// How many shards the version has, so that any copy tells when a set of them is complete.
    pub shard_count: u32,
    /// Of which the version is.
    pub sequence: u64,
}

/// A version that was found to have enough verified copies, with the digests that they have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Commit {
    /// What is committed.
    pub version: Version,
    /// See [`manifest_digest`].
    pub manifest: Digest,
}

/// The digest of a manifest: of the version and of the digests of its shards, in order.
pub fn manifest_digest(version: Version, shards: impl IntoIterator<Item = Digest>) -> Digest {
    let mut sum = Crc64::new();
    for word in [version.epoch.packed(), version.step] {
        sum.update(&word.to_le_bytes());
    }
    for shard in shards {
        sum.update(&shard.0.to_le_bytes());
    }
    Digest(sum.finish())
}
