//! The machines of one agent, and all that happens to them, one thing after the other.
//!
//! Pure: inputs are messages, ticks, requests of trainers and what became of slots; outputs are effects, to be carried
//! out in order. It is here that messages find their machine: the agent's own, or the controller that may run beside it,
//! to which the own agent's messages go without a way through the network. Invariants: what is to be remembered comes before
//! every effect that follows from it; a message is answered to where it came from, whatever it says of itself.

mod effect;
mod outputs;
mod presence;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use waystation_format::slot::Id;
use waystation_format::{Error, Kind, Result};

pub use self::effect::Effect;
use super::founding::Blank;
use super::hosts::Hosts;
use super::mail::Letter;
use super::notes::{Notes, Stage};
use crate::local::message::HexId;
use crate::protocol::Agent;
use crate::protocol::controller::{self, Controller, Settings};
use crate::protocol::election::{Candidate, Patience};
use crate::protocol::events::Input;
use crate::protocol::memory::{Limits, Memory};
use crate::protocol::message::{Orders, Purpose, ToAgent};
use crate::protocol::names::{AgentId, Key, Program, SealedCopy};
use crate::protocol::wire::Envelope;

/// What does not change.
#[derive(Clone, Debug)]
pub struct Role {
    /// This agent.
    pub id: AgentId,
    /// All of them.
    pub hosts: Hosts,
    /// This boot of this machine.
    pub boot: Id,
    /// How much it may hold.
    pub limits: Limits,
    /// Of a controller.
    pub settings: Settings,
    /// Before it starts one.
    pub patience: Patience,
}

/// See the module.
#[derive(Debug)]
pub struct Driver {
    role: Role,
    now_ms: u64,
    member: Member,
    candidate: Candidate,
    controller: Option<Controller>,
    /// Draws the number of a controller.
    draw: fn() -> u32,
    /// The controller that was heard last from each host.
    controllers: Vec<Option<u32>>,
    /// When the others are to hear of this one again.
    beat_ms: u64,
    /// Who was given another list of hosts, which people were told.
    differing: BTreeSet<AgentId>,
    /// What was asked for: from whom, for which decision.
    asked: BTreeMap<Key, (AgentId, u32)>,
    remembered: Option<Notes>,
    work: VecDeque<Work>,
    effects: Vec<Effect>,
}

/// An input that waits for those before it.
#[derive(Debug)]
enum Work {
    Agent(Input),
    Controller(controller::Input),
    /// What a controller tells the agent.
    Heard(ToAgent),
}

/// What takes part, or waits for it.
#[derive(Debug)]
enum Member {
    Blank {
        blank: Blank,
        /// What slots hold.
        copies: BTreeMap<Key, SealedCopy>,
        /// What is to begin once it takes part.
        program: Option<Program>,
    },
    Agent {
        founders: Vec<u64>,
        agent: Box<Agent>,
    },
}

impl Driver {
    /// Goes on with what is remembered; without that in a new incarnation.
    pub fn new(
        role: Role,
        stage: Option<Stage>,
        incarnation: u64,
        copies: BTreeMap<Key, SealedCopy>,
        draw: fn() -> u32,
    ) -> Self {
        let count = role.hosts.names.len();
        let member = match stage {
            Some(Stage::Member { founders, memory }) => {
                let agent = Box::new(Agent::new(role.id, role.limits, Memory { copies, ..memory }));
                Member::Agent { founders, agent }
            }
            Some(Stage::Blank(blank)) => Member::Blank { blank, copies, program: None },
            None => Member::Blank { blank: Blank::new(role.id.0, count, incarnation), copies, program: None },
        };
        Self {
            candidate: Candidate::new(role.id, count, role.patience, 0),
            role,
            now_ms: 0,
            member,
            controller: None,
            draw,
            controllers: vec![None; count],
            beat_ms: 0,
            differing: BTreeSet::new(),
            asked: BTreeMap::new(),
            remembered: None,
            work: VecDeque::new(),
            effects: Vec::new(),
        }
    }

