//! The agent's part: what it has promised, which copies it holds, who it brings them to.
//!
//! A pure machine: inputs are messages, ticks and what happened to slots; outputs are messages and effects, to be carried
//! out in order. What [`Memory`] holds must be in place before anything that follows it leaves the host; it outlives
//! the agent's process, not the host.
//!
//! In order of a version's life: the trainer seals a shard here (`Sealed`); the bytes go to the shard's other holders
//! until each has verified and kept them (`replication`); reports tell the controller, which commits; once a majority
//! has noted that, the orders let older copies go. After a failure, and when a newer program begins, a controller with a
//! higher epoch asks for a promise, gathers what is left, decides, and has the shards brought where they are needed
//! (`restoring`). Trainers whose program still is the newest go on all the while, and save in the new epoch once its
//! orders are here.
//!
//! Invariants: nothing of another epoch than the promised one is acted on; nothing that trainers seal is kept once a
//! newer program than theirs is known; the agent never holds two copies of one
//! shard of one version, nor accepts a second digest for one; a copy that was reported is freed only when orders of
//! the promised epoch say that a newer commit replaces it or that its version will never be committed, or when those that
//! they name as its holders all keep it and this agent is none of them; there are never more copies than the limits allow.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::events::{Input, Output, Refusal};
use super::memory::{Limits, Memory};
use super::message::{Decision, Inventory, Orders, Purpose, Report, ToAgent, ToController, ToPeer};
use super::names::{AgentId, Epoch, Key, Program};
use super::restoring::Restoring;

/// The machine.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Agent {
    pub(super) id: AgentId,
    limits: Limits,
    pub(super) memory: Memory,
    pub(super) orders: Option<Arc<Orders>>,
    pub(super) restoring: Option<Restoring>,
    /// Copies that other holders have said they keep.
    pub(super) kept: BTreeSet<(Key, AgentId)>,
    /// Whether copies were verified in the promised epoch.
    is_verified: bool,
    /// The controller that was heard last; if its epoch is over, reports tell it so.
    asked_by: Option<u32>,
}

impl Agent {
    /// An agent that goes on with what memory holds: of itself before its process ended, of a founder, or of one that
    /// has lost it.
    pub fn new(id: AgentId, limits: Limits, memory: Memory) -> Self {
        let (orders, restoring, kept) = (None, None, BTreeSet::new());
        Self { id, limits, memory, orders, restoring, kept, is_verified: false, asked_by: None }
    }

    /// What holds while trainers train; None while they do not.
    pub fn orders(&self) -> Option<&Orders> {
        self.orders.as_deref()
    }

    /// What outlives the process.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Why a trainer's shard would not be kept now; None if it would.
    pub fn refusal_of(&self, key: Key) -> Option<Refusal> {
        let of_epoch = self.orders.as_ref().filter(|orders| orders.epoch == key.version.epoch);
        let Some(orders) = of_epoch.filter(|orders| self.memory.program.as_ref() == Some(&orders.program))
        else {
            return Some(Refusal::Fenced);
        };
        if self.memory.copies.contains_key(&key) {
            Some(Refusal::Conflict)
        } else if key.version.step < orders.floor {
            Some(Refusal::Late)
        } else {
            (!orders.is_open || !self.has_room(key.shard)).then_some(Refusal::Full)
        }
    }

    /// Takes an input; returns what to do, in order.
    pub fn handle(&mut self, input: Input) -> Vec<Output> {
        let mut outputs = Vec::new();
        match input {
            Input::Controller(message) => self.hear(message, &mut outputs),
            Input::Peer(from, message) => self.hear_peer(from, message, &mut outputs),
            Input::Bytes { from, epoch, key, copy, purpose, is_intact } => {
                if self.follows(epoch) {
                    if !is_intact {
                        outputs.push(Output::ToPeer(from, ToPeer::Damaged { epoch, key }));
                    }
                    match purpose {
                        Purpose::Replica if is_intact => self.keep_replica(from, key, copy, &mut outputs),
                        Purpose::Replica => {} // it is sent again if it was only the way that damaged it
                        Purpose::Restore { attempt } => {
                            self.fetched(from, attempt, key, copy, is_intact, &mut outputs);
                        }
                    }
                }
            }
            Input::Begin(program) => {
                self.hear_of(&program, &mut outputs);
                self.report(&mut outputs);
            }
            Input::Sealed(key, copy) => self.seal(key, copy, &mut outputs),
            Input::Verified(damaged) => self.take_stock(&damaged, &mut outputs),
            Input::Loaded { attempt, shard, is_loaded } => {
                self.loaded(attempt, shard, is_loaded, &mut outputs);
            }
            Input::Coming(key) => self.coming(key),
            Input::Tick => {
                self.replicate(&mut outputs);
                self.fetch_again(&mut outputs);
                self.report(&mut outputs);
            }
        }
        outputs
    }

