//! Versions that go from agent to agent, over real sockets and through proxies that harm them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::bulk::{self, *};
use crate::peers::{Fate, Way, credentials, handshake_bytes, plain, proxy};
use crate::support;
use tokio::task::JoinSet;
use waystation_agent::peers::bulk::{Admission, Pacer, Route, fetch, replicate};
use waystation_agent::peers::{Name, Peer};
use waystation_agent::writer::SlotWriter;
use waystation_agent::{Kind, Result};
use waystation_format::checksum::BLOCK_BYTES;
use waystation_format::slot::{Key, Sums};

/// Where the first byte of the first block is in what a client sends after the handshake: offer, header, checksums.
const FIRST_BLOCK_AT: usize = (32 + 33) + (32 + 3 * 8);

/// Two agents of one machine, which do not encrypt what they send to each other, a way there, and how long their handshake is.
async fn plain_agents() -> (Agent, Agent, Route, usize) {
    let near = agent_with(plain(credentials("near")), support::memory_directory(), order()).await;
    let far = agent_with(plain(credentials("far")), support::memory_directory(), order()).await;
    let route = Route { credentials: plain(credentials("sender")), ..route(&far.peer) };
    let (handshake, _) = handshake_bytes(&route.credentials, plain(credentials("far"))).await;
    (near, far, route, handshake)
}

#[tokio::test]
async fn a_version_goes_from_slot_to_slot() {
    let (near, far) = (agent("near").await, agent("far").await);
    for streams in [1, 3] {
        let key = key("a", streams as u64);
        let sums = seal(&near.store, &key);
        let route = Route { streams, ..route(&far.peer) };
        assert_eq!(replicate(&near.store, &key, &route).await.unwrap(), sums);
        assert_sealed(&far.store, &key);
        until(|| far.intake.progress().is_empty()).await;
        // What is there is not sent again.
        let (address, mut sent) = proxy(far.peer.address, |_, _, _| Fate::Pass).await;
        let through = Route { peer: Peer { address, ..far.peer.clone() }, streams: 1, ..route };
        assert_eq!(replicate(&near.store, &key, &through).await.unwrap(), sums);
        assert!(sent.recv().await.unwrap().len() < 2000);
    }
}

/// Takes every version, but some time after it is sealed.
#[derive(Debug)]
struct SlowToKeep;

impl Admission for SlowToKeep {
    fn expect(&self, _: &Name, _: &Key) -> Result<()> {
        Ok(())
    }

    fn keep(&self, _: &Name, _: &Key, _: Sums) -> Result<()> {
        std::thread::sleep(Duration::from_millis(300));
        Ok(())
    }
}

#[tokio::test]
async fn a_connection_that_leaves_late_does_not_end_the_one_that_finishes() {
    let near = agent("near").await;
    let far =
        agent_admitting(credentials("far"), support::memory_directory(), order(), Arc::new(SlowToKeep)).await;
    let is_other = |connection: usize| if connection > 0 { Fate::Late } else { Fate::Pass };
    let (address, _) = proxy(far.peer.address, move |connection, _, _| is_other(connection)).await;
    let key = key("a", 1);
    let sums = seal(&near.store, &key);
    let peer = Peer { address, ..far.peer.clone() };
    let route = Route { streams: 3, attempts: 1, ..route(&peer) };
    assert_eq!(replicate(&near.store, &key, &route).await.unwrap(), sums);
    until(|| far.intake.progress().is_empty()).await;
    assert_sealed(&far.store, &key);
}

#[tokio::test]
async fn a_slot_is_sent_while_it_is_written() {
    let (near, far) = (agent("near").await, agent("far").await);
    let key = key("a", 1);
    let grant = begin(&near.store, key.clone());
    let mut writer = SlotWriter::open(&grant).unwrap();
    put_blocks(&mut writer, 1, 0..10);
    let (store, going, route) = (Arc::clone(&near.store), key.clone(), route(&far.peer));
    let sending = tokio::spawn(async move { replicate(&store, &going, &route).await });
    until(|| far.intake.progress() == [(key.clone(), 10)]).await;
    assert!(!sending.is_finished());
    put_blocks(&mut writer, 1, 10..BLOCKS);
    drop(writer);
    let sums = sending.await.unwrap().unwrap();
    assert_sealed(&far.store, &key);
    assert_eq!(near.store.seal(grant.slot, grant.ticket).unwrap(), sums);
}

#[tokio::test]
async fn a_writer_that_stands_still_is_not_waited_for_for_ever() {
    let (near, far) = (agent("near").await, agent("far").await);
    let key = key("a", 1);
    let grant = begin(&near.store, key.clone());
    put_blocks(&mut SlotWriter::open(&grant).unwrap(), 1, 0..10);
    let mut route = Route { attempts: 1, ..route(&far.peer) };
    route.order.stall = Duration::from_millis(50);
    let refused = replicate(&near.store, &key, &route).await.unwrap_err();
    assert_eq!(refused.kind(), Kind::Unavailable);
    assert!(refused.message().contains("stands still"), "{refused}");
    // What has come stays for a while, then its slot is free again.
    until(|| far.intake.expire(Duration::ZERO) == [key.clone()]).await;
    assert!(support::states(&far.store).iter().all(|&state| state == "free"));
}