    /// The agent's machine; None as long as it does not know what it is.
    pub fn agent(&self) -> Option<&Agent> {
        match &self.member {
            Member::Agent { agent, .. } => Some(agent),
            Member::Blank { .. } => None,
        }
    }

    /// The orders of the promised epoch, if they are here.
    pub fn orders(&self) -> Option<&Orders> {
        self.agent().and_then(Agent::orders)
    }

    /// Whether a controller runs beside the agent.
    pub fn is_controller(&self) -> bool {
        self.controller.is_some()
    }

    /// The hosts.
    pub fn hosts(&self) -> &Hosts {
        &self.role.hosts
    }

    /// Whether the agent of a host was heard lately, or is this one.
    pub fn is_heard(&self, agent: AgentId) -> bool {
        self.candidate.is_heard(self.now_ms, agent)
    }

    /// Whether a version of a shard is to be taken from another agent.
    pub fn expects(&self, from: AgentId, key: Key) -> bool {
        let is_asked = self.asked.get(&key).is_some_and(|&(asked, _)| asked == from);
        is_asked || self.agent().is_some_and(|agent| agent.would_keep(key))
    }

    /// Whether a version of a shard that comes in would be of use.
    pub fn wants(&self, key: Key) -> bool {
        self.asked.contains_key(&key) || self.agent().is_some_and(|agent| agent.would_keep(key))
    }

    /// What was asked for, and is not here yet.
    pub fn asked(&self) -> impl Iterator<Item = Key> {
        self.asked.keys().copied()
    }

    /// Takes what another agent has sent.
    pub fn deliver(&mut self, from: AgentId, letter: Letter) -> Vec<Effect> {
        self.candidate.hear_agent(self.now_ms, from);
        match letter {
            Letter::Announcement(told) => self.hear_announcement(from, &told),
            Letter::Envelope(Envelope::ToAgent(message)) => {
                if let Some(known) = self.controllers.get_mut(usize::from(from.0)) {
                    *known = Some(message.epoch().controller);
                }
                self.work.push_back(Work::Heard(message));
            }
            Letter::Envelope(Envelope::ToController { controller, message }) => {
                if self.controller_number() == Some(controller) {
                    self.work.push_back(Work::Controller(controller::Input::Message(from, message)));
                }
            }
            Letter::Envelope(Envelope::ToPeer(message)) => self.step(Input::Peer(from, message)),
            Letter::Beat => {}
        }
        self.done()
    }

    /// Some time has passed: what was asked for and is on its way is not silent.
    pub fn tick(&mut self, now_ms: u64, coming: &[Key]) -> Vec<Effect> {
        self.now_ms = now_ms;
        self.announce();
        self.beat();
        for &key in coming {
            self.step(Input::Coming(key));
        }
        self.step(Input::Tick);
        self.work.push_back(Work::Controller(controller::Input::Tick(now_ms)));
        if self.agent().is_some() && self.candidate.is_due(now_ms) {
            let number = (self.draw)();
            let log = vec![("controller", format!("{number:08x}"))];
            self.effects.push(Effect::Log("controller_started", log));
            self.controller = Some(Controller::new(number, self.role.settings.clone(), now_ms));
        }
        self.done()
    }

    /// A program begins, here or on other hosts.
    ///
    /// Fenced if a newer one is known, Conflict if this one is known with other processes.
    pub fn begin(&mut self, program: Program) -> Result<Vec<Effect>> {
        let known = match &self.member {
            Member::Blank { program, .. } => program.as_ref(),
            Member::Agent { agent, .. } => agent.memory().program.as_ref(),
        };
        let token = program.token;
        if let Some(known) = known.filter(|known| known.token >= token && **known != program) {
            let (kind, message) = if known.token > token {
                (Kind::Fenced, "a newer start of the program has taken over; end this one")
            } else {
                (Kind::Conflict, "the program has begun already, with other processes or another sequence")
            };
            return Err(Error::new(kind, message)
                .with("program", token.to_string())
                .with("found", known.token.to_string()));
        }
        if let Member::Blank { program: waiting, .. } = &mut self.member {
            *waiting = Some(program);
        } else {
            self.step(Input::Begin(program));
        }
        Ok(self.done())
    }

