//! The simulated world: hosts, a network and a clock that only events move. What the user's program does is in
//! `programs`.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::Arc;

use waystation_agent::protocol::controller::{self, Controller, Settings};
use waystation_agent::protocol::events::{Input, Output};
use waystation_agent::protocol::memory::Limits;
use waystation_agent::protocol::message::{Decision, Purpose, ToAgent};
use waystation_agent::protocol::names::{AgentId, Epoch, Key, Version};

use super::host::{Content, Host, digest_of};
use super::laws::Laws;
use super::network::Network;
use super::random::Random;
use super::run::Run;

pub const AGENT_TICK_MS: u64 = 200;
const CONTROLLER_TICK_MS: u64 = 100;
const SLOT_MS: u64 = 30;

pub enum Event {
    /// For one process of a host's agent, or for whichever runs.
    ToAgent {
        host: u16,
        process: Option<u64>,
        input: Input,
        content: Option<Content>,
    },
    ToController(u32, controller::Input),
    AgentTick {
        host: u16,
        process: u64,
    },
    ControllerTick(u32),
    /// A host hears that another one's agent is there.
    Beat {
        from: u16,
        to: u16,
    },
    StartAgent {
        host: u16,
        process: u64,
    },
    /// A process of a program asks its agent how things stand.
    Poll {
        token: u64,
        process: usize,
    },
    /// All programs have done a step.
    Step,
    /// A process of a program seals its shard.
    Seal {
        token: u64,
        process: usize,
        version: Version,
    },
    /// The launcher looks whether the program runs.
    Launcher,
    /// A zombie ends.
    Bury {
        token: u64,
        process: usize,
    },
    Fault,
    Heal,
    HealLinks,
    /// The program saves no more.
    Pause,
    /// A copy of the newest commit is found damaged.
    Damage,
}

pub struct World {
    pub now_ms: u64,
    pub random: Random,
    pub hosts: Vec<Host>,
    pub controllers: BTreeMap<u32, Controller>,
    /// On which host each controller runs or ran.
    pub places: BTreeMap<u32, u16>,
    pub network: Network,
    pub settings: Settings,
    /// How many processes the program has, if all hosts are there.
    pub process_count: usize,
    /// By token.
    pub runs: BTreeMap<u64, Run>,
    pub laws: Laws,
    pub committed: Option<Version>,
    /// The one before.
    pub committed_before: Option<Version>,
    /// Loads fail in so many of a thousand cases.
    pub failing_loads: u64,
    /// Processes become zombies in so many of a thousand cases.
    pub zombies: u64,
    /// Whether programs go on without saving.
    pub is_paused: bool,
    /// Whether what happens is printed.
    pub is_told: bool,
    pub decisions: BTreeMap<(Epoch, u32), Arc<Decision>>,
    queue: BinaryHeap<Reverse<(u64, u64)>>,
    events: BTreeMap<u64, Event>,
    sequence: u64,
}

impl World {
    pub fn new(seed: u64, settings: Settings, process_count: usize) -> Self {
        let hosts = settings.domains.len();
        // Programs are started on few hosts as well, and one may have a copy of every shard; of every version, and some more.
        let versions_of_shard = settings.versions + 1;
        let limits = Limits { copies: versions_of_shard * process_count + 2, versions_of_shard };
        let mut world = Self {
            now_ms: 0,
            random: Random::new(seed),
            hosts: (0..hosts as u16).map(|number| Host::founder(number, hosts, limits)).collect(),
            controllers: BTreeMap::new(),
            places: BTreeMap::new(),
            network: Network::new(),
            settings,
            process_count,
            runs: BTreeMap::new(),
            laws: Laws::default(),
            committed: None,
            committed_before: None,
            failing_loads: 0,
            zombies: 0,
            is_paused: false,
            is_told: false,
            decisions: BTreeMap::new(),
            queue: BinaryHeap::new(),
            events: BTreeMap::new(),
            sequence: 0,
        };
        for host in 0..hosts as u16 {
            world.after(u64::from(host), Event::AgentTick { host, process: 1 });
        }
        world.after(1, Event::Launcher);
        world.after(1, Event::Step);
        world
    }

    pub fn after(&mut self, delay_ms: u64, event: Event) {
        self.sequence += 1;
        self.queue.push(Reverse((self.now_ms + delay_ms, self.sequence)));
        self.events.insert(self.sequence, event);
    }

    pub fn tell(&self, what: impl FnOnce() -> String) {
        if self.is_told {
            println!("{:>6} {}", self.now_ms, what());
        }
    }

    /// The next event, and the clock set to it.
    pub fn next_event(&mut self) -> Option<Event> {
        let Reverse((when_ms, sequence)) = self.queue.pop()?;
        self.now_ms = when_ms;
        self.events.remove(&sequence)
    }

