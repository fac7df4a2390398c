//! Which version a recovery goes back to: one decision, from what all agents have.
//!
//! A version can be restored if every shard of it has a verified copy in some agent's memory, or on the disk tier; if
//! no two copies of a shard differ; and if it was committed, only with the digests of that commit. The newest goes
//! first. Commits are not preferred to newer versions that are complete: those were saved whole, and the program
//! has done their work.

use std::collections::{BTreeMap, BTreeSet};

use super::message::{Inventory, ShardDecision, Source};
use super::names::{AgentId, Commit, Digest, Key, SealedCopy, Version, manifest_digest};

/// What there is to choose from.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Findings {
    /// The answers, one for each agent that gave one in time.
    pub inventories: BTreeMap<AgentId, Inventory>,
    /// The newest version on the disk tier, and its number of shards.
    pub on_disk: Option<(Version, u32)>,
}

/// A version that can be restored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Its name.
    pub version: Version,
    /// For each shard its copy and who holds it; None where only the disk does.
    pub shards: Vec<Option<(SealedCopy, BTreeSet<AgentId>)>>,
    /// Whether the disk tier has it too.
    pub is_on_disk: bool,
}

impl Findings {
    /// The newest commit that any agent has noted.
    pub fn newest_commit(&self) -> Option<Commit> {
        self.noted().max()
    }

    fn noted(&self) -> impl Iterator<Item = Commit> {
        self.inventories.values().flat_map(|found| found.noted.iter().copied())
    }

    /// The commits that are to stay until a newer one is there: of those that anybody has noted and that are whole in
    /// memory, all from the newest to the first that has `needed` copies of every shard. Not those in quarantine.
    ///
    /// A commit that was noted by few may be one of which no majority was ever told; if it has fewer copies than needed, the
    /// one before it is still what must not be lost. And one that could not be loaded this time may be loaded the next.
    pub fn commits_to_keep(&self, needed: usize, fruitless_limit: u32) -> BTreeSet<Commit> {
        let mut kept = BTreeSet::new();
        let noted: BTreeSet<Commit> =
            self.noted().filter(|commit| self.fruitless(commit.version) < fruitless_limit).collect();
        for commit in noted.into_iter().rev() {
            let copies = self.fewest_copies(commit.version);
            if copies > 0 {
                kept.insert(commit);
            }
            if copies >= needed {
                break;
            }
        }
        kept
    }

    /// How many copies in memory there are of a version's rarest shard; none if it cannot be restored.
    pub fn fewest_copies(&self, version: Version) -> usize {
        let Some(candidate) = self.candidate(version) else { return 0 };
        let copies =
            candidate.shards.iter().map(|shard| shard.as_ref().map_or(0, |(_, holders)| holders.len()));
        copies.min().unwrap_or(0)
    }

    /// How often training began with a version in vain: the most that any agent has counted.
    pub fn fruitless(&self, version: Version) -> u32 {
        let counts = self.inventories.values().filter_map(|found| found.fruitless.get(&version));
        counts.copied().max().unwrap_or(0)
    }

    /// Every version that can be restored, the newest first.
    pub fn candidates(&self) -> Vec<Candidate> {
        let mut versions: BTreeSet<Version> =
            self.inventories.values().flat_map(|found| found.copies.keys()).map(|key| key.version).collect();
        versions.extend(self.on_disk.map(|(version, _)| version));
        versions.into_iter().rev().filter_map(|version| self.candidate(version)).collect()
    }

    fn candidate(&self, version: Version) -> Option<Candidate> {
        let disk_shards = self.on_disk.filter(|&(newest, _)| newest == version).map(|(_, count)| count);
        let held = match self.holders(version) {
            Some(held) => held,
            None if disk_shards.is_some() => BTreeMap::new(),
            None => return None,
        };
        let counts = held.values().map(|(copy, _)| copy.shard_count);
        let count = disk_shards.into_iter().chain(counts).max()?;
        let same_count = held.values().all(|(copy, _)| copy.shard_count == count);
        if !same_count || disk_shards.is_some_and(|on_disk| on_disk != count) {
            return None;
        }
        if disk_shards.is_none() && held.len() != count as usize {
            return None; // before anything is made as large as a count says
        }
        let shards: Vec<_> = (0..count).map(|shard| held.get(&shard).cloned()).collect();
        let is_whole = shards.iter().all(Option::is_some);
        let digests = shards.iter().flatten().map(|(copy, _)| copy.digest);
        if is_whole && !self.agrees_with_commits(version, digests) {
            return None;
        }
        (is_whole || disk_shards.is_some()).then_some(Candidate {
            version,
            shards,
            is_on_disk: disk_shards.is_some(),
        })
    }

    /// Who has each shard of a version; None if copies of one differ.
    fn holders(&self, version: Version) -> Option<BTreeMap<u32, (SealedCopy, BTreeSet<AgentId>)>> {
        let mut held: BTreeMap<u32, (SealedCopy, BTreeSet<AgentId>)> = BTreeMap::new();
        let range = Key { version, shard: 0 }..=Key { version, shard: u32::MAX };
        for (&agent, inventory) in &self.inventories {
            for (key, &copy) in inventory.copies.range(range.clone()) {
                let entry = held.entry(key.shard).or_insert_with(|| (copy, BTreeSet::new()));
                if entry.0 != copy {
                    return None;
                }
                entry.1.insert(agent);
            }
        }
        Some(held)
    }

    fn agrees_with_commits(&self, version: Version, digests: impl Iterator<Item = Digest>) -> bool {
        let found = manifest_digest(version, digests);
        self.noted().filter(|commit| commit.version == version).all(|commit| commit.manifest == found)
    }
}

impl Candidate {
    /// Who reads each shard, and where: own memory, the same domain, other peers (those that have been given the
    /// fewest first), the disk.
    pub fn sources(&self, readers: &[AgentId], domain_of: impl Fn(AgentId) -> u32) -> Vec<ShardDecision> {
        let mut given: BTreeMap<AgentId, usize> = BTreeMap::new();
        let mut decided = Vec::with_capacity(self.shards.len());
        for (shard, &reader) in self.shards.iter().zip(readers) {
            let mut holders: Vec<AgentId> =
                shard.iter().flat_map(|(_, holders)| holders.iter().copied()).collect();
            holders.sort_by_key(|&holder| {
                let is_other = holder != reader;
                let is_far = domain_of(holder) != domain_of(reader);
                (is_other, is_far, given.get(&holder).copied().unwrap_or(0), holder)
            });
            if let Some(&first) = holders.first() {
                *given.entry(first).or_default() += 1;
            }
            let mut sources: Vec<Source> = holders.into_iter().map(Source::Memory).collect();
            sources.extend(self.is_on_disk.then_some(Source::Disk));
            decided.push(ShardDecision { reader, copy: shard.as_ref().map(|(copy, _)| *copy), sources });
        }
        decided
    }
}
