//! What the simulation has found in the protocol, and what it could only find with luck, one case at a time.

mod cluster;
mod programs;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use waystation_agent::protocol::Agent;
use waystation_agent::protocol::decision::Findings;
use waystation_agent::protocol::events::{Input, Output, Refusal};
use waystation_agent::protocol::memory::{Limits, Memory};
use waystation_agent::protocol::message::{Base, Inventory, Orders, Purpose, Report, ToAgent, ToPeer};
use waystation_agent::protocol::names::{
    AgentId, Commit, Digest, Epoch, Key, Program, SealedCopy, Version, manifest_digest,
};
use waystation_agent::protocol::quorum::Quorum;

const COPY: SealedCopy = SealedCopy { digest: Digest(7), shard_count: 1, sequence: 3 };

/// One process, on the first agent.
fn program(token: u64) -> Program {
    Program { token, sequence: 3, owners: vec![AgentId(0)] }
}

fn epoch(number: u32) -> Epoch {
    Epoch { number, controller: 1 }
}

fn version(number: u32, step: u64) -> Version {
    Version { epoch: epoch(number), step }
}

fn key(number: u32, step: u64) -> Key {
    Key { version: version(number, step), shard: 0 }
}

fn commit(number: u32, step: u64) -> Commit {
    let version = version(number, step);
    Commit { version, manifest: manifest_digest(version, [COPY.digest]) }
}

fn orders(number: u32, holders: &[u16]) -> Orders {
    Orders {
        epoch: epoch(number),
        attempt: 1,
        revision: 0,
        program: program(1),
        is_continued: false,
        base: None,
        is_base_kept: false,
        commits: BTreeSet::new(),
        is_open: true,
        doubted: BTreeSet::new(),
        lost: None,
        floor: 0,
        holders: vec![holders.iter().copied().map(AgentId).collect()],
    }
}

/// An agent in an epoch that has carried out its decision, and with what it holds.
fn agent_of(id: u16, number: u32, copies: &[Key]) -> Agent {
    let memory = Memory {
        promised: Some(epoch(number)),
        restored: Some((epoch(number), 1)),
        copies: copies.iter().map(|&key| (key, COPY)).collect(),
        ..Memory::default()
    };
    Agent::new(AgentId(id), Limits { copies: 4, versions_of_shard: 2 }, memory)
}

fn hears(agent: &mut Agent, message: ToAgent) -> Vec<Output> {
    agent.handle(Input::Controller(message))
}

fn train(orders: &Orders) -> ToAgent {
    ToAgent::Train(Arc::new(orders.clone()))
}

fn said_kept(number: u32, key: Key) -> ToPeer {
    ToPeer::Kept { epoch: epoch(number), key, digest: COPY.digest }
}

/// Copies of a commit that lie where an earlier epoch wanted them filled the slots for ever: nothing was committed again.
#[test]
fn a_copy_that_is_for_others_to_keep_goes_once_they_all_do() {
    let held = key(1, 5);
    let mut agent = agent_of(3, 2, &[held]);
    let told = Orders { commits: BTreeSet::from([commit(1, 5)]), ..orders(2, &[0, 1]) };
    let outputs = hears(&mut agent, train(&told));
    let offered = |to| Output::Bytes {
        to: AgentId(to),
        epoch: epoch(2),
        key: held,
        copy: COPY,
        purpose: Purpose::Replica,
    };
    assert!(outputs.contains(&offered(0)) && outputs.contains(&offered(1)));

    let outputs = agent.handle(Input::Peer(AgentId(0), said_kept(2, held)));
    assert!(!outputs.contains(&Output::Free(held)), "one of two holders does not keep it");
    let outputs = agent.handle(Input::Peer(AgentId(1), said_kept(2, held)));
    assert!(outputs.contains(&Output::Free(held)));
    assert!(agent.memory().copies.is_empty());
}

#[test]
fn a_holder_brings_old_copies_to_the_others_and_keeps_its_own() {
    let held = key(1, 5);
    let mut agent = agent_of(1, 2, &[held]);
    let told = Orders { commits: BTreeSet::from([commit(1, 5)]), ..orders(2, &[0, 1]) };
    let outputs = hears(&mut agent, train(&told));
    let receivers: Vec<AgentId> = outputs
        .iter()
        .filter_map(|output| if let Output::Bytes { to, .. } = output { Some(*to) } else { None })
        .collect();
    assert_eq!(receivers, [AgentId(0)]);
    agent.handle(Input::Peer(AgentId(0), said_kept(2, held)));
    assert!(agent.memory().copies.contains_key(&held));
}

