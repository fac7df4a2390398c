//! What the machines want done.
//!
//! Invariants: effects are carried out in order, while the machines are locked; what takes long is only begun. As long as
//! notes cannot be written nothing is told to others: the machines say it again.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::Builder;

use waystation_format::slot;
use waystation_format::{Error, Kind, Result};

use super::driver::Effect;
use super::mail::Letter;
use super::names::{copy_in, slot_key, slot_version};
use super::notes::Notes;
use super::{Inner, Recovery, Shared, Verification};
use crate::daemon::log;
use crate::protocol::events::{Input, Refusal};
use crate::protocol::message::ToPeer;
use crate::protocol::names::{AgentId, Commit, Key, SealedCopy};

impl Inner {
    /// Takes note of how far a recovery has come, and tells of one that has ended.
    fn note_recovery(&mut self) {
        let Some(Recovery { decide, transfer }) = self.recoveries.note(&self.driver) else { return };
        let told = [("decide_s", decide), ("transfer_s", transfer)];
        log::line("recovered", &told.map(|(phase, time)| (phase, format!("{:.6}", time.as_secs_f64()))));
    }
}

impl Shared {
    /// Does what is wanted; returns what is not kept of what trainers have sealed.
    pub(super) fn carry_out(
        self: &Arc<Self>,
        inner: &mut Inner,
        effects: Vec<Effect>,
    ) -> Vec<(Key, Refusal)> {
        inner.note_recovery();
        let mut waiting = VecDeque::from(effects);
        let mut refused = Vec::new();
        while let Some(effect) = waiting.pop_front() {
            match effect {
                Effect::Remember(notes) => inner.unwritten = Some(notes),
                Effect::Tell(to, letter) => self.tell(inner, to, &letter),
                Effect::Send { to, key, copy } => self.send(inner, to, key, copy),
                Effect::Free(key) => {
                    inner.unfreed.insert(key);
                    self.free_unneeded(inner);
                }
                Effect::Verify => self.verify(inner),
                Effect::Load { attempt, key } => {
                    let is_loaded = self.is_here(inner, key);
                    let input = Input::Loaded { attempt, shard: key.shard, is_loaded };
                    waiting.extend(inner.driver.happen(input));
                }
                Effect::Fence => note("slots_not_taken_back", self.store.abort_others(&self.writer)),
                Effect::Raise(epoch) => note("epoch_not_raised", self.store.raise_epoch(epoch)),
                Effect::Refuse(key, refusal) => refused.push((key, refusal)),
                Effect::Committed(commit) => self.note_commit(commit),
                Effect::Log(event, pairs) => log::line(event, &pairs),
            }
            self.write_notes(inner);
        }
        inner.note_recovery();
        refused
    }

    /// Frees what could not be freed when that was wanted.
    pub(super) fn free_unneeded(&self, inner: &mut Inner) {
        let driver = &inner.driver;
        let holds = |key: &Key| driver.agent().is_some_and(|agent| agent.memory().copies.contains_key(key));
        inner.unfreed.retain(|key| !holds(key) && self.free(*key).is_err_and(is_in_use));
    }

    fn free(&self, key: Key) -> Result<()> {
        for header in self.store.inventory() {
            if copy_in(&header).is_some_and(|(held, _)| held == key) {
                self.store.release(&header)?;
                if let Some(tenant) = header.state.tenant() {
                    self.guests.remove(&tenant.key);
                }
            }
        }
        Ok(())
    }

    fn write_notes(&self, inner: &mut Inner) {
        let written = inner.unwritten.as_ref().map(|notes| self.write(notes));
        match written {
            None => {}
            Some(Ok(())) => inner.unwritten = None,
            Some(Err(error)) => log::error("notes_not_written", &error),
        }
    }

    fn write(&self, notes: &Notes) -> Result<()> {
        self.store.write_notes(&notes.encode()?)
    }

    fn tell(&self, inner: &Inner, to: AgentId, letter: &Letter) {
        let running = self.running.get().filter(|_| inner.unwritten.is_none());
        let outbox = running.and_then(|running| running.outboxes.get(usize::from(to.0))?.as_ref());
        let Some(outbox) = outbox else { return };
        match letter.encode() {
            Ok(message) => outbox.put(message),
            Err(error) => log::error("not_told", &error),
        }
    }

