//! Everything that there is at one time in the model, and what each action makes of it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use waystation_agent::protocol::Agent;
use waystation_agent::protocol::controller::{self, Controller, Settings};
use waystation_agent::protocol::events::{Input, Output};
use waystation_agent::protocol::memory::{Limits, Memory};
use waystation_agent::protocol::message::{Purpose, ToAgent, ToController};
use waystation_agent::protocol::names::{AgentId, Digest, Epoch, Key, Program, SealedCopy, Version};

const SEQUENCE: u64 = 7;
const LIMITS: Limits = Limits { copies: 4, versions_of_shard: 2 };

/// What becomes of an agent's answers to a controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Answers {
    Heard,
    Lost,
    /// They arrive at any later time, once.
    Late,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// A controller tells an agent what it has to say now.
    Speak { controller: u32, agent: u16, answers: Answers },
    /// Answers that were late arrive.
    Arrive,
    /// Time passes for an agent: it brings its copies to others, and reports.
    Tick { agent: u16 },
    /// Time passes for a controller, more than it waits for inventories.
    Wait { controller: u32 },
    /// A trainer seals a shard, in an epoch that it was once told of.
    Seal { token: u64, epoch: Epoch, shard: u32 },
    /// The first process of a newer program tells its agent.
    Begin,
    /// An agent has heard no controller for too long, or thinks so.
    Start { host: u16 },
    /// The agent's process is killed, and another goes on with its memory.
    Restart { host: u16 },
    /// A host is lost with its memory, and another takes its place.
    Lose { host: u16 },
}

/// What has ever been, as far as it matters to what must hold.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct History {
    /// Which versions a majority has noted, and in which epoch; without those of which hosts that were lost had every copy
    /// of a shard.
    pub committed: BTreeSet<(Epoch, Version)>,
    /// For each epoch that was trained in: the attempt, the program and the version that it began with.
    pub begun: BTreeMap<Epoch, (u32, u64, Option<Version>)>,
    /// Whose trainers have sealed what was kept.
    pub sealed: BTreeMap<Version, BTreeSet<u64>>,
    /// An epoch was begun in two ways.
    pub is_split: bool,
    /// Something was kept of a program after the agent had heard of a newer one.
    pub is_unfenced: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct State {
    pub agents: Vec<Agent>,
    /// By number: on which host, what time it is there, and the machine.
    controllers: BTreeMap<u32, (u16, u64, Controller)>,
    /// How many controllers there have been.
    started: u32,
    late: Option<(u32, AgentId, Vec<ToController>)>,
    /// Of each action that is limited, how often it has been done.
    pub done: Done,
    pub history: History,
}

/// Counts of actions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Done {
    pub seals: u32,
    pub programs: u32,
    pub controllers: u32,
    pub waits: u32,
    pub silences: u32,
    pub restarts: u32,
    pub losses: u32,
}

fn settings(agents: u16) -> Settings {
    Settings {
        domains: (0..u32::from(agents)).collect(),
        copies: 2,
        // Silence is not waited for: that an agent starts another controller stands for it.
        dead_after_ms: 1000,
        gather_ms: 1,
        stuck_ms: 1,
        give_up_ms: 1000,
        versions: 1,
        fruitless_limit: 9,
    }
}

impl State {
    /// A run that trains, of a program with so many processes, one on each of the first agents.
    pub fn training(agents: u16, processes: u16) -> Self {
        let founder = |id| Agent::new(AgentId(id), LIMITS, Memory::of_founder());
        let mut state = Self {
            agents: (0..agents).map(founder).collect(),
            controllers: BTreeMap::new(),
            started: 0,
            late: None,
            done: Done::default(),
            history: History::default(),
        };
        state.start(0);
        state.begin(processes);
        while state.agents.iter().any(|agent| agent.orders().is_none()) {
            (0..agents).for_each(|agent| state.speak(1, agent, Answers::Heard));
        }
        (0..agents).for_each(|agent| state.speak(1, agent, Answers::Heard));
        state.look();
        state.done = Done::default();
        state
    }

    /// Every trainer saves, and the copies are brought where they belong; nobody has noted a commit yet.
    pub fn save(&mut self) {
        let begun: Vec<(Epoch, u64)> =
            self.history.begun.iter().map(|(&epoch, &(_, token, _))| (epoch, token)).collect();
        for (epoch, token) in begun {
            let processes = self.program().map_or(0, |program| program.owners.len());
            (0..processes as u32).for_each(|shard| self.act(Action::Seal { token, epoch, shard }));
        }
        assert!(!self.history.sealed.is_empty(), "no trainer has saved anything: {:?}", self.history);
        (0..self.agents.len() as u16).for_each(|agent| self.act(Action::Tick { agent }));
        self.done = Done::default();
    }

    /// One agent has noted the commit, when the last one starts another controller, and hears it.
    pub fn contest(&mut self) {
        let (last, answers) = (self.agents.len() as u16 - 1, Answers::Heard);
        self.act(Action::Speak { controller: 1, agent: 0, answers });
        self.act(Action::Start { host: last });
        self.act(Action::Speak { controller: 2, agent: last, answers });
        self.done = Done::default();
    }

