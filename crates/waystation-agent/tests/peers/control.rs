//! Calls between agents, over real sockets, and a server that is started, stopped and started again.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::bulk::{BLOCKS, DATA_BYTES, assert_sealed, key, open, order, route, seal};
use crate::peers::{Fate, LONG, RUN, Way, any_port, credentials, credentials_of, limits, proxy};
use crate::support::memory_directory;
use tempfile::TempDir;
use waystation_agent::peers::bulk::{BulkService, Intake, replicate};
use waystation_agent::peers::{
    ControlClient, ControlService, MESSAGE_LIMIT_BYTES, Name, Peer, Server, Services, Status,
};
use waystation_agent::store::Store;
use waystation_agent::{Error, Kind};

/// What was delivered, and by whom.
type Delivered = Arc<Mutex<Vec<(String, Vec<u8>)>>>;

struct Host {
    server: Server,
    store: Arc<Store>,
    delivered: Delivered,
    directory: TempDir,
}

fn start(address: SocketAddr) -> Host {
    let directory = memory_directory();
    let store = open(directory.path());
    let delivered = Delivered::default();
    let (intake, order) = (Arc::new(Intake::new(Arc::clone(&store)).unwrap()), order());
    order.pacer.limit(1 << 40, 0.5).unwrap();
    let taken = Arc::clone(&delivered);
    let deliver = move |from: &Name, message: Vec<u8>| {
        if message == b"refuse" {
            return Err(Error::new(Kind::Fenced, "the epoch is over").with("epoch", "7"));
        }
        taken.lock().unwrap().push((from.to_string(), message));
        Ok(())
    };
    let host = Name::new("far").unwrap();
    let control = ControlService::new(host, Arc::clone(&intake), Arc::clone(&order.pacer), Box::new(deliver));
    let services = Services { bulk: BulkService::new(intake, order), control };
    let server = Server::start(address, credentials("far"), limits(), services).unwrap();
    Host { server, store, delivered, directory }
}

fn far(address: SocketAddr) -> Peer {
    Peer { name: Name::new("far").unwrap(), address }
}

fn client(address: SocketAddr) -> ControlClient {
    ControlClient::new(far(address), credentials("near"), LONG)
}

#[tokio::test]
async fn agents_tell_each_other_what_they_are_and_hold() {
    let host = start(any_port());
    let client = client(host.server.address());
    let record = host.store.record();
    let expected = Status {
        host: "far".to_owned(),
        release: env!("CARGO_PKG_VERSION").to_owned(),
        run: RUN.to_string(),
        store: record.store.to_string(),
        topology: record.topology.to_string(),
        epoch: 0,
        slot_count: 3,
        slot_bytes: record.slot_bytes,
        versions_per_shard: 2,
    };
    assert_eq!(client.status().await.unwrap(), expected);
    host.store.raise_epoch(1).unwrap();
    assert_eq!(client.status().await.unwrap().epoch, 1);
    let sums = seal(&host.store, &key("a", 12));
    let slots = client.inventory().await.unwrap().slots;
    let states: Vec<&str> = slots.iter().map(|slot| slot.state.as_str()).collect();
    assert_eq!(states, ["sealed", "free", "free"]);
    let held = &slots[0];
    assert_eq!((held.shard.as_str(), held.epoch, held.step, held.data_bytes), ("a", 1, 12, DATA_BYTES));
    assert_eq!((held.digest, slots[1].digest), (Some(sums.digest), None));
    let stats = client.stats().await.unwrap();
    assert_eq!((stats.limit_bytes_per_s, stats.is_paused, stats.delivered), (Some(1 << 39), false, 0));
}