    pub(super) fn follows(&self, epoch: Epoch) -> bool {
        self.memory.promised == Some(epoch)
    }

    fn hear(&mut self, message: ToAgent, outputs: &mut Vec<Output>) {
        self.asked_by = Some(message.epoch().controller);
        match message {
            ToAgent::Prepare { epoch } => match self.memory.promised {
                Some(promised) if promised < epoch => self.promise(epoch),
                None if self.memory.pledged < Some(epoch) => {
                    self.memory.pledged = Some(epoch);
                    // What it says of others from now on it was told in this epoch.
                    self.memory.incarnations.clear();
                }
                _ => {}
            },
            ToAgent::Admit { epoch, incarnation, incarnations, noted, program } => {
                let is_free = self.memory.promised.is_none() && self.memory.pledged <= Some(epoch);
                if is_free && incarnation == self.memory.incarnation {
                    self.memory.incarnations = incarnations;
                    self.memory.noted = noted;
                    if let Some(program) = program {
                        self.hear_of(&program, outputs);
                    }
                    self.promise(epoch);
                }
            }
            ToAgent::Learn { epoch, agent, incarnation } => {
                if self.memory.is_bound(epoch) && agent != self.id {
                    let known = self.memory.incarnations.entry(agent).or_default();
                    *known = incarnation.max(*known);
                }
            }
            ToAgent::Gather { epoch } if self.follows(epoch) => {
                return if self.is_verified { self.answer(outputs) } else { outputs.push(Output::Verify) };
            }
            ToAgent::Restore(decision) if self.follows(decision.epoch) => {
                return self.restore(decision, outputs);
            }
            ToAgent::Train(orders) if self.follows(orders.epoch) => return self.train(orders, outputs),
            ToAgent::Bring { epoch, key, to } if self.follows(epoch) => return self.bring(key, to, outputs),
            ToAgent::Commit { epoch, commit } => {
                // Before the first orders of the epoch, which say what is noted then, it would be forgotten again.
                if self.follows(epoch) && self.memory.trained == Some(epoch) {
                    self.memory.note(commit);
                }
            }
            ToAgent::Gather { .. } | ToAgent::Restore(_) | ToAgent::Train(_) | ToAgent::Bring { .. } => {}
        }
        self.report(outputs);
    }

    fn promise(&mut self, epoch: Epoch) {
        (self.memory.promised, self.memory.pledged) = (Some(epoch), None);
        (self.orders, self.restoring, self.is_verified) = (None, None, false);
        self.kept.clear();
    }

    /// Takes note of a program, and fences those before it.
    fn hear_of(&mut self, program: &Program, outputs: &mut Vec<Output>) {
        if self.memory.program.as_ref() < Some(program) {
            self.memory.program = Some(program.clone());
            outputs.push(Output::Fence(program.token));
        }
    }

    pub(super) fn report(&self, outputs: &mut Vec<Output>) {
        let memory = &self.memory;
        let report = ToController::Report(Report {
            incarnation: memory.incarnation,
            promised: memory.promised,
            pledged: memory.pledged,
            program: memory.program.clone(),
            incarnations: memory.incarnations.clone(),
            copies: memory.copies.clone(),
            noted: memory.noted.clone(),
            trained: memory.trained,
        });
        let followed = memory.promised.or(memory.pledged).map(|epoch| epoch.controller);
        for controller in
            followed.into_iter().chain(self.asked_by.filter(|&asked_by| followed != Some(asked_by)))
        {
            outputs.push(Output::ToController(controller, report.clone()));
        }
    }

    /// Lets go of copies that are damaged, and says what is left.
    fn take_stock(&mut self, damaged: &[Key], outputs: &mut Vec<Output>) {
        for key in damaged {
            self.free(*key, outputs);
        }
        self.is_verified = true;
        self.answer(outputs);
        if !damaged.is_empty() {
            self.report(outputs);
        }
    }