#[tokio::test]
async fn a_block_that_comes_damaged_is_asked_for_again() {
    let (near, far, route, handshake) = plain_agents().await;
    let key = key("a", 1);
    let sums = seal(&near.store, &key);
    let first = handshake + FIRST_BLOCK_AT;
    let harmed = [first, first + 2 * BLOCK_BYTES + 77];
    let harm =
        move |_, way, at| if way == Way::ToServer && harmed.contains(&at) { Fate::Flip } else { Fate::Pass };
    let (address, mut sent) = proxy(far.peer.address, harm).await;
    let through = Route { peer: Peer { address, ..far.peer.clone() }, attempts: 1, ..route };
    assert_eq!(replicate(&near.store, &key, &through).await.unwrap(), sums);
    assert_sealed(&far.store, &key);
    let sent = sent.recv().await.unwrap().len() as u64;
    let twice = 2 * BLOCK_BYTES as u64;
    assert!((DATA_BYTES + twice..DATA_BYTES + twice + 10_000).contains(&sent), "{sent}");
    let (gone, come) = (through.order.pacer.traffic().counts(), far.intake.traffic().counts());
    assert_eq!((gone.whole, gone.failed, come.whole, come.damaged_blocks), (1, 0, 1, 2));
    assert!(gone.bytes == come.bytes && gone.bytes > DATA_BYTES + twice, "{gone:?} {come:?}");
}

#[tokio::test]
async fn what_always_comes_damaged_is_refused_in_the_end_and_never_sealed() {
    let (near, far, route, handshake) = plain_agents().await;
    let key = key("a", 1);
    seal(&near.store, &key);
    // One byte of each block, wherever it is in what is sent.
    let harm = move |_, way, at: usize| match way {
        Way::ToServer if at > handshake + FIRST_BLOCK_AT && at.is_multiple_of(200_000) => Fate::Flip,
        _ => Fate::Pass,
    };
    let (address, _sent) = proxy(far.peer.address, harm).await;
    let through = Route { peer: Peer { address, ..far.peer.clone() }, attempts: 2, ..route.clone() };
    let refused = replicate(&near.store, &key, &through).await.unwrap_err();
    assert_eq!((refused.kind(), refused.context("attempts")), (Kind::Corrupt, Some("2")), "{refused}");
    assert!(refused.message().contains("damaged 4 times"), "{refused}");
    let gone = through.order.pacer.traffic().counts();
    assert_eq!((gone.whole, gone.failed, gone.resumed), (0, 1, 1));
    assert!(support::states(&far.store).iter().all(|&state| state == "free" || state == "writing"));
    // Nothing of it is in the way of a whole copy.
    replicate(&near.store, &key, &route).await.unwrap();
    assert_sealed(&far.store, &key);
}

/// Sends a version through a proxy that harms the first connection at a place; returns what went over each.
async fn sent_in_spite_of(fate: Fate, way: Way, position: usize) -> Vec<usize> {
    let (near, far) = (agent("near").await, agent("far").await);
    let key = key("a", 1);
    let sums = seal(&near.store, &key);
    let harm = move |number, on, at| if (number, on, at) == (0, way, position) { fate } else { Fate::Pass };
    let (address, mut sent) = proxy(far.peer.address, harm).await;
    let through = Route { peer: Peer { address, ..far.peer.clone() }, ..route(&far.peer) };
    assert_eq!(replicate(&near.store, &key, &through).await.unwrap(), sums);
    assert_sealed(&far.store, &key);
    assert_eq!(through.order.pacer.traffic().counts().resumed, 1);
    let mut lengths = Vec::new();
    while lengths.len() < 2 {
        lengths.push(sent.recv().await.unwrap().len());
    }
    lengths
}

#[tokio::test]
async fn a_connection_that_is_cut_or_changed_is_made_anew_and_goes_on_where_it_was() {
    let half = DATA_BYTES as usize / 2;
    let lengths = sent_in_spite_of(Fate::Cut, Way::ToServer, half).await;
    // Of the second connection at most the chunk is repeated in which it was cut.
    let most = DATA_BYTES as usize - DATA_BYTES as usize / 2 + 4 * BLOCK_BYTES;
    assert!(lengths[1] < most, "{lengths:?}");
    // In the offer, in blocks, in the answers: whatever is changed, all that came before counts, and nothing after it.
    // At the same time, since some changes are noticed only when a side has been silent for too long.
    let (there, back) = handshake_bytes(&credentials("sender"), credentials("far")).await;
    let positions = [
        (Way::ToServer, there + 1),
        (Way::ToServer, there + 40),
        (Way::ToServer, half),
        (Way::ToServer, DATA_BYTES as usize),
        (Way::ToClient, back + 3),
        (Way::ToClient, back + 30),
    ];
    let sent: JoinSet<_> =
        positions.map(|(way, position)| sent_in_spite_of(Fate::Flip, way, position)).into_iter().collect();
    sent.join_all().await;
}

