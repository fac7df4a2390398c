//! What agents and controllers tell each other, and what a decision looks like.
//!
//! Every message may be lost, delayed, repeated or overtaken: receivers act on a message only in its epoch, acting
//! on it twice changes nothing more, and senders repeat what is not answered. `wire` says how they are written.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::names::{AgentId, Commit, Digest, Epoch, Key, Program, SealedCopy, Version};
use super::pairs;

/// From a controller to an agent. But for the first two, only those who have promised the epoch act on it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ToAgent {
    /// Promise to follow no older epoch; if you remember nothing, pledge that you will be admitted to no older one.
    Prepare {
        /// To promise.
        epoch: Epoch,
    },
    /// Promise this epoch although you remember nothing: a majority of others knows that you forgot, or all do and nobody
    /// follows an older epoch any more.
    Admit {
        /// To promise.
        epoch: Epoch,
        /// Whom the majority was told of. A later start of the same host needs another one.
        incarnation: u64,
        /// The newest starts without memory that are known, of all agents.
        #[serde(with = "pairs")]
        incarnations: BTreeMap<AgentId, u64>,
        /// The commits that the others know of, and what counts as committed from now on.
        noted: BTreeSet<Commit>,
        /// The newest program that anybody has heard of.
        program: Option<Program>,
    },
    /// Take note that an agent has started without memory: what it promised before no longer counts.
    Learn {
        /// Of the sender.
        epoch: Epoch,
        /// Who forgot.
        agent: AgentId,
        /// Its present start.
        incarnation: u64,
    },
    /// Verify the copies, and tell which there are.
    Gather {
        /// Of the sender.
        epoch: Epoch,
    },
    /// Have in memory what the decision says.
    Restore(Arc<Decision>),
    /// Train, and keep what the orders say.
    Train(Arc<Orders>),
    /// Bring a copy to one who is to keep it and does not have it, whatever that one has said before: it may have found
    /// its own to be damaged since, and let go of it.
    Bring {
        /// Of the sender.
        epoch: Epoch,
        /// Of which shard.
        key: Key,
        /// Who lacks it.
        to: AgentId,
    },
    /// Note that this version has enough copies.
    Commit {
        /// Of the sender; the version's may be older.
        epoch: Epoch,
        /// To note.
        commit: Commit,
    },
}

impl ToAgent {
    /// The sender's epoch.
    pub fn epoch(&self) -> Epoch {
        match self {
            ToAgent::Prepare { epoch }
            | ToAgent::Admit { epoch, .. }
            | ToAgent::Learn { epoch, .. }
            | ToAgent::Gather { epoch }
            | ToAgent::Bring { epoch, .. }
            | ToAgent::Commit { epoch, .. } => *epoch,
            ToAgent::Restore(decision) => decision.epoch,
            ToAgent::Train(orders) => orders.epoch,
        }
    }
}

/// From an agent to a controller.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ToController {
    /// How things stand: at every tick, on every change, and as the answer to most messages.
    Report(Report),
    /// What is there, verified just now; the answer to [`ToAgent::Gather`].
    Inventory(Inventory),
    /// The answer to [`ToAgent::Restore`].
    Restored {
        /// Of the decision.
        epoch: Epoch,
        /// Of the decision.
        attempt: u32,
        /// Whether all shards that this agent was to have are there.
        is_loaded: bool,
    },
}

/// What an agent holds and has promised.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Report {
    /// Of the start since which it remembers everything.
    pub incarnation: u64,
    /// None if it has forgotten, and was not admitted since.
    pub promised: Option<Epoch>,
    /// If so, the greatest epoch that it was asked to promise.
    pub pledged: Option<Epoch>,
    /// The newest that it has heard of.
    pub program: Option<Program>,
    /// The starts without memory that it has taken note of.
    #[serde(with = "pairs")]
    pub incarnations: BTreeMap<AgentId, u64>,
    /// Verified copies.
    #[serde(with = "pairs")]
    pub copies: BTreeMap<Key, SealedCopy>,
    /// From the oldest that is still to be kept.
    pub noted: BTreeSet<Commit>,
    /// The epoch of the last orders: what is noted counts in that epoch. Its first orders say anew what is noted.
    pub trained: Option<Epoch>,
}

impl Report {
    /// The epoch before which this start of the agent does nothing any more.
    pub fn bound(&self) -> Option<Epoch> {
        self.promised.or(self.pledged)
    }
}

