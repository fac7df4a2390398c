//! What an agent keeps beyond its process, and how much of it there may be.

use std::collections::{BTreeMap, BTreeSet};

use super::names::{AgentId, Commit, Epoch, Key, SealedCopy, Version};

/// How much an agent may hold. A recovery that places shards anew needs room for copies at both places at once:
/// with room for two versions of every shard nothing ever waits for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Limits {
    /// In all.
    pub copies: usize,
    /// Of one shard; at least two, or the newest commit would be in the way of the next version.
    pub versions_of_shard: usize,
}

/// What outlives the agent's process: the slots, and a small record beside them.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Memory {
    /// Of the start since which it remembers everything; later starts without memory have greater ones.
    pub incarnation: u64,
    /// None if this start has forgotten what was promised before.
    pub promised: Option<Epoch>,
    /// The starts without memory of other agents.
    pub incarnations: BTreeMap<AgentId, u64>,
    /// Sealed slots.
    pub copies: BTreeMap<Key, SealedCopy>,
    /// Commits that were noted, from the oldest that is still to be kept.
    pub noted: BTreeSet<Commit>,
    /// The decision that was carried out last.
    pub restored: Option<(Epoch, u32)>,
    /// The epoch in which training was last begun.
    pub trained: Option<Epoch>,
    /// How often training was begun with a version, since the last commit.
    pub fruitless: BTreeMap<Version, u32>,
}

impl Memory {
    /// Of an agent that is there when its run is founded, once in its life.
    pub fn of_founder() -> Self {
        Self { promised: Some(Epoch::default()), ..Self::default() }
    }

    /// Of an agent whose host has lost what was in it; greater than every incarnation of this agent before.
    pub fn lost(incarnation: u64) -> Self {
        Self { incarnation, ..Self::default() }
    }

    pub(super) fn note(&mut self, commit: Commit) {
        self.noted.insert(commit);
        // Work was done since training was begun with any of these.
        self.fruitless.retain(|&version, _| version >= commit.version);
    }
}
