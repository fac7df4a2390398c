//! The controller's part: who is alive, which epoch holds, what is committed, what to go back to.
//!
//! A pure machine. In order of a recovery: *preparing* asks for promises of a new epoch until a majority has given
//! them, and admits agents that remember nothing once all are bound to it, where no majority remembers; *gathering* asks for inventories, until all have answered or the time for that is over; *restoring* has
//! everybody bring the decision into place, and decides for the next older version if anybody cannot; *training* watches
//! reports, commits, and begins a recovery when an agent falls silent, comes back without memory, or joins, and when a
//! newer program begins. As long as there is no program, gathering goes on.
//!
//! Invariants: an epoch is used only after a majority has promised it, and never again once anybody was heard to have
//! promised a higher one; a version is committed only while every shard has verified copies on enough distinct
//! agents; orders let older copies go only after a majority has noted that; there is one decision at a time, and
//! trainers begin only when everybody has carried it out. Whoever hears no majority for too long ends: it may be the only
//! one that is not heard by others, but those who hear it would wait for it for ever.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::decision::Findings;
use super::message::{Decision, Report, ToAgent, ToController};
use super::names::{AgentId, Commit, Epoch, Program, Version};
use super::quorum::Quorum;
use super::training::Training;

/// What a run is made of, and how long it waits.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Settings {
    /// The failure domain of each agent; their number is that of the agents.
    pub domains: Vec<u32>,
    /// Of each shard, its owner's included.
    pub copies: usize,
    /// An agent that was silent for so long is taken for dead.
    pub dead_after_ms: u64,
    /// How long a recovery waits for inventories.
    pub gather_ms: u64,
    /// How long agents are waited for that may hold what is missing of every version, before trainers go back to the disk.
    pub stuck_ms: u64,
    /// A version that has not got its copies after so long is given up.
    pub give_up_ms: u64,
    /// How many commits are kept, at least one.
    pub versions: usize,
    /// After so many beginnings without a later commit a version is in doubt.
    pub fruitless_limit: u32,
}

/// What happens to a controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// An agent says something.
    Message(AgentId, ToController),
    /// It is now so late.
    Tick(u64),
    /// Another controller speaks to agents, in this epoch.
    Heard(Epoch),
}

/// What a controller wants done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Tell an agent.
    ToAgent(AgentId, ToAgent),
    /// A recovery goes back to this.
    Decided(Arc<Decision>),
    /// A majority has noted this.
    Committed(Commit),
    /// This version has not got its copies in time: the save has failed, training goes on.
    GivenUp(Version),
    /// This version was begun with in vain too often: an older one goes before it.
    Doubted(Version),
    /// Nothing that is left can be restored, though something was committed. It is tried again: agents may come back.
    Stuck,
    /// Another controller is in charge, in this epoch; this one does nothing more.
    Ended(Epoch),
    /// For too long too few agents were heard to be a majority. Another may hear more; this one does nothing more.
    LeftAlone,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Phase {
    Preparing,
    Gathering { since_ms: u64, is_stuck: bool },
    Restoring { decision: Arc<Decision>, loaded: BTreeSet<AgentId> },
    Training(Training),
    Ended,
}

/// The machine.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Controller {
    pub(super) number: u32,
    pub(super) settings: Settings,
    pub(super) began_ms: u64,
    pub(super) now_ms: u64,
    pub(super) epoch: Epoch,
    pub(super) phase: Phase,
    pub(super) quorum: Quorum,
    pub(super) heard_ms: BTreeMap<AgentId, u64>,
    pub(super) findings: Findings,
    /// The newest that any agent has heard of.
    pub(super) program: Option<Program>,
    /// Since when nothing can be restored.
    pub(super) stuck_since_ms: Option<u64>,
    /// Versions of this epoch's decisions that could not be loaded.
    pub(super) failed: BTreeSet<Version>,
    /// How many decisions this epoch has had.
    pub(super) attempt: u32,
}

impl Controller {
    /// A controller with a number that no other has ever had. It begins with a recovery.
    pub fn new(number: u32, settings: Settings, now_ms: u64) -> Self {
        let quorum = Quorum::of(settings.domains.len());
        Self {
            number,
            settings,
            began_ms: now_ms,
            now_ms,
            epoch: Epoch { number: 1, controller: number },
            phase: Phase::Preparing,
            quorum,
            heard_ms: BTreeMap::new(),
            findings: Findings::default(),
            program: None,
            stuck_since_ms: None,
            failed: BTreeSet::new(),
            attempt: 0,
        }
    }

    /// The epoch that it is in, or tries to begin.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Whether trainers train.
    pub fn is_training(&self) -> bool {
        matches!(self.phase, Phase::Training(_))
    }

    /// What the last decision was made from.
    pub fn findings(&self) -> &Findings {
        &self.findings
    }

