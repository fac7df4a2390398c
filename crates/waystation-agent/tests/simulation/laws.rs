//! What must hold whatever happens. A law that is broken ends the run with a panic that says which.
//!
//! - The processes of a program begin with the bytes of one version, as they were saved, all of one lineage.
//! - A key never has two digests; the shards of a version that is committed are of one lineage.
//! - An epoch is of one program, and what is kept as saved in it was sealed by that program's processes, never by those
//!   of an older one. Programs that are let train do not go back to older ones as epochs go on.
//! - Of the newest version that a majority has noted as committed, a copy of every shard is left while fewer hosts
//!   than were needed for the commit were lost or damaged; the newest epoch lets go of it only if some shard of it was
//!   out of reach when it decided, or for a newer commit that is as safe. That it was begun with in vain is no reason.
//! - When a majority has promised an epoch, one of it knows of every commit of older epochs that a majority ever
//!   notes: what nobody there knows is never committed.
//! - All of this holds also where majorities lose their memory, as long as every shard of the version still has a copy.
//!   What is lost with all who knew of it counts as if it had never been.
//! - No host holds more copies than it may.

use std::collections::{BTreeMap, BTreeSet};

use waystation_agent::protocol::controller::Settings;
use waystation_agent::protocol::decision::Findings;
use waystation_agent::protocol::message::Decision;
use waystation_agent::protocol::names::{Commit, Digest, Epoch, Key, Version};

use super::host::{Content, Host};

/// What a shard's bytes are, and where they are from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Truth {
    pub content: Content,
    pub lineage: u64,
    pub sealed_ms: u64,
}

#[derive(Default)]
pub struct Laws {
    pub truth: BTreeMap<Key, Truth>,
    digests: BTreeMap<Key, Digest>,
    /// The token of the program of each epoch that was trained in.
    programs: BTreeMap<Epoch, u64>,
    /// The newest epoch that a majority has promised at the same time.
    established: Epoch,
    /// For each such epoch, the commits that were noted by any of its majority.
    known: BTreeMap<Epoch, BTreeSet<(Epoch, Version)>>,
    /// What controllers have told agents to note.
    issued: BTreeMap<(Epoch, Version), Commit>,
    /// Who has ever noted a commit, by the epoch in which it was done.
    noted: BTreeMap<(Epoch, Version), BTreeSet<u16>>,
    /// The commit that has to survive.
    reference: Option<Version>,
    /// What epochs have let go of it for, before a majority has heard of that: one of them all has to survive.
    successors: BTreeSet<Version>,
    /// Of all hosts, ever.
    harms: Vec<Harm>,
    /// Those that count against the reference.
    counted: Vec<Harm>,
    pub majority_commits: u64,
}

/// A host was lost, or copies on it were damaged.
#[derive(Clone, Debug)]
struct Harm {
    when_ms: u64,
    host: u16,
    /// What it lost.
    keys: BTreeSet<Key>,
    /// The last epoch in which others may have heard that it keeps them.
    epoch: Option<Epoch>,
}

impl Laws {
    /// A process of a program has sealed a shard, and it was kept.
    pub fn seal(&mut self, key: Key, truth: Truth, token: u64) {
        let first = *self.truth.entry(key).or_insert(truth);
        assert!(first.content == truth.content, "two different shards were sealed as {key:?}");
        let program = self.programs.get(&key.version.epoch);
        assert!(program == Some(&token), "{key:?} of program {token} is kept in the epoch of {program:?}");
    }

    /// Trainers of a program may save in an epoch.
    pub fn train(&mut self, epoch: Epoch, token: u64) {
        let first = *self.programs.entry(epoch).or_insert(token);
        assert!(first == token, "{epoch:?} is of programs {first} and {token}");
        let mut pairs = self.programs.values().zip(self.programs.values().skip(1));
        assert!(pairs.all(|(earlier, later)| earlier <= later), "programs go back: {:?}", self.programs);
    }

    /// A host is about to lose copies, as it is lost or they are damaged.
    pub fn harm(&mut self, when_ms: u64, host: &Host, keys: impl IntoIterator<Item = Key>) {
        let (epoch, keys) = (host.remembers().promised, keys.into_iter().collect());
        let harm = Harm { when_ms, host: host.id.0, keys, epoch };
        self.harms.push(harm.clone());
        self.counted.push(harm);
    }