    /// That controller has taken over, all trainers have saved in its epoch, and a third one is started.
    pub fn succeed(&mut self) {
        let is_its = |agent: &Agent| agent.orders().is_some_and(|orders| orders.epoch.controller == 2);
        while !self.agents.iter().all(is_its) {
            (0..self.agents.len() as u16).for_each(|agent| self.speak(2, agent, Answers::Heard));
        }
        self.look();
        self.save();
        self.act(Action::Start { host: 1 });
        self.done = Done::default();
    }

    /// Whether a copy of each shard is left.
    pub fn is_complete(&self, version: Version) -> bool {
        let copies = self.agents.iter().flat_map(|agent| &agent.memory().copies);
        let held: BTreeMap<u32, u32> = copies
            .filter(|(key, _)| key.version == version)
            .map(|(key, copy)| (key.shard, copy.shard_count))
            .collect();
        held.values().next().is_some_and(|&count| held.len() == count as usize)
    }

    /// Controllers that are there, with their hosts.
    pub fn controllers(&self) -> impl Iterator<Item = (u32, u16)> {
        self.controllers.iter().map(|(&number, &(host, _, _))| (number, host))
    }

    pub fn is_training(&self, number: u32) -> bool {
        self.controllers.get(&number).is_some_and(|(_, _, controller)| controller.is_training())
    }

    pub fn has_late(&self) -> bool {
        self.late.is_some()
    }

    /// The newest program that any agent knows.
    pub fn program(&self) -> Option<&Program> {
        self.agents.iter().filter_map(|agent| agent.memory().program.as_ref()).max()
    }

    pub fn act(&mut self, action: Action) {
        match action {
            Action::Speak { controller, agent, answers } => {
                self.done.silences += u32::from(answers != Answers::Heard);
                self.speak(controller, agent, answers);
            }
            Action::Arrive => {
                let Some((number, from, messages)) = self.late.take() else { return };
                for message in messages {
                    self.tell_controller(number, controller::Input::Message(from, message));
                }
            }
            Action::Tick { agent } => self.give(agent, Input::Tick, Answers::Heard, true),
            Action::Wait { controller } => {
                self.done.waits += 1;
                let Some((_, now_ms, _)) = self.controllers.get_mut(&controller) else { return };
                *now_ms += 1;
                let input = controller::Input::Tick(*now_ms);
                self.tell_controller(controller, input);
            }
            Action::Seal { token, epoch, shard } => self.seal(token, epoch, shard),
            Action::Begin => {
                self.done.programs += 1;
                let processes = self.program().map_or(1, |program| program.owners.len());
                self.begin(processes as u16);
            }
            Action::Start { host } => {
                self.done.controllers += 1;
                self.start(host);
            }
            Action::Restart { host } => {
                self.done.restarts += 1;
                let memory = self.agents[usize::from(host)].memory().clone();
                self.renew(host, memory);
            }
            Action::Lose { host } => {
                self.done.losses += 1;
                self.renew(host, Memory::lost(u64::from(self.done.losses)));
                let committed = std::mem::take(&mut self.history.committed).into_iter();
                self.history.committed =
                    committed.filter(|&(_, version)| self.is_complete(version)).collect();
            }
        }
        self.look();
    }

    fn renew(&mut self, host: u16, memory: Memory) {
        self.controllers.retain(|_, (at, _, _)| *at != host);
        self.agents[usize::from(host)] = Agent::new(AgentId(host), LIMITS, memory);
    }

    fn start(&mut self, host: u16) {
        self.started += 1;
        self.controllers.retain(|_, (at, _, _)| *at != host);
        let controller = Controller::new(self.started, settings(self.agents.len() as u16), 0);
        self.controllers.insert(self.started, (host, 0, controller));
    }

    fn begin(&mut self, processes: u16) {
        let token = self.program().map_or(1, |program| program.token + 1);
        let program = Program { token, sequence: SEQUENCE, owners: (0..processes).map(AgentId).collect() };
        self.give(0, Input::Begin(program), Answers::Heard, false);
    }

    /// What a controller has to say to others than this agent is lost: it says it again.
    fn speak(&mut self, number: u32, agent: u16, answers: Answers) {
        let Some((_, now_ms, controller)) = self.controllers.get_mut(&number) else { return };
        let outputs = controller.handle(controller::Input::Tick(*now_ms));
        for message in self.note(number, outputs, Some(agent)) {
            let epoch = message.epoch();
            let own = self.controllers().find(|&(own, host)| host == agent && own != number);
            if let Some((own, _)) = own {
                self.tell_controller(own, controller::Input::Heard(epoch));
            }
            let brings = matches!(message, ToAgent::Bring { .. });
            self.give(agent, Input::Controller(message), answers, brings);
        }
    }

