//! Any message that agents may send each other.

pub mod golden;

use std::sync::Arc;

use proptest::collection::{btree_map, btree_set, vec};
use proptest::option;
use proptest::prelude::*;
use waystation_agent::protocol::memory::{Beginnings, Memory};
use waystation_agent::protocol::message::{
    Base, Decision, Inventory, Orders, Report, ShardDecision, ToAgent, ToController, ToPeer,
};
use waystation_agent::protocol::names::{AgentId, Commit, Digest, Epoch, Key, Program, SealedCopy, Version};
use waystation_agent::protocol::wire::Envelope;

/// There are so many.
pub const AGENTS: usize = 4;

/// Small ones, so that some meet; and the greatest.
fn numbers() -> impl Strategy<Value = u64> + Clone {
    prop_oneof![8 => 0..4u64, 1 => Just(u64::MAX)]
}

fn agents() -> impl Strategy<Value = AgentId> + Clone {
    (0..AGENTS as u16).prop_map(AgentId)
}

pub fn epochs() -> impl Strategy<Value = Epoch> + Clone {
    let number = prop_oneof![8 => 0..4u32, 1 => Just(u32::MAX)];
    (number, 0..3u32).prop_map(|(number, controller)| Epoch { number, controller })
}

fn versions() -> impl Strategy<Value = Version> + Clone {
    (epochs(), numbers()).prop_map(|(epoch, step)| Version { epoch, step })
}

fn keys() -> impl Strategy<Value = Key> + Clone {
    (versions(), 0..3u32).prop_map(|(version, shard)| Key { version, shard })
}

fn copies() -> impl Strategy<Value = SealedCopy> + Clone {
    let count = prop_oneof![8 => 3..5u32, 1 => Just(u32::MAX)];
    let named = (numbers().prop_map(Digest), count, 0..2u64);
    named.prop_map(|(digest, shard_count, sequence)| SealedCopy { digest, shard_count, sequence })
}

fn commits() -> impl Strategy<Value = Commit> + Clone {
    (versions(), numbers().prop_map(Digest)).prop_map(|(version, manifest)| Commit { version, manifest })
}

fn programs() -> impl Strategy<Value = Program> + Clone {
    let owners = vec(agents(), 1..5);
    (numbers(), 0..2u64, owners).prop_map(|(token, sequence, owners)| Program { token, sequence, owners })
}

fn decisions() -> impl Strategy<Value = Arc<Decision>> {
    let shards = vec((agents(), numbers(), vec(agents(), 0..3)), 0..4);
    (epochs(), 0..4u32, programs(), versions(), shards).prop_map(
        |(epoch, attempt, program, version, named)| {
            let shard_count = named.len() as u32;
            let copy_of =
                |digest| SealedCopy { digest: Digest(digest), shard_count, sequence: program.sequence };
            let shards: Vec<ShardDecision> = named
                .into_iter()
                .map(|(reader, digest, sources)| ShardDecision { reader, copy: copy_of(digest), sources })
                .collect();
            let version = Some(version).filter(|_| !shards.is_empty());
            Arc::new(Decision { epoch, attempt, program, version, shards })
        },
    )
}

fn orders() -> impl Strategy<Value = Arc<Orders>> {
    let named = (epochs(), 0..4u32, numbers(), programs(), numbers());
    let base = option::of((versions(), 1..4u32));
    let said = (any::<[bool; 3]>(), base, btree_set(commits(), 0..3), vec(vec(agents(), 0..3), 5));
    (named, said).prop_map(|((epoch, attempt, revision, program, floor), (flags, base, commits, places))| {
        let [is_continued, is_base_kept, is_open] = flags;
        let base = base.map(|(version, shard_count)| Base { version, shard_count });
        let holders = places[..program.owners.len()].to_vec();
        Arc::new(Orders {
            epoch,
            attempt,
            revision,
            program,
            is_continued,
            base,
            is_base_kept,
            commits,
            is_open,
            doubted: base.iter().map(|base| base.version).collect(),
            lost: base.map(|base| base.version),
            floor,
            holders,
        })
    })
}

