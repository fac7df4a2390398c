//! One host: its memory, the agent's process with the controller that may run in it.

use std::collections::BTreeMap;

use waystation_agent::protocol::Agent;
use waystation_agent::protocol::election::{Candidate, Patience};
use waystation_agent::protocol::memory::{Limits, Memory};
use waystation_agent::protocol::names::{AgentId, Digest, Epoch, Key};

/// Stands for the bytes of a shard.
pub type Content = u64;

const PATIENCE: Patience = Patience { least_ms: 1500, stagger_ms: 500 };

/// What the bytes add up to.
pub fn digest_of(content: Content) -> Digest {
    Digest(content.wrapping_mul(0x2545_f491_4f6c_dd1d).rotate_left(29) ^ 0x5bd1_e995)
}

pub struct Host {
    pub id: AgentId,
    pub limits: Limits,
    /// None while the process is dead.
    pub agent: Option<Agent>,
    pub candidate: Candidate,
    hosts: usize,
    /// The number of the controller in the process.
    pub controller: Option<u32>,
    /// What is left of it while it is dead.
    pub memory: Memory,
    /// The slots.
    pub bytes: BTreeMap<Key, Content>,
    /// Bytes that have arrived to be loaded.
    pub arrived: BTreeMap<(u32, Key), Content>,
    /// What there is for trainers to read, by decision.
    pub loaded: BTreeMap<(Epoch, u32), BTreeMap<u32, (Key, Content)>>,
    /// Counts the agent's processes, so that what was meant for an earlier one is dropped.
    pub process: u64,
}

impl Host {
    /// One of so many.
    pub fn founder(number: u16, hosts: usize, limits: Limits) -> Self {
        let id = AgentId(number);
        let mut host = Self {
            id,
            limits,
            agent: None,
            hosts,
            candidate: Candidate::new(id, hosts, PATIENCE, 0),
            controller: None,
            memory: Memory::of_founder(),
            bytes: BTreeMap::new(),
            arrived: BTreeMap::new(),
            loaded: BTreeMap::new(),
            process: 0,
        };
        host.start(0);
        host
    }

    /// Starts the agent with what memory holds; what is damaged is not taken over.
    pub fn start(&mut self, now_ms: u64) {
        let bytes = &self.bytes;
        let is_intact =
            |key: &Key, digest: Digest| bytes.get(key).is_some_and(|&content| digest_of(content) == digest);
        self.memory.copies.retain(|key, copy| is_intact(key, copy.digest));
        let kept = &self.memory.copies;
        self.bytes.retain(|key, _| kept.contains_key(key));
        self.process += 1;
        self.agent = Some(Agent::new(self.id, self.limits, self.memory.clone()));
        self.candidate = Candidate::new(self.id, self.hosts, PATIENCE, now_ms);
    }

    /// SIGKILL of the agent, and of the controller in it: memory stays.
    pub fn kill_agent(&mut self) {
        if let Some(agent) = self.agent.take() {
            self.memory = agent.memory().clone();
        }
        self.controller = None;
        self.arrived.clear();
    }

    /// The host is lost; the one in its place has a greater incarnation and nothing else.
    pub fn lose(&mut self, incarnation: u64) {
        self.kill_agent();
        self.memory = Memory::lost(incarnation);
        self.bytes.clear();
        self.loaded.clear();
    }

    /// What the agent remembers, or will.
    pub fn remembers(&self) -> &Memory {
        self.agent.as_ref().map_or(&self.memory, Agent::memory)
    }

    /// Whether it has intact bytes of a shard in a slot.
    pub fn holds(&self, key: Key) -> bool {
        let copy = self.remembers().copies.get(&key);
        copy.is_some_and(|copy| {
            self.bytes.get(&key).is_some_and(|&content| digest_of(content) == copy.digest)
        })
    }
}
