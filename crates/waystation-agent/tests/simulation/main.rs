//! Whole programs in a simulation: the protocol's machines under faults, seed by seed.
//!
//! `make test` plays forty seeds, `make test-long` (which sets `WAYSTATION_TEST_LONG`) thousands. A run that
//! breaks a law says its seed; `WAYSTATION_SIMULATION_SEED` plays that one again and prints what happens in it.

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

use std::panic::catch_unwind;

const SEEDS: u64 = 40;
const SEEDS_IN_LONG_TESTS: u64 = 10_000;

#[test]
fn laws_hold_under_faults() {
    if let Ok(seed) = std::env::var("WAYSTATION_SIMULATION_SEED") {
        println!("{:?}", storm::play(seed.parse().expect("a seed is a number"), true));
        return;
    }
    let is_long = std::env::var_os("WAYSTATION_TEST_LONG").is_some();
    let seeds = if is_long { SEEDS_IN_LONG_TESTS } else { SEEDS };
    let (mut commits, mut faults, mut broken) = (0, 0, Vec::new());
    for seed in 0..seeds {
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
    println!("{seeds} seeds, {faults} faults, {commits} commits");
    assert!(commits > 10 * seeds, "only {commits} commits: the storm is too heavy to show anything");
}

#[test]
fn the_same_seed_plays_the_same() {
    let (first, second) = (storm::play(5, false), storm::play(5, false));
    assert_eq!(format!("{first:?}"), format!("{second:?}"));
}