#[tokio::test]
async fn messages_are_delivered_with_the_name_of_who_has_proven_it() {
    let host = start(any_port());
    let client = client(host.server.address());
    let large: Vec<u8> = (0..MESSAGE_LIMIT_BYTES - 16).map(|index| (index % 251) as u8).collect();
    for message in [b"one".to_vec(), Vec::new(), large.clone()] {
        client.deliver(message).await.unwrap();
    }
    let expected = [b"one".to_vec(), Vec::new(), large].map(|message| ("near".to_owned(), message));
    assert!(*host.delivered.lock().unwrap() == expected);
    assert_eq!(client.stats().await.unwrap().delivered, 3);
    let refused = client.deliver(b"refuse".to_vec()).await.unwrap_err();
    assert_eq!((refused.kind(), refused.message()), (Kind::Fenced, "the epoch is over (epoch: 7)"));
    assert_eq!((refused.context("peer"), refused.context("call")), (Some("far"), Some("Agent/Deliver")));
    let too_long = client.deliver(vec![0; MESSAGE_LIMIT_BYTES]).await.unwrap_err();
    assert_eq!(too_long.kind(), Kind::InvalidInput);
    // Many at once, by clones of one client, over one connection.
    let calls = (0..200u8).map(|number| {
        let client = client.clone();
        tokio::spawn(async move { client.deliver(vec![number]).await })
    });
    for call in calls.collect::<Vec<_>>() {
        call.await.unwrap().unwrap();
    }
    assert_eq!(host.delivered.lock().unwrap().len(), 203);
    assert_eq!(client.stats().await.unwrap().delivered, 203);
}

#[tokio::test]
async fn calls_and_versions_go_to_one_address() {
    let host = start(any_port());
    let (address, near) = (host.server.address(), memory_directory());
    let store = open(near.path());
    let sums = seal(&store, &key("a", 1));
    let client = client(address);
    let slow = route(&far(address));
    slow.order.pacer.limit(32 << 20, 1.0).unwrap();
    let wanted = key("a", 1);
    let watching = async {
        // Calls are answered while bytes come in.
        loop {
            let found = client.stats().await.unwrap().incoming;
            if let Some(incoming) = found.into_iter().find(|it| (1..BLOCKS).contains(&it.blocks_in_place)) {
                return incoming;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let (sent, incoming) = tokio::join!(replicate(&store, &wanted, &slow), watching);
    assert_eq!(sent.unwrap(), sums);
    assert_eq!((incoming.shard.as_str(), incoming.epoch, incoming.step), ("a", 1, 1));
    assert_sealed(&host.store, &wanted);
}

#[tokio::test]
async fn a_server_that_was_stopped_is_found_again() {
    let host = start(any_port());
    let address = host.server.address();
    let client = ControlClient::new(far(address), credentials("near"), Duration::from_secs(20));
    client.status().await.unwrap();
    drop(host);
    let gone = client.status().await.unwrap_err();
    assert_eq!(gone.kind(), Kind::Unavailable, "{gone}");
    assert_eq!(client.status().await.unwrap_err().kind(), Kind::Unavailable);
    let host = start(address);
    assert_eq!(host.server.address(), address);
    client.status().await.unwrap();
    assert!(host.directory.path().exists());
}

#[tokio::test]
async fn strangers_call_nothing() {
    let host = start(any_port());
    let stranger = credentials_of("near", RUN, &[9; 16]);
    let refused = ControlClient::new(far(host.server.address()), stranger, LONG).status().await.unwrap_err();
    assert_eq!(refused.kind(), Kind::InvalidInput, "{refused}");
    assert!(host.delivered.lock().unwrap().is_empty());
    assert_eq!(client(host.server.address()).stats().await.unwrap().turned_away, 1);
}

#[tokio::test]
async fn what_is_changed_on_the_way_is_never_delivered() {
    let host = start(any_port());
    for position in [608, 612, 700, 5000] {
        let harm =
            move |_, way, at| if (way, at) == (Way::ToServer, position) { Fate::Flip } else { Fate::Pass };
        let (address, _sent) = proxy(host.server.address(), harm).await;
        let refused = client(address).deliver(vec![7; 20_000]).await.unwrap_err();
        assert_eq!(refused.kind(), Kind::Unavailable, "{position}: {refused}");
    }
    assert!(host.delivered.lock().unwrap().is_empty());
}

#[tokio::test]
async fn an_address_that_is_taken_is_an_error_at_the_start() {
    let host = start(any_port());
    let order = order();
    let intake = Arc::new(Intake::new(Arc::clone(&host.store)).unwrap());
    let name = Name::new("other").unwrap();
    let pacer = Arc::clone(&order.pacer);
    let control = ControlService::new(name, Arc::clone(&intake), pacer, Box::new(|_, _| Ok(())));
    let services = Services { bulk: BulkService::new(intake, order), control };
    let taken = Server::start(host.server.address(), credentials("other"), limits(), services).unwrap_err();
    assert_eq!(taken.kind(), Kind::Conflict, "{taken}");
}
