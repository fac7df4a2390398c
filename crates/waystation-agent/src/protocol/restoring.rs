//! How an agent carries out a decision: each shard that is to be read here, from the first source that can give it.
//!
//! A source that is silent for some ticks is passed over for the next one, and asked again after the last: one transfer that
//! has failed says little of a copy. One that gives bytes that are not what the decision says is not asked again. When a
//! shard has no source left, or all of them were silent some times, the agent says that it could not; the controller then
//! sees what is there. Bytes that were fetched are kept as a copy where there is room, so that the restored version has its
//! copies again soon.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::agent::Agent;
use super::events::Output;
use super::message::{Decision, ToController, ToPeer};
use super::names::{AgentId, Epoch, Key, SealedCopy};

/// After so many ticks without an answer a source is passed over.
const PATIENCE_TICKS: u32 = 4;
/// So often all sources are asked, one after the other.
const ROUNDS: usize = 5;

/// A decision that is being carried out.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Restoring {
    decision: Arc<Decision>,
    /// The shards that are not loaded yet.
    missing: BTreeMap<u32, Progress>,
    has_failed: bool,
}

/// How far one shard has come.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Progress {
    /// How many times a source was silent: after the last one the first comes again.
    turn: usize,
    /// Those that have nothing of use.
    useless: BTreeSet<AgentId>,
    ticks: u32,
    /// The bytes are here, and are being loaded.
    is_loading: bool,
}

impl Restoring {
    pub(super) fn attempt(&self) -> u32 {
        self.decision.attempt
    }

    /// The shard's key, and the source that is its turn.
    fn turn(&self, shard: u32) -> Option<(Key, Option<AgentId>)> {
        let progress = self.missing.get(&shard)?;
        let sources = self.decision.shards.get(shard as usize)?.sources.iter();
        let useful: Vec<AgentId> =
            sources.copied().filter(|source| !progress.useless.contains(source)).collect();
        let mut rounds = useful.iter().copied().cycle().take(ROUNDS * useful.len());
        let key = Key { version: self.decision.version?, shard };
        Some((key, rounds.nth(progress.turn)))
    }
}

impl Agent {
    pub(super) fn begin_restoring(&mut self, decision: Arc<Decision>, outputs: &mut Vec<Output>) {
        let own = decision.shards.iter().zip(0u32..).filter(|(shard, _)| shard.reader == self.id);
        let missing: BTreeMap<u32, Progress> = own.map(|(_, number)| (number, Progress::default())).collect();
        let shards: Vec<u32> = missing.keys().copied().collect();
        self.restoring = Some(Restoring { decision, missing, has_failed: false });
        for shard in shards {
            self.ask(shard, outputs);
        }
        self.say_if_restored(outputs);
    }

    /// Asks the source whose turn it is.
    fn ask(&mut self, shard: u32, outputs: &mut Vec<Output>) {
        let id = self.id;
        let Some(restoring) = &mut self.restoring else { return };
        let Some((key, source)) = restoring.turn(shard) else { return };
        let (attempt, epoch) = (restoring.decision.attempt, restoring.decision.epoch);
        let Some(progress) = restoring.missing.get_mut(&shard) else { return };
        progress.ticks = 0;
        match source {
            None => restoring.has_failed = true,
            Some(holder) if holder != id => {
                outputs.push(Output::ToPeer(holder, ToPeer::Fetch { epoch, attempt, key }));
            }
            Some(_) => {
                progress.is_loading = true;
                outputs.push(Output::Load { attempt, key });
            }
        }
    }

    /// Asks the next source: this one is silent, or has nothing of use.
    fn pass_over(&mut self, shard: u32, is_useless: bool, outputs: &mut Vec<Output>) {
        let Some(restoring) = &mut self.restoring else { return };
        let turn = restoring.turn(shard);
        let Some(progress) = restoring.missing.get_mut(&shard) else { return };
        progress.is_loading = false;
        match turn.and_then(|(_, source)| source).filter(|_| is_useless) {
            Some(source) => drop(progress.useless.insert(source)),
            None => progress.turn += 1,
        }
        self.ask(shard, outputs);
        self.say_if_restored(outputs);
    }

