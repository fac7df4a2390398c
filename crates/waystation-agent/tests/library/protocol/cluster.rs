//! A controller and agents that hear each other at once, unless they are cut off.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use waystation_agent::protocol::Agent;
use waystation_agent::protocol::controller::{self, Controller, Settings};
use waystation_agent::protocol::events::{Input, Output, Refusal};
use waystation_agent::protocol::memory::{Limits, Memory};
use waystation_agent::protocol::message::{Decision, Inventory, Report, ToController};
use waystation_agent::protocol::names::{
    AgentId, Commit, Epoch, Key, Program, SealedCopy, Version, manifest_digest,
};

use super::{COPY, commit, inventory, key, program, version};

fn settings() -> Settings {
    Settings {
        domains: vec![0, 1, 2],
        copies: 2,
        dead_after_ms: 1000,
        gather_ms: 100,
        stuck_ms: 500,
        give_up_ms: 1000,
        versions: 1,
        fruitless_limit: 2,
    }
}

/// A controller and agents that hear each other at once.
struct Cluster {
    controller: Controller,
    agents: Vec<Agent>,
    /// Those that hear nothing and are not heard.
    cut_off: BTreeSet<u16>,
    /// Copies that do not get through.
    lost: BTreeSet<Key>,
    /// What the controller wants besides messages.
    wants: Vec<controller::Output>,
}

impl Cluster {
    fn of(agents: Vec<Agent>) -> Self {
        let controller = Controller::new(1, settings(), 0);
        Self { controller, agents, cut_off: BTreeSet::new(), lost: BTreeSet::new(), wants: Vec::new() }
    }

    fn founders() -> Self {
        let limits = Limits { copies: 4, versions_of_shard: 2 };
        Self::of((0..3).map(|id| Agent::new(AgentId(id), limits, Memory::of_founder())).collect())
    }

    fn training() -> Self {
        let mut cluster = Self::founders();
        cluster.agent(AgentId(2), Input::Begin(program(1)));
        while cluster.agents.iter().any(|agent| agent.orders().is_none()) {
            cluster.tick(0); // who hears too early says nothing, and is asked again
        }
        cluster
    }

    fn controller(&mut self, input: controller::Input) {
        for output in self.controller.handle(input) {
            match output {
                controller::Output::ToAgent(to, message) => self.agent(to, Input::Controller(message)),
                other => self.wants.push(other),
            }
        }
    }

    fn agent(&mut self, id: AgentId, input: Input) {
        if self.cut_off.contains(&id.0) {
            return;
        }
        for output in self.agents[usize::from(id.0)].handle(input) {
            match output {
                Output::ToController(1, message) => {
                    self.controller(controller::Input::Message(id, message));
                }
                Output::ToController(..) => {}
                Output::ToPeer(to, message) => self.agent(to, Input::Peer(id, message)),
                Output::Bytes { key, .. } if self.lost.contains(&key) => {}
                Output::Bytes { to, epoch, key, copy, purpose } => {
                    self.agent(to, Input::Bytes { from: id, epoch, key, copy, purpose, is_intact: true });
                }
                Output::Verify => self.agent(id, Input::Verified(Vec::new())),
                Output::Load { attempt, key, .. } => {
                    self.agent(id, Input::Loaded { attempt, shard: key.shard, is_loaded: true });
                }
                Output::Free(_) | Output::Fence(_) | Output::Train(_) | Output::Refuse(..) => {}
            }
        }
    }

    fn tick(&mut self, now_ms: u64) {
        self.controller(controller::Input::Tick(now_ms));
        for id in 0..3 {
            self.agent(AgentId(id), Input::Tick);
        }
    }

    fn committed(&self) -> Vec<Version> {
        let commits = self.wants.iter().filter_map(|want| match want {
            controller::Output::Committed(commit) => Some(commit.version),
            _ => None,
        });
        commits.collect()
    }
}

#[test]
fn a_version_is_committed_as_soon_as_it_has_its_copies() {
    let mut cluster = Cluster::training();
    let key = Key { version: Version { epoch: cluster.controller.epoch(), step: 1 }, shard: 0 };
    cluster.cut_off.insert(1);
    cluster.agent(AgentId(0), Input::Sealed(key, COPY));
    assert_eq!(cluster.committed(), []);
    cluster.cut_off.clear();
    cluster.tick(10);
    assert_eq!(cluster.committed(), [key.version]);
}