    /// A host was lost. What no agent is bound by any more, nobody can ever go on with: it counts as if it had never been.
    pub fn lose(&mut self, hosts: &[Host]) {
        let bound = hosts.iter().filter_map(|host| host.remembers().promised.or(host.remembers().pledged));
        let newest = bound.max().unwrap_or_default();
        self.programs.retain(|epoch, _| *epoch <= newest);
        self.known.retain(|epoch, _| *epoch <= newest);
        self.noted.retain(|(epoch, _), _| *epoch <= newest);
        self.issued.retain(|(epoch, _), _| *epoch <= newest);
        self.established = self.known.keys().next_back().copied().unwrap_or_default();
        if self.reference.is_some_and(|reference| self.fewest_copies(hosts, reference) == 0) {
            self.refer_to(None);
        }
    }

    /// How many hosts have an intact copy of the rarest shard of a version.
    pub fn fewest_copies(&self, hosts: &[Host], version: Version) -> usize {
        self.fewest_copies_at(hosts, version, &|_| true)
    }

    fn fewest_copies_at(&self, hosts: &[Host], version: Version, counts: &dyn Fn(&Host) -> bool) -> usize {
        let of_version = Key { version, shard: 0 }..=Key { version, shard: u32::MAX };
        let holders = |key: Key| hosts.iter().filter(|host| counts(host) && host.holds(key)).count();
        self.truth.range(of_version).map(|(&key, _)| holders(key)).min().unwrap_or(0)
    }

    /// Processes begin with what they have read, shard by shard. Returns its lineage.
    pub fn begin(&self, decision: &Decision, read: &[(Key, Content)]) -> u64 {
        // The disk holds what the first program began with.
        let Some(version) = decision.version else { return 0 };
        let lineages = self.lineages(version);
        assert!(lineages.len() == 1, "{version:?} was decided for, whose shards are of {lineages:?}");
        assert!(read.len() == decision.shards.len(), "of {version:?} there is only {read:?}");
        for (shard, found) in (0u32..).zip(read) {
            let key = Key { version, shard };
            assert!(*found == (key, self.truth[&key].content), "{found:?} was read as {key:?}");
        }
        lineages.into_iter().next().unwrap_or_default()
    }

    fn lineages(&self, version: Version) -> BTreeSet<u64> {
        let of_version = Key { version, shard: 0 }..=Key { version, shard: u32::MAX };
        self.truth.range(of_version).map(|(_, truth)| truth.lineage).collect()
    }

    /// Looks at everything that is there; called after every step of an agent.
    pub fn look(&mut self, hosts: &[Host], at: u16) {
        let host = &hosts[usize::from(at)];
        let memory = host.remembers();
        assert!(memory.copies.len() <= host.limits.copies, "host {at} holds {} copies", memory.copies.len());
        assert!(
            memory.copies.keys().eq(host.bytes.keys()) || host.agent.is_none(),
            "the slots of host {at} are not what its agent says"
        );
        for (key, copy) in &memory.copies {
            let first = *self.digests.entry(*key).or_insert(copy.digest);
            assert!(first == copy.digest, "{key:?} has two digests");
        }
        self.note_promises(hosts);
        self.note_commits(hosts, at);
    }

    fn note_promises(&mut self, hosts: &[Host]) {
        let mut followers: BTreeMap<Epoch, BTreeSet<u16>> = BTreeMap::new();
        for host in hosts {
            if let Some(promised) = host.remembers().promised {
                followers.entry(promised).or_default().insert(host.id.0);
            }
        }
        for (epoch, members) in followers {
            if members.len() > hosts.len() / 2 && !self.known.contains_key(&epoch) {
                let noted = self.noted.iter().filter(|(_, noters)| !noters.is_disjoint(&members));
                self.known.insert(epoch, noted.map(|(commit, _)| *commit).collect());
                self.established = self.established.max(epoch);
            }
        }
    }

    /// A controller has found that a version has its copies, and tells agents to note that.
    pub fn issue(&mut self, hosts: &[Host], epoch: Epoch, commit: Commit) {
        let first = *self.issued.entry((epoch, commit.version)).or_insert(commit);
        assert!(first == commit, "{epoch:?} commits {:?} with two digests", commit.version);
        let lineages = self.lineages(commit.version);
        assert!(lineages.len() == 1, "{:?} is committed, whose shards are of {lineages:?}", commit.version);
        for host in hosts {
            self.note_commits(hosts, host.id.0);
        }
    }

