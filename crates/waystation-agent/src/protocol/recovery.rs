//! How a controller brings a recovery to its end: a new epoch, one decision after another, the orders.
//!
//! Invariants: what training is to begin with rests on inventories that their agents gave in this epoch and have not lost
//! since; orders begin with every commit that may be the one that must not be lost (see
//! [`commits_to_keep`](super::decision::Findings::commits_to_keep)).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::controller::{Controller, Output, Phase};
use super::message::{Decision, Inventory, Orders, ToAgent};
use super::names::{AgentId, Epoch, Version};
use super::training::Training;

impl Controller {
    /// Begins a recovery, in a new epoch.
    pub(super) fn recover(&mut self, outputs: &mut Vec<Output>) {
        let greatest = self.quorum.greatest_promise().unwrap_or_default().number.max(self.epoch.number);
        self.epoch = Epoch { number: greatest + 1, controller: self.number };
        self.phase = Phase::Preparing;
        self.findings.inventories.clear();
        self.failed.clear();
        self.attempt = 0;
        self.tell_all(&ToAgent::Prepare { epoch: self.epoch }, outputs);
    }

    pub(super) fn note_inventory(&mut self, agent: AgentId, found: Inventory, outputs: &mut Vec<Output>) {
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

    /// Has others take note of agents that remember nothing, and admits those of which a majority knows.
    pub(super) fn admit(&self, outputs: &mut Vec<Output>) {
        if matches!(self.phase, Phase::Preparing | Phase::Ended) {
            return;
        }
        for (agent, message) in self.quorum.admissions(self.epoch) {
            let is_admitted = matches!(message, ToAgent::Admit { .. });
            outputs.push(Output::ToAgent(agent, message));
            if is_admitted {
                outputs.push(Output::ToAgent(agent, ToAgent::Gather { epoch: self.epoch }));
            }
        }
    }

    pub(super) fn decide(&mut self, outputs: &mut Vec<Output>) {
        self.attempt += 1;
        let live: Vec<AgentId> = self.findings.inventories.keys().copied().collect();
        let mut chosen = None;
        for candidate in self.findings.candidates() {
            let fruitless = self.findings.fruitless(candidate.version);
            if self.failed.contains(&candidate.version) {
                continue;
            }
            if fruitless < self.settings.fruitless_limit || candidate.is_on_disk {
                chosen = Some(candidate);
                break;
            }
            outputs.push(Output::Quarantined(candidate.version));
        }
        let is_new_run = self.findings.newest_commit().is_none() && self.findings.candidates().is_empty();
        if chosen.is_none() && !is_new_run {
            self.phase = Phase::Gathering { since_ms: self.now_ms, is_stuck: true };
            outputs.push(Output::Stuck);
            return;
        }
        let shards = chosen.as_ref().map_or_else(Vec::new, |candidate| {
            let readers = self.readers(&live, candidate.shards.len() as u32);
            candidate.sources(&readers, |agent| self.settings.domains[usize::from(agent.0)])
        });
        let version = chosen.map(|candidate| candidate.version);
        let decision = Arc::new(Decision { epoch: self.epoch, attempt: self.attempt, version, shards });
        outputs.push(Output::Decided(Arc::clone(&decision)));
        self.phase = Phase::Restoring { decision, loaded: BTreeSet::new() };
        self.repeat(outputs);
    }

    /// Who reads each shard of a version: who will seal it, if it is cut as versions are now, else all in turn.
    fn readers(&self, live: &[AgentId], shards: u32) -> Vec<AgentId> {
        if shards == self.settings.shards {
            let holders = (self.settings.place)(live, shards, self.settings.copies);
            return holders.iter().filter_map(|holders| holders.first().copied()).collect();
        }
        live.iter().copied().cycle().take(shards as usize).collect()
    }

    pub(super) fn train(&mut self, decision: &Decision, outputs: &mut Vec<Output>) {
        let live: Vec<AgentId> = self.findings.inventories.keys().copied().collect();
        let members: BTreeMap<AgentId, u64> =
            self.findings.inventories.iter().map(|(&agent, found)| (agent, found.incarnation)).collect();
        let base = decision.version;
        let commits =
            self.findings.commits_to_keep(self.settings.needed_copies(), self.settings.fruitless_limit);
        let is_committed = |version: Version| commits.iter().any(|commit| commit.version == version);
        let is_base_kept =
            base.is_some_and(|base| !is_committed(base) && self.findings.fewest_copies(base) > 0);
        let orders = Orders {
            epoch: self.epoch,
            attempt: decision.attempt,
            revision: 0,
            base,
            is_base_kept,
            is_open: !is_base_kept && commits.len() <= 1,
            commits,
            floor: 0,
            holders: (self.settings.place)(&live, self.settings.shards, self.settings.copies),
        };
        self.phase = Phase::Training(Training::new(orders, members, self.now_ms));
        self.repeat(outputs);
    }

    /// Begins a recovery if somebody who is needed has been silent for too long.
    pub(super) fn look_for_silence(&mut self, outputs: &mut Vec<Output>) {
        let needed: Vec<AgentId> = match &self.phase {
            Phase::Restoring { .. } => self.findings.inventories.keys().copied().collect(),
            Phase::Training(training) => training.members().collect(),
            Phase::Preparing | Phase::Gathering { .. } | Phase::Ended => return,
        };
        let is_silent = |agent: &AgentId| {
            let heard_ms = self.heard_ms.get(agent).copied().unwrap_or_default();
            self.now_ms > heard_ms + self.settings.dead_after_ms
        };
        if needed.iter().any(is_silent) {
            self.recover(outputs);
        }
    }
}