fn to_agents() -> impl Strategy<Value = ToAgent> {
    let incarnations = btree_map(agents(), numbers(), 0..3);
    let noted = btree_set(commits(), 0..3);
    prop_oneof![
        epochs().prop_map(|epoch| ToAgent::Prepare { epoch }),
        (epochs(), numbers(), incarnations, noted, option::of(programs())).prop_map(
            |(epoch, incarnation, incarnations, noted, program)| ToAgent::Admit {
                epoch,
                incarnation,
                incarnations,
                noted,
                program
            }
        ),
        (epochs(), agents(), numbers()).prop_map(|(epoch, agent, incarnation)| ToAgent::Learn {
            epoch,
            agent,
            incarnation
        }),
        epochs().prop_map(|epoch| ToAgent::Gather { epoch }),
        (epochs(), keys(), agents()).prop_map(|(epoch, key, to)| ToAgent::Bring { epoch, key, to }),
        decisions().prop_map(ToAgent::Restore),
        orders().prop_map(ToAgent::Train),
        (epochs(), commits()).prop_map(|(epoch, commit)| ToAgent::Commit { epoch, commit }),
    ]
}

fn to_controllers() -> impl Strategy<Value = ToController> {
    let held = || (btree_map(keys(), copies(), 0..6), btree_set(commits(), 0..3), option::of(programs()));
    let bound = (option::of(epochs()), option::of(epochs()));
    let report = (numbers(), bound, btree_map(agents(), numbers(), 0..3), held());
    let inventory =
        (epochs(), numbers(), held(), btree_map(versions(), 0..4u32, 0..3), option::of(numbers()));
    prop_oneof![
        report.prop_map(|(incarnation, (promised, pledged), incarnations, (copies, noted, program))| {
            let trained = promised;
            ToController::Report(Report {
                incarnation,
                promised,
                pledged,
                program,
                incarnations,
                copies,
                noted,
                trained,
            })
        }),
        inventory.prop_map(|(epoch, incarnation, (copies, noted, program), fruitless, begun)| {
            ToController::Inventory(Inventory {
                epoch,
                incarnation,
                copies,
                noted,
                fruitless,
                program,
                begun,
            })
        }),
        (epochs(), 0..4u32, any::<bool>()).prop_map(|(epoch, attempt, is_loaded)| ToController::Restored {
            epoch,
            attempt,
            is_loaded
        }),
    ]
}

fn to_peers() -> impl Strategy<Value = ToPeer> {
    prop_oneof![
        (epochs(), keys(), numbers()).prop_map(|(epoch, key, digest)| ToPeer::Kept {
            epoch,
            key,
            digest: Digest(digest)
        }),
        (epochs(), keys()).prop_map(|(epoch, key)| ToPeer::Damaged { epoch, key }),
        (epochs(), 0..4u32, keys()).prop_map(|(epoch, attempt, key)| ToPeer::Fetch { epoch, attempt, key }),
    ]
}

/// Any message.
pub fn envelopes() -> impl Strategy<Value = Envelope> {
    prop_oneof![
        to_agents().prop_map(Envelope::ToAgent),
        (0..3u32, to_controllers())
            .prop_map(|(controller, message)| Envelope::ToController { controller, message }),
        to_peers().prop_map(Envelope::ToPeer),
    ]
}

/// Anything that an agent may keep beyond its process.
pub fn memories() -> impl Strategy<Value = Memory> {
    let beginnings =
        (0..4u32, numbers(), epochs()).prop_map(|(count, token, epoch)| Beginnings { count, token, epoch });
    let bound = (option::of(epochs()), option::of(epochs()));
    let promises = (bound, option::of(epochs()), option::of((epochs(), 0..4u32)));
    let held = (btree_map(keys(), copies(), 0..4), btree_set(commits(), 0..3));
    let begun = (option::of(numbers()), btree_map(versions(), beginnings, 0..3));
    let known = (numbers(), option::of(programs()), btree_map(agents(), numbers(), 0..3));
    (promises, held, begun, known).prop_map(
        |(((promised, pledged), trained, restored), (copies, noted), (begun, fruitless), known)| {
            let (incarnation, program, incarnations) = known;
            Memory {
                incarnation,
                promised,
                pledged,
                program,
                incarnations,
                copies,
                noted,
                restored,
                trained,
                begun,
                fruitless,
            }
        },
    )
}
