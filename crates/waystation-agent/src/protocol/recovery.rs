//! How a controller brings a recovery to its end: a new epoch, one decision after another, the orders.
//!
//! Invariants: what training is to begin with rests on inventories that their agents gave in this epoch and have not lost
//! since; an epoch is of one program, so that versions, which are of one epoch, are too; orders begin with every commit that may be the one that must not be lost (see
//! [`commits_to_keep`](super::decision::Findings::commits_to_keep)).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::controller::{Controller, Output, Phase, Settings};
use super::decision::Restorable;
use super::message::{Base, Decision, Inventory, Orders, ToAgent};
use super::names::{AgentId, Commit, Epoch, Program, Version};
use super::placement;
use super::training::Training;

impl Controller {
    /// Begins a recovery, in a new epoch.
    pub(super) fn recover(&mut self, outputs: &mut Vec<Output>) {
        let greatest = self.quorum.greatest_promise().unwrap_or_default().number.max(self.epoch.number);
        self.epoch = Epoch { number: greatest.saturating_add(1), controller: self.number };
        self.phase = Phase::Preparing;
        self.findings.inventories.clear();
        self.failed.clear();
        self.attempt = 0;
        self.tell_all(&ToAgent::Prepare { epoch: self.epoch }, outputs);
    }

    /// Takes note of a program that an agent has heard of. What was decided for an older one is over; and so is what was
    /// found before the first one began, if that was long ago.
    pub(super) fn note_program(&mut self, program: Option<&Program>, outputs: &mut Vec<Output>) {
        let Some(newer) = program.filter(|&program| self.program.as_ref() < Some(program)) else { return };
        if !newer.fits(self.settings.domains.len()) {
            return;
        }
        self.program = Some(newer.clone());
        self.stuck_since_ms = None;
        let is_outdated = match &self.phase {
            Phase::Preparing | Phase::Ended => false,
            Phase::Gathering { since_ms, .. } => self.now_ms >= since_ms + self.settings.gather_ms,
            Phase::Restoring { decision, .. } => decision.program < *newer,
            Phase::Training(training) => training.program() < newer,
        };
        if is_outdated {
            self.recover(outputs);
        }
    }

    pub(super) fn note_inventory(&mut self, agent: AgentId, found: Inventory, outputs: &mut Vec<Output>) {
        self.note_program(found.program.as_ref(), outputs);
        let has_forgotten = self.quorum.has_forgotten(agent, found.incarnation);
        if found.epoch == self.epoch && !has_forgotten && matches!(self.phase, Phase::Gathering { .. }) {
            self.findings.inventories.insert(agent, found);
            if matches!(self.phase, Phase::Gathering { is_stuck: true, .. }) {
                self.decide(outputs);
            }
        }
    }

    pub(super) fn note_restored(
        &mut self,
        agent: AgentId,
        of: (Epoch, u32),
        is_loaded: bool,
        outputs: &mut Vec<Output>,
    ) {
        let Phase::Restoring { decision, loaded } = &mut self.phase else { return };
        if (decision.epoch, decision.attempt) != of {
            return;
        }
        if is_loaded {
            loaded.insert(agent);
            return;
        }
        let version = decision.version;
        self.failed.extend(version);
        self.decide(outputs);
    }

    /// Has others take note of agents that remember nothing, and admits those of which a majority knows, or all do.
    pub(super) fn admit(&self, outputs: &mut Vec<Output>) {
        if matches!(self.phase, Phase::Ended) {
            return;
        }
        let needed = self.settings.needed_copies();
        let is_preparing = matches!(self.phase, Phase::Preparing);
        for (agent, message) in self.quorum.admissions(self.epoch, self.program.as_ref(), needed) {
            let is_admitted = matches!(message, ToAgent::Admit { .. });
            outputs.push(Output::ToAgent(agent, message));
            if is_admitted && !is_preparing {
                outputs.push(Output::ToAgent(agent, ToAgent::Gather { epoch: self.epoch }));
            }
        }
    }

    pub(super) fn decide(&mut self, outputs: &mut Vec<Output>) {
        let Some(program) = self.program.clone() else { return };
        self.attempt += 1;
        let found = self.findings.all_restorable(program.sequence);
        let chosen = self.choice(&found, outputs);
        let is_clear = self.is_clear(&program, &found, chosen.as_ref().map(|chosen| chosen.version));
        if !is_clear && !self.has_waited_enough() {
            self.phase = Phase::Gathering { since_ms: self.now_ms, is_stuck: true };
            outputs.push(Output::Stuck);
            return;
        }
        let shards = chosen.as_ref().map_or_else(Vec::new, |chosen| {
            let readers = self.readers(&program, chosen.shards.len());
            chosen.sources(&readers, |agent| self.settings.domains[usize::from(agent.0)])
        });
        let version = chosen.map(|chosen| chosen.version);
        let (epoch, attempt) = (self.epoch, self.attempt);
        let decision = Arc::new(Decision { epoch, attempt, program, version, shards });
        outputs.push(Output::Decided(Arc::clone(&decision)));
        self.phase = Phase::Restoring { decision, loaded: BTreeSet::new() };
        self.repeat(outputs);
    }

