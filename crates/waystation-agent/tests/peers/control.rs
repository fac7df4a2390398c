//! Calls between agents, over real sockets, and a server that is started, stopped and started again.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::bulk::{BLOCKS, assert_sealed, begin, key, open, order, route, seal};
use crate::peers::{
    Fate, LONG, RUN, Way, any_port, credentials, credentials_of, handshake_bytes, limits, proxy,
};
use crate::support::memory_directory;
use tempfile::TempDir;
use waystation_agent::peers::bulk::{BulkService, Intake, replicate};
use waystation_agent::peers::{
    Connection, ControlClient, ControlService, MESSAGE_LIMIT_BYTES, Name, Peer, Purpose, Server, Services,
    decode_failure,
};
use waystation_agent::store::Store;
use waystation_agent::{Error, Kind};

/// What was delivered, and by whom.
type Delivered = Arc<Mutex<Vec<(String, Vec<u8>)>>>;

/// What the servers of this process have told of clients that they have turned away.
static TURNED_AWAY: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct Host {
    server: Server,
    store: Arc<Store>,
    intake: Arc<Intake>,
    delivered: Delivered,
    directory: TempDir,
}

fn start(address: SocketAddr) -> Host {
    let directory = memory_directory();
    let store = open(directory.path());
    let delivered = Delivered::default();
    let (intake, order) = (Arc::new(Intake::new(Arc::clone(&store)).unwrap()), order());
    let taken = Arc::clone(&delivered);
    let deliver = move |from: &Name, message: &[u8]| {
        if message == b"refuse" {
            return Err(Error::new(Kind::Fenced, "the epoch is over").with("epoch", "7"));
        }
        taken.lock().unwrap().push((from.to_string(), message.to_vec()));
        Ok(())
    };
    let control = ControlService::new(Arc::clone(&store), Box::new(deliver));
    let turned_away = |error: &Error| TURNED_AWAY.lock().unwrap().push(error.to_string());
    let services = Services { bulk: BulkService::new(Arc::clone(&intake), order), control, turned_away };
    let server = Server::start(address, credentials("far"), limits(), services).unwrap();
    Host { server, store, intake, delivered, directory }
}

fn far(address: SocketAddr) -> Peer {
    Peer { name: Name::new("far").unwrap(), address }
}

fn client(address: SocketAddr) -> ControlClient {
    ControlClient::new(far(address), credentials("near"), LONG)
}