    fn tell_controller(&mut self, number: u32, input: controller::Input) {
        let Some((_, _, controller)) = self.controllers.get_mut(&number) else { return };
        let outputs = controller.handle(input);
        self.note(number, outputs, None);
    }

    /// Notes what a controller has done; returns what it says to an agent.
    fn note(&mut self, number: u32, outputs: Vec<controller::Output>, to: Option<u16>) -> Vec<ToAgent> {
        let mut messages = Vec::new();
        for output in outputs {
            match output {
                controller::Output::ToAgent(agent, message) if Some(agent.0) == to => messages.push(message),
                controller::Output::Committed(commit) => {
                    let epoch = self.controllers[&number].2.epoch();
                    // What agents said before they were lost counts, but not against those that are left.
                    if self.done.losses == 0 || self.is_complete(commit.version) {
                        self.history.committed.insert((epoch, commit.version));
                    }
                }
                controller::Output::Ended(_) | controller::Output::LeftAlone => {
                    self.controllers.remove(&number);
                }
                _ => {}
            }
        }
        messages
    }

    /// Gives an agent an input, and all that follows from it at other agents. Copies go out only if it brings them: at
    /// other times they are lost on their way, since they are brought again.
    fn give(&mut self, agent: u16, input: Input, answers: Answers, brings: bool) {
        let mut waiting = VecDeque::from([(agent, input)]);
        let mut late: BTreeMap<u32, Vec<ToController>> = BTreeMap::new();
        while let Some((at, input)) = waiting.pop_front() {
            let from = AgentId(at);
            for output in self.agents[usize::from(at)].handle(input) {
                match output {
                    Output::ToController(number, message) if at == agent => match answers {
                        Answers::Heard => {
                            self.tell_controller(number, controller::Input::Message(from, message));
                        }
                        Answers::Lost => {}
                        Answers::Late => late.entry(number).or_default().push(message),
                    },
                    Output::ToPeer(to, message) => waiting.push_back((to.0, Input::Peer(from, message))),
                    Output::Bytes { to, epoch, key, copy, purpose } => {
                        if purpose != Purpose::Replica || brings && at == agent {
                            let input = Input::Bytes { from, epoch, key, copy, purpose, is_intact: true };
                            waiting.push_back((to.0, input));
                        }
                    }
                    Output::Verify => waiting.push_back((at, Input::Verified(Vec::new()))),
                    Output::Load { attempt, key } => {
                        let input = Input::Loaded { attempt, shard: key.shard, is_loaded: true };
                        waiting.push_back((at, input));
                    }
                    // What other agents would report they report at their next tick.
                    Output::ToController(..)
                    | Output::Free(_)
                    | Output::Fence(_)
                    | Output::Train(_)
                    | Output::Refuse(..) => {}
                }
            }
        }
        if let Some((number, messages)) = late.pop_first() {
            self.late = Some((number, AgentId(agent), messages));
        }
    }

    /// Each trainer saves one step in each epoch: that after the one that the epoch began with.
    fn seal(&mut self, token: u64, epoch: Epoch, shard: u32) {
        self.done.seals += 1;
        let Some(key) = self.next_key(epoch, shard) else { return };
        let Some(program) = self.program().cloned() else { return };
        let owner = program.owners[shard as usize];
        // Trainers of different programs that do the same step may have different bytes.
        let digest = Digest(token << 32 | key.version.step << 8 | u64::from(shard));
        let copy = SealedCopy { digest, shard_count: program.owners.len() as u32, sequence: SEQUENCE };
        let agent = &self.agents[usize::from(owner.0)];
        let knows_newer = agent.memory().program.as_ref().is_some_and(|newest| newest.token > token);
        let had = agent.memory().copies.contains_key(&key);
        self.give(owner.0, Input::Sealed(key, copy), Answers::Heard, false);
        if !had && self.agents[usize::from(owner.0)].memory().copies.contains_key(&key) {
            self.history.is_unfenced |= knows_newer;
            self.history.sealed.entry(key.version).or_default().insert(token);
        }
    }

    /// What a trainer that was told of an epoch saves next; None if it has.
    pub fn next_key(&self, epoch: Epoch, shard: u32) -> Option<Key> {
        let (_, _, base) = self.history.begun.get(&epoch)?;
        let begun = base.map_or(0, |version| version.step);
        let is_sealed = |step: &u64| {
            let version = Version { epoch, step: *step };
            self.agents.iter().any(|agent| agent.memory().copies.contains_key(&Key { version, shard }))
                || self.history.committed.iter().any(|&(_, committed)| committed == version)
        };
        let step = (begun + 1..begun + 3).find(|step| !is_sealed(step))?;
        Some(Key { version: Version { epoch, step }, shard })
    }

    /// Notes what agents train in.
    fn look(&mut self) {
        for orders in self.agents.iter().filter_map(Agent::orders) {
            let base = orders.base.map(|base| base.version);
            let found = (orders.attempt, orders.program.token, base);
            let first = *self.history.begun.entry(orders.epoch).or_insert(found);
            self.history.is_split |= first != found;
        }
    }
}
