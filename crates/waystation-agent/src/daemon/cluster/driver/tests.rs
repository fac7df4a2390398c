//! Drivers that hear each other without a network.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};

use super::*;
use crate::peers::Name;
use crate::protocol::names::Digest;

const TICK_MS: u64 = 200;
const COUNT: u16 = 3;

struct Run {
    now_ms: u64,
    /// When each was started.
    began_ms: Vec<u64>,
    drivers: Vec<Option<Driver>>,
    letters: VecDeque<(AgentId, AgentId, Letter)>,
    /// Who does not hear whom.
    cut: BTreeSet<(AgentId, AgentId)>,
    notes: Vec<Option<Notes>>,
    sent: Vec<(AgentId, AgentId, Key, SealedCopy)>,
}

fn hosts() -> Hosts {
    let names: Vec<Name> = (0..COUNT).map(|id| Name::new(format!("host-{id}")).unwrap()).collect();
    let addresses = vec!["a:1".to_owned(); names.len()];
    Hosts { domains: (0..u32::from(COUNT)).collect(), addresses, names }
}

fn driver(id: u16, stage: Option<Stage>, incarnation: u64) -> Driver {
    let hosts = hosts();
    let settings = Settings {
        domains: hosts.domains.clone(),
        copies: 2,
        dead_after_ms: 2000,
        gather_ms: 1000,
        stuck_ms: 5000,
        give_up_ms: 5000,
        versions: 1,
        fruitless_limit: 2,
    };
    let patience = Patience { least_ms: 1000, stagger_ms: 600 };
    let limits = Limits { copies: 8, versions_of_shard: 2 };
    let role = Role { id: AgentId(id), hosts, boot: Id([9; 16]), limits, settings, patience };
    Driver::new(role, stage, incarnation, BTreeMap::new(), draw)
}

fn draw() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

fn program(token: u64) -> Program {
    Program { token, sequence: 7, owners: (0..COUNT).map(AgentId).collect() }
}

impl Run {
    fn new() -> Self {
        let drivers = (0..COUNT).map(|id| Some(driver(id, None, u64::from(id) + 1))).collect();
        let notes = vec![None; usize::from(COUNT)];
        let began_ms = vec![0; usize::from(COUNT)];
        let (letters, cut) = (VecDeque::new(), BTreeSet::new());
        Self { now_ms: 0, began_ms, drivers, letters, cut, notes, sent: Vec::new() }
    }

    fn with(&mut self, id: u16, act: impl FnOnce(&mut Driver) -> Vec<Effect>) {
        let Some(driver) = &mut self.drivers[usize::from(id)] else { return };
        let mut effects = VecDeque::from(act(driver));
        while let Some(effect) = effects.pop_front() {
            match effect {
                Effect::Remember(notes) => self.notes[usize::from(id)] = Some(notes),
                Effect::Tell(to, letter) => {
                    assert!(self.notes[usize::from(id)].is_some(), "nothing is told that is not remembered");
                    if !self.cut.contains(&(AgentId(id), to)) {
                        self.letters.push_back((AgentId(id), to, letter));
                    }
                }
                Effect::Send { to, key, copy } => self.sent.push((AgentId(id), to, key, copy)),
                Effect::Verify => effects.extend(driver.happen(Input::Verified(Vec::new()))),
                Effect::Load { attempt, key } => {
                    let input = Input::Loaded { attempt, shard: key.shard, is_loaded: true };
                    effects.extend(driver.happen(input));
                }
                _ => {}
            }
        }
    }

    fn tick(&mut self) {
        self.now_ms += TICK_MS;
        for id in 0..COUNT {
            let now_ms = self.now_ms - self.began_ms[usize::from(id)];
            self.with(id, |driver| driver.tick(now_ms, &[]));
        }
        while let Some((from, to, letter)) = self.letters.pop_front() {
            let read = Letter::decode(&letter.encode().unwrap(), COUNT.into()).unwrap();
            self.with(to.0, |driver| driver.deliver(from, read));
        }
        for (from, to, key, copy) in std::mem::take(&mut self.sent) {
            let expects =
                self.drivers[usize::from(to.0)].as_ref().is_some_and(|driver| driver.expects(from, key));
            if expects {
                self.with(to.0, |driver| driver.arrive(from, key, copy));
            }
        }
    }

    fn restart(&mut self, id: u16, stage: Option<Stage>, incarnation: u64) {
        self.began_ms[usize::from(id)] = self.now_ms;
        self.drivers[usize::from(id)] = Some(driver(id, stage, incarnation));
    }

    fn until(&mut self, what: &str, is_so: impl Fn(&Self) -> bool) {
        for _ in 0..200 {
            if is_so(self) {
                return;
            }
            self.tick();
        }
        unreachable!("{what}: not so after {} ms", self.now_ms);
    }