#[tokio::test]
async fn whom_a_server_turns_away_it_tells() {
    let host = start(any_port());
    let stranger = credentials_of("stranger", RUN, &[0x5f; 32]);
    let peer = far(host.server.address());
    Connection::connect(&peer, &stranger, Purpose::Control, LONG).await.unwrap_err();
    let is_told = async {
        let wanted =
            "the other side refuses the key or the certificate of this one; give both the same secret";
        while !TURNED_AWAY.lock().unwrap().iter().any(|line| line.contains(wanted)) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(LONG, is_told).await.unwrap();
}

#[tokio::test]
async fn agents_find_versions_that_others_have_sealed() {
    let host = start(any_port());
    let client = client(host.server.address());
    let wanted = key("a", 12);
    assert_eq!(client.find(&wanted).await.unwrap(), None);
    let grant = begin(&host.store, wanted.clone());
    assert_eq!(client.find(&wanted).await.unwrap(), None, "it is still written");
    host.store.abort(grant.slot, grant.ticket).unwrap();
    let sums = seal(&host.store, &wanted);
    assert_eq!(client.find(&wanted).await.unwrap(), Some(sums.digest));
    for other in [key("b", 12), key("a", 11)] {
        assert_eq!(client.find(&other).await.unwrap(), None);
    }
    for no_name in ["", &"x".repeat(2000)] {
        let refused = client.find(&key(no_name, 1)).await.unwrap_err();
        assert_eq!((refused.kind(), refused.context("call")), (Kind::Corrupt, Some("find")));
    }
}

#[tokio::test]
async fn messages_are_delivered_with_the_name_of_who_has_proven_it() {
    let host = start(any_port());
    let client = client(host.server.address());
    let large: Vec<u8> = (0..MESSAGE_LIMIT_BYTES - 1).map(|index| (index % 251) as u8).collect();
    for message in [&b"one"[..], b"", &large] {
        client.deliver(message).await.unwrap();
    }
    let expected = [b"one".to_vec(), Vec::new(), large].map(|message| ("near".to_owned(), message));
    assert!(*host.delivered.lock().unwrap() == expected);
    let refused = client.deliver(b"refuse").await.unwrap_err();
    assert_eq!((refused.kind(), refused.message()), (Kind::Fenced, "the epoch is over (epoch: 7)"));
    assert_eq!((refused.context("peer"), refused.context("call")), (Some("far"), Some("deliver")));
    let too_long = client.deliver(&vec![0; MESSAGE_LIMIT_BYTES]).await.unwrap_err();
    assert_eq!(too_long.kind(), Kind::InvalidInput);
    // Many at once, by clones of one client, over one connection.
    let calls = (0..200u8).map(|number| {
        let client = client.clone();
        tokio::spawn(async move { client.deliver(&[number]).await })
    });
    for call in calls.collect::<Vec<_>>() {
        call.await.unwrap().unwrap();
    }
    assert_eq!(host.delivered.lock().unwrap().len(), 203);
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
            assert_eq!(client.find(&key("b", 1)).await.unwrap(), None);
            if (1..BLOCKS).contains(&host.intake.blocks_in_place(&wanted)) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let (sent, ()) = tokio::join!(replicate(&store, &wanted, &slow), watching);
    assert_eq!(sent.unwrap(), sums);
    assert_sealed(&host.store, &wanted);
}

#[tokio::test]
async fn a_server_that_was_stopped_is_found_again() {
    let host = start(any_port());
    let address = host.server.address();
    let client = ControlClient::new(far(address), credentials("near"), Duration::from_secs(20));
    client.deliver(b"one").await.unwrap();
    drop(host);
    let gone = client.deliver(b"one").await.unwrap_err();
    assert_eq!(gone.kind(), Kind::Unavailable, "{gone}");
    assert_eq!(client.deliver(b"one").await.unwrap_err().kind(), Kind::Unavailable);
    let host = start(address);
    assert_eq!(host.server.address(), address);
    client.deliver(b"one").await.unwrap();
    assert!(host.directory.path().exists());
}

#[tokio::test]
async fn strangers_call_nothing() {
    let host = start(any_port());
    let stranger = credentials_of("near", RUN, &[9; 16]);
    let refused = ControlClient::new(far(host.server.address()), stranger, LONG).deliver(b"one").await;
    let refused = refused.unwrap_err();
    assert_eq!(refused.kind(), Kind::InvalidInput, "{refused}");
    assert!(host.delivered.lock().unwrap().is_empty());
}

#[tokio::test]
async fn what_is_changed_on_the_way_is_never_delivered() {
    let host = start(any_port());
    let (handshake, _) = handshake_bytes(&credentials("near"), credentials("far")).await;
    for position in [1, 5, 700, 20_000].map(|at| handshake + at) {
        let harm =
            move |_, way, at| if (way, at) == (Way::ToServer, position) { Fate::Flip } else { Fate::Pass };
        let (address, _sent) = proxy(host.server.address(), harm).await;
        let refused = client(address).deliver(&[7; 20_000]).await.unwrap_err();
        assert_eq!(refused.kind(), Kind::Unavailable, "{position}: {refused}");
    }
    assert!(host.delivered.lock().unwrap().is_empty());
}

#[tokio::test]
async fn an_address_that_is_taken_is_an_error_at_the_start() {
    let host = start(any_port());
    let order = order();
    let intake = Arc::new(Intake::new(Arc::clone(&host.store)).unwrap());
    let control = ControlService::new(Arc::clone(&host.store), Box::new(|_, _| Ok(())));
    let services = Services { bulk: BulkService::new(intake, order), control, turned_away: |_| {} };
    let taken = Server::start(host.server.address(), credentials("other"), limits(), services).unwrap_err();
    assert_eq!(taken.kind(), Kind::Conflict, "{taken}");
}

#[tokio::test]
async fn what_is_no_call_is_refused_and_what_is_too_long_ends_the_connection() {
    let host = start(any_port());
    let (far, credentials) = (far(host.server.address()), credentials("near"));
    let connect = || Connection::connect(&far, &credentials, Purpose::Control, LONG);
    let mut connection = connect().await.unwrap();
    let hostile: [(&[u8], Kind); 4] = [
        (b"", Kind::Unsupported),
        (b"\x07what", Kind::Unsupported),
        (b"\x02short", Kind::Corrupt),
        (&[2; 2000], Kind::Corrupt),
    ];
    for (call, kind) in hostile {
        connection.send(call).await.unwrap();
        let answer = connection.receive(MESSAGE_LIMIT_BYTES).await.unwrap();
        assert_eq!((answer[0], decode_failure(&answer[1..]).kind()), (1, kind), "{call:?}");
    }
    connection.send(&vec![1; MESSAGE_LIMIT_BYTES + 1]).await.ok(); // it may end before all is sent
    assert_eq!(connection.receive(MESSAGE_LIMIT_BYTES).await.unwrap_err().kind(), Kind::Unavailable);
    // Nor does this side take an answer that is longer than it expects.
    let mut connection = connect().await.unwrap();
    connection.send(b"\x01refuse").await.unwrap();
    assert_eq!(connection.receive(5).await.unwrap_err().kind(), Kind::Corrupt);
    assert!(host.delivered.lock().unwrap().is_empty());
}