/// The first orders say what counts as noted; a commit that overtook them was noted, counted, and forgotten again.
#[test]
fn a_commit_that_overtakes_the_first_orders_is_not_noted() {
    let mut agent = agent_of(0, 2, &[]);
    let early = ToAgent::Commit { epoch: epoch(2), commit: commit(2, 1) };
    hears(&mut agent, early.clone());
    assert!(agent.memory().noted.is_empty());
    hears(&mut agent, train(&orders(2, &[0])));
    hears(&mut agent, early);
    assert_eq!(agent.memory().noted, BTreeSet::from([commit(2, 1)]));
}

/// A copy that was damaged after it was verified was sent again and again, and what it took the room of never came.
#[test]
fn who_sent_damaged_bytes_verifies_them() {
    let held = key(1, 5);
    let mut receiver = agent_of(0, 2, &[]);
    let told = Orders { commits: BTreeSet::from([commit(1, 5)]), ..orders(2, &[0, 1]) };
    hears(&mut receiver, train(&told));
    let (from, epoch, purpose) = (AgentId(1), epoch(2), Purpose::Replica);
    let damaged = Input::Bytes { from, epoch, key: held, copy: COPY, purpose, is_intact: false };
    let complaint = ToPeer::Damaged { epoch, key: held };
    assert_eq!(receiver.handle(damaged), [Output::ToPeer(from, complaint)]);

    let mut sender = agent_of(1, 2, &[held]);
    hears(&mut sender, train(&told));
    assert_eq!(sender.handle(Input::Peer(AgentId(0), complaint)), [Output::Verify]);
    let outputs = sender.handle(Input::Verified(vec![held]));
    assert!(outputs.contains(&Output::Free(held)));
}

#[test]
fn older_orders_change_nothing() {
    let mut agent = agent_of(0, 2, &[]);
    let newer = Orders { revision: 3, floor: 9, ..orders(2, &[0]) };
    hears(&mut agent, train(&newer));
    hears(&mut agent, train(&orders(2, &[0])));
    assert_eq!(agent.orders(), Some(&newer));
}

/// New versions took the room that the copies of the version that training began with needed.
#[test]
fn no_new_version_is_taken_before_the_old_one_is_safe() {
    let mut agent = agent_of(0, 2, &[key(1, 5)]);
    let told = Orders {
        base: Some(Base { version: version(1, 5), shard_count: 1 }),
        is_base_kept: true,
        is_open: false,
        ..orders(2, &[0, 1])
    };
    hears(&mut agent, train(&told));
    let refused = Output::Refuse(key(2, 6), Refusal::Full);
    assert_eq!(agent.handle(Input::Sealed(key(2, 6), COPY)), [refused]);
    hears(&mut agent, train(&Orders { revision: 1, is_open: true, ..told }));
    agent.handle(Input::Sealed(key(2, 6), COPY));
    assert!(agent.memory().copies.contains_key(&key(2, 6)));
}

fn inventory(number: u32, copies: &[Key], noted: &[Commit]) -> Inventory {
    Inventory {
        epoch: epoch(number),
        incarnation: 0,
        copies: copies.iter().map(|&key| (key, COPY)).collect(),
        noted: noted.iter().copied().collect(),
        fruitless: BTreeMap::new(),
        program: Some(program(1)),
        begun: None,
    }
}

fn findings(inventories: &[Inventory]) -> Findings {
    let inventories = (0u16..).map(AgentId).zip(inventories.iter().cloned()).collect();
    Findings { inventories }
}

/// A commit that few had noted, and that had lost copies when an epoch went back behind it, took the place of one that
/// was safe.
#[test]
fn the_newest_commit_with_enough_copies_stays_beside_newer_ones() {
    let (old, new) = (commit(1, 5), commit(1, 8));
    let found = findings(&[
        inventory(2, &[key(1, 5), key(1, 8)], &[old, new]),
        inventory(2, &[key(1, 5)], &[old]),
        inventory(2, &[key(1, 3)], &[commit(1, 3)]),
    ]);
    assert_eq!(found.commits_to_keep(3, 2, 1, 2), BTreeSet::from([old, new]));
    // Once the newer one is as safe, the older one may go.
    let found = findings(&[
        inventory(2, &[key(1, 5), key(1, 8)], &[old, new]),
        inventory(2, &[key(1, 5), key(1, 8)], &[old]),
    ]);
    assert_eq!(found.commits_to_keep(3, 2, 1, 2), BTreeSet::from([new]));
}