    /// Lets one event happen; those that are faults are the caller's.
    pub fn happen(&mut self, event: Event) {
        match event {
            Event::ToAgent { host, process, input, content } => {
                if process.is_none_or(|process| process == self.hosts[usize::from(host)].process) {
                    self.step(host, input, content);
                }
            }
            Event::ToController(number, input) => self.tell_controller(number, input),
            Event::AgentTick { host, process } => {
                let found = &mut self.hosts[usize::from(host)];
                if found.process == process && found.agent.is_some() {
                    if found.candidate.is_due(self.now_ms) {
                        self.start_controller(host);
                    }
                    self.step(host, Input::Tick, None);
                    self.beat(host);
                    self.after(AGENT_TICK_MS, Event::AgentTick { host, process });
                }
            }
            Event::ControllerTick(number) => {
                if self.controllers.contains_key(&number) {
                    self.tell_controller(number, controller::Input::Tick(self.now_ms));
                    self.after(CONTROLLER_TICK_MS, Event::ControllerTick(number));
                }
            }
            Event::Beat { from, to } => {
                self.hosts[usize::from(to)].candidate.hear_agent(self.now_ms, AgentId(from));
            }
            Event::StartAgent { host, process } => self.start_agent(host, process),
            Event::Poll { token, process } => self.poll(token, process),
            Event::Step => self.step_programs(),
            Event::Seal { token, process, version } => self.seal(token, process, version),
            Event::Launcher => self.launch(),
            Event::Bury { token, process } => self.bury(token, process),
            Event::Fault | Event::Heal | Event::HealLinks | Event::Pause | Event::Damage => {
                unreachable!("faults are the storm's")
            }
        }
    }

    /// Starts a controller in the process of a host's agent, in place of the one that is there.
    pub fn start_controller(&mut self, host: u16) {
        let number = self.places.len() as u32 + 1;
        self.tell(|| format!("host {host} starts controller {number}"));
        self.places.insert(number, host);
        self.end_controller(host);
        self.hosts[usize::from(host)].controller = Some(number);
        self.controllers.insert(number, Controller::new(number, self.settings.clone(), self.now_ms));
        self.after(1, Event::ControllerTick(number));
    }

    pub fn end_controller(&mut self, host: u16) {
        if let Some(number) = self.hosts[usize::from(host)].controller.take() {
            self.controllers.remove(&number);
        }
    }

    fn start_agent(&mut self, host: u16, process: u64) {
        let now_ms = self.now_ms;
        let found = &mut self.hosts[usize::from(host)];
        if found.process == process && found.agent.is_none() {
            found.start(now_ms);
            let process = found.process;
            self.after(1, Event::AgentTick { host, process });
        }
    }

    fn beat(&mut self, from: u16) {
        for to in (0..self.hosts.len() as u16).filter(|&to| to != from) {
            self.send(from, to, || Event::Beat { from, to });
        }
    }

    /// Gives an agent an input, with the bytes that come with it, and does what it wants.
    pub fn step(&mut self, host: u16, input: Input, content: Option<Content>) {
        let now_ms = self.now_ms;
        let found = &mut self.hosts[usize::from(host)];
        let Some(agent) = &mut found.agent else { return };
        let mut superseding = None;
        let key = match &input {
            Input::Controller(message) => {
                let epoch = message.epoch();
                found.candidate.hear(now_ms, epoch, agent.memory().promised);
                superseding = found.controller.filter(|&own| own != epoch.controller).map(|own| (own, epoch));
                None
            }
            Input::Sealed(key, _) => Some(*key),
            Input::Bytes { key, purpose, .. } => {
                if let (Purpose::Restore { attempt }, Some(content)) = (purpose, content) {
                    found.arrived.insert((*attempt, *key), content);
                }
                Some(*key)
            }
            _ => None,
        };
        let outputs = agent.handle(input);
        if let (Some(key), Some(content)) = (key, content)
            && agent.memory().copies.contains_key(&key)
        {
            found.bytes.entry(key).or_insert(content);
        }
        for output in outputs {
            self.carry_out(host, output);
        }
        if let Some((own, epoch)) = superseding {
            self.tell_controller(own, controller::Input::Heard(epoch));
        }
        self.laws.look(&self.hosts, host);
        self.laws.check_reference(&self.hosts, &self.settings);
    }