    /// Counts who knows of the commits of its epoch.
    fn note_commits(&mut self, hosts: &[Host], at: u16) {
        let memory = hosts[usize::from(at)].remembers();
        let Some(epoch) = memory.promised.filter(|_| memory.promised == memory.trained) else { return };
        for commit in &memory.noted {
            if self.issued.contains_key(&(epoch, commit.version)) {
                self.note_commit(hosts, epoch, commit.version, at);
            }
        }
    }

    fn note_commit(&mut self, hosts: &[Host], epoch: Epoch, version: Version, at: u16) {
        let noted = self.noted.entry((epoch, version)).or_default();
        if noted.insert(at) && noted.len() == hosts.len() / 2 + 1 {
            for (later, known) in self.known.range(epoch..).skip(1) {
                assert!(
                    known.contains(&(epoch, version)),
                    "{version:?} was committed by {epoch:?}, which nobody in {later:?} knew when that began"
                );
            }
            self.majority_commits += 1;
            if epoch >= self.established && self.reference.is_none_or(|reference| reference < version) {
                self.refer_to(Some(version));
            }
        }
    }

    /// The commit that has to survive has.
    pub fn check_reference(&mut self, hosts: &[Host], settings: &Settings) {
        let Some(version) = self.reference else { return };
        let needed = settings.needed_copies();
        let of_version = |version| Key { version, shard: 0 }..=Key { version, shard: u32::MAX };
        let fewest_at =
            |version, counts: &dyn Fn(&Host) -> bool| self.fewest_copies_at(hosts, version, counts);
        let fewest_of = |version| self.fewest_copies(hosts, version);
        let fewest = fewest_of(version);
        // Damage that nobody has found yet is still to come: others free their copies because that one is there.
        let is_hidden = |host: &Host| {
            let copies = host.remembers().copies.keys();
            copies.filter(|key| key.version == version).any(|&key| !host.holds(key))
        };
        // As long as the host may be believed to keep what it has lost, others that see to it that enough do may free theirs.
        let is_believed = |harm: &Harm| {
            let host = &hosts[usize::from(harm.host)];
            harm.keys.range(of_version(version)).any(|&key| !host.holds(key))
                && fewest_at(version, &|host| host.remembers().promised > harm.epoch) < needed
        };
        let counted: Vec<Harm> = if fewest < needed || hosts.iter().any(is_hidden) {
            self.counted.clone()
        } else {
            self.counted.iter().filter(|harm| is_believed(harm)).cloned().collect()
        };
        let harmed: BTreeSet<u16> = counted.iter().map(|harm| harm.host).collect();
        assert!(
            fewest > 0
                || harmed.len() >= needed
                || self.successors.iter().any(|&successor| fewest_of(successor) > 0),
            "{version:?} was committed and is gone, after harm to {harmed:?} only"
        );
        self.counted = counted;
    }

    /// A controller has decided.
    pub fn decide(&mut self, decision: &Decision, findings: &Findings, settings: &Settings) {
        if decision.epoch < self.established {
            return; // nobody follows it
        }
        let Some(reference) = self.reference else { return };
        let sequence = decision.program.sequence;
        let Settings { versions, fruitless_limit, .. } = *settings;
        let commits = findings.commits_to_keep(sequence, settings.needed_copies(), versions, fruitless_limit);
        if commits.iter().any(|commit| commit.version == reference) {
            return;
        }
        // What takes its place must be as safe as it was, or it was passed over for a reason.
        let is_safe = |version: &Version| findings.fewest_copies(*version) >= settings.needed_copies();
        let safe = commits.iter().rev().map(|commit| commit.version).find(is_safe);
        let could = findings.all_restorable(sequence).iter().any(|found| found.version == reference);
        assert!(
            safe > Some(reference) || !could,
            "{:?} was decided for, and {commits:?} kept, though the committed {reference:?} could be restored",
            decision.version
        );
        match commits.iter().find(|commit| Some(commit.version) == safe) {
            Some(commit) => {
                self.successors.insert(commit.version);
                self.issued.entry((decision.epoch, commit.version)).or_insert(*commit);
            }
            None => self.refer_to(None),
        }
    }

    /// From now on this version has to survive.
    fn refer_to(&mut self, version: Option<Version>) {
        self.reference = version;
        self.successors.retain(|&successor| Some(successor) > version);
        let Some(version) = version else { return };
        let of_version = Key { version, shard: 0 }..=Key { version, shard: u32::MAX };
        let since_ms = self.truth.range(of_version).map(|(_, truth)| truth.sealed_ms).min().unwrap_or(0);
        self.counted = self.harms.iter().filter(|harm| harm.when_ms >= since_ms).cloned().collect();
    }
}