    /// Takes an input; returns what to do, in order.
    pub fn handle(&mut self, input: Input) -> Vec<Output> {
        let mut outputs = Vec::new();
        if matches!(self.phase, Phase::Ended) {
            return outputs;
        }
        match input {
            Input::Tick(now_ms) => {
                self.now_ms = now_ms;
                self.look_for_silence(&mut outputs);
                self.repeat(&mut outputs);
            }
            // It does not try to be quicker than that one: two would keep each other from a majority.
            Input::Heard(epoch) if epoch > self.epoch => self.end(epoch, &mut outputs),
            Input::Heard(_) => {}
            Input::Message(agent, message) => {
                self.heard_ms.insert(agent, self.now_ms);
                match message {
                    ToController::Report(report) => self.note_report(agent, report, &mut outputs),
                    ToController::Inventory(found) => self.note_inventory(agent, found, &mut outputs),
                    ToController::Restored { epoch, attempt, is_loaded } => {
                        self.note_restored(agent, (epoch, attempt), is_loaded, &mut outputs);
                    }
                }
            }
        }
        self.advance(&mut outputs);
        outputs
    }

    pub(super) fn agents(&self) -> impl Iterator<Item = AgentId> + use<> {
        (0..self.settings.domains.len() as u16).map(AgentId)
    }

    pub(super) fn tell_all(&self, message: &ToAgent, outputs: &mut Vec<Output>) {
        outputs.extend(self.agents().map(|agent| Output::ToAgent(agent, message.clone())));
    }

    fn note_report(&mut self, agent: AgentId, report: Report, outputs: &mut Vec<Output>) {
        let incarnation = report.incarnation;
        self.note_program(report.program.as_ref(), outputs);
        if !self.quorum.note(agent, report) {
            return;
        }
        if let Some(promised) = self.quorum.greatest_promise().filter(|promised| *promised > self.epoch) {
            if matches!(self.phase, Phase::Preparing) {
                self.recover(outputs);
            } else {
                self.end(promised, outputs);
            }
            return;
        }
        match &self.phase {
            // What the decision counts on is gone.
            Phase::Restoring { .. } if self.is_changed(agent, incarnation) => self.recover(outputs),
            Phase::Gathering { .. } if self.is_changed(agent, incarnation) => {
                self.findings.inventories.remove(&agent); // it is asked again
            }
            // Its memory was lost, or it was not there when training began.
            Phase::Training(training) if !training.has_member(agent, incarnation) => self.recover(outputs),
            _ => {}
        }
    }

    fn end(&mut self, epoch: Epoch, outputs: &mut Vec<Output>) {
        self.phase = Phase::Ended;
        outputs.push(Output::Ended(epoch));
    }

    /// Whether the inventory of an agent is of an earlier incarnation.
    fn is_changed(&self, agent: AgentId, incarnation: u64) -> bool {
        self.findings.inventories.get(&agent).is_some_and(|found| found.incarnation != incarnation)
    }

    /// Moves on where a phase has what it waits for.
    fn advance(&mut self, outputs: &mut Vec<Output>) {
        self.admit(outputs);
        match &mut self.phase {
            Phase::Preparing if self.quorum.is_established(self.epoch) => {
                self.phase = Phase::Gathering { since_ms: self.now_ms, is_stuck: false };
                self.tell_all(&ToAgent::Gather { epoch: self.epoch }, outputs);
            }
            Phase::Gathering { since_ms, is_stuck: false } => {
                let answers = self.findings.inventories.len();
                let is_over = self.now_ms >= *since_ms + self.settings.gather_ms;
                let is_enough =
                    answers == self.settings.domains.len() || is_over && answers >= self.quorum.majority();
                if is_enough && self.program.is_some() {
                    self.decide(outputs);
                }
            }
            Phase::Gathering { since_ms, is_stuck: true } => {
                // What could not be loaded may be there again, and agents may have come back.
                if self.now_ms >= *since_ms + self.settings.gather_ms {
                    self.recover(outputs);
                }
            }
            Phase::Restoring { decision, loaded } => {
                if self.findings.inventories.keys().all(|agent| loaded.contains(agent)) {
                    let decision = Arc::clone(decision);
                    self.train(&decision, outputs);
                }
            }
            Phase::Training(training) => {
                training.watch(&self.quorum, &self.settings, self.now_ms, outputs);
            }
            Phase::Preparing | Phase::Ended => {}
        }
    }

    /// Says again what the phase has said, to those who have not answered.
    pub(super) fn repeat(&self, outputs: &mut Vec<Output>) {
        let epoch = self.epoch;
        match &self.phase {
            Phase::Preparing => self.tell_all(&ToAgent::Prepare { epoch }, outputs),
            Phase::Gathering { .. } => {
                self.tell_all(&ToAgent::Prepare { epoch }, outputs);
                let answered = &self.findings.inventories;
                for agent in self.agents().filter(|agent| !answered.contains_key(agent)) {
                    outputs.push(Output::ToAgent(agent, ToAgent::Gather { epoch }));
                }
            }
            Phase::Restoring { decision, loaded } => {
                for &agent in self.findings.inventories.keys().filter(|agent| !loaded.contains(agent)) {
                    outputs.push(Output::ToAgent(agent, ToAgent::Restore(Arc::clone(decision))));
                }
            }
            Phase::Training(training) => {
                self.tell_all(&ToAgent::Prepare { epoch }, outputs);
                training.tell(outputs);
                training.mend(&self.quorum, outputs);
            }
            Phase::Ended => {}
        }
    }
}

impl Settings {
    /// On how many distinct agents every shard of a version must be before it is committed.
    pub fn needed_copies(&self) -> usize {
        self.copies.min(2)
    }
}