    /// Something happened to slots.
    pub fn happen(&mut self, input: Input) -> Vec<Effect> {
        self.step(input);
        self.done()
    }

    /// A version from another agent lies verified in its slot.
    pub fn arrive(&mut self, from: AgentId, key: Key, copy: SealedCopy) -> Vec<Effect> {
        let Some(epoch) = self.agent().and_then(|agent| agent.memory().promised) else { return Vec::new() };
        let purpose = match self.asked.get(&key) {
            Some(&(asked, attempt)) if asked == from => {
                self.asked.remove(&key);
                Purpose::Restore { attempt }
            }
            _ => Purpose::Replica,
        };
        self.step(Input::Bytes { from, epoch, key, copy, purpose, is_intact: true });
        self.done()
    }

    fn controller_number(&self) -> Option<u32> {
        self.controller.as_ref().map(|controller| controller.epoch().controller)
    }

    fn step(&mut self, input: Input) {
        self.work.push_back(Work::Agent(input));
    }

    /// Does what is to be done, and gives out what comes of it.
    fn done(&mut self) -> Vec<Effect> {
        while let Some(work) = self.work.pop_front() {
            match work {
                Work::Agent(input) => self.run_agent(input),
                Work::Controller(input) => self.run_controller(input),
                Work::Heard(message) => self.hear_controller(message),
            }
        }
        std::mem::take(&mut self.effects)
    }

    fn hear_controller(&mut self, message: ToAgent) {
        let Some(agent) = self.agent() else { return };
        let epoch = message.epoch();
        self.candidate.hear(self.now_ms, epoch, agent.memory().promised);
        if self.controller_number().is_some_and(|number| number != epoch.controller) {
            self.run_controller(controller::Input::Heard(epoch));
        }
        self.run_agent(Input::Controller(message));
    }

    fn run_agent(&mut self, input: Input) {
        let Member::Agent { agent, .. } = &mut self.member else { return };
        let noted = agent.memory().noted.last().copied();
        let promised = agent.memory().promised;
        let outputs = agent.handle(input);
        let memory = agent.memory();
        let committed = memory.noted.last().copied().filter(|&newest| Some(newest) > noted);
        if memory.promised != promised {
            self.asked.clear();
        }
        self.remember();
        self.effects.extend(committed.map(Effect::Committed));
        outputs.into_iter().for_each(|output| self.put(output));
    }

    /// Writes down what has changed.
    fn remember(&mut self) {
        let stage = match &self.member {
            Member::Blank { blank, .. } => Stage::Blank(blank.clone()),
            Member::Agent { founders, agent } => {
                Stage::Member { founders: founders.clone(), memory: without_copies(agent.memory()) }
            }
        };
        let Role { id, hosts, boot, .. } = &self.role;
        let host = self.name_of(*id);
        let notes = Notes { boot: HexId(*boot), host, hosts: hosts.digest(), stage };
        if self.remembered.as_ref() != Some(&notes) {
            self.remembered = Some(notes.clone());
            self.effects.push(Effect::Remember(notes));
        }
    }

    fn others(&self) -> Vec<AgentId> {
        let count = self.role.hosts.names.len() as u16;
        (0..count).map(AgentId).filter(|&agent| agent != self.role.id).collect()
    }

    fn name_of(&self, agent: AgentId) -> String {
        self.role.hosts.names.get(usize::from(agent.0)).map_or_else(String::new, ToString::to_string)
    }
}

fn without_copies(memory: &Memory) -> Memory {
    Memory { copies: BTreeMap::new(), ..memory.clone() }
}

#[cfg(test)]
mod tests;