/// What an agent can give to a recovery.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Inventory {
    /// That asked.
    pub epoch: Epoch,
    /// Of the start since which it remembers everything.
    pub incarnation: u64,
    /// Each verified after it was asked.
    #[serde(with = "pairs")]
    pub copies: BTreeMap<Key, SealedCopy>,
    /// From the oldest that is still to be kept.
    pub noted: BTreeSet<Commit>,
    /// How often programs began with a version and no newer one was committed.
    #[serde(with = "pairs")]
    pub fruitless: BTreeMap<Version, u32>,
    /// The newest program that it has heard of.
    pub program: Option<Program>,
    /// The token of the newest program that was let begin there.
    pub begun: Option<u64>,
}

/// How one shard is restored.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardDecision {
    /// The agent to whose memory it is brought.
    pub reader: AgentId,
    /// What its bytes must be.
    pub copy: SealedCopy,
    /// Who has it, to be tried in this order.
    pub sources: Vec<AgentId>,
}

/// The one decision of a recovery, for all.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Decision {
    /// In which it holds.
    pub epoch: Epoch,
    /// Counts the decisions of this epoch, from 1.
    pub attempt: u32,
    /// For which it is made.
    pub program: Program,
    /// None if memory has nothing to begin with: then trainers take what is on the disk.
    pub version: Option<Version>,
    /// One for each shard of the version.
    pub shards: Vec<ShardDecision>,
}

/// What a program begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Base {
    /// Of the program's sequence.
    pub version: Version,
    /// How many shards it has.
    pub shard_count: u32,
}

/// What holds while trainers train.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Orders {
    /// In which they hold.
    pub epoch: Epoch,
    /// Of the decision that must have been carried out.
    pub attempt: u32,
    /// Counts the orders of this epoch: an agent that has seen later ones passes over these.
    pub revision: u64,
    /// Whose trainers train: who seals the shards.
    pub program: Program,
    /// Whether the program was let begin before, in an earlier epoch. Its trainers go on with the state that they have:
    /// nothing is begun with the base then.
    pub is_continued: bool,
    /// What the program may begin with; None if memory has nothing.
    pub base: Option<Base>,
    /// Whether copies of that are kept though it is not among the commits.
    pub is_base_kept: bool,
    /// The newest commits: what is older than all of them may be freed. More than are to be kept only as long as the newer
    /// ones are not known to have enough copies.
    pub commits: BTreeSet<Commit>,
    /// Versions that programs began with in vain too often. They are kept as any other, and are begun with only if nothing
    /// else can be restored.
    pub doubted: BTreeSet<Version>,
    /// The newest commit, if it could not be restored and is newer than what the program may begin with.
    pub lost: Option<Version>,
    /// Whether versions of this epoch are kept. Not before what training began with has its copies again (or has not got
    /// them in time): they would take its room.
    pub is_open: bool,
    /// No version of this epoch with a smaller step will be committed any more, unless it is already.
    pub floor: u64,
    /// For each shard who keeps it; the first seals it and brings it to the others.
    pub holders: Vec<Vec<AgentId>>,
}

impl Orders {
    /// Whether copies of this version may still be needed.
    pub fn keeps(&self, version: Version) -> bool {
        let is_committed = self.commits.iter().any(|commit| commit.version == version);
        let may_be_committed = version.epoch == self.epoch && version.step >= self.floor;
        let is_base = self.base.is_some_and(|base| base.version == version);
        is_committed || may_be_committed || self.is_base_kept && is_base
    }

    /// Whether a new copy of this version is taken.
    pub fn takes(&self, version: Version) -> bool {
        self.keeps(version) && (self.is_open || version.epoch != self.epoch)
    }

    /// Whether a version is a commit that has a newer one: what a program may fall back to.
    pub fn is_spare(&self, version: Version) -> bool {
        self.commits.last().is_some_and(|newest| version < newest.version)
            && self.commits.iter().any(|commit| commit.version == version)
    }

    /// Who is to keep a shard. An earlier version may be cut into more shards than versions are now.
    pub fn holders_of(&self, key: Key) -> &[AgentId] {
        let places = self.holders.len().max(1);
        self.holders.get(key.shard as usize % places).map_or(&[], Vec::as_slice)
    }
}

/// From agent to agent, besides the bytes of copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ToPeer {
    /// Your copy is verified and sealed here.
    Kept {
        /// Of both.
        epoch: Epoch,
        /// Of which shard.
        key: Key,
        /// Of the bytes.
        digest: Digest,
    },
    /// The bytes of your copy are not what you said: verify it.
    Damaged {
        /// Of both.
        epoch: Epoch,
        /// Of which shard.
        key: Key,
    },
    /// Send the bytes of a shard.
    Fetch {
        /// Of both.
        epoch: Epoch,
        /// For which decision.
        attempt: u32,
        /// Of which shard.
        key: Key,
    },
}

/// What bytes are sent for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Purpose {
    /// To be kept.
    Replica,
    /// To be loaded, as this decision says.
    Restore {
        /// Of the decision.
        attempt: u32,
    },
}
