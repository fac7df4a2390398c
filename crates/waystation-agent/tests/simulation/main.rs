//! Whole programs in a simulation: the protocol's machines under faults, seed by seed.
//!
//! `WAYSTATION_SIMULATION_SEEDS` says how many seeds are played (by default a few hundred) from
//! `WAYSTATION_SIMULATION_FIRST` on, and
//! `WAYSTATION_SIMULATION_SEED` plays one again and prints what happens in it. A run that breaks a law says its seed.

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

const SEEDS: u64 = 300;

fn number_from(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is to be a number, not '{text}'")))
}

#[test]
fn laws_hold_under_faults() {
    if let Some(seed) = number_from("WAYSTATION_SIMULATION_SEED") {
        println!("{:?}", storm::play(seed, true));
        return;
    }
    let seeds = number_from("WAYSTATION_SIMULATION_SEEDS").unwrap_or(SEEDS);
    let first = number_from("WAYSTATION_SIMULATION_FIRST").unwrap_or(0);
    let (mut commits, mut faults, mut broken) = (0, 0, Vec::new());
    for seed in first..first + seeds {
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