/// An agent that was lost between its inventory and the beginning became a member that never trained: no shard of it was
/// ever saved again, and nobody noticed.
#[test]
fn who_is_lost_while_a_decision_is_carried_out_makes_a_new_one_necessary() {
    let mut cluster = Cluster::founders();
    // Agent 2 gives its inventory and is lost before the others are done.
    let decided = |cluster: &Cluster| {
        let decisions = cluster.wants.iter().filter_map(|want| match want {
            controller::Output::Decided(decision) => Some(Arc::clone(decision)),
            _ => None,
        });
        decisions.collect::<Vec<Arc<Decision>>>()
    };
    for output in cluster.controller.handle(controller::Input::Tick(0)) {
        let controller::Output::ToAgent(to, message) = output else { continue };
        for answer in cluster.agents[usize::from(to.0)].handle(Input::Controller(message)) {
            if let Output::ToController(1, message) = answer {
                // Promises only: what is asked then is dropped.
                cluster.controller.handle(controller::Input::Message(to, message));
            }
        }
    }
    let epoch = cluster.controller.epoch();
    for id in 0..3 {
        let found = ToController::Inventory(Inventory { epoch, ..inventory(1, &[], &[]) });
        let outputs = cluster.controller.handle(controller::Input::Message(AgentId(id), found));
        cluster.wants.extend(outputs);
    }
    assert_eq!(decided(&cluster).len(), 1);
    let report = Report {
        incarnation: 1,
        promised: None,
        pledged: None,
        program: None,
        incarnations: BTreeMap::new(),
        copies: BTreeMap::new(),
        noted: BTreeSet::new(),
        trained: None,
    };
    let lost = controller::Input::Message(AgentId(2), ToController::Report(report));
    cluster.controller.handle(lost);
    assert!(cluster.controller.epoch() > epoch, "the decision still counts on what was lost");
}

/// With a save at every interval, what was given up came to be saved by halves again and again.
#[test]
fn after_each_failure_more_steps_are_skipped() {
    let mut cluster = Cluster::training();
    let epoch = cluster.controller.epoch();
    cluster.cut_off.insert(1); // no second copy
    let mut floors = Vec::new();
    let mut now_ms = 0;
    for _ in 0..4 {
        let floor = cluster.agents[0].orders().expect("it trains").floor;
        let key = Key { version: Version { epoch, step: floor }, shard: 0 };
        cluster.agent(AgentId(0), Input::Sealed(key, COPY));
        for _ in 0..3 {
            now_ms += 500;
            // The silence of the second is not the matter here.
            cluster.controller(controller::Input::Message(AgentId(1), heard(epoch)));
            cluster.tick(now_ms);
        }
        assert!(cluster.wants.contains(&controller::Output::GivenUp(key.version)));
        floors.push(cluster.agents[0].orders().expect("it trains").floor - floor);
    }
    assert_eq!(floors, [1, 2, 4, 8]);
}

#[test]
fn a_newer_program_begins_a_new_epoch_and_an_older_one_does_not() {
    let mut cluster = Cluster::training();
    let epoch = cluster.controller.epoch();
    cluster.agent(AgentId(1), Input::Begin(program(4)));
    let newer = cluster.controller.epoch();
    assert!(newer > epoch);
    while cluster.agents.iter().any(|agent| agent.orders().is_none()) {
        cluster.tick(0);
    }
    assert!(
        cluster.agents.iter().all(|agent| agent.orders().is_some_and(|orders| orders.program.token == 4))
    );
    cluster.agent(AgentId(2), Input::Begin(program(3)));
    cluster.tick(0);
    assert_eq!(cluster.controller.epoch(), newer);
}

#[test]
fn without_a_program_nothing_is_decided() {
    let mut cluster = Cluster::founders();
    for now_ms in [0, 10, 500, 1000] {
        cluster.tick(now_ms);
    }
    assert_eq!(cluster.wants, []);
    cluster.agent(AgentId(0), Input::Begin(program(1)));
    while !cluster.controller.is_training() {
        cluster.tick(1000);
    }
}

/// Founders of which one has noted what is not there.
fn with_a_commit_that_is_gone() -> Cluster {
    let mut cluster = Cluster::founders();
    let limits = Limits { copies: 4, versions_of_shard: 2 };
    let noted = BTreeSet::from([commit(1, 5)]);
    let memory = Memory { noted, ..Memory::of_founder() };
    cluster.agents[1] = Agent::new(AgentId(1), limits, memory);
    cluster.agent(AgentId(0), Input::Begin(program(1)));
    cluster
}

