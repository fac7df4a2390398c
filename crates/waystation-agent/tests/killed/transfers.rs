//! Agents in processes of their own, which are killed while a version goes from one to the other.

use std::env;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::bulk::*;
use crate::peers::{Fate, Way, any_port, credentials, limits, proxy};
use crate::support::memory_directory;
use crate::{DIRECTORY, ROLE, Test};
use waystation_agent::peers::bulk::{BulkService, Intake, Route, replicate};
use waystation_agent::peers::{Listener, Name, Peer};
use waystation_format::checksum::BLOCK_BYTES;
use waystation_format::slot::PROGRESS_OFFSET;

const ADDRESS: &str = "WAYSTATION_TEST_ADDRESS";
const BYTES_PER_S: &str = "WAYSTATION_TEST_BYTES_PER_S";

pub const TESTS: &[Test] = &[
    ("a_transfer_goes_on_after_its_sender_was_killed", || {
        run(a_transfer_goes_on_after_its_sender_was_killed());
    }),
    ("a_transfer_goes_on_after_its_receiver_was_killed", || {
        run(a_transfer_goes_on_after_its_receiver_was_killed());
    }),
];

/// Does what a role is there for; returns whether it is one of these tests.
pub fn play(role: &str, directory: &Path) -> bool {
    match role {
        "sender" => run(send(directory)),
        "receiver" => run(receive(directory)),
        _ => return false,
    }
    true
}

fn run(work: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work);
}

fn start(role: &str, directory: &Path, address: SocketAddr, bytes_per_s: u64) -> Child {
    let mut command = Command::new(env::current_exe().unwrap());
    command.env(ROLE, role).env(DIRECTORY, directory).env(ADDRESS, address.to_string());
    command.env(BYTES_PER_S, bytes_per_s.to_string()).stdin(Stdio::null()).stdout(Stdio::piped());
    command.spawn().unwrap()
}

fn kill(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

fn argument(name: &str) -> String {
    env::var(name).unwrap()
}

fn far(address: SocketAddr) -> Peer {
    Peer { name: Name::new("far").unwrap(), address }
}

/// Sends the version that it finds in its store.
async fn send(directory: &Path) {
    let store = open(directory);
    let route = route(&far(argument(ADDRESS).parse().unwrap()));
    route.order.pacer.limit(argument(BYTES_PER_S).parse().unwrap(), 1.0).unwrap();
    replicate(&store, &key("a", 1), &route).await.unwrap();
}

/// Takes what comes, and tells where.
async fn receive(directory: &Path) {
    let intake = Arc::new(Intake::new(open(directory)).unwrap());
    let service = BulkService::new(intake, order());
    let address = argument(ADDRESS).parse().unwrap();
    let mut listener = Listener::bind(address, credentials("far"), limits()).await.unwrap();
    println!("{}", listener.address().unwrap());
    loop {
        service.serve(listener.accept().await).unwrap();
    }
}

async fn a_transfer_goes_on_after_its_sender_was_killed() {
    let directory = memory_directory();
    seal(&open(directory.path()), &key("a", 1));
    let far = agent("far").await;
    let connections = Arc::new(AtomicUsize::new(0));
    let killed = Arc::new(AtomicUsize::new(0));
    let (begun, ended) = (Arc::clone(&connections), Arc::clone(&killed));
    // However long its death takes here, no sender sends more than a third of it.
    let most = 13 * BLOCK_BYTES + 128 * 1024;
    let counted = move |number, way, position| {
        if position == 0 {
            begun.fetch_max(number + 1, Ordering::Relaxed);
        }
        match way {
            Way::ToServer if number < 3 && position >= most => {
                if ended.load(Ordering::Relaxed) > number {
                    Fate::Cut
                } else {
                    Fate::Hold
                }
            }
            _ => Fate::Pass,
        }
    };
    let (address, mut sent) = proxy(far.peer.address, counted).await;
    let mut before = 0;
    for (number, enough) in [3, 12, 25].into_iter().enumerate() {
        let child = start("sender", directory.path(), address, 8 << 20);
        let in_place = || far.intake.blocks_in_place(&key("a", 1));
        // What is in place may have come from the one before.
        until(|| in_place() >= enough && connections.load(Ordering::Relaxed) > number).await;
        kill(child);
        killed.store(number + 1, Ordering::Relaxed);
        let lengths = sent.recv().await.unwrap().len() as u64;
        // Nothing that was in place was sent again: at most a chunk was on its way.
        let most = (in_place() - before + 4) * BLOCK_BYTES as u64;
        assert!(lengths < most, "{lengths} bytes for {} blocks", in_place() - before);
        before = in_place();
    }
    assert!(before < BLOCKS);
    let mut last = start("sender", directory.path(), address, u64::MAX);
    until(|| last.try_wait().unwrap().is_some()).await;
    assert!(last.wait().unwrap().success());
    assert_sealed(&far.store, &key("a", 1));
}

async fn a_transfer_goes_on_after_its_receiver_was_killed() {
    let near = agent("near").await;
    let sums = seal(&near.store, &key("a", 1));
    let directory = memory_directory();
    let started = |address| {
        let mut child = start("receiver", directory.path(), address, 0);
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        (child, line.trim_end().parse::<SocketAddr>().unwrap())
    };
    let (child, address) = started(any_port());
    let killed = Arc::new(AtomicBool::new(false));
    let ended = Arc::clone(&killed);
    // However long the receiver's death takes here, it has not got everything before.
    let held = move |number, way, position| match way {
        Way::ToServer if number == 0 && position >= 30 * BLOCK_BYTES => {
            if ended.load(Ordering::Relaxed) {
                Fate::Cut
            } else {
                Fate::Hold
            }
        }
        _ => Fate::Pass,
    };
    let (through, mut sent) = proxy(address, held).await;
    let route = Route { attempts: 100, ..route(&far(through)) };
    route.order.pacer.limit(8 << 20, 1.0).unwrap();
    let pacer = Arc::clone(&route.order.pacer);
    let store = Arc::clone(&near.store);
    let sending = tokio::spawn(async move {
        let key = key("a", 1);
        replicate(&store, &key, &route).await
    });
    let slot = directory.path().join("slot-00000");
    until(|| progress(&slot) >= BLOCKS / 2).await;
    kill(child);
    killed.store(true, Ordering::Relaxed);
    let before = progress(&slot);
    pacer.limit(u64::MAX, 1.0).unwrap();
    let (child, again) = started(address);
    assert_eq!(again, address);
    assert_eq!(sending.await.unwrap().unwrap(), sums);
    kill(child);
    // What was acknowledged is there, whoever was killed since.
    assert_sealed(&open(directory.path()), &key("a", 1));
    // What was in place was not sent again.
    let _first = sent.recv().await.unwrap();
    let last = sent.recv().await.unwrap().len() as u64;
    assert!(last < (BLOCKS - before + 1) * BLOCK_BYTES as u64, "{last} bytes, {before} blocks were there");
}

fn progress(slot: &Path) -> u64 {
    let mut bytes = [0; 8];
    File::open(slot).unwrap().read_exact_at(&mut bytes, PROGRESS_OFFSET).unwrap();
    u64::from_le_bytes(bytes)
}
