//! One start of the user's program, as its processes go through it.
//!
//! They agree in rounds, as real ones do: they begin with one base, which all of their agents have named, or not at all;
//! and they save a step in the epoch that all of their agents are in, or leave the save out. A process that is left
//! over from an older start, a zombie, agrees with nobody: it goes on to save in the epoch that it knows.

use waystation_agent::protocol::names::{AgentId, Epoch, Program};

/// What a process has been told that it may begin with: in which epoch, by which of its decisions.
pub type Told = (Epoch, u32);

/// How far the processes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    Opening,
    Training {
        /// Of all that have begun with the same bytes.
        lineage: u64,
        /// The last that was done.
        step: u64,
        /// In which the last save was agreed on.
        epoch: Epoch,
    },
}

pub struct Process {
    pub is_alive: bool,
    /// Whether it takes no notice of anybody.
    pub is_zombie: bool,
    pub told: Option<Told>,
}

pub struct Run {
    pub program: Program,
    pub since_ms: u64,
    pub stage: Stage,
    pub processes: Vec<Process>,
}

impl Run {
    pub fn new(program: Program, since_ms: u64) -> Self {
        let process = || Process { is_alive: true, is_zombie: false, told: None };
        let processes = program.owners.iter().map(|_| process()).collect();
        Self { program, since_ms, stage: Stage::Opening, processes }
    }

    pub fn is_whole(&self) -> bool {
        self.processes.iter().all(|process| process.is_alive && !process.is_zombie)
    }

    /// What all processes have been told, if it is the same.
    pub fn agreed(&self) -> Option<Told> {
        let first = self.processes.first()?.told;
        let is_agreed = self.is_whole() && self.processes.iter().all(|process| process.told == first);
        first.filter(|_| is_agreed)
    }

    /// The processes end, but for those that take no notice.
    pub fn end(&mut self) {
        for process in self.processes.iter_mut().filter(|process| !process.is_zombie) {
            process.is_alive = false;
        }
    }

    /// The processes of a host.
    pub fn on(&mut self, host: AgentId) -> impl Iterator<Item = &mut Process> {
        let owners = self.program.owners.iter();
        self.processes
            .iter_mut()
            .zip(owners)
            .filter(move |(_, owner)| **owner == host)
            .map(|(process, _)| process)
    }
}