#[test]
fn what_no_agent_has_is_not_waited_for() {
    let mut cluster = with_a_commit_that_is_gone();
    while !cluster.controller.is_training() {
        cluster.tick(0);
    }
    assert!(!cluster.wants.contains(&controller::Output::Stuck));
}

/// What was committed may be with an agent that is not heard, and that does not come back: the trainers have to go on from
/// the disk.
#[test]
fn what_is_missing_is_waited_for_and_then_let_go() {
    let mut cluster = with_a_commit_that_is_gone();
    cluster.cut_off.insert(2);
    let mut now_ms = 0;
    while !cluster.wants.contains(&controller::Output::Stuck) {
        now_ms += 10;
        cluster.tick(now_ms);
    }
    let since_ms = now_ms;
    while !cluster.controller.is_training() {
        now_ms += 10;
        cluster.tick(now_ms);
    }
    assert!(now_ms >= since_ms + settings().stuck_ms, "given up after {} ms", now_ms - since_ms);
    let orders = cluster.agents[0].orders().expect("it trains");
    assert_eq!((orders.base, orders.commits.len()), (None, 0));
}

#[test]
fn a_controller_gives_way_to_one_of_a_higher_epoch() {
    let mut cluster = Cluster::training();
    let epoch = cluster.controller.epoch();
    let older = Epoch { number: 0, controller: 9 };
    assert_eq!(cluster.controller.handle(controller::Input::Heard(older)), []);
    let newer = Epoch { number: epoch.number + 1, controller: 9 };
    let outputs = cluster.controller.handle(controller::Input::Heard(newer));
    assert_eq!(outputs, [controller::Output::Ended(newer)]);
}

/// It went on speaking: whoever heard it waited for it, and it for answers that did not reach it.
#[test]
fn a_controller_that_hears_no_majority_ends() {
    let mut cluster = Cluster::training();
    cluster.cut_off.insert(1);
    cluster.cut_off.insert(2);
    cluster.tick(1000);
    assert!(!cluster.wants.contains(&controller::Output::LeftAlone));
    cluster.tick(1001);
    assert!(cluster.wants.contains(&controller::Output::LeftAlone));
    assert_eq!(cluster.controller.handle(controller::Input::Tick(2000)), []);
}

/// Its other holder had heard that it keeps it.
#[test]
fn a_copy_that_its_holder_lets_go_as_damaged_is_brought_again() {
    let mut cluster = Cluster::training();
    let key = Key { version: Version { epoch: cluster.controller.epoch(), step: 1 }, shard: 0 };
    cluster.agent(AgentId(0), Input::Sealed(key, COPY));
    cluster.tick(10);
    assert_eq!(cluster.committed(), [key.version]);
    // The one that it was brought to, and the one that has sealed it.
    for id in [1, 0] {
        cluster.agent(AgentId(id), Input::Verified(vec![key]));
        assert!(!cluster.agents[usize::from(id)].memory().copies.contains_key(&key));
        cluster.tick(20);
        assert!(cluster.agents[usize::from(id)].memory().copies.contains_key(&key), "agent {id} lacks it");
    }
}

/// Of three that had one copy each the second got another one first, was committed, and the newest was let go of.
#[test]
fn a_newer_commit_that_lacks_copies_outlasts_an_older_one_that_has_them() {
    let remembering = |id: u16, keys: &[Key], noted: &[Commit]| {
        let memory = Memory {
            copies: keys.iter().map(|&key| (key, COPY)).collect(),
            noted: noted.iter().copied().collect(),
            ..Memory::of_founder()
        };
        Agent::new(AgentId(id), Limits { copies: 8, versions_of_shard: 4 }, memory)
    };
    let newest = key(0, 8);
    let mut cluster = Cluster::of(vec![
        remembering(0, &[newest], &[commit(0, 8)]),
        remembering(1, &[key(0, 3), key(0, 5)], &[commit(0, 3), commit(0, 5)]),
        remembering(2, &[], &[]),
    ]);
    cluster.lost.insert(newest);
    cluster.agent(AgentId(2), Input::Begin(program(1)));
    while cluster.agents.iter().any(|agent| agent.orders().is_none()) {
        cluster.tick(0);
    }
    (1..5).for_each(|now_ms| cluster.tick(now_ms));
    assert_eq!(cluster.committed(), [version(0, 5)]);
    assert!(cluster.agents[0].memory().copies.contains_key(&newest));
    cluster.lost.clear();
    (5..9).for_each(|now_ms| cluster.tick(now_ms));
    assert_eq!(cluster.committed(), [version(0, 5), version(0, 8)]);
}