#[tokio::test]
async fn an_agent_that_is_not_there_is_given_up_after_some_attempts() {
    let near = agent("near").await;
    let far = agent("far").await.peer.clone();
    let key = key("a", 1);
    seal(&near.store, &key);
    let refused = replicate(&near.store, &key, &Route { attempts: 3, ..route(&far) }).await.unwrap_err();
    assert_eq!((refused.kind(), refused.context("attempts")), (Kind::Unavailable, Some("3")), "{refused}");
    assert_eq!(refused.context("peer"), Some("far"));
    let missing = replicate(&near.store, &bulk::key("b", 1), &route(&near.peer)).await.unwrap_err();
    assert_eq!((missing.kind(), missing.context("attempts")), (Kind::NotFound, Some("1")), "{missing}");
}

#[tokio::test]
async fn a_newer_version_of_the_shard_takes_the_place_of_one_that_comes_in() {
    let (near, far) = (agent("near").await, agent("far").await);
    let (older, newer) = (key("a", 1), key("a", 2));
    seal(&near.store, &older);
    seal(&near.store, &newer);
    let slow = route(&far.peer);
    slow.order.pacer.limit(8 << 20, 1.0).unwrap();
    let (store, key) = (Arc::clone(&near.store), older.clone());
    let sending = tokio::spawn(async move { replicate(&store, &key, &slow).await });
    until(|| far.intake.progress().iter().any(|(_, blocks)| *blocks > 2)).await;
    // Slowly too, so that the other sender comes again in the middle of it.
    let paced = route(&far.peer);
    paced.order.pacer.limit(8 << 20, 1.0).unwrap();
    replicate(&near.store, &newer, &paced).await.unwrap();
    assert_sealed(&far.store, &newer);
    let superseded = sending.await.unwrap().unwrap_err();
    assert_eq!(superseded.kind(), Kind::Cancelled, "{superseded}");
    until(|| far.intake.progress().is_empty()).await;
    let mut states = support::states(&far.store);
    states.sort_unstable();
    assert_eq!(states, ["free", "free", "sealed"]);
}

#[tokio::test]
async fn a_version_is_fetched_into_a_slot_and_past_the_store() {
    let (near, far) = (agent("near").await, agent("far").await);
    let key = key("a", 1);
    let sums = seal(&far.store, &key);
    let route = route(&far.peer);
    let wrong = fetch(&near.intake, &key, Some(sums.digest ^ 1), &route).await.unwrap_err();
    assert_eq!(wrong.kind(), Kind::NotFound, "{wrong}");
    let missing = fetch(&near.intake, &bulk::key("b", 1), None, &route).await.unwrap_err();
    assert_eq!(missing.kind(), Kind::NotFound, "{missing}");
    assert_eq!(fetch(&near.intake, &key, Some(sums.digest), &route).await.unwrap(), sums);
    assert_sealed(&near.store, &key);
    assert_eq!(fetch(&near.intake, &key, None, &route).await.unwrap(), sums, "it is there already");
    assert_comes_past_store(&key, sums, &route).await;
}

#[tokio::test]
async fn bytes_go_no_faster_than_the_share_of_the_link_and_not_at_all_while_paused() {
    let (near, far) = (agent("near").await, agent("far").await);
    let key = key("a", 1);
    seal(&near.store, &key);
    let mut route = Route { streams: 2, ..route(&far.peer) };
    let pacer = Pacer::new();
    pacer.limit(128 << 20, 0.25).unwrap();
    route.order.pacer = Arc::clone(&pacer);
    let pause = pacer.pause();
    let store = Arc::clone(&near.store);
    let start = Instant::now();
    let sending = tokio::spawn(async move {
        let wanted = bulk::key("a", 1);
        replicate(&store, &wanted, &route).await
    });
    until(|| !far.intake.progress().is_empty()).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(far.intake.progress(), [(key.clone(), 0)]);
    drop(pause);
    sending.await.unwrap().unwrap();
    // The last chunk need not have waited for its own time; how much longer it took is the machine's affair.
    let last_chunk = 3 * BLOCK_BYTES as u64 + 4096;
    let least = Duration::from_secs_f64((DATA_BYTES - last_chunk) as f64 / f64::from(32 << 20));
    assert!(start.elapsed() >= least - Duration::from_millis(10));
    assert_sealed(&far.store, &key);
}
