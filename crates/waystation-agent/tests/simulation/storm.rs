//! One run: a storm of faults, then calm, in which the program must make progress again.

use waystation_agent::protocol::Agent;
use waystation_agent::protocol::controller::Settings;
use waystation_agent::protocol::events::Input;
use waystation_agent::protocol::message::ToPeer;
use waystation_agent::protocol::names::{AgentId, Key, Version};

use super::network::{CALM, Weather};
use super::random::Random;
use super::world::{Event, World};

const STORM_MS: u64 = 25_000;
const CALM_MS: u64 = 25_000;
/// How long a copy that is found damaged may take to be there again, and every copy when nothing is saved any more.
const MEND_MS: u64 = 2_000;
const FAULT_EVERY_MS: u64 = 900;

/// What came of a run.
#[derive(Debug, Default)]
pub struct Outcome {
    pub commits: u64,
    pub faults: u64,
}

/// Plays one seed to its end, and prints what happens if `is_told`. Panics if a law is broken or nothing is committed in the
/// calm.
pub fn play(seed: u64, is_told: bool) -> Outcome {
    let mut random = Random::new(seed ^ 0x57a7_1015);
    let settings = settings(&mut random);
    let processes = settings.domains.len() + usize::from(random.permille(300));
    let spares_majority = random.permille(600);
    let world = World::new(seed, settings, processes);
    let mut storm = Storm { world, random, spares_majority, incarnation: 0, faults: 0 };
    storm.world.is_told = is_told;
    storm.run(seed)
}

fn settings(random: &mut Random) -> Settings {
    let hosts = 2 + random.below(4) as u16;
    let copies = if hosts > 2 && random.permille(250) { 3 } else { 2 };
    Settings {
        domains: (0..u32::from(hosts)).map(|host| host % 3).collect(),
        copies,
        dead_after_ms: 1000,
        gather_ms: 1500,
        stuck_ms: 4000,
        give_up_ms: 1600,
        versions: if random.permille(700) { 2 } else { 1 },
        fruitless_limit: 2,
    }
}

struct Storm {
    world: World,
    random: Random,
    /// Whether a majority always remembers what it promised.
    spares_majority: bool,
    /// The greatest that any host has.
    incarnation: u64,
    faults: u64,
}

impl Storm {
    fn run(&mut self, seed: u64) -> Outcome {
        self.world.after(2_000, Event::Fault);
        self.world.after(STORM_MS, Event::Heal);
        self.world.after(STORM_MS + CALM_MS, Event::Pause);
        self.world.after(STORM_MS + CALM_MS + MEND_MS, Event::Damage);
        let mut before_calm = None;
        while let Some(event) = self.world.next_event() {
            if self.world.now_ms > STORM_MS + CALM_MS + 2 * MEND_MS {
                break;
            }
            match event {
                Event::Fault if self.world.now_ms < STORM_MS => {
                    self.fault();
                    let next_ms = 1 + self.random.below(2 * FAULT_EVERY_MS);
                    self.world.after(next_ms, Event::Fault);
                }
                Event::Fault => {}
                Event::HealLinks => self.world.network.heal(),
                Event::Heal => {
                    self.calm();
                    before_calm = self.world.committed;
                }
                Event::Pause => self.world.is_paused = true,
                Event::Damage => self.damage_last(),
                other => self.world.happen(other),
            }
        }
        assert!(self.world.committed > before_calm, "seed {seed}: nothing was committed in the calm");
        self.check_copies();
        Outcome { commits: self.world.laws.majority_commits, faults: self.faults }
    }

    fn calm(&mut self) {
        let world = &mut self.world;
        world.tell(|| "calm".to_owned());
        world.network.weather = CALM;
        world.network.heal();
        world.failing_loads = 0;
        world.zombies = 0;
        for host in 0..world.hosts.len() as u16 {
            let process = world.hosts[usize::from(host)].process;
            world.after(1, Event::StartAgent { host, process });
        }
    }

    fn some_host(&mut self) -> u16 {
        self.random.below(self.world.hosts.len() as u64) as u16
    }

    fn fault(&mut self) {
        self.faults += 1;
        let kind = self.random.below(12);
        self.world.tell(|| format!("fault {kind}"));
        match kind {
            0 | 1 => self.kill_agent(),
            2 | 3 => self.lose_host(),
            4 | 5 => self.kill_process(),
            6 => self.end_controller(),
            7 => {
                let host = self.some_host();
                if self.world.hosts[usize::from(host)].agent.is_some() {
                    self.world.start_controller(host); // out of turn
                }
            }
            8 | 9 => self.cut_links(),
            10 => self.damage(),
            _ => {
                let (lost, repeated) = (self.random.below(200), self.random.below(200));
                let slowest_ms = 1 + self.random.below(400);
                self.world.network.weather = Weather { lost, repeated, slowest_ms };
                self.world.failing_loads = self.random.below(100);
                self.world.zombies = self.random.below(400);
            }
        }
    }

    fn kill_agent(&mut self) {
        let host = self.some_host();
        self.world.end_controller(host);
        let found = &mut self.world.hosts[usize::from(host)];
        found.kill_agent();
        let process = found.process;
        let delay_ms = 100 + self.random.below(2_000);
        self.world.after(delay_ms, Event::StartAgent { host, process });
    }

