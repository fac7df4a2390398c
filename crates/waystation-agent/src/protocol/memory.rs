//! What an agent keeps beyond its process, and how much of it there may be.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::names::{AgentId, Commit, Epoch, Key, Program, SealedCopy, Version};
use super::pairs;

/// How much an agent may hold. A recovery that places shards anew needs room for copies at both places at once:
/// with room for two versions of every shard nothing ever waits for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Limits {
    /// In all.
    pub copies: usize,
    /// Of one shard: the commits that are kept, and the next version.
    pub versions_of_shard: usize,
}

/// How often training was begun with a version.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Beginnings {
    /// How often.
    pub count: u32,
    /// The token of the program that was counted last.
    pub token: u64,
    /// The epoch in which it was; notes of earlier releases do not have it.
    #[serde(default)]
    pub epoch: Epoch,
}

/// What outlives the agent's process: the slots, and a small record beside them.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Memory {
    /// Of the start since which it remembers everything; later starts without memory have greater ones.
    pub incarnation: u64,
    /// None if this start has forgotten what was promised before.
    pub promised: Option<Epoch>,
    /// As long as that is forgotten, the greatest epoch that this start was asked to promise: it is admitted to none that
    /// is older. Notes of earlier releases do not have it.
    #[serde(default)]
    pub pledged: Option<Epoch>,
    /// The newest that it has heard of.
    pub program: Option<Program>,
    /// The starts without memory of other agents.
    #[serde(with = "pairs")]
    pub incarnations: BTreeMap<AgentId, u64>,
    /// Sealed slots.
    #[serde(with = "pairs")]
    pub copies: BTreeMap<Key, SealedCopy>,
    /// Commits that were noted, from the oldest that is still to be kept.
    pub noted: BTreeSet<Commit>,
    /// The decision that was carried out last.
    pub restored: Option<(Epoch, u32)>,
    /// The epoch of the last orders.
    pub trained: Option<Epoch>,
    /// The token of the newest program that was let begin here.
    pub begun: Option<u64>,
    /// How often programs were begun with a version, as long as nothing was saved and committed since.
    #[serde(with = "pairs")]
    pub fruitless: BTreeMap<Version, Beginnings>,
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

    /// Whether nothing is done any more in an epoch before this one.
    pub(super) fn is_bound(&self, epoch: Epoch) -> bool {
        self.promised.or(self.pledged) == Some(epoch)
    }

    /// Counts that a program begins with a version, unless it was counted for it.
    pub(super) fn count_beginning(&mut self, version: Version, token: u64, epoch: Epoch) {
        let beginnings = self.fruitless.entry(version).or_default();
        if beginnings.token != token || beginnings.count == 0 {
            *beginnings = Beginnings { count: beginnings.count.saturating_add(1), token, epoch };
        }
    }

    pub(super) fn note(&mut self, commit: Commit) {
        self.noted.insert(commit);
        // Work was done since training was begun with any of these: the commit was saved after that.
        self.fruitless.retain(|&version, beginnings| {
            version >= commit.version || beginnings.epoch > commit.version.epoch
        });
    }
}