/// A commit in doubt was let go of, though there was nothing else: the program began from nothing.
#[test]
fn a_commit_that_is_not_whole_is_not_kept_and_one_in_doubt_is() {
    let mut tired = inventory(2, &[key(1, 5)], &[commit(1, 5), commit(1, 9)]);
    tired.fruitless.insert(version(1, 5), 2);
    let found = findings(&[tired]);
    assert_eq!(found.commits_to_keep(3, 2, 1, 2), BTreeSet::from([commit(1, 5)]));
    assert_eq!((found.doubted(2), found.doubted(3)), (BTreeSet::from([version(1, 5)]), BTreeSet::new()));
    assert_eq!(found.lost(3), Some(version(1, 9)));
}

#[test]
fn as_many_commits_are_kept_as_are_wanted_and_those_in_doubt_go_first() {
    let steps = [3, 5, 8, 9];
    let keys = steps.map(|step| key(1, step));
    let commits = steps.map(|step| commit(1, step));
    let kept = |doubted: &[u64], wanted| {
        let mut both = [(); 2].map(|()| inventory(2, &keys, &commits));
        both[1].fruitless.extend(doubted.iter().map(|&step| (version(1, step), 2)));
        findings(&both).commits_to_keep(3, 2, wanted, 2).iter().map(|commit| commit.version.step).collect()
    };
    let kept: &dyn Fn(&[u64], usize) -> Vec<u64> = &kept;
    assert_eq!((kept(&[], 1), kept(&[], 2), kept(&[], 3)), (vec![9], vec![8, 9], vec![5, 8, 9]));
    assert_eq!((kept(&[9], 2), kept(&[8], 2), kept(&[8, 9], 3)), (vec![8, 9], vec![5, 9], vec![3, 5, 9]));
    assert_eq!(kept(&[3, 5, 8, 9], 2), [8, 9]);
}

/// The newest commit is brought to where it is to be, and the next version needs room: an older one takes neither's.
#[test]
fn a_fallback_is_taken_where_it_leaves_room() {
    let (old, new) = (commit(1, 5), commit(1, 8));
    let told = Orders { commits: BTreeSet::from([old, new]), ..orders(2, &[0, 1]) };
    for (copies, takes) in [(3, true), (2, false)] {
        let memory = Memory { promised: Some(epoch(2)), restored: Some((epoch(2), 1)), ..Memory::default() };
        let mut agent = Agent::new(AgentId(1), Limits { copies, versions_of_shard: 3 }, memory);
        hears(&mut agent, train(&told));
        assert_eq!(agent.would_keep(key(1, 5)), takes, "of {copies}");
        assert!(agent.would_keep(key(1, 8)) && agent.would_keep(key(2, 1)));
    }
}

/// Who comes back without memory has to be told what a majority has noted, or of that majority nobody might be left.
#[test]
fn who_is_admitted_learns_of_commits() {
    let mut quorum = Quorum::of(3);
    let report = |noted: &[Commit]| Report {
        incarnation: 0,
        promised: Some(epoch(2)),
        pledged: None,
        program: None,
        incarnations: BTreeMap::from([(AgentId(2), 4)]),
        copies: BTreeMap::new(),
        noted: noted.iter().copied().collect(),
        trained: Some(epoch(2)),
    };
    quorum.note(AgentId(0), report(&[commit(1, 5)]));
    quorum.note(AgentId(1), report(&[]));
    let forgetful = Report { incarnation: 4, promised: None, incarnations: BTreeMap::new(), ..report(&[]) };
    quorum.note(AgentId(2), forgetful);
    let messages = quorum.admissions(epoch(2), Some(&program(6)), 2);
    let [(AgentId(2), ToAgent::Admit { incarnation: 4, noted, program: Some(newest), .. })] =
        messages.as_slice()
    else {
        panic!("{messages:?}");
    };
    assert_eq!((noted, newest), (&BTreeSet::from([commit(1, 5)]), &program(6)));
}

