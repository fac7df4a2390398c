//! What the user's program does in the world, start after start: it opens, trains, saves, and is started again.

use waystation_agent::protocol::events::Input;
use waystation_agent::protocol::message::Orders;
use waystation_agent::protocol::names::{AgentId, Epoch, Key, Program, SealedCopy, Version};

use super::host::digest_of;
use super::laws::Truth;
use super::random::Random;
use super::run::{Run, Stage, Told};
use super::world::{Event, World};

const STEP_MS: u64 = 500;
const POLL_MS: u64 = 150;
const LAUNCHER_MS: u64 = 700;
/// The launcher ends a program that has not begun to train after so long.
const OPENING_MS: u64 = 8000;
/// A zombie ends after at most so long.
const ZOMBIE_MS: u64 = 6000;
const SEQUENCE: u64 = 7;

impl World {
    /// Starts the program again if any process of it has ended.
    pub fn launch(&mut self) {
        self.after(LAUNCHER_MS, Event::Launcher);
        let now_ms = self.now_ms;
        let is_well = self.runs.values().next_back().is_some_and(|run| {
            run.is_whole() && (run.stage != Stage::Opening || now_ms < run.since_ms + OPENING_MS)
        });
        if is_well {
            return;
        }
        self.end_program();
        let owners = self.choose_owners();
        // The clocks of two primaries may show the same, or the later one the earlier time; a launcher sees to it that tokens
        // grow.
        let token = now_ms + 1;
        let program = Program { token, sequence: SEQUENCE, owners };
        self.tell(|| format!("{program:?} is started"));
        for process in 0..program.owners.len() {
            let delay_ms = 1 + self.random.below(POLL_MS);
            self.after(delay_ms, Event::Poll { token, process });
        }
        self.runs.insert(token, Run::new(program, now_ms));
    }

    fn end_program(&mut self) {
        let Some(mut run) = self.runs.pop_last() else { return };
        let token = run.0;
        for (number, process) in run.1.processes.iter_mut().enumerate() {
            if process.is_alive && self.random.permille(self.zombies) {
                process.is_zombie = true;
                let delay_ms = self.random.below(ZOMBIE_MS);
                self.after(delay_ms, Event::Bury { token, process: number });
            }
        }
        run.1.end();
        self.runs.insert(token, run.1);
    }

    pub fn bury(&mut self, token: u64, process: usize) {
        if let Some(run) = self.runs.get_mut(&token) {
            run.processes[process].is_alive = false;
        }
    }

    /// On all hosts, those that are to come back included; or only on those that are there, with as many processes or fewer.
    fn choose_owners(&mut self) -> Vec<AgentId> {
        let all = 0..self.hosts.len() as u16;
        let is_there = |host: &u16| self.hosts[usize::from(*host)].agent.is_some();
        let live: Vec<u16> = all.clone().filter(is_there).collect();
        let waits = live.is_empty() || self.random.permille(600);
        let hosts: Vec<u16> = if waits { all.collect() } else { live };
        let is_fewer = self.random.permille(300);
        let count = if is_fewer { hosts.len() } else { self.process_count };
        hosts.into_iter().cycle().take(count).map(AgentId).collect()
    }

    /// A program with this token has begun: older ones end on this host, but for their zombies.
    pub fn fence(&mut self, host: u16, token: u64) {
        assert!(self.runs.contains_key(&token), "a program is fenced by one that was never started");
        for (_, run) in self.runs.range_mut(..token) {
            for process in run.on(AgentId(host)).filter(|process| !process.is_zombie) {
                process.is_alive = false;
            }
        }
    }

    fn orders_on(&self, host: AgentId) -> Option<&Orders> {
        self.hosts[usize::from(host.0)].agent.as_ref()?.orders()
    }

