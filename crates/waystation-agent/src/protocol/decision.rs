//! Which version a recovery goes back to: one decision, from what all agents have.
//!
//! A version can be restored if every shard of it has a verified copy in some agent's memory; if no two copies of a shard
//! differ; and if it was committed, only with the digests of that commit. The newest of the program's sequence goes first.
//! Commits are not preferred to newer versions that are complete: those were saved whole, and the program has done their
//! work. A version that programs began with in vain too often is in doubt: another one goes first, and it is taken only if
//! nothing else can be. What is on the disk is compared by the trainers, who know it.

use std::collections::{BTreeMap, BTreeSet};

use super::message::{Inventory, ShardDecision};
use super::names::{AgentId, Commit, Digest, Key, SealedCopy, Version, manifest_digest};

/// What there is to choose from.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Findings {
    /// The answers, one for each agent that gave one in time.
    pub inventories: BTreeMap<AgentId, Inventory>,
}

/// A version that can be restored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restorable {
    /// Its name.
    pub version: Version,
    /// Of which it is.
    pub sequence: u64,
    /// For each shard its copy and who holds it.
    pub shards: Vec<(SealedCopy, BTreeSet<AgentId>)>,
}

impl Findings {
    /// Whether there was ever a commit of this sequence, as far as is known: what is of another one is known by its copies.
    pub fn has_commit(&self, sequence: u64) -> bool {
        let is_of_another = |version| {
            let mut copies = self.copies_of(version).map(|(_, _, copy)| copy.sequence);
            copies.any(|of| of != sequence)
        };
        self.noted().any(|commit| !is_of_another(commit.version))
    }

    /// Whether anybody has noted a version as committed.
    pub fn is_noted(&self, version: Version) -> bool {
        self.noted().any(|commit| commit.version == version)
    }

    fn noted(&self) -> impl Iterator<Item = Commit> {
        self.inventories.values().flat_map(|found| found.noted.iter().copied())
    }

    fn copies_of(&self, version: Version) -> impl Iterator<Item = (AgentId, u32, SealedCopy)> {
        let range = Key { version, shard: 0 }..=Key { version, shard: u32::MAX };
        self.inventories.iter().flat_map(move |(&agent, inventory)| {
            inventory.copies.range(range.clone()).map(move |(key, &copy)| (agent, key.shard, copy))
        })
    }

    /// The commits of a sequence that are to stay until newer ones are there: of those that anybody has noted and that are
    /// whole in memory, all from the newest to the first that has `needed` copies of every shard, and older ones so that
    /// there are `versions` from that one on. Of older ones those that are in doubt come last.
    ///
    /// A commit that was noted by few may be one of which no majority was ever told; if it has fewer copies than needed, the
    /// one before it is still what must not be lost. And one that could not be loaded this time may be loaded the next.
    pub fn commits_to_keep(
        &self,
        sequence: u64,
        needed: usize,
        versions: usize,
        fruitless_limit: u32,
    ) -> BTreeSet<Commit> {
        let noted: BTreeSet<Commit> = self.noted().collect();
        let mut older = Vec::new();
        let mut kept = BTreeSet::new();
        let mut has_safe = false;
        for commit in noted.into_iter().rev() {
            let Some(found) = self.restorable(commit.version).filter(|found| found.sequence == sequence)
            else {
                continue;
            };
            if has_safe {
                older.push(commit);
            } else {
                kept.insert(commit);
                has_safe = found.fewest_copies() >= needed;
            }
        }
        let is_doubted = |commit: &Commit| self.fruitless(commit.version) >= fruitless_limit;
        kept.extend(fallbacks(older, versions, is_doubted));
        kept
    }

    /// Of each sequence the complete versions from the newest to the first that has `needed` copies of every shard, noted
    /// or not. Those who noted that one of them is committed may have forgotten it: the one that must not be lost is among
    /// them, or is older than one that is as safe.
    pub fn complete(&self, needed: usize) -> BTreeSet<Commit> {
        let copies = self.inventories.values().flat_map(|found| found.copies.values());
        let sequences: BTreeSet<u64> = copies.map(|copy| copy.sequence).collect();
        let mut complete = BTreeSet::new();
        for found in sequences.into_iter().map(|sequence| self.all_restorable(sequence)) {
            let safe = found.iter().position(|found| found.fewest_copies() >= needed);
            let most = safe.map_or(found.len(), |safe| safe + 1);
            complete.extend(found[..most].iter().map(Restorable::commit));
        }
        complete
    }

    /// The newest commit of a sequence, as far as is known, if it cannot be restored.
    pub fn lost(&self, sequence: u64) -> Option<Version> {
        let is_of_another = |version| self.copies_of(version).any(|(_, _, copy)| copy.sequence != sequence);
        let versions = self.noted().map(|commit| commit.version);
        let newest = versions.filter(|&version| !is_of_another(version)).max()?;
        self.restorable(newest).is_none().then_some(newest)
    }

