//! The simulated world: hosts, controllers, a network and a clock that only events move.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::Arc;

use waystation_agent::protocol::controller::{self, Controller, Settings};
use waystation_agent::protocol::events::{Input, Output};
use waystation_agent::protocol::memory::Limits;
use waystation_agent::protocol::message::{Decision, Purpose, ToAgent};
use waystation_agent::protocol::names::{AgentId, Epoch, Key, SealedCopy, Version};

use super::host::{Content, Host, Trainer, digest_of};
use super::laws::{Laws, Truth};
use super::network::{Network, Place};
use super::random::Random;

pub const AGENT_TICK_MS: u64 = 200;
const CONTROLLER_TICK_MS: u64 = 100;
const SAVE_EVERY_MS: u64 = 500;
const SLOT_MS: u64 = 30;

pub enum Event {
    /// For one process of a host's agent, or for whichever runs.
    ToAgent {
        host: u16,
        process: Option<u64>,
        input: Input,
        content: Option<Content>,
    },
    ToController(u64, controller::Input),
    AgentTick {
        host: u16,
        process: u64,
    },
    ControllerTick(u64),
    Save(u16),
    StartAgent {
        host: u16,
        process: u64,
    },
    /// The launcher looks whether there are a controller and the trainers that should be there.
    Launcher,
    Fault,
    Heal,
    HealLinks,
}

pub struct World {
    pub now_ms: u64,
    pub random: Random,
    pub hosts: Vec<Host>,
    pub controllers: BTreeMap<u64, Controller>,
    pub next_controller: u64,
    pub network: Network,
    pub settings: Settings,
    pub laws: Laws,
    pub committed: Option<Version>,
    /// Loads fail in so many of a thousand cases.
    pub failing_loads: u64,
    /// Whether what happens is printed.
    pub is_told: bool,
    decisions: BTreeMap<(Epoch, u32), Arc<Decision>>,
    began_ms: BTreeMap<Epoch, u64>,
    queue: BinaryHeap<Reverse<(u64, u64)>>,
    events: BTreeMap<u64, Event>,
    sequence: u64,
}