    fn send(self: &Arc<Self>, inner: &Inner, to: AgentId, key: Key, copy: SealedCopy) {
        let running = self.running.get().filter(|_| inner.unwritten.is_none());
        let (Some(running), Some(place)) = (running, self.places.get(usize::from(to.0))) else { return };
        let shared = Arc::clone(self);
        let damaged = move || {
            let mut inner = shared.lock();
            let Some(epoch) = inner.driver.agent().and_then(|agent| agent.memory().promised) else { return };
            let effects = inner.driver.happen(Input::Peer(to, ToPeer::Damaged { epoch, key }));
            shared.carry_out(&mut inner, effects);
        };
        let named = slot_key(self.store.record().run, key, copy);
        self.transfers.begin(&running.runtime, to, Arc::clone(place), named, damaged);
    }

    /// Whether a shard is sealed here. What the machine does not count as a copy is a guest.
    fn is_here(&self, inner: &Inner, key: Key) -> bool {
        let is_it = |header: &slot::Header| copy_in(header).is_some_and(|(held, _)| held == key);
        let Some(found) = self.store.inventory().into_iter().find(is_it) else { return false };
        let is_copy = inner.driver.agent().is_some_and(|agent| agent.memory().copies.contains_key(&key));
        if let Some(tenant) = found.state.tenant().filter(|_| !is_copy) {
            self.guests.add(&tenant.key);
        }
        true
    }

    fn note_commit(&self, commit: Commit) {
        let version = slot_version(commit.version);
        note("commit_not_noted", self.store.note_commit(version));
        self.guests.before(version).iter().for_each(|guest| self.dismiss(guest));
    }

    /// Frees slots of guests until there is a free one.
    pub(super) fn make_room(&self) {
        let is_full = || self.store.inventory().iter().all(|header| header.state != slot::State::Free);
        for guest in self.guests.all() {
            if !is_full() {
                return;
            }
            self.dismiss(&guest);
        }
    }

    fn dismiss(&self, (version, shard): &(slot::Version, String)) {
        let key = slot::Key { run: self.store.record().run, shard: shard.clone(), version: *version };
        self.guests.remove(&key);
        for header in self.store.inventory() {
            let is_it = header.state.tenant().is_some_and(|tenant| tenant.key == key);
            if is_it && self.store.release(&header).is_err_and(is_in_use) {
                self.guests.add(&key); // as long as it is being sent
            }
        }
    }

    /// Begins to verify all slots, in a thread of its own.
    pub(super) fn verify(self: &Arc<Self>, inner: &mut Inner) {
        if inner.verification != Verification::Idle {
            inner.verification = Verification::Outdated;
            return;
        }
        inner.verification = Verification::Running;
        let shared = Arc::clone(self);
        let spawned = Builder::new().name("waystation-verify".to_owned()).spawn(move || shared.verify_all());
        if let Err(error) = spawned {
            inner.verification = Verification::Idle; // it is asked for again
            log::line("not_verified", &[("message", error.to_string())]);
        }
    }

    fn verify_all(self: &Arc<Self>) {
        loop {
            let found = self.store.verify_all();
            let mut inner = self.lock();
            if inner.verification == Verification::Outdated {
                inner.verification = Verification::Running;
                continue;
            }
            inner.verification = Verification::Idle;
            let found = match found {
                Ok(found) => found,
                Err(error) => return log::error("not_verified", &error),
            };
            let mut keys = Vec::new();
            for (slot, error) in found.mended {
                log::error("mended", &error.with("slot", slot.to_string()));
            }
            for (header, error) in found.damaged {
                log::error("damaged", &error.with("slot", header.slot.to_string()));
                keys.extend(copy_in(&header).map(|(key, _)| key));
            }
            inner.unfreed.extend(&keys);
            let effects = inner.driver.happen(Input::Verified(keys));
            self.carry_out(&mut inner, effects);
            return self.free_unneeded(&mut inner);
        }
    }
}

fn is_in_use(error: Error) -> bool {
    error.kind() == Kind::Unavailable
}

fn note(event: &str, outcome: Result<()>) {
    if let Err(error) = outcome {
        log::error(event, &error);
    }
}