    /// A host and all its memory; where a majority is spared, unless too few would be left that remember what they promised.
    fn lose_host(&mut self) {
        let hosts = &self.world.hosts;
        let remember = hosts.iter().filter(|host| host.remembers().promised.is_some()).count();
        let host = self.some_host();
        let found = &self.world.hosts[usize::from(host)];
        let is_needed = self.spares_majority && found.remembers().promised.is_some();
        if is_needed && remember <= self.world.settings.domains.len() / 2 + 1 {
            return;
        }
        self.incarnation += 1;
        let delay_ms = 100 + self.random.below(4_000);
        self.world.lose(host, self.incarnation, delay_ms);
    }

    /// One of the program's: the launcher notices, and starts all of it anew.
    fn kill_process(&mut self) {
        let Some(run) = self.world.runs.values_mut().next_back() else { return };
        let number = self.random.below(run.processes.len() as u64) as usize;
        run.processes[number].is_alive = false;
    }

    /// A controller hangs for ever; its agent does not.
    fn end_controller(&mut self) {
        let hosts = self.world.controllers.keys().filter_map(|number| self.world.places.get(number));
        let hosts: Vec<u16> = hosts.copied().collect();
        if let Some(&host) = hosts.get(self.random.below(hosts.len().max(1) as u64) as usize) {
            self.world.end_controller(host);
        }
    }

    fn cut_links(&mut self) {
        let places: Vec<u16> = (0..self.world.hosts.len() as u16).collect();
        let side: Vec<bool> = places.iter().map(|_| self.random.permille(400)).collect();
        let one_way = self.random.permille(400);
        for (&from, from_side) in places.iter().zip(&side) {
            for (&to, to_side) in places.iter().zip(&side) {
                if from_side != to_side && (!one_way || *from_side) {
                    self.world.network.cut(from, to);
                }
            }
        }
        let healed_ms = 300 + self.random.below(4_000);
        self.world.after(healed_ms, Event::HealLinks);
    }

    /// Of one copy, which is found at once, or when something needs it.
    fn damage(&mut self) {
        let host = self.some_host();
        let keys: Vec<_> = self.world.hosts[usize::from(host)].bytes.keys().copied().collect();
        if let Some(&key) = keys.get(self.random.below(keys.len().max(1) as u64) as usize) {
            self.world.damage(host, key);
            if self.random.permille(500) {
                self.world.find_damage(host, key);
            }
        }
    }

    /// Of a copy of the last commit, which is found at once.
    fn damage_last(&mut self) {
        self.check_copies();
        let copies = self.last_copies();
        if let Some(&(host, key)) = copies.get(self.random.below(copies.len().max(1) as u64) as usize) {
            self.world.damage(host, key);
            self.world.find_damage(host, key);
        }
    }

    /// Where copies of the newest commit are to be, as those orders say that are followed.
    fn last_copies(&self) -> Vec<(u16, Key)> {
        let agents = self.world.hosts.iter().filter_map(|host| host.agent.as_ref());
        let orders = agents.filter_map(Agent::orders).max_by_key(|orders| orders.epoch);
        let (Some(version), Some(orders)) = (self.world.committed, orders) else { return Vec::new() };
        let of_version = Key { version, shard: 0 }..=Key { version, shard: u32::MAX };
        let keys = self.world.laws.truth.range(of_version).map(|(&key, _)| key);
        keys.flat_map(|key| orders.holders_of(key).iter().map(move |holder| (holder.0, key))).collect()
    }

    /// The commit before the last one is whole, wherever its copies are.
    fn check_fallback(&self) {
        let world = &self.world;
        let Some(version) = world.committed_before.filter(|_| world.settings.versions > 1) else { return };
        let of_version = Key { version, shard: 0 }..=Key { version, shard: u32::MAX };
        for (key, _) in world.laws.truth.range(of_version) {
            assert!(world.hosts.iter().any(|host| host.holds(*key)), "nobody has {key:?} to fall back to");
        }
    }

    /// Nothing has been saved for a while, so every copy of the last commit is where it is to be.
    fn check_copies(&self) {
        self.check_fallback();
        for (host, key) in self.last_copies() {
            let found = &self.world.hosts[usize::from(host)];
            assert!(found.holds(key), "host {host} is to keep {key:?}, and it is not brought to it");
        }
    }
}

impl World {
    /// A host is gone with all its memory; after a while there is another in its place.
    pub fn lose(&mut self, host: u16, incarnation: u64, delay_ms: u64) {
        self.end_controller(host);
        let found = &mut self.hosts[usize::from(host)];
        let keys: Vec<Key> = found.remembers().copies.keys().copied().collect();
        self.laws.harm(self.now_ms, found, keys);
        found.lose(incarnation);
        let process = found.process;
        self.laws.lose(&self.hosts);
        let is_left = |version: &Version| self.laws.fewest_copies(&self.hosts, *version) > 0;
        self.committed_before = self.committed_before.filter(is_left);
        self.committed = self.committed.filter(is_left);
        for run in self.runs.values_mut() {
            run.on(AgentId(host)).for_each(|process| process.is_alive = false);
        }
        self.tell(|| format!("host {host} is lost"));
        self.after(delay_ms, Event::StartAgent { host, process });
    }

    /// Flips bits of a copy.
    pub fn damage(&mut self, host: u16, key: Key) {
        self.tell(|| format!("host {host} has damage in {key:?}"));
        let found = &mut self.hosts[usize::from(host)];
        self.laws.harm(self.now_ms, found, [key]);
        found.bytes.entry(key).and_modify(|content| *content ^= 1 << 7);
    }

    /// Somebody has read a copy of a host, and found it to be damaged.
    pub fn find_damage(&mut self, host: u16, key: Key) {
        let Some(epoch) = self.hosts[usize::from(host)].remembers().promised else { return };
        self.step(host, Input::Peer(AgentId(host), ToPeer::Damaged { epoch, key }), None);
    }
}