    fn carry_out(&mut self, host: u16, output: Output) {
        let process = self.hosts[usize::from(host)].process;
        let later = |input| Event::ToAgent { host, process: Some(process), input, content: None };
        match output {
            Output::ToController(number, message) => {
                let input = controller::Input::Message(AgentId(host), message);
                let Some(&to) = self.places.get(&number) else { return };
                self.send(host, to, || Event::ToController(number, input.clone()));
            }
            Output::ToPeer(to, message) => {
                let input = Input::Peer(AgentId(host), message);
                self.send(host, to.0, || Event::ToAgent {
                    host: to.0,
                    process: None,
                    input: input.clone(),
                    content: None,
                });
            }
            Output::Bytes { to, .. } if !self.network.carries_copies(host, to.0) => {}
            Output::Bytes { to, epoch, key, copy, purpose } => {
                let content = self.hosts[usize::from(host)].bytes[&key];
                let (from, is_intact) = (AgentId(host), digest_of(content) == copy.digest);
                let input = Input::Bytes { from, epoch, key, copy, purpose, is_intact };
                self.send(host, to.0, || Event::ToAgent {
                    host: to.0,
                    process: None,
                    input: input.clone(),
                    content: Some(content),
                });
            }
            Output::Free(key) => {
                self.tell(|| format!("host {host} frees {key:?}"));
                self.hosts[usize::from(host)].bytes.remove(&key);
            }
            Output::Verify => {
                let found = &self.hosts[usize::from(host)];
                let damaged =
                    found.remembers().copies.keys().copied().filter(|&key| !found.holds(key)).collect();
                self.after(SLOT_MS, later(Input::Verified(damaged)));
            }
            Output::Load { attempt, key } => {
                let is_loaded = self.load(host, attempt, key);
                self.after(SLOT_MS, later(Input::Loaded { attempt, shard: key.shard, is_loaded }));
            }
            Output::Fence(token) => self.fence(host, token),
            Output::Train(epoch) => self.begin_epoch(host, epoch),
            Output::Refuse(key, refusal) => self.tell(|| {
                let copies: Vec<_> = self.hosts[usize::from(host)].remembers().copies.keys().collect();
                format!("host {host} refuses {key:?}: {refusal:?}, it has {copies:?}")
            }),
        }
    }

    fn load(&mut self, host: u16, attempt: u32, key: Key) -> bool {
        let fails = self.random.permille(self.failing_loads);
        let truth = self.laws.truth.get(&key).map(|truth| truth.content);
        let found = &mut self.hosts[usize::from(host)];
        let content = found.bytes.get(&key).copied().or_else(|| found.arrived.remove(&(attempt, key)));
        let Some(epoch) = found.remembers().promised else { return false };
        // Whoever loads verifies: against the slot's header, or what the sender said.
        match content.filter(|&content| Some(digest_of(content)) == truth.map(digest_of) && !fails) {
            Some(content) => {
                found.loaded.entry((epoch, attempt)).or_default().insert(key.shard, (key, content));
                true
            }
            None => false,
        }
    }

    fn begin_epoch(&mut self, host: u16, epoch: Epoch) {
        let agent = self.hosts[usize::from(host)].agent.as_ref();
        let Some(orders) = agent.and_then(|agent| agent.orders()) else { return };
        self.laws.train(epoch, orders.program.token);
    }

    fn send(&mut self, from: u16, to: u16, event: impl Fn() -> Event) {
        for delay_ms in self.network.delays(&mut self.random, from, to) {
            self.after(delay_ms, event());
        }
    }

    pub fn tell_controller(&mut self, number: u32, input: controller::Input) {
        let Some(controller) = self.controllers.get_mut(&number) else { return };
        let Some(&from) = self.places.get(&number) else { return };
        let outputs = controller.handle(input);
        for output in outputs {
            if let controller::Output::ToAgent(_, ToAgent::Commit { epoch, commit }) = &output {
                self.laws.issue(&self.hosts, *epoch, *commit);
            }
            if !matches!(output, controller::Output::ToAgent(..)) {
                self.tell(|| format!("controller {number}: {output:?}"));
            }
            match output {
                controller::Output::ToAgent(agent, message) => {
                    let input = Input::Controller(message);
                    self.send(from, agent.0, || Event::ToAgent {
                        host: agent.0,
                        process: None,
                        input: input.clone(),
                        content: None,
                    });
                }
                controller::Output::Decided(decision) => {
                    if let Some(controller) = self.controllers.get(&number) {
                        self.laws.decide(&decision, controller.findings(), &self.settings);
                    }
                    self.decisions.insert((decision.epoch, decision.attempt), decision);
                }
                controller::Output::Committed(commit) => {
                    if self.committed < Some(commit.version) {
                        self.committed_before = self.committed.replace(commit.version);
                    }
                }
                controller::Output::Ended(_) | controller::Output::LeftAlone => self.end_controller(from),
                controller::Output::GivenUp(_)
                | controller::Output::Doubted(_)
                | controller::Output::Stuck => {}
            }
        }
    }
}