    /// The versions that programs have begun with in vain so often.
    pub fn doubted(&self, fruitless_limit: u32) -> BTreeSet<Version> {
        let counts = self.inventories.values().flat_map(|found| &found.fruitless);
        counts.filter(|(_, count)| **count >= fruitless_limit).map(|(version, _)| *version).collect()
    }

    /// The newest commit of a sequence of which something is left, but not every shard. Trainers may have the rest of it on
    /// the disk: until something newer is committed, what is left is as good as it was.
    pub fn remains_to_keep(&self, sequence: u64) -> Option<Commit> {
        let is_left = |commit: &Commit| {
            let mut copies = self.copies_of(commit.version).map(|(_, _, copy)| copy).peekable();
            copies.peek().is_some() && copies.all(|copy| copy.sequence == sequence)
        };
        let noted: BTreeSet<Commit> = self.noted().filter(is_left).collect();
        noted.into_iter().next_back().filter(|commit| self.restorable(commit.version).is_none())
    }

    /// How many copies in memory there are of a version's rarest shard; none if it cannot be restored.
    pub fn fewest_copies(&self, version: Version) -> usize {
        self.restorable(version).map_or(0, |found| found.fewest_copies())
    }

    /// How often programs began with a version in vain: the most that any agent has counted.
    pub fn fruitless(&self, version: Version) -> u32 {
        let counts = self.inventories.values().filter_map(|found| found.fruitless.get(&version));
        counts.copied().max().unwrap_or(0)
    }

    /// Every version of a sequence that can be restored, the newest first.
    pub fn all_restorable(&self, sequence: u64) -> Vec<Restorable> {
        let versions: BTreeSet<Version> =
            self.inventories.values().flat_map(|found| found.copies.keys()).map(|key| key.version).collect();
        let found = versions.into_iter().rev().filter_map(|version| self.restorable(version));
        found.filter(|found| found.sequence == sequence).collect()
    }

    fn restorable(&self, version: Version) -> Option<Restorable> {
        let mut held: BTreeMap<u32, (SealedCopy, BTreeSet<AgentId>)> = BTreeMap::new();
        for (agent, shard, copy) in self.copies_of(version) {
            let entry = held.entry(shard).or_insert_with(|| (copy, BTreeSet::new()));
            if entry.0 != copy {
                return None;
            }
            entry.1.insert(agent);
        }
        let first = held.values().next()?.0;
        let is_whole =
            held.len() == first.shard_count as usize && held.keys().copied().eq(0..first.shard_count);
        let is_of_one = held
            .values()
            .all(|(copy, _)| (copy.shard_count, copy.sequence) == (first.shard_count, first.sequence));
        let digests = held.values().map(|(copy, _)| copy.digest);
        let is_sound = is_whole && is_of_one && self.agrees_with_commits(version, digests);
        is_sound.then(|| Restorable {
            version,
            sequence: first.sequence,
            shards: held.into_values().collect(),
        })
    }

    fn agrees_with_commits(&self, version: Version, digests: impl Iterator<Item = Digest>) -> bool {
        let found = manifest_digest(version, digests);
        self.noted().filter(|commit| commit.version == version).all(|commit| commit.manifest == found)
    }
}

/// Which commits stay beside a newer one so that there are `versions` in all: the newest of them, given newest first, but
/// those in doubt only where there are no others.
pub fn fallbacks(
    older: Vec<Commit>,
    versions: usize,
    is_doubted: impl Fn(&Commit) -> bool,
) -> impl Iterator<Item = Commit> {
    let (doubted, trusted): (Vec<Commit>, Vec<Commit>) = older.into_iter().partition(is_doubted);
    trusted.into_iter().chain(doubted).take(versions.saturating_sub(1))
}

impl Restorable {
    /// It, as a commit.
    fn commit(&self) -> Commit {
        let digests = self.shards.iter().map(|(copy, _)| copy.digest);
        Commit { version: self.version, manifest: manifest_digest(self.version, digests) }
    }

    fn fewest_copies(&self) -> usize {
        self.shards.iter().map(|(_, holders)| holders.len()).min().unwrap_or(0)
    }

    /// Who reads each shard, and where: own memory, the same domain, other agents (those that have been given the fewest
    /// first).
    pub fn sources(&self, readers: &[AgentId], domain_of: impl Fn(AgentId) -> u32) -> Vec<ShardDecision> {
        let mut given: BTreeMap<AgentId, usize> = BTreeMap::new();
        let mut decided = Vec::with_capacity(self.shards.len());
        for ((copy, holders), &reader) in self.shards.iter().zip(readers) {
            let mut sources: Vec<AgentId> = holders.iter().copied().collect();
            sources.sort_by_key(|&holder| {
                let is_other = holder != reader;
                let is_far = domain_of(holder) != domain_of(reader);
                (is_other, is_far, given.get(&holder).copied().unwrap_or(0), holder)
            });
            if let Some(&first) = sources.first() {
                *given.entry(first).or_default() += 1;
            }
            decided.push(ShardDecision { reader, copy: *copy, sources });
        }
        decided
    }
}