    /// What the program begins with: the newest that is not in doubt, else the newest.
    fn choice(&self, found: &[Restorable], outputs: &mut Vec<Output>) -> Option<Restorable> {
        let is_doubted =
            |found: &&Restorable| self.findings.fruitless(found.version) >= self.settings.fruitless_limit;
        let left = || found.iter().filter(|found| !self.failed.contains(&found.version));
        let chosen = left().find(|found| !is_doubted(found)).or_else(|| left().next());
        let from = chosen.map(|chosen| chosen.version);
        let doubted = left().filter(is_doubted).filter(|found| Some(found.version) >= from);
        outputs.extend(doubted.map(|found| Output::Doubted(found.version)));
        chosen.cloned()
    }

    /// Whether there is nothing to wait for. Copies may be where nobody was heard yet; and a commit of which all copies are
    /// there is not given up because one of them did not get through this time, nor is whatever else there is for nothing.
    fn is_clear(&self, program: &Program, found: &[Restorable], chosen: Option<Version>) -> bool {
        let mut passed_over =
            found.iter().map(|found| found.version).filter(|&version| Some(version) > chosen);
        let may_succeed =
            |version| self.failed.contains(&version) && (chosen.is_none() || self.findings.is_noted(version));
        if passed_over.any(may_succeed) {
            return false;
        }
        let is_new = found.is_empty() && !self.findings.has_commit(program.sequence);
        chosen.is_some() || is_new || self.has_heard_all()
    }

    /// Whether there is nobody left who could still have what is missing.
    fn has_heard_all(&self) -> bool {
        self.findings.inventories.len() == self.settings.domains.len()
    }

    /// Whether what is missing is not waited for any longer.
    fn has_waited_enough(&mut self) -> bool {
        let since_ms = *self.stuck_since_ms.get_or_insert(self.now_ms);
        self.now_ms >= since_ms + self.settings.stuck_ms
    }

    fn live(&self) -> BTreeSet<AgentId> {
        self.findings.inventories.keys().copied().collect()
    }

    fn holders(&self, program: &Program) -> Vec<Vec<AgentId>> {
        let Settings { domains, copies, .. } = &self.settings;
        placement::holders_of(&program.owners, &self.live(), domains, *copies)
    }

    /// Who reads each shard of a version: who will seal it, if it is cut as versions are now, else all in turn.
    fn readers(&self, program: &Program, shards: usize) -> Vec<AgentId> {
        if shards == program.owners.len() {
            let holders = self.holders(program);
            return holders.iter().filter_map(|holders| holders.first().copied()).collect();
        }
        self.live().iter().copied().cycle().take(shards).collect()
    }

    pub(super) fn train(&mut self, decision: &Decision, outputs: &mut Vec<Output>) {
        let inventories = &self.findings.inventories;
        let members: BTreeMap<AgentId, u64> =
            inventories.iter().map(|(&agent, found)| (agent, found.incarnation)).collect();
        let program = decision.program.clone();
        let is_continued = inventories.values().any(|found| found.begun >= Some(program.token));
        let base =
            decision.version.map(|version| Base { version, shard_count: decision.shards.len() as u32 });
        let Settings { fruitless_limit, versions, .. } = self.settings;
        let needed = self.settings.needed_copies();
        let mut commits = self.findings.commits_to_keep(program.sequence, needed, versions, fruitless_limit);
        let is_safe = |commit: &&Commit| self.findings.fewest_copies(commit.version) >= needed;
        let settled = commits.iter().rev().find(is_safe).or(commits.first()).map(|commit| commit.version);
        let lost = self.findings.lost(program.sequence).filter(|&lost| Some(lost) > decision.version);
        if commits.is_empty() {
            commits.extend(self.findings.remains_to_keep(program.sequence));
        }
        let is_committed = |version: Version| commits.iter().any(|commit| commit.version == version);
        let is_base_kept = base
            .is_some_and(|base| !is_committed(base.version) && self.findings.fewest_copies(base.version) > 0);
        let orders = Orders {
            epoch: self.epoch,
            attempt: decision.attempt,
            revision: 0,
            is_continued,
            base,
            is_base_kept,
            is_open: !is_base_kept && commits.len() <= versions,
            commits,
            doubted: self.findings.doubted(fruitless_limit),
            lost,
            floor: 0,
            holders: self.holders(&program),
            program,
        };
        self.stuck_since_ms = None;
        self.phase = Phase::Training(Training::new(orders, settled, members, self.now_ms));
        self.repeat(outputs);
    }

    /// Begins a recovery if somebody who is needed has been silent for too long; ends if too many are.
    pub(super) fn look_for_silence(&mut self, outputs: &mut Vec<Output>) {
        if self.agents().filter(|&agent| !self.is_silent(agent)).count() < self.quorum.majority() {
            self.phase = Phase::Ended;
            return outputs.push(Output::LeftAlone);
        }
        let needed: Vec<AgentId> = match &self.phase {
            Phase::Restoring { .. } => self.findings.inventories.keys().copied().collect(),
            Phase::Training(training) => training.members().collect(),
            Phase::Preparing | Phase::Gathering { .. } | Phase::Ended => return,
        };
        if needed.into_iter().any(|agent| self.is_silent(agent)) {
            self.recover(outputs);
        }
    }

    fn is_silent(&self, agent: AgentId) -> bool {
        let heard_ms = self.heard_ms.get(&agent).copied().unwrap_or(self.began_ms);
        self.now_ms > heard_ms + self.settings.dead_after_ms
    }
}
