//! The controller while trainers train: which versions have their copies, which is committed, which is given up.
//!
//! The newest version of which every shard has one digest and enough verified copies is committed first; what is older is
//! never committed after it. Copies count as long as the newest report of an agent that follows the epoch has them. The
//! version that training began with is committed like any other, if it was not, or no longer has the copies of a
//! commit; until it is, or has not got its copies in time, no new version is taken. What a holder lacks is brought to it
//! by one that has it, again and again until it reports it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::controller::{Output, Settings};
use super::decision::fallbacks;
use super::message::{Orders, Report, ToAgent};
use super::names::{AgentId, Commit, Digest, Epoch, Key, Program, SealedCopy, Version, manifest_digest};
use super::quorum::Quorum;

/// At most so many steps are skipped at a time.
const MOST_SKIPPED: u64 = 64;

/// One time of training.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Training {
    orders: Arc<Orders>,
    members: BTreeMap<AgentId, u64>,
    began_ms: u64,
    /// By how many steps the next versions that are given up are skipped.
    skipped: u64,
    /// Which the agents are to note.
    pending: Option<Commit>,
    /// The newest commit that is known to have enough copies; what is older is not committed any more.
    settled: Option<Version>,
    /// When versions of this epoch were first heard of.
    seen_ms: BTreeMap<Version, u64>,
}

impl Training {
    pub(super) fn new(
        orders: Orders,
        settled: Option<Version>,
        members: BTreeMap<AgentId, u64>,
        now_ms: u64,
    ) -> Self {
        Self {
            orders: Arc::new(orders),
            members,
            began_ms: now_ms,
            skipped: 1,
            pending: None,
            settled,
            seen_ms: BTreeMap::new(),
        }
    }

    pub(super) fn program(&self) -> &Program {
        &self.orders.program
    }

    pub(super) fn members(&self) -> impl Iterator<Item = AgentId> {
        self.members.keys().copied()
    }

    pub(super) fn has_member(&self, agent: AgentId, incarnation: u64) -> bool {
        self.members.get(&agent) == Some(&incarnation)
    }

    /// Tells every member the orders, and what to note.
    pub(super) fn tell(&self, outputs: &mut Vec<Output>) {
        let epoch = self.orders.epoch;
        for agent in self.members() {
            outputs.push(Output::ToAgent(agent, ToAgent::Train(Arc::clone(&self.orders))));
            if let Some(commit) = self.pending {
                outputs.push(Output::ToAgent(agent, ToAgent::Commit { epoch, commit }));
            }
        }
    }

    /// Has every copy brought where it is to be and, as far as is known, is not.
    pub(super) fn mend(&self, quorum: &Quorum, outputs: &mut Vec<Output>) {
        let epoch = self.orders.epoch;
        let mut held: BTreeMap<Key, BTreeSet<AgentId>> = BTreeMap::new();
        for (agent, report) in quorum.followers(epoch) {
            for &key in report.copies.keys().filter(|key| self.orders.keeps(key.version)) {
                held.entry(key).or_default().insert(agent);
            }
        }
        for (key, having) in held {
            let holders = self.orders.holders_of(key);
            let Some(&from) = holders.iter().chain(&having).find(|&agent| having.contains(agent)) else {
                continue;
            };
            for &to in holders.iter().filter(|&agent| !having.contains(agent)) {
                outputs.push(Output::ToAgent(from, ToAgent::Bring { epoch, key, to }));
            }
        }
    }

    /// Commits and gives up, as reports and time allow.
    pub(super) fn watch(
        &mut self,
        quorum: &Quorum,
        settings: &Settings,
        now_ms: u64,
        outputs: &mut Vec<Output>,
    ) {
        let before = (self.pending, Arc::clone(&self.orders));
        self.settle(quorum, settings.versions, outputs);
        if self.pending.is_none() {
            self.pending = self.open_versions(quorum).iter().rev().find_map(|&version| {
                let manifest = manifest_of(quorum, self.orders.epoch, version, settings.needed_copies())?;
                Some(Commit { version, manifest })
            });
        }
        self.give_up(quorum, settings, now_ms, outputs);
        if before.1 != self.orders {
            let revision = before.1.revision + 1;
            self.orders = Arc::new(Orders { revision, ..Orders::clone(&self.orders) });
        }
        if before != (self.pending, Arc::clone(&self.orders)) {
            self.tell(outputs);
        }
    }

    /// Ends the pending commit if a majority has noted it.
    fn settle(&mut self, quorum: &Quorum, versions: usize, outputs: &mut Vec<Output>) {
        let Some(commit) = self.pending else { return };
        let epoch = self.orders.epoch;
        // What was noted before the first orders of the epoch is forgotten as they arrive.
        let has_noted = |report: &Report| report.trained == Some(epoch) && report.noted.contains(&commit);
        if quorum.followers(epoch).filter(|(_, report)| has_noted(report)).count() < quorum.majority() {
            return;
        }
        (self.pending, self.skipped) = (None, 1);
        let mut orders = Orders::clone(&self.orders);
        // A newer one that has lost copies is brought them meanwhile, and is not let go of for an older one that is safe.
        let newer = orders.commits.split_off(&Commit { manifest: Digest(0), ..commit });
        let is_newest = newer.iter().all(|kept| kept.version == commit.version);
        let older: Vec<Commit> = orders.commits.iter().rev().copied().collect();
        let doubted = &orders.doubted;
        let older = fallbacks(older, versions, |older| doubted.contains(&older.version));
        orders.commits = newer.into_iter().chain([commit]).chain(older).collect();
        self.settled = self.settled.max(Some(commit.version));
        orders.is_base_kept &= orders.base.is_some_and(|base| base.version > commit.version);
        // Beside a base that has yet to get its copies there may be no room, and only while it is waited for is it given up.
        orders.is_open |= is_newest && !orders.is_base_kept;
        if commit.version.epoch == orders.epoch {
            orders.floor = orders.floor.max(commit.version.step);
        }
        self.orders = Arc::new(orders);
        self.seen_ms.retain(|&version, _| version > commit.version);
        outputs.push(Output::Committed(commit));
    }