/// The version that training began with had lost the last copy of a shard; an older one got its copies and was committed.
/// What was left of the first kept its room for ever, and no agent had any for what was saved next.
#[test]
fn what_is_left_of_the_base_gives_way_where_an_older_version_is_committed() {
    let shards = |step| [0, 1].map(|shard| Key { shard, ..key(0, step) });
    let two = Program { owners: vec![AgentId(0), AgentId(1)], ..program(1) };
    let copy = SealedCopy { shard_count: 2, ..COPY };
    let noted = |step| {
        let manifest = manifest_digest(version(0, step), [copy.digest; 2]);
        Commit { version: version(0, step), manifest }
    };
    let remembering = |id: u16, keys: &[&[Key]]| {
        let memory = Memory {
            copies: keys.concat().into_iter().map(|key| (key, copy)).collect(),
            noted: [noted(3), noted(5)].into(),
            ..Memory::of_founder()
        };
        Agent::new(AgentId(id), Limits { copies: 4, versions_of_shard: 2 }, memory)
    };
    let (safe, older, base) = (shards(3), shards(5), shards(8));
    let mut cluster = Cluster::of(vec![
        remembering(0, &[&older, &base[..1]]),
        remembering(1, &[&safe, &base[1..]]),
        remembering(2, &[&safe]),
    ]);
    cluster.lost.extend(base);
    cluster.agent(AgentId(2), Input::Begin(two));
    while cluster.agents.iter().any(|agent| agent.orders().is_none()) {
        cluster.tick(0);
    }
    let orders = cluster.agents[0].orders().expect("it trains");
    assert_eq!(orders.base.map(|base| base.version), Some(version(0, 8)));
    cluster.agent(AgentId(1), Input::Verified(vec![base[1]]));
    (1..9).for_each(|now_ms| cluster.tick(now_ms));
    assert_eq!(cluster.committed(), [version(0, 5)]);
    let next = Key { version: Version { epoch: cluster.controller.epoch(), step: 9 }, shard: 0 };
    assert_eq!(cluster.agents[0].refusal_of(next), Some(Refusal::Full));
    let in_time_ms = 8 + settings().give_up_ms;
    (9..=in_time_ms).for_each(|now_ms| cluster.tick(now_ms));
    assert!(cluster.wants.contains(&controller::Output::GivenUp(version(0, 8))));
    assert_eq!(cluster.agents[0].refusal_of(next), None);
}

/// The agent of a process was killed while that saved: its copy was missing for ever, and the others' took the room of the
/// next step until the time for it was over.
#[test]
fn a_version_is_given_up_when_a_process_has_gone_on_without_it() {
    let two = Program { owners: vec![AgentId(0), AgentId(1)], ..program(1) };
    let copy = SealedCopy { shard_count: 2, ..COPY };
    let mut cluster = Cluster::founders();
    cluster.agent(AgentId(2), Input::Begin(two));
    while cluster.agents.iter().any(|agent| agent.orders().is_none()) {
        cluster.tick(0);
    }
    let epoch = cluster.controller.epoch();
    let key = |step, shard| Key { version: Version { epoch, step }, shard };
    cluster.agent(AgentId(0), Input::Sealed(key(1, 0), copy));
    cluster.tick(10);
    assert!(!cluster.wants.contains(&controller::Output::GivenUp(key(1, 0).version)), "it may still come");
    cluster.agent(AgentId(1), Input::Sealed(key(2, 1), copy));
    cluster.tick(20);
    assert!(cluster.wants.contains(&controller::Output::GivenUp(key(1, 0).version)));
    assert!(!cluster.agents[0].memory().copies.contains_key(&key(1, 0)), "its room is free");
    cluster.agent(AgentId(0), Input::Sealed(key(2, 0), copy));
    cluster.tick(30);
    assert_eq!(cluster.committed(), [key(2, 0).version]);
}

/// A report of an agent that follows an epoch and has nothing.
fn heard(epoch: Epoch) -> ToController {
    ToController::Report(Report {
        incarnation: 0,
        promised: Some(epoch),
        pledged: None,
        program: None,
        incarnations: BTreeMap::new(),
        copies: BTreeMap::new(),
        noted: BTreeSet::new(),
        trained: None,
    })
}
