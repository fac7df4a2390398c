//! Who keeps whose shards. `tests/memory/test_placement.py` proves what is promised of it.

use std::collections::BTreeSet;

use proptest::collection::{btree_set, vec};
use proptest::prelude::*;
use serde::Deserialize;
use waystation_agent::protocol::names::AgentId;
use waystation_agent::protocol::placement::{holders_of, place};

/// Groups that agents of earlier versions have found: all agents of a cluster must find the same.
const VECTORS: &str = include_str!("../placements.json");

#[derive(Deserialize)]
struct Vector {
    domains: Vec<u32>,
    copies: usize,
    groups: Vec<Vec<usize>>,
}

#[test]
fn groups_stay_what_they_were() {
    let vectors: Vec<Vector> = serde_json::from_str(VECTORS).expect("they are JSON");
    assert!(vectors.len() >= 80);
    for Vector { domains, copies, groups } in vectors {
        assert_eq!(place(&domains, copies), groups, "{copies} copies on hosts of {domains:?}");
    }
}

#[test]
fn without_hosts_or_copies_there_are_no_groups() {
    assert_eq!(place::<u32>(&[], 1), Vec::<Vec<usize>>::new());
    assert_eq!(place(&[0, 1], 3), Vec::<Vec<usize>>::new());
    assert_eq!(place(&[0, 1], 0), Vec::<Vec<usize>>::new());
}

#[test]
fn who_is_not_there_keeps_nothing_and_others_keep_its_shard() {
    let live = BTreeSet::from([AgentId(0), AgentId(1), AgentId(3), AgentId(4)]);
    let owners: Vec<AgentId> = (0..5).map(AgentId).collect();
    let holders = holders_of(&owners, &live, &[0, 0, 1, 1, 2], 2);
    assert_eq!(holders[0][0], AgentId(0));
    assert!(holders.iter().all(|holders| holders.len() == 2 && !holders.contains(&AgentId(2))));
    assert_eq!(holders_of(&owners, &BTreeSet::new(), &[0; 5], 2), vec![Vec::new(); 5]);
}

proptest! {
    /// Every shard has its copies on different agents that are there, the owner first if it is.
    #[test]
    fn every_shard_has_its_holders(
        domains in vec(0u32..6, 1..30),
        lost in btree_set(0u16..30, 0..10),
        owners in vec(0u16..30, 1..40),
        copies in 1usize..5,
    ) {
        let count = domains.len() as u16;
        let live: BTreeSet<AgentId> = (0..count).filter(|id| !lost.contains(id)).map(AgentId).collect();
        prop_assume!(!live.is_empty());
        let owners: Vec<AgentId> = owners.into_iter().map(|owner| AgentId(owner % count)).collect();
        let holders = holders_of(&owners, &live, &domains, copies);
        prop_assert_eq!(holders.len(), owners.len());
        for (owner, holders) in owners.iter().zip(&holders) {
            let distinct: BTreeSet<AgentId> = holders.iter().copied().collect();
            prop_assert_eq!(distinct.len(), copies.min(live.len()));
            prop_assert_eq!(holders.len(), distinct.len());
            prop_assert!(distinct.is_subset(&live));
            prop_assert!(holders[0] == *owner || !live.contains(owner));
        }
    }
}