    fn orders(&self, id: u16) -> Option<&Orders> {
        self.drivers[usize::from(id)].as_ref()?.orders()
    }

    fn all_train(&self, token: u64) -> bool {
        let epochs: Vec<_> = (0..COUNT).filter_map(|id| self.orders(id)).collect();
        epochs.len() == usize::from(COUNT)
            && epochs.iter().all(|orders| orders.program.token == token && orders.epoch == epochs[0].epoch)
    }

    fn seal(&mut self, step: u64) {
        for id in 0..COUNT {
            let epoch = self.orders(id).unwrap().epoch;
            let key = Key { version: crate::protocol::names::Version { epoch, step }, shard: id.into() };
            let copy =
                SealedCopy { digest: Digest(step + u64::from(id)), shard_count: COUNT.into(), sequence: 7 };
            self.with(id, |driver| driver.happen(Input::Sealed(key, copy)));
        }
    }

    fn has_commit(&self, step: u64) -> bool {
        let has = |orders: &Orders| orders.commits.iter().any(|commit| commit.version.step == step);
        (0..COUNT).all(|id| self.orders(id).is_some_and(has))
    }
}

fn trained(token: u64) -> Run {
    let mut run = Run::new();
    run.with(1, |driver| driver.begin(program(token)).unwrap());
    run.until("all train", |run| run.all_train(token));
    run
}

#[test]
fn a_run_is_founded_and_what_is_saved_is_committed() {
    let mut run = trained(5);
    run.seal(1);
    run.until("it is committed", |run| run.has_commit(1));
    for driver in run.drivers.iter().flatten() {
        assert!(
            (0..COUNT).all(|id| driver.is_heard(AgentId(id))),
            "also those that only speak to the controller"
        );
    }
    run.with(2, |driver| driver.begin(program(9)).unwrap());
    run.until("a newer program trains", |run| run.all_train(9));
    assert_eq!(run.orders(0).unwrap().base.unwrap().version.step, 1);
    let older = run.drivers[0].as_mut().unwrap().begin(program(5)).unwrap_err();
    assert_eq!(older.kind(), Kind::Fenced);
    let other = Program { sequence: 8, ..program(9) };
    assert_eq!(run.drivers[0].as_mut().unwrap().begin(other).unwrap_err().kind(), Kind::Conflict);
}

#[test]
fn what_is_remembered_is_gone_on_with_and_what_is_forgotten_is_admitted() {
    let mut run = trained(5);
    let epoch = run.orders(0).unwrap().epoch;
    let notes = run.notes[1].clone().unwrap();
    let read = Notes::decode(&notes.encode().unwrap(), Id([9; 16]), "host-1", hosts().digest()).unwrap();
    assert_eq!(read.as_ref(), Some(&notes));
    run.restart(1, read.map(|notes| notes.stage), 77);
    run.until("it has its orders again", |run| run.all_train(5));
    assert_eq!(run.orders(1).unwrap().epoch, epoch, "nobody needed another epoch");
    run.restart(1, None, 88);
    run.until("a new epoch has it", |run| run.all_train(5) && run.orders(1).unwrap().epoch > epoch);
    let memory = run.drivers[1].as_ref().unwrap().agent().unwrap().memory();
    assert_eq!(memory.incarnation, 88);
}

#[test]
fn without_the_first_the_second_starts_a_controller() {
    let mut run = trained(5);
    let epoch = run.orders(1).unwrap().epoch;
    run.drivers[0] = None;
    run.until("the others have a new epoch", |run| {
        (1..COUNT).all(|id| run.orders(id).is_some_and(|orders| orders.epoch > epoch))
    });
    assert!(!run.drivers[1].as_ref().unwrap().is_heard(AgentId(0)));
}

/// It is heard by the others, and does not hear them: it has to give way, and to leave them alone.
#[test]
fn who_hears_nobody_is_no_controller() {
    let mut run = trained(5);
    assert!(run.drivers[0].as_ref().unwrap().is_controller());
    let epoch = run.orders(1).unwrap().epoch;
    run.cut.extend((1..COUNT).map(|from| (AgentId(from), AgentId(0))));
    let has_newer =
        |run: &Run| (1..COUNT).all(|id| run.orders(id).is_some_and(|orders| orders.epoch > epoch));
    run.until("the others have a new epoch", has_newer);
    let newer = run.orders(1).unwrap().epoch;
    (0..50).for_each(|_| run.tick());
    assert_eq!(run.orders(1).unwrap().epoch, newer);
    assert!(!run.drivers[0].as_ref().unwrap().is_controller());
    run.cut.clear();
    run.until("all train", |run| run.all_train(5));
}