/// Who was asked by a newer controller was admitted by an older one, in whose epoch others committed what the newer one never
/// heard of.
#[test]
fn who_has_pledged_is_admitted_to_no_older_epoch() {
    let limits = Limits { copies: 4, versions_of_shard: 2 };
    let mut agent = Agent::new(AgentId(2), limits, Memory::lost(4));
    let admit = |number| ToAgent::Admit {
        epoch: epoch(number),
        incarnation: 4,
        incarnations: BTreeMap::new(),
        noted: BTreeSet::new(),
        program: None,
    };
    let learn = |number| ToAgent::Learn { epoch: epoch(number), agent: AgentId(1), incarnation: 6 };
    hears(&mut agent, ToAgent::Prepare { epoch: epoch(2) });
    hears(&mut agent, learn(2));
    assert_eq!(agent.memory().incarnations, BTreeMap::from([(AgentId(1), 6)]));
    hears(&mut agent, ToAgent::Prepare { epoch: epoch(3) });
    hears(&mut agent, ToAgent::Prepare { epoch: epoch(2) });
    hears(&mut agent, learn(2));
    hears(&mut agent, admit(2));
    assert_eq!((agent.memory().promised, agent.memory().pledged), (None, Some(epoch(3))));
    assert!(
        agent.memory().incarnations.is_empty(),
        "what it was told in an older epoch is no answer in this one"
    );
    hears(&mut agent, admit(3));
    assert_eq!((agent.memory().promised, agent.memory().pledged), (Some(epoch(3)), None));
}

/// The two that had noted a commit were lost, so nobody who was left counted it as one: it was restored once, and let go of
/// for a version that was lost next.
#[test]
fn where_no_majority_remembers_all_admit_each_other_and_what_is_complete_is_committed() {
    let mut quorum = Quorum::of(3);
    let forgetful = |known: &[(u16, u64)]| Report {
        incarnation: 4,
        promised: None,
        pledged: Some(epoch(5)),
        program: None,
        incarnations: known.iter().map(|&(agent, incarnation)| (AgentId(agent), incarnation)).collect(),
        copies: BTreeMap::new(),
        noted: BTreeSet::new(),
        trained: None,
    };
    let remembering = |known: &[(u16, u64)]| Report {
        incarnation: 0,
        promised: Some(epoch(5)),
        pledged: None,
        copies: [key(1, 3), key(2, 4), key(2, 5)].map(|key| (key, COPY)).into(),
        noted: BTreeSet::from([commit(1, 3)]),
        ..forgetful(known)
    };
    let admitted = |quorum: &Quorum| -> Vec<AgentId> {
        let messages = quorum.admissions(epoch(5), None, 2).into_iter();
        messages.filter(|(_, told)| matches!(told, ToAgent::Admit { .. })).map(|(agent, _)| agent).collect()
    };
    quorum.note(AgentId(0), remembering(&[(1, 4), (2, 4)]));
    quorum.note(AgentId(1), forgetful(&[(2, 4)]));
    quorum.note(AgentId(2), Report { pledged: Some(epoch(4)), ..forgetful(&[(1, 4)]) });
    assert_eq!(admitted(&quorum), [], "one of them may still be admitted to the epoch before");
    quorum.note(AgentId(2), forgetful(&[]));
    assert_eq!(admitted(&quorum), [], "one of them does not know that the other forgot");
    let learn = ToAgent::Learn { epoch: epoch(5), agent: AgentId(1), incarnation: 4 };
    assert_eq!(quorum.admissions(epoch(5), None, 2), [(AgentId(2), learn)]);
    quorum.note(AgentId(2), forgetful(&[(1, 4)]));
    assert_eq!(admitted(&quorum), [AgentId(1), AgentId(2)]);
    let messages = quorum.admissions(epoch(5), None, 2);
    let Some((_, ToAgent::Admit { noted, .. })) = messages.first() else { panic!("{messages:?}") };
    assert_eq!(*noted, BTreeSet::from([commit(1, 3), commit(2, 4), commit(2, 5)]));
    let messages = quorum.admissions(epoch(5), None, 1);
    let Some((_, ToAgent::Admit { noted, .. })) = messages.first() else { panic!("{messages:?}") };
    assert_eq!(*noted, BTreeSet::from([commit(1, 3), commit(2, 5)]), "the newest is safe enough");
    // A later start of one of them is another one.
    quorum.note(AgentId(1), Report { incarnation: 9, pledged: None, ..forgetful(&[]) });
    assert_eq!(admitted(&quorum), []);
}