impl World {
    pub fn new(seed: u64, settings: Settings) -> Self {
        let hosts = settings.domains.len() as u16;
        let copies = 2 * settings.copies * (settings.shards as usize).div_ceil(usize::from(hosts)) + 2;
        let limits = Limits { copies, versions_of_shard: 2 };
        let mut laws = Laws::default();
        for shard in 0..settings.shards {
            let truth = Truth { content: 1000 + u64::from(shard), lineage: 0, sealed_ms: 0 };
            laws.seal(Key { version: Version::default(), shard }, truth);
        }
        let mut world = Self {
            now_ms: 0,
            random: Random::new(seed),
            hosts: (0..hosts).map(|number| Host::founder(number, limits)).collect(),
            controllers: BTreeMap::new(),
            next_controller: 1,
            network: Network::new(),
            settings,
            laws,
            committed: None,
            failing_loads: 0,
            is_told: false,
            decisions: BTreeMap::new(),
            began_ms: BTreeMap::new(),
            queue: BinaryHeap::new(),
            events: BTreeMap::new(),
            sequence: 0,
        };
        for host in 0..hosts {
            world.after(u64::from(host), Event::AgentTick { host, process: 1 });
            world.after(u64::from(host), Event::Save(host));
        }
        world.after(1, Event::Launcher);
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

    pub fn start_controller(&mut self) {
        let number = self.next_controller;
        self.next_controller += 1;
        self.controllers.insert(number, Controller::new(number, self.settings.clone(), self.now_ms));
        let shards = self.settings.shards;
        self.tell_controller(number, controller::Input::OnDisk(Version::default(), shards));
        self.after(1, Event::ControllerTick(number));
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
                let found = &self.hosts[usize::from(host)];
                if found.process == process && found.agent.is_some() {
                    self.step(host, Input::Tick, None);
                    self.after(AGENT_TICK_MS, Event::AgentTick { host, process });
                }
            }
            Event::ControllerTick(number) => {
                if self.controllers.contains_key(&number) {
                    self.tell_controller(number, controller::Input::Tick(self.now_ms));
                    self.after(CONTROLLER_TICK_MS, Event::ControllerTick(number));
                }
            }
            Event::Save(host) => {
                self.save(host);
                let jitter_ms = self.random.below(60);
                let next_ms = (self.now_ms / SAVE_EVERY_MS + 1) * SAVE_EVERY_MS + jitter_ms;
                self.after(next_ms - self.now_ms, Event::Save(host));
            }
            Event::StartAgent { host, process } => self.start_agent(host, process),
            Event::Launcher => {
                self.launch();
                self.after(700, Event::Launcher);
            }
            Event::Fault | Event::Heal | Event::HealLinks => unreachable!("faults are the storm's"),
        }
    }

    fn launch(&mut self) {
        if self.controllers.is_empty() {
            self.start_controller();
        }
        let has_orders = |host: &Host| host.agent.as_ref().is_some_and(|agent| agent.orders().is_some());
        let has_died = self.hosts.iter().any(|host| host.trainer.is_none() && has_orders(host));
        if let Some(&number) = self.controllers.keys().next_back()
            && has_died
        {
            self.tell_controller(number, controller::Input::Recover);
        }
    }

    fn start_agent(&mut self, host: u16, process: u64) {
        let found = &mut self.hosts[usize::from(host)];
        if found.process == process && found.agent.is_none() {
            found.start();
            let process = found.process;
            self.after(1, Event::AgentTick { host, process });
        }
    }

    /// The trainer of a host seals its shards, if it is at work.
    fn save(&mut self, host: u16) {
        let found = &self.hosts[usize::from(host)];
        let Some(trainer) = found.trainer.clone() else { return };
        let Some(orders) = found.agent.as_ref().and_then(|agent| agent.orders()) else { return };
        // Trainers of one epoch are in step, as collectives keep them: all save the same in one interval.
        let steps = 1 + self.now_ms / SAVE_EVERY_MS - self.began_ms[&trainer.epoch] / SAVE_EVERY_MS;
        let version = Version { epoch: trainer.epoch, step: trainer.base.step + steps };
        let own = (0u32..).zip(&orders.holders).filter(|(_, holders)| holders.first() == Some(&found.id));
        let shards: Vec<u32> = own.map(|(shard, _)| shard).collect();
        for shard in shards {
            let key = Key { version, shard };
            let mixed = trainer.lineage ^ version.step.rotate_left(17) ^ u64::from(shard).rotate_left(41);
            let content = Random::new(mixed).next();
            let copy = SealedCopy { digest: digest_of(content), shard_count: self.settings.shards };
            self.step(host, Input::Sealed(key, copy), Some(content));
            if self.hosts[usize::from(host)].bytes.contains_key(&key) {
                let truth = Truth { content, lineage: trainer.lineage, sealed_ms: self.now_ms };
                self.laws.seal(key, truth);
            }
        }
    }

    /// Gives an agent an input, with the bytes that come with it, and does what it wants.
    fn step(&mut self, host: u16, input: Input, content: Option<Content>) {
        let found = &mut self.hosts[usize::from(host)];
        let Some(agent) = &mut found.agent else { return };
        let key = match &input {
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
        self.laws.look(&self.hosts, host);
        self.laws.check_reference(&self.hosts, &self.settings);
    }

    fn carry_out(&mut self, host: u16, output: Output) {
        let process = self.hosts[usize::from(host)].process;
        let later = |input| Event::ToAgent { host, process: Some(process), input, content: None };
        match output {
            Output::ToController(number, message) => {
                let input = controller::Input::Message(AgentId(host), message);
                self.send(Place::Host(host), Place::Controller(number), || {
                    Event::ToController(number, input.clone())
                });
            }
            Output::ToPeer(to, message) => {
                let input = Input::Peer(AgentId(host), message);
                self.send(Place::Host(host), Place::Host(to.0), || Event::ToAgent {
                    host: to.0,
                    process: None,
                    input: input.clone(),
                    content: None,
                });
            }
            Output::Bytes { to, epoch, key, copy, purpose } => {
                let content = self.hosts[usize::from(host)].bytes[&key];
                let (from, is_intact) = (AgentId(host), digest_of(content) == copy.digest);
                let input = Input::Bytes { from, epoch, key, copy, purpose, is_intact };
                self.send(Place::Host(host), Place::Host(to.0), || Event::ToAgent {
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
            Output::Load { attempt, key, from_disk } => {
                let is_loaded = self.load(host, attempt, key, from_disk);
                self.after(SLOT_MS, later(Input::Loaded { attempt, shard: key.shard, is_loaded }));
            }
            Output::Fence(epoch) => {
                let trainer = &mut self.hosts[usize::from(host)].trainer;
                if trainer.as_ref().is_some_and(|trainer| trainer.epoch < epoch) {
                    *trainer = None;
                }
            }
            Output::Train(epoch) => self.begin_training(host, epoch),
            Output::Refuse(key, refusal) => self.tell(|| {
                let copies: Vec<_> = self.hosts[usize::from(host)].remembers().copies.keys().collect();
                format!("host {host} refuses {key:?}: {refusal:?}, it has {copies:?}")
            }),
        }
    }

    fn load(&mut self, host: u16, attempt: u32, key: Key, from_disk: bool) -> bool {
        let fails = self.random.permille(self.failing_loads);
        let truth = self.laws.truth.get(&key).map(|truth| truth.content);
        let found = &mut self.hosts[usize::from(host)];
        let content = if from_disk {
            truth
        } else {
            found.bytes.get(&key).copied().or_else(|| found.arrived.remove(&(attempt, key)))
        };
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

    fn begin_training(&mut self, host: u16, epoch: Epoch) {
        let found = &mut self.hosts[usize::from(host)];
        if found.trainer.as_ref().is_some_and(|trainer| trainer.epoch == epoch) {
            return;
        }
        let Some((_, attempt)) = found.remembers().restored else { return };
        let Some(decision) = self.decisions.get(&(epoch, attempt)) else { return };
        let given = found.loaded.get(&(epoch, attempt));
        let parent = self.laws.begin(decision, given, host);
        let lineage = Random::new(parent ^ epoch.number.rotate_left(32) ^ epoch.controller).next();
        found.trainer = Some(Trainer { epoch, base: decision.version.unwrap_or_default(), lineage });
        let now_ms = self.now_ms;
        self.began_ms.entry(epoch).or_insert(now_ms);
    }

    fn send(&mut self, from: Place, to: Place, event: impl Fn() -> Event) {
        for delay_ms in self.network.delays(&mut self.random, from, to) {
            self.after(delay_ms, event());
        }
    }

    pub fn tell_controller(&mut self, number: u64, input: controller::Input) {
        let Some(controller) = self.controllers.get_mut(&number) else { return };
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
                    self.send(Place::Controller(number), Place::Host(agent.0), || Event::ToAgent {
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
                    self.committed = self.committed.max(Some(commit.version))
                }
                controller::Output::Ended(_) => drop(self.controllers.remove(&number)),
                controller::Output::GivenUp(_)
                | controller::Output::Quarantined(_)
                | controller::Output::Stuck => {}
            }
        }
    }
}
