//! One host: its memory, the agent's process, the trainer's process.

use std::collections::BTreeMap;

use waystation_agent::protocol::Agent;
use waystation_agent::protocol::memory::{Limits, Memory};
use waystation_agent::protocol::names::{AgentId, Digest, Epoch, Key, Version};

/// Stands for the bytes of a shard.
pub type Content = u64;

/// What the bytes add up to.
pub fn digest_of(content: Content) -> Digest {
    Digest(content.wrapping_mul(0x2545_f491_4f6c_dd1d).rotate_left(29) ^ 0x5bd1_e995)
}

/// A trainer: the epoch in which it was let go on, and what it began with.
#[derive(Clone, Debug)]
pub struct Trainer {
    pub epoch: Epoch,
    pub base: Version,
    /// The same for all that began with the same bytes in the same epoch.
    pub lineage: u64,
}

pub struct Host {
    pub id: AgentId,
    pub limits: Limits,
    /// None while the process is dead.
    pub agent: Option<Agent>,
    /// What is left of it while it is dead.
    pub memory: Memory,
    /// The slots.
    pub bytes: BTreeMap<Key, Content>,
    /// Bytes that have arrived to be loaded.
    pub arrived: BTreeMap<(u32, Key), Content>,
    /// What the trainer was given, by decision.
    pub loaded: BTreeMap<(Epoch, u32), BTreeMap<u32, (Key, Content)>>,
    pub trainer: Option<Trainer>,
    /// Counts the agent's processes, so that what was meant for an earlier one is dropped.
    pub process: u64,
}

impl Host {
    pub fn founder(number: u16, limits: Limits) -> Self {
        let memory = Memory::of_founder();
        let mut host = Self {
            id: AgentId(number),
            limits,
            agent: None,
            memory,
            bytes: BTreeMap::new(),
            arrived: BTreeMap::new(),
            loaded: BTreeMap::new(),
            trainer: None,
            process: 0,
        };
        host.start();
        host
    }

    /// Starts the agent with what memory holds; what is damaged is not taken over.
    pub fn start(&mut self) {
        let bytes = &self.bytes;
        let is_intact =
            |key: &Key, digest: Digest| bytes.get(key).is_some_and(|&content| digest_of(content) == digest);
        self.memory.copies.retain(|key, copy| is_intact(key, copy.digest));
        let kept = &self.memory.copies;
        self.bytes.retain(|key, _| kept.contains_key(key));
        self.process += 1;
        self.agent = Some(Agent::new(self.id, self.limits, self.memory.clone()));
    }

    /// SIGKILL of the agent: memory stays.
    pub fn kill_agent(&mut self) {
        if let Some(agent) = self.agent.take() {
            self.memory = agent.memory().clone();
        }
        self.arrived.clear();
    }

    /// The host is lost; the one in its place has a greater incarnation and nothing else.
    pub fn lose(&mut self, incarnation: u64) {
        self.agent = None;
        self.memory = Memory::lost(incarnation);
        self.bytes.clear();
        self.arrived.clear();
        self.loaded.clear();
        self.trainer = None;
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