    /// A process that is opening asks its agent, until it and all others are told to begin with the same.
    pub fn poll(&mut self, token: u64, process: usize) {
        let Some(run) = self.runs.get(&token) else { return };
        if run.stage != Stage::Opening || !run.processes[process].is_alive {
            return;
        }
        let (host, program) = (run.program.owners[process], run.program.clone());
        self.step(host.0, Input::Begin(program), None);
        let orders = self.orders_on(host).filter(|orders| orders.program.token == token);
        let told = orders.map(|orders| (orders.epoch, orders.attempt));
        if let Some(run) = self.runs.get_mut(&token) {
            run.processes[process].told = told;
            if let Some(agreed) = run.agreed() {
                self.begin(token, agreed);
            }
        }
        self.after(POLL_MS, Event::Poll { token, process });
    }

    /// All processes read what they have agreed on, and begin; or all end.
    fn begin(&mut self, token: u64, agreed: Told) {
        let Some(decision) = self.decisions.get(&agreed).cloned() else { return };
        assert!(decision.program.token == token, "{agreed:?} is for another program");
        let readers = decision.shards.iter().map(|shard| usize::from(shard.reader.0));
        let read: Option<Vec<_>> = (0u32..)
            .zip(readers)
            .map(|(shard, reader)| self.hosts[reader].loaded.get(&agreed)?.get(&shard).copied())
            .collect();
        let Some(run) = self.runs.get_mut(&token) else { return };
        let Some(read) = read else {
            return run.end(); // the host that was to give it was lost meanwhile
        };
        let parent = self.laws.begin(&decision, &read);
        let lineage = Random::new(parent ^ token.rotate_left(32)).next();
        let step = decision.version.map_or(0, |version| version.step);
        run.stage = Stage::Training { lineage, step, epoch: agreed.0 };
        self.tell(|| format!("program {token} begins with {:?}", decision.version));
    }

    /// Every program that trains does a step, and saves it, unless all pause.
    pub fn step_programs(&mut self) {
        self.after(STEP_MS, Event::Step);
        if self.is_paused {
            return;
        }
        let tokens: Vec<u64> = self.runs.keys().copied().collect();
        for token in tokens {
            let agreed = self.agree_on_save(token);
            let Some(run) = self.runs.get_mut(&token) else { continue };
            let is_whole = run.is_whole();
            let Stage::Training { step, epoch, .. } = &mut run.stage else { continue };
            *step += 1;
            *epoch = agreed.unwrap_or(*epoch);
            let version = Version { epoch: *epoch, step: *step };
            // Where one has died, the others wait for it; a zombie does not.
            let saves: Vec<usize> = (0..run.processes.len())
                .filter(|&process| run.processes[process].is_alive)
                .filter(|&process| run.processes[process].is_zombie || is_whole && agreed.is_some())
                .collect();
            for process in saves {
                let delay_ms = 1 + self.random.below(120);
                self.after(delay_ms, Event::Seal { token, process, version });
            }
        }
    }

    /// The epoch that all agents of a program say it is in, if they say the same.
    fn agree_on_save(&self, token: u64) -> Option<Epoch> {
        let run = self.runs.get(&token)?;
        let mut epochs = run.program.owners.iter().map(|&host| {
            let orders = self.orders_on(host).filter(|orders| orders.program.token == token);
            orders.filter(|orders| orders.is_open).map(|orders| orders.epoch)
        });
        let first = epochs.next()??;
        epochs.all(|epoch| epoch == Some(first)).then_some(first)
    }

    pub fn seal(&mut self, token: u64, process: usize, version: Version) {
        let Some(run) = self.runs.get(&token).filter(|run| run.processes[process].is_alive) else { return };
        let Stage::Training { lineage, .. } = run.stage else { return };
        let (host, shard_count) = (run.program.owners[process].0, run.program.owners.len() as u32);
        let key = Key { version, shard: process as u32 };
        let mixed = lineage ^ version.step.rotate_left(17) ^ u64::from(key.shard).rotate_left(41);
        let content = Random::new(mixed).next();
        let copy = SealedCopy { digest: digest_of(content), shard_count, sequence: SEQUENCE };
        let had = self.hosts[usize::from(host)].bytes.contains_key(&key);
        self.step(host, Input::Sealed(key, copy), Some(content));
        if !had && self.hosts[usize::from(host)].bytes.contains_key(&key) {
            let truth = Truth { content, lineage, sealed_ms: self.now_ms };
            self.laws.seal(key, truth, token);
        }
    }
}