    /// The source whose turn it is sends, however long that takes.
    pub(super) fn coming(&mut self, key: Key) {
        let Some(restoring) = &mut self.restoring else { return };
        if restoring.turn(key.shard).is_some_and(|(asked, _)| asked == key)
            && let Some(progress) = restoring.missing.get_mut(&key.shard)
        {
            progress.ticks = 0;
        }
    }

    /// Passes over the sources that have been silent for too long, and asks the others again.
    pub(super) fn fetch_again(&mut self, outputs: &mut Vec<Output>) {
        let Some(restoring) = &mut self.restoring else { return };
        let mut silent = Vec::new();
        for (&shard, progress) in restoring.missing.iter_mut().filter(|(_, progress)| !progress.is_loading) {
            progress.ticks += 1;
            silent.push((shard, progress.ticks));
        }
        for (shard, ticks) in silent {
            if ticks >= PATIENCE_TICKS {
                self.pass_over(shard, false, outputs);
            } else if let Some((key, Some(holder))) =
                self.restoring.as_ref().and_then(|restoring| restoring.turn(shard))
            {
                let Some((epoch, attempt)) = self.decision() else { return };
                outputs.push(Output::ToPeer(holder, ToPeer::Fetch { epoch, attempt, key }));
            }
        }
    }

    pub(super) fn fetched(
        &mut self,
        from: AgentId,
        attempt: u32,
        key: Key,
        copy: SealedCopy,
        is_intact: bool,
        outputs: &mut Vec<Output>,
    ) {
        let Some(restoring) = &mut self.restoring else { return };
        let wanted = restoring.decision.shards.get(key.shard as usize).map(|shard| shard.copy);
        let is_turn = restoring.turn(key.shard) == Some((key, Some(from)));
        let Some(progress) = restoring.missing.get_mut(&key.shard) else { return };
        if restoring.decision.attempt != attempt || !is_turn || progress.is_loading {
            return;
        }
        if !is_intact || wanted != Some(copy) {
            return self.pass_over(key.shard, true, outputs);
        }
        progress.is_loading = true;
        if !self.memory.copies.contains_key(&key) && self.has_room(key.shard) {
            self.memory.copies.insert(key, copy);
        }
        outputs.push(Output::Load { attempt, key });
    }

    pub(super) fn loaded(&mut self, attempt: u32, shard: u32, is_loaded: bool, outputs: &mut Vec<Output>) {
        if self.decision().is_none_or(|(_, current)| current != attempt) {
            return;
        }
        if !is_loaded {
            let turn = self.restoring.as_ref().and_then(|restoring| restoring.turn(shard));
            if turn.is_some_and(|(key, _)| self.memory.copies.contains_key(&key)) {
                outputs.push(Output::Verify); // if that is why, others must not count on it
            }
            return self.pass_over(shard, true, outputs);
        }
        if let Some(restoring) = &mut self.restoring {
            restoring.missing.remove(&shard);
        }
        self.say_if_restored(outputs);
    }

    /// The decision that is being carried out: its epoch, and the number of the attempt.
    pub fn decision(&self) -> Option<(Epoch, u32)> {
        self.restoring.as_ref().map(|restoring| (restoring.decision.epoch, restoring.decision.attempt))
    }

    /// Tells the controller how the decision was carried out, once that is known.
    pub(super) fn say_if_restored(&mut self, outputs: &mut Vec<Output>) {
        let Some(restoring) = &self.restoring else { return };
        let (epoch, attempt) = (restoring.decision.epoch, restoring.decision.attempt);
        let is_loaded = restoring.missing.is_empty();
        if is_loaded {
            self.memory.restored = Some((epoch, attempt));
        }
        if is_loaded || restoring.has_failed {
            let answer = ToController::Restored { epoch, attempt, is_loaded };
            outputs.push(Output::ToController(epoch.controller, answer));
        }
    }
}
