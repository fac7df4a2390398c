//! The messages that `docs/protocol-peers.md` shows, in its order.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use waystation_agent::protocol::message::{
    Base, Decision, Inventory, Orders, Report, ShardDecision, ToAgent, ToController, ToPeer,
};
use waystation_agent::protocol::names::{
    AgentId, Commit, Digest, Epoch, Key, Program, SealedCopy, Version, manifest_digest,
};
use waystation_agent::protocol::wire::Envelope;

const EPOCH: Epoch = Epoch { number: 3, controller: 0x9e37_79b9 };
const OLDER: Epoch = Epoch { number: 2, controller: 7 };
const VERSION: Version = Version { epoch: OLDER, step: 40 };
const KEY: Key = Key { version: VERSION, shard: 1 };

/// Of a version with two shards.
fn copy(shard: u64) -> SealedCopy {
    SealedCopy { digest: Digest(u64::MAX - shard), shard_count: 2, sequence: 5 }
}

fn commit() -> Commit {
    Commit { version: VERSION, manifest: manifest_digest(VERSION, [copy(0).digest, copy(1).digest]) }
}

fn program() -> Program {
    Program { token: 1_795_000_000_000_000_000, sequence: 5, owners: vec![AgentId(0), AgentId(2)] }
}

fn to_agents() -> Vec<ToAgent> {
    let shard = |shard, reader, sources: &[u16]| ShardDecision {
        reader: AgentId(reader),
        copy: copy(shard),
        sources: sources.iter().copied().map(AgentId).collect(),
    };
    let decision = Decision {
        epoch: EPOCH,
        attempt: 1,
        program: program(),
        version: Some(VERSION),
        shards: vec![shard(0, 0, &[0, 1]), shard(1, 2, &[1])],
    };
    let orders = Orders {
        epoch: EPOCH,
        attempt: 1,
        revision: 2,
        program: program(),
        is_continued: false,
        base: Some(Base { version: VERSION, shard_count: 2 }),
        is_base_kept: false,
        commits: BTreeSet::from([commit()]),
        is_open: true,
        doubted: BTreeSet::new(),
        lost: None,
        floor: 41,
        holders: vec![vec![AgentId(0), AgentId(1)], vec![AgentId(2), AgentId(0)]],
    };
    vec![
        ToAgent::Prepare { epoch: EPOCH },
        ToAgent::Admit {
            epoch: EPOCH,
            incarnation: 8,
            incarnations: BTreeMap::from([(AgentId(0), 0), (AgentId(2), 8)]),
            noted: BTreeSet::from([commit()]),
            program: Some(program()),
        },
        ToAgent::Learn { epoch: EPOCH, agent: AgentId(2), incarnation: 8 },
        ToAgent::Gather { epoch: EPOCH },
        ToAgent::Restore(Arc::new(decision)),
        ToAgent::Train(Arc::new(orders)),
        ToAgent::Bring { epoch: EPOCH, key: KEY, to: AgentId(0) },
        ToAgent::Commit { epoch: EPOCH, commit: commit() },
    ]
}

fn to_controllers() -> Vec<ToController> {
    let copies = BTreeMap::from([(Key { shard: 0, ..KEY }, copy(0)), (KEY, copy(1))]);
    vec![
        ToController::Report(Report {
            incarnation: 0,
            promised: Some(EPOCH),
            pledged: None,
            program: Some(program()),
            incarnations: BTreeMap::from([(AgentId(2), 8)]),
            copies: copies.clone(),
            noted: BTreeSet::from([commit()]),
            trained: Some(OLDER),
        }),
        ToController::Report(Report {
            incarnation: 8,
            promised: None,
            pledged: Some(EPOCH),
            program: None,
            incarnations: BTreeMap::from([(AgentId(0), 4)]),
            copies: BTreeMap::new(),
            noted: BTreeSet::new(),
            trained: None,
        }),
        ToController::Inventory(Inventory {
            epoch: EPOCH,
            incarnation: 8,
            copies,
            noted: BTreeSet::new(),
            fruitless: BTreeMap::from([(VERSION, 1)]),
            program: None,
            begun: None,
        }),
        ToController::Restored { epoch: EPOCH, attempt: 1, is_loaded: true },
    ]
}

/// All of them.
pub fn envelopes() -> Vec<Envelope> {
    let to_peers = [
        ToPeer::Kept { epoch: EPOCH, key: KEY, digest: copy(1).digest },
        ToPeer::Damaged { epoch: EPOCH, key: KEY },
        ToPeer::Fetch { epoch: EPOCH, attempt: 1, key: KEY },
    ];
    let controller = EPOCH.controller;
    let answers = to_controllers().into_iter().map(|message| Envelope::ToController { controller, message });
    let commands = to_agents().into_iter().map(Envelope::ToAgent);
    commands.chain(answers).chain(to_peers.into_iter().map(Envelope::ToPeer)).collect()
}
