//! One run: a storm of faults, then calm, in which the program must make progress again.

use waystation_agent::protocol::controller::Settings;
use waystation_agent::protocol::names::AgentId;

use super::network::{CALM, Place, Weather};
use super::random::Random;
use super::world::{Event, World};

const STORM_MS: u64 = 25_000;
const CALM_MS: u64 = 25_000;
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
    let mut storm = Storm { world: World::new(seed, settings), random, incarnation: 0, faults: 0 };
    storm.world.is_told = is_told;
    storm.run(seed)
}

fn settings(random: &mut Random) -> Settings {
    let hosts = 3 + random.below(3) as u16;
    let copies = if random.permille(250) { 3 } else { 2 };
    Settings {
        domains: (0..u32::from(hosts)).map(|host| host % 3).collect(),
        shards: u32::from(hosts) + u32::from(random.permille(300)),
        copies,
        place: neighbours,
        dead_after_ms: 1000,
        gather_ms: 1500,
        give_up_ms: 1600,
        fruitless_limit: 2,
    }
}

/// Each shard goes to one of the agents and those after it.
fn neighbours(live: &[AgentId], shards: u32, copies: usize) -> Vec<Vec<AgentId>> {
    let holders =
        |shard: usize| (0..copies.min(live.len())).map(move |step| live[(shard + step) % live.len()]);
    (0..shards as usize).map(|shard| holders(shard).collect()).collect()
}

struct Storm {
    world: World,
    random: Random,
    /// The greatest that any host has.
    incarnation: u64,
    faults: u64,
}

impl Storm {
    fn run(&mut self, seed: u64) -> Outcome {
        self.world.after(2_000, Event::Fault);
        self.world.after(STORM_MS, Event::Heal);
        let mut before_calm = None;
        while let Some(event) = self.world.next_event() {
            if self.world.now_ms > STORM_MS + CALM_MS {
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
                other => self.world.happen(other),
            }
        }
        assert!(self.world.committed > before_calm, "seed {seed}: nothing was committed in the calm");
        Outcome { commits: self.world.laws.majority_commits, faults: self.faults }
    }

    fn calm(&mut self) {
        let world = &mut self.world;
        world.tell(|| "calm".to_owned());
        world.network.weather = CALM;
        world.network.heal();
        world.failing_loads = 0;
        // The launcher keeps one controller, the newest.
        while world.controllers.len() > 1 {
            world.controllers.pop_first();
        }
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
        let kind = self.random.below(10);
        self.world.tell(|| format!("fault {kind}"));
        match kind {
            0 | 1 => self.kill_agent(),
            2 | 3 => self.lose_host(),
            4 => self.kill_trainer(),
            5 => self.replace_controller(),
            6 | 7 => self.cut_links(),
            8 => self.damage(),
            _ => {
                let (lost, repeated) = (self.random.below(200), self.random.below(200));
                let slowest_ms = 1 + self.random.below(400);
                self.world.network.weather = Weather { lost, repeated, slowest_ms };
                self.world.failing_loads = self.random.below(100);
            }
        }
    }

    fn kill_agent(&mut self) {
        let host = self.some_host();
        let found = &mut self.world.hosts[usize::from(host)];
        found.kill_agent();
        let process = found.process;
        let delay_ms = 100 + self.random.below(2_000);
        self.world.after(delay_ms, Event::StartAgent { host, process });
    }

    /// A host and all its memory, unless too few would be left that remember what they promised.
    fn lose_host(&mut self) {
        let hosts = &self.world.hosts;
        let remember = hosts.iter().filter(|host| host.remembers().promised.is_some()).count();
        let host = self.some_host();
        let found = &mut self.world.hosts[usize::from(host)];
        if found.remembers().promised.is_some() && remember <= self.world.settings.domains.len() / 2 + 1 {
            return;
        }
        self.incarnation += 1;
        found.lose(self.incarnation);
        let process = found.process;
        self.world.tell(|| format!("host {host} is lost"));
        self.world.laws.harm(self.world.now_ms, host);
        let delay_ms = 100 + self.random.below(4_000);
        self.world.after(delay_ms, Event::StartAgent { host, process });
    }

    /// The launcher notices, and has the controller begin a recovery.
    fn kill_trainer(&mut self) {
        let host = self.some_host();
        self.world.hosts[usize::from(host)].trainer = None;
    }

    /// A new one; the old one is killed, or cut off and goes on.
    fn replace_controller(&mut self) {
        if self.random.permille(600) {
            self.world.controllers.clear();
        }
        if self.world.controllers.len() < 3 {
            self.world.start_controller();
        }
    }

    fn cut_links(&mut self) {
        let mut places: Vec<Place> = (0..self.world.hosts.len() as u16).map(Place::Host).collect();
        places.extend(self.world.controllers.keys().map(|&number| Place::Controller(number)));
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

    /// Flips bits of one copy.
    fn damage(&mut self) {
        let host = self.some_host();
        let found = &mut self.world.hosts[usize::from(host)];
        let keys: Vec<_> = found.bytes.keys().copied().collect();
        if let Some(key) = keys.get(self.random.below(keys.len().max(1) as u64) as usize) {
            found.bytes.entry(*key).and_modify(|content| *content ^= 1 << 7);
            self.world.tell(|| format!("host {host} has damage in {key:?}"));
            self.world.laws.harm(self.world.now_ms, host);
        }
    }
}