    /// Versions that agents have copies of and that may still be committed, oldest first.
    fn open_versions(&self, quorum: &Quorum) -> BTreeSet<Version> {
        let held = quorum.followers(self.orders.epoch).flat_map(|(_, report)| report.copies.keys());
        let versions = held.map(|key| key.version);
        versions.filter(|&version| Some(version) > self.settled && self.orders.keeps(version)).collect()
    }

    /// The newest open version of which a shard was never sealed and never will be: nobody has it, though its process has
    /// gone on to a later step, as one does whose agent died while it saved. Its room is needed by that step.
    fn newest_hopeless(&self, quorum: &Quorum) -> Option<Version> {
        let mut sealed: BTreeMap<Version, BTreeSet<u32>> = BTreeMap::new();
        for (_, report) in quorum.followers(self.orders.epoch) {
            for key in report.copies.keys().filter(|key| self.seen_ms.contains_key(&key.version)) {
                sealed.entry(key.version).or_default().insert(key.shard);
            }
        }
        let mut later: BTreeSet<u32> = BTreeSet::new();
        sealed.into_iter().rev().find_map(|(version, shards)| {
            let is_hopeless = !later.is_subset(&shards);
            later.extend(shards);
            is_hopeless.then_some(version)
        })
    }

    /// Gives up what has not got its copies in time. All versions of the epoch that are open go together, and some steps
    /// after them: slots are then free on all hosts before the next version that counts. Else some hosts would wait with
    /// one step and others with the next, and none would ever be whole. How many steps it takes until all hosts know is
    /// not known here: with each failure twice as many are skipped.
    fn give_up(&mut self, quorum: &Quorum, settings: &Settings, now_ms: u64, outputs: &mut Vec<Output>) {
        let give_up_ms = settings.give_up_ms;
        let open = self.open_versions(quorum);
        for version in open.into_iter().filter(|version| version.epoch == self.orders.epoch) {
            self.seen_ms.entry(version).or_insert(now_ms);
        }
        if self.pending.is_some() {
            return; // it has its copies, and may make the others unnecessary
        }
        let mut orders = Orders::clone(&self.orders);
        if let Some(hopeless) = self.newest_hopeless(quorum) {
            orders.floor = orders.floor.max(hopeless.step.saturating_add(1));
            let later = self.seen_ms.split_off(&Version { step: orders.floor, ..hopeless });
            let given_up = std::mem::replace(&mut self.seen_ms, later);
            outputs.extend(given_up.into_keys().map(Output::GivenUp));
        }
        if now_ms >= self.began_ms + give_up_ms
            && (!orders.is_open || orders.commits.len() > settings.versions)
        {
            orders.is_open = true;
            // What has lost its last copy of a shard only takes room from what is left.
            let is_whole = |commit: &Commit| {
                manifest_of(quorum, orders.epoch, commit.version, 1) == Some(commit.manifest)
            };
            if orders.commits.iter().any(is_whole) {
                orders.commits = orders.commits.iter().copied().filter(is_whole).collect();
            }
            self.drop_spare(&mut orders.commits, settings.versions.max(2));
            // Its room is needed, if there is another version to go back to.
            if orders.is_base_kept && !orders.commits.is_empty() {
                orders.is_base_kept = false;
                outputs.extend(orders.base.map(|base| Output::GivenUp(base.version)));
            }
        }
        if self.seen_ms.values().any(|&seen| now_ms >= seen + give_up_ms) {
            let newest = self.seen_ms.keys().map(|version| version.step).max().unwrap_or(0);
            orders.floor = newest.saturating_add(self.skipped);
            self.skipped = (2 * self.skipped).min(MOST_SKIPPED);
            outputs.extend(std::mem::take(&mut self.seen_ms).into_keys().map(Output::GivenUp));
        }
        if orders != *self.orders {
            self.orders = Arc::new(orders);
        }
    }
}

impl Training {
    /// Lets go of the oldest commits where there are more than so many: never of the newest, nor of the newest that has
    /// its copies.
    fn drop_spare(&self, commits: &mut BTreeSet<Commit>, most: usize) {
        let newest = commits.last().map(|commit| commit.version);
        let is_needed = |commit: &Commit| [newest, self.settled].contains(&Some(commit.version));
        while commits.len() > most {
            let Some(spare) = commits.iter().copied().find(|commit| !is_needed(commit)) else { return };
            commits.remove(&spare);
        }
    }
}

/// The manifest of a version of which every shard has one digest and at least `needed` copies.
fn manifest_of(quorum: &Quorum, epoch: Epoch, version: Version, needed: usize) -> Option<Digest> {
    let mut held: BTreeMap<u32, (SealedCopy, usize)> = BTreeMap::new();
    let range = Key { version, shard: 0 }..=Key { version, shard: u32::MAX };
    for (_, report) in quorum.followers(epoch) {
        for (key, &copy) in report.copies.range(range.clone()) {
            let entry = held.entry(key.shard).or_insert((copy, 0));
            if entry.0 != copy {
                return None;
            }
            entry.1 += 1;
        }
    }
    let (first, _) = held.values().next()?;
    let has_all = held.len() == first.shard_count as usize
        && held.keys().copied().eq(0..first.shard_count)
        && held.values().all(|(copy, count)| copy.shard_count == first.shard_count && *count >= needed);
    has_all.then(|| manifest_digest(version, held.values().map(|(copy, _)| copy.digest)))
}
