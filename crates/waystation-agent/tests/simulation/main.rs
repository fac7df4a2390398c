//! Whole programs in a simulation: the protocol's machines under faults, seed by seed.
//!
//! `make test` plays forty seeds, `make test-long` (which sets `WAYSTATION_TEST_LONG`) thousands. A run that
//! breaks a law says its seed; `WAYSTATION_SIMULATION_SEED` plays that one again and prints what happens in it.
//! `WAYSTATION_SIMULATION_SEEDS=10000..20000` plays these, so that several processes can share a large number.

#![allow(clippy::expect_used, clippy::panic)]

mod host;
mod laws;
mod network;
mod programs;
mod random;
mod run;
mod scripts;
mod storm;
mod world;

use std::ops::Range;
use std::panic::catch_unwind;

const SEEDS: u64 = 40;
const SEEDS_IN_LONG_TESTS: u64 = 10_000;

#[test]
fn laws_hold_under_faults() {
    if let Ok(seed) = std::env::var("WAYSTATION_SIMULATION_SEED") {
        println!("{:?}", storm::play(seed.parse().expect("a seed is a number"), true));
        return;
    }
    let seeds = seeds_to_play();
    let number = seeds.end - seeds.start;
    let (mut commits, mut faults, mut broken) = (0, 0, Vec::new());
    for seed in seeds {
        match catch_unwind(|| storm::play(seed, false)) {
            Ok(outcome) => {
                commits += outcome.commits;
                faults += outcome.faults;
            }
            Err(_) => {
                println!("seed {seed} breaks a law");
                broken.push(seed);
            }
        }
    }
    assert!(
        broken.is_empty(),
        "play again with WAYSTATION_SIMULATION_SEED={}; of all: {broken:?}",
        broken[0]
    );
    println!("{number} seeds, {faults} faults, {commits} commits");
    assert!(commits > 10 * number, "only {commits} commits: the storm is too heavy to show anything");
}

fn seeds_to_play() -> Range<u64> {
    if let Ok(given) = std::env::var("WAYSTATION_SIMULATION_SEEDS") {
        let (first, end) = given.split_once("..").expect("seeds are given as FIRST..END");
        return first.parse().expect("FIRST is a number")..end.parse().expect("END is a number");
    }
    let is_long = std::env::var_os("WAYSTATION_TEST_LONG").is_some();
    0..if is_long { SEEDS_IN_LONG_TESTS } else { SEEDS }
}

#[test]
fn the_same_seed_plays_the_same() {
    let (first, second) = (storm::play(5, false), storm::play(5, false));
    assert_eq!(format!("{first:?}"), format!("{second:?}"));
}