    fn answer(&self, outputs: &mut Vec<Output>) {
        let Some(epoch) = self.memory.promised else { return };
        let found = ToController::Inventory(Inventory {
            epoch,
            incarnation: self.memory.incarnation,
            copies: self.memory.copies.clone(),
            noted: self.memory.noted.clone(),
            fruitless: self
                .memory
                .fruitless
                .iter()
                .map(|(&version, beginnings)| (version, beginnings.count))
                .collect(),
            program: self.memory.program.clone(),
            begun: self.memory.begun,
        });
        outputs.push(Output::ToController(epoch.controller, found));
    }

    fn restore(&mut self, decision: Arc<Decision>, outputs: &mut Vec<Output>) {
        self.hear_of(&decision.program, outputs);
        let (attempt, epoch) = (decision.attempt, decision.epoch);
        let done = self.memory.restored.filter(|(of, _)| *of == epoch).map(|(_, attempt)| attempt);
        if done >= Some(attempt) {
            if done == Some(attempt) {
                let answer = ToController::Restored { epoch, attempt, is_loaded: true };
                outputs.push(Output::ToController(epoch.controller, answer));
            }
        } else if self.restoring.as_ref().is_none_or(|earlier| earlier.attempt() < attempt) {
            self.begin_restoring(decision, outputs);
        } else {
            self.say_if_restored(outputs);
        }
    }

    fn train(&mut self, orders: Arc<Orders>, outputs: &mut Vec<Output>) {
        if self.memory.restored != Some((orders.epoch, orders.attempt)) {
            return; // it has no part in this, or has not loaded what it was to
        }
        if self.orders.as_ref().is_some_and(|known| known.revision > orders.revision) {
            return; // an older message
        }
        self.hear_of(&orders.program, outputs);
        if self.memory.trained != Some(orders.epoch) {
            self.memory.trained = Some(orders.epoch);
            // The decision may have gone back behind what this agent has noted.
            self.memory.noted.clear();
            let token = orders.program.token;
            if let Some(base) = orders.base.filter(|_| !orders.is_continued) {
                self.memory.count_beginning(base.version, token, orders.epoch);
            }
            self.memory.begun = self.memory.begun.max(Some(token));
        }
        for &commit in &orders.commits {
            self.memory.note(commit);
        }
        let oldest = orders.commits.first().copied();
        self.memory.noted.retain(|&commit| Some(commit) >= oldest);
        if self.orders.is_none() {
            self.restoring = None;
            outputs.push(Output::Train(orders.epoch)); // again after the agent was started anew
        }
        self.orders = Some(orders);
        self.free_unneeded(outputs);
        self.replicate(outputs);
        self.report(outputs);
    }

    /// Frees the copies that the orders let go.
    fn free_unneeded(&mut self, outputs: &mut Vec<Output>) {
        let Some(orders) = self.orders.clone() else { return };
        let keys: Vec<Key> = self.memory.copies.keys().copied().collect();
        for key in keys.into_iter().filter(|key| !orders.keeps(key.version)) {
            self.free(key, outputs);
        }
    }

    pub(super) fn free(&mut self, key: Key, outputs: &mut Vec<Output>) {
        if self.memory.copies.remove(&key).is_some() {
            self.kept.retain(|(kept, _)| *kept != key);
            outputs.push(Output::Free(key));
        }
    }

    /// Whether a copy that comes from elsewhere has room. One of an older commit has only where that leaves room for what
    /// this agent is to keep of the newest commit, and of the next version.
    pub(super) fn has_room_for(&self, orders: &Orders, key: Key) -> bool {
        let is_left = || self.memory.copies.len() + 1 + self.reserved(orders) <= self.limits.copies;
        self.has_room(key.shard) && (!orders.is_spare(key.version) || is_left())
    }

    /// How many slots that is: those of them that it does not have yet.
    fn reserved(&self, orders: &Orders) -> usize {
        let Some(newest) = orders.commits.last() else { return 0 };
        let own = orders.holders.iter().filter(|holders| holders.contains(&self.id)).count();
        let is_had =
            |key: &&Key| key.version >= newest.version && orders.holders_of(**key).contains(&self.id);
        (2 * own).saturating_sub(self.memory.copies.keys().filter(is_had).count())
    }

    /// Whether there is a free slot for a shard.
    pub(super) fn has_room(&self, shard: u32) -> bool {
        let of_shard = self.memory.copies.keys().filter(|key| key.shard == shard).count();
        self.memory.copies.len() < self.limits.copies && of_shard < self.limits.versions_of_shard
    }
}
