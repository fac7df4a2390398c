//! The protocol's machines, at small sizes, in every order of what may happen: a model checker drives them.
//!
//! A run of three agents (or two) with two copies of each shard trains. From there on everything that may happen next is
//! tried, and from each state that comes of it again: controllers speak to single agents, whose answers are heard,
//! lost, or late; agents bring copies; trainers save, those of older programs too; agents start other controllers,
//! are killed, and lose their memory. How often each may happen is bounded, and how many actions follow on each other;
//! within that, all states are visited. `make test-long` sets `WAYSTATION_TEST_LONG`: more actions, in a release build.
//!
//! What is simpler than in the world: what a controller says reaches one agent at a time or is lost, and is never late;
//! the bytes of copies, and what agents say to each other, are not late either. The simulation has all of that.

#![allow(clippy::expect_used, clippy::panic)]

mod state;

use stateright::{Checker, Expectation, Model, Property};
use waystation_agent::protocol::names::{Epoch, Version};

use self::state::{Action, Answers, Done, State};

/// How far a run has come when everything may happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Begin {
    Training,
    /// A version has its copies, and is about to be noted.
    Saved,
    /// Only one agent has noted it when another controller is started.
    Contested,
    /// That one has taken over, and another version has its copies, when a third controller is started.
    Succeeded,
}

/// A run, and how often what may happen to it.
#[derive(Clone, Debug)]
struct Run {
    agents: u16,
    processes: u16,
    begin: Begin,
    most: Done,
}

impl Model for Run {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let mut state = State::training(self.agents, self.processes);
        if self.begin != Begin::Training {
            state.save();
        }
        if matches!(self.begin, Begin::Contested | Begin::Succeeded) {
            state.contest();
        }
        if self.begin == Begin::Succeeded {
            state.succeed();
        }
        vec![state]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        let (done, most) = (&state.done, &self.most);
        let hosts = 0..self.agents;
        for (controller, _) in state.controllers() {
            for agent in hosts.clone() {
                actions.push(Action::Speak { controller, agent, answers: Answers::Heard });
                if done.silences < most.silences {
                    actions.push(Action::Speak { controller, agent, answers: Answers::Lost });
                    if !state.has_late() {
                        actions.push(Action::Speak { controller, agent, answers: Answers::Late });
                    }
                }
            }
            if done.waits < most.waits && !state.is_training(controller) {
                actions.push(Action::Wait { controller });
            }
        }
        actions.extend(hosts.clone().map(|agent| Action::Tick { agent }));
        if state.has_late() {
            actions.push(Action::Arrive);
        }
        if done.seals < most.seals {
            for (&epoch, &(_, token, _)) in &state.history.begun {
                for shard in
                    (0..u32::from(self.processes)).filter(|&shard| state.next_key(epoch, shard).is_some())
                {
                    actions.push(Action::Seal { token, epoch, shard });
                }
            }
        }
        if done.programs < most.programs {
            actions.push(Action::Begin);
        }
        for host in hosts {
            if done.controllers < most.controllers {
                actions.push(Action::Start { host });
            }
            if done.restarts < most.restarts {
                actions.push(Action::Restart { host });
            }
            if done.losses < most.losses {
                actions.push(Action::Lose { host });
            }
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        state.act(action);
        (state != *last).then_some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut properties = vec![
            Property::always(
                "a committed version is kept as long as lost hosts leave a copy of each shard",
                |_, state| newest_commit(state).is_none_or(|newest| is_kept(state, newest)),
            ),
            Property::always("an epoch is begun in one way", |_, state: &State| !state.history.is_split),
            Property::always("an epoch begins with every commit of those before it", |_, state: &State| {
                let history = &state.history;
                history.begun.iter().all(|(&later, &(_, _, base))| {
                    history.committed.iter().all(|&(epoch, version)| epoch >= later || base >= Some(version))
                })
            }),
            Property::always("what a fenced program seals is not kept", |_, state: &State| {
                !state.history.is_unfenced
            }),
            Property::always(
                "what is committed was sealed by the program of its epoch",
                |_, state: &State| {
                    state.history.committed.iter().all(|&(_, version)| is_of_its_program(state, version))
                },
            ),
        ];
        // Once another controller was started, the first has nothing committed, and there is nothing new.
        if self.begin != Begin::Contested {
            properties.push(Property::sometimes("a version is committed", |_, state: &State| {
                !state.history.committed.is_empty()
            }));
        }
        // A whole recovery is more actions than are tried where there are three controllers.
        if matches!(self.begin, Begin::Training | Begin::Saved) {
            properties.push(Property::sometimes(
                "an epoch begins with a commit of an older one",
                |_, state: &State| {
                    let base_of = |(_, _, base): &(u32, u64, Option<Version>)| *base;
                    state
                        .history
                        .begun
                        .values()
                        .filter_map(base_of)
                        .any(|base| Some(base) == newest_commit(state))
                },
            ));
        }
        properties
    }

