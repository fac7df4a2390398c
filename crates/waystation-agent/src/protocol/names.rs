//! What the protocol speaks of: agents, epochs, versions, shards and their copies.
//!
//! Keys name slices of a state, never ranks. All machines of one protocol serve one run; whoever carries messages
//! keeps runs apart.

use waystation_format::checksum::Crc64;

/// One agent, and the host that it runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AgentId(pub u16);

/// A term of one controller. Ordered by number; the controller's own number, which no other has ever had, makes epochs
/// unique, so that no two controllers are ever in the same one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch {
    /// Higher fences lower.
    pub number: u64,
    /// Who is in charge.
    pub controller: u64,
}

/// A step as one epoch's trainers saved it. A later epoch's version is newer, whatever its step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// In which it was saved.
    pub epoch: Epoch,
    /// That it holds.
    pub step: u64,
}

/// One shard of a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// Of which it is a part.
    pub version: Version,
    /// Its number: an index into the slices that the version's shards are.
    pub shard: u32,
}

/// The checksum of a shard's bytes, or of a manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest(pub u64);

/// A copy in a sealed slot, as the slot's header describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SealedCopy {
    /// Of the bytes.
    pub digest: Digest,
    /// How many shards the version has, so that any copy tells when a set of them is complete.
    pub shard_count: u32,
}

/// A version that was found to have enough verified copies, with the digests that they have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Commit {
    /// What is committed.
    pub version: Version,
    /// See [`manifest_digest`].
    pub manifest: Digest,
}

/// The digest of a manifest: of the version and of the digests of its shards, in order.
pub fn manifest_digest(version: Version, shards: impl IntoIterator<Item = Digest>) -> Digest {
    let mut sum = Crc64::new();
    for word in [version.epoch.number, version.epoch.controller, version.step] {
        sum.update(&word.to_le_bytes());
    }
    for shard in shards {
        sum.update(&shard.0.to_le_bytes());
    }
    Digest(sum.finish())
}
