//! Programs: who is fenced, who goes on, and which beginnings are counted.

use std::collections::BTreeSet;

use waystation_agent::protocol::Agent;
use waystation_agent::protocol::events::{Input, Output, Refusal};
use waystation_agent::protocol::message::{Base, Decision, Orders, ToAgent, ToController};
use waystation_agent::protocol::names::{Key, SealedCopy};

use super::{
    COPY, agent_of, commit, epoch, findings, hears, inventory, key, orders, program, train, version,
};

/// Lets an agent promise an epoch and begin it; returns what it wanted done.
fn begin(agent: &mut Agent, orders: &Orders) -> Vec<Output> {
    let (epoch, attempt, program) = (orders.epoch, orders.attempt, orders.program.clone());
    let decision = Decision { epoch, attempt, program, version: None, shards: Vec::new() };
    let mut outputs = hears(agent, ToAgent::Prepare { epoch });
    outputs.extend(hears(agent, ToAgent::Restore(decision.into())));
    outputs.extend(hears(agent, train(orders)));
    outputs
}

fn fences(outputs: &[Output]) -> Vec<u64> {
    let fenced = outputs.iter().filter_map(|output| match output {
        Output::Fence(token) => Some(*token),
        _ => None,
    });
    fenced.collect()
}

#[test]
fn another_epoch_ends_no_trainers() {
    let mut agent = agent_of(0, 1, &[]);
    assert_eq!(fences(&begin(&mut agent, &orders(2, &[0]))), [1]);
    let outputs = begin(&mut agent, &orders(3, &[0]));
    assert_eq!(fences(&outputs), [] as [u64; 0]);
    assert!(outputs.contains(&Output::Train(epoch(3))));
    // What was agreed on before is not kept any more; the next save is.
    let late = Output::Refuse(key(2, 4), Refusal::Fenced);
    assert_eq!(agent.handle(Input::Sealed(key(2, 4), COPY)), [late]);
    agent.handle(Input::Sealed(key(3, 5), COPY));
    assert!(agent.memory().copies.contains_key(&key(3, 5)));
}

#[test]
fn a_newer_program_fences_the_older_one_before_it_has_an_epoch() {
    let mut agent = agent_of(0, 1, &[]);
    begin(&mut agent, &orders(2, &[0]));
    let outputs = agent.handle(Input::Begin(program(5)));
    assert_eq!(fences(&outputs), [5]);
    let told = outputs.iter().any(|output| {
        matches!(output, Output::ToController(1, ToController::Report(report)) if report.program == Some(program(5)))
    });
    assert!(told, "the controller does not hear of it");
    assert_eq!(agent.refusal_of(key(2, 4)), Some(Refusal::Fenced));
    // Neither the older one nor the same one again changes anything.
    for token in [1, 5] {
        assert_eq!(fences(&agent.handle(Input::Begin(program(token)))), [] as [u64; 0]);
    }
    assert_eq!(agent.memory().program, Some(program(5)));
}

#[test]
fn only_what_a_program_begins_with_is_counted_and_once() {
    let mut agent = agent_of(0, 1, &[]);
    let base = Some(Base { version: version(1, 5), shard_count: 1 });
    let of = |number, token, is_continued| Orders {
        base,
        is_continued,
        program: program(token),
        ..orders(number, &[0])
    };
    let count = |agent: &Agent| agent.memory().fruitless.get(&version(1, 5)).map(|found| found.count);
    begin(&mut agent, &of(2, 1, false));
    begin(&mut agent, &of(3, 1, false));
    assert_eq!(count(&agent), Some(1));
    begin(&mut agent, &of(4, 2, true));
    assert_eq!(count(&agent), Some(1), "its trainers have not begun with that");
    begin(&mut agent, &of(5, 3, false));
    assert_eq!(count(&agent), Some(2));
    // A commit that was there before is no work that was done since; one of this epoch is.
    begin(&mut agent, &Orders { commits: BTreeSet::from([commit(4, 9)]), ..of(6, 3, true) });
    assert_eq!(count(&agent), Some(2));
    begin(&mut agent, &Orders { commits: BTreeSet::from([commit(5, 6)]), ..of(7, 3, true) });
    assert_eq!(count(&agent), None);
}

#[test]
fn a_shard_that_is_none_of_the_program_is_refused() {
    let mut agent = agent_of(0, 1, &[]);
    begin(&mut agent, &orders(2, &[0]));
    let second = Key { shard: 1, ..key(2, 4) };
    let others = [
        (key(2, 4), SealedCopy { sequence: 4, ..COPY }),
        (key(2, 4), SealedCopy { shard_count: 2, ..COPY }),
        (second, COPY),
    ];
    for (key, copy) in others {
        assert_eq!(agent.handle(Input::Sealed(key, copy)), [Output::Refuse(key, Refusal::Conflict)]);
    }
}

#[test]
fn what_another_sequence_has_saved_is_neither_restored_nor_kept() {
    let found =
        findings(&[inventory(2, &[key(1, 5)], &[commit(1, 5)]), inventory(2, &[key(1, 5)], &[commit(1, 5)])]);
    assert_eq!(found.all_restorable(3).len(), 1);
    assert!(found.has_commit(3));
    assert_eq!(found.all_restorable(4), []);
    assert_eq!(found.commits_to_keep(4, 2, 1, 2), BTreeSet::new());
    assert!(!found.has_commit(4));
}