    fn within_boundary(&self, state: &State) -> bool {
        let newest = state.agents.iter().filter_map(|agent| agent.memory().promised).max();
        newest.unwrap_or_default().number <= 1 + self.most.controllers + self.most.losses + self.most.programs
    }
}

fn newest_commit(state: &State) -> Option<Version> {
    state.history.committed.iter().map(|&(_, version)| version).max()
}

/// Whether a copy of each shard is left, or of a later version that agents were told is committed.
fn is_kept(state: &State, version: Version) -> bool {
    let told = state.agents.iter().flat_map(|agent| &agent.memory().noted);
    let mut kept = told.map(|commit| commit.version).filter(|&later| later > version).chain([version]);
    kept.any(|version| state.is_complete(version))
}

fn is_of_its_program(state: &State, version: Version) -> bool {
    let program = |epoch: Epoch| state.history.begun.get(&epoch).map(|&(_, token, _)| token);
    let sealed = state.history.sealed.get(&version);
    sealed.is_some_and(|tokens| tokens.iter().all(|&token| Some(token) == program(version.epoch)))
}

/// Visits every state that so many actions lead to: `few` where time is short, `all` that matter where
/// `WAYSTATION_TEST_LONG` is set. What must be possible is looked for only where all are, for it takes as many.
fn check(name: &str, run: Run, few: usize, all: usize) {
    let depth = if std::env::var_os("WAYSTATION_TEST_LONG").is_some() { all } else { few };
    let is_whole = depth == all;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    // The first state is at depth 1.
    let checker = run.checker().threads(threads).target_max_depth(depth + 1).spawn_bfs().join();
    println!("{name}: {} states, of up to {depth} actions", checker.unique_state_count());
    for property in checker.model().properties() {
        if property.expectation == Expectation::Always || is_whole {
            let is_found = checker.discovery(property.name).is_some();
            let is_right = is_found == (property.expectation == Expectation::Sometimes);
            assert!(is_right, "{name}: {}: {:?}", property.name, checker.discovery(property.name));
        }
    }
}

/// A host is lost while a version is noted.
#[test]
fn nothing_is_lost_with_one_host() {
    let most = Done { waits: 1, losses: 1, ..Done::default() };
    check("a lost host", Run { agents: 3, processes: 1, begin: Begin::Saved, most }, 20, 20);
}

/// One of two hosts is lost: the other is no majority, and has every copy.
#[test]
fn one_of_two_hosts_is_enough() {
    let most = Done { waits: 1, losses: 1, controllers: 1, ..Done::default() };
    check("one of two hosts", Run { agents: 2, processes: 1, begin: Begin::Saved, most }, 16, 24);
}

/// Two of three hosts are lost at once or one after the other, among them one twice, while a version is noted.
#[test]
fn one_of_three_hosts_is_enough() {
    let most = Done { losses: 2, ..Done::default() };
    check("one of three hosts", Run { agents: 3, processes: 1, begin: Begin::Saved, most }, 9, 26);
}

/// Two controllers at a time have agents bound to them, some of which are lost again.
#[test]
fn controllers_that_bind_all_do_not_contradict_each_other() {
    let most = Done { controllers: 1, losses: 3, silences: 1, ..Done::default() };
    check("two hosts and two controllers", Run { agents: 2, processes: 1, begin: Begin::Saved, most }, 8, 16);
}

/// Three controllers at a time; answers are lost, or arrive when nobody waits for them any more.
#[test]
fn controllers_do_not_contradict_each_other() {
    let most = Done { controllers: 1, waits: 1, silences: 1, restarts: 1, ..Done::default() };
    check("three controllers", Run { agents: 3, processes: 1, begin: Begin::Contested, most }, 3, 8);
}

/// The second of three controllers commits what is saved meanwhile, in spite of the first and of the third.
#[test]
fn controllers_commit_in_spite_of_each_other() {
    let most = Done { seals: 2, waits: 1, silences: 1, restarts: 1, ..Done::default() };
    let run = Run { agents: 3, processes: 1, begin: Begin::Succeeded, most };
    check("three controllers and seals", run, 3, 7);
}

/// A newer program begins while trainers of the older one go on.
#[test]
fn trainers_of_older_programs_save_nothing() {
    let most = Done { seals: 2, programs: 1, waits: 1, ..Done::default() };
    check("a newer program", Run { agents: 3, processes: 1, begin: Begin::Saved, most }, 7, 20);
}

/// Two agents, each with a shard of its own: both are a majority.
#[test]
fn versions_of_two_shards_are_whole() {
    let most = Done { seals: 4, controllers: 1, ..Done::default() };
    check("two shards", Run { agents: 2, processes: 2, begin: Begin::Training, most }, 20, 20);
}
