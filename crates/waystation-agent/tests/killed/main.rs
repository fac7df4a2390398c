//! Agents and those who use them as processes that are killed, in one program: to link one for every file takes longer
//! than to run them. It runs itself in the processes that it kills, each in a role, so it has a main function of its
//! own.
#![allow(clippy::unwrap_used)]

mod agent;
#[path = "../support/agent.rs"]
mod agent_support;
#[path = "../support/bulk.rs"]
mod bulk;
#[path = "../support/peers.rs"]
mod peers;
mod store;
#[path = "../support/mod.rs"]
mod support;
#[path = "../support/trace.rs"]
mod trace;
mod transfers;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::{env, io};

use support::*;

const ROLE: &str = "WAYSTATION_TEST_ROLE";
const DIRECTORY: &str = "WAYSTATION_TEST_DIRECTORY";

/// A test, by name.
type Test = (&'static str, fn());

fn main() {
    let Ok(role) = env::var(ROLE) else {
        for (name, test) in agent::TESTS.iter().chain(store::TESTS).chain(transfers::TESTS) {
            test();
            println!("{name} ... ok");
        }
        return;
    };
    let directory = PathBuf::from(env::var_os(DIRECTORY).unwrap_or_default());
    let roles: [fn(&str, &Path) -> bool; 3] = [agent::play, store::play, transfers::play];
    assert!(roles.iter().any(|play| play(&role, &directory)), "nobody plays '{role}'");
}

/// Waits for a line of who has started this process.
fn next_order() -> String {
    let mut line = String::new();
    io::stdin().read_line(&mut line).unwrap();
    line
}

/// Asked before each block of a slot whether to stop: never, but waits for an order once there is one block.
fn wait_after_one() -> impl Fn() -> bool {
    let asked = AtomicU64::new(0);
    move || {
        if asked.fetch_add(1, Ordering::Relaxed) == 1 {
            println!("one block is in place");
            next_order();
        }
        false
    }
}
