//! Agents that show each other certificates: who is let in then, and what goes between them.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;

use crate::bulk::{
    self, Agent, BLOCKS, DATA_BYTES, agent_with, assert_comes_past_store, assert_sealed, key, order, route,
    seal,
};
use crate::certificates::{Authority, Files, write_private};
use crate::peers::*;
use crate::support::memory_directory;
use rcgen::{ExtendedKeyUsagePurpose, date_time_ymd};
use waystation_agent::peers::bulk::{BulkService, Intake, Route, fetch, replicate};
use waystation_agent::peers::{
    Connection, ControlClient, ControlService, Credentials, Limits, Name, Peer, Purpose, Server, Services,
    Tls,
};
use waystation_agent::{Error, Kind};

fn credentials_with(name: &str, tls: Arc<Tls>) -> Credentials {
    Credentials { tls, ..credentials(name) }
}

fn of(authority: &Authority, name: &str) -> Credentials {
    credentials_with(name, authority.tls(name))
}

async fn connect(peer: &Peer, credentials: &Credentials) -> Result<Connection, Error> {
    Connection::connect(peer, credentials, Purpose::Control, LONG).await
}

/// Asserts that a client and a server refuse each other; returns what the client and the server say of it.
async fn refused(client: &Credentials, server: Credentials) -> [String; 2] {
    let (mut listener, peer) = listen_as(server, limits()).await;
    let error = nobody_gets_in(&mut listener, connect(&peer, client)).await.unwrap_err();
    assert_eq!(error.kind(), Kind::InvalidInput, "{error}");
    // The client may have been answered before the server has noted it.
    let mut noted = listener.turned_away().0;
    while noted.is_empty() {
        nobody_gets_in(&mut listener, tokio::task::yield_now()).await;
        noted = listener.turned_away().0;
    }
    assert_eq!(noted[0].kind(), Kind::InvalidInput, "{}", noted[0]);
    [error.message().to_owned(), noted[0].message().to_owned()]
}

#[tokio::test]
async fn what_hosts_say_to_each_other_is_encrypted() {
    let authority = Authority::new();
    let (mut listener, peer) = listen_as(of(&authority, "b"), limits()).await;
    let (address, mut sent) = proxy(peer.address, |_, _, _| Fate::Pass).await;
    let (through, own) = (Peer { address, ..peer }, of(&authority, "a"));
    let (mut server, client) = gets_in(&mut listener, connect(&through, &own)).await;
    let mut client = client.unwrap();
    assert_eq!((server.peer().as_str(), client.peer().as_str()), ("a", "b"));
    client.send(b"a question that nobody overhears").await.unwrap();
    assert_eq!(server.receive(100).await.unwrap(), b"a question that nobody overhears");
    server.send(b"answer").await.unwrap();
    assert_eq!(client.receive(100).await.unwrap(), b"answer");
    drop((client, server));
    let sent = sent.recv().await.unwrap();
    for plain in [&b"WSTMPEER"[..], b"question"] {
        assert!(!sent.windows(plain.len()).any(|window| window == plain));
    }
}

#[tokio::test]
async fn a_certificate_of_another_authority_is_refused() {
    let (ours, others) = (Authority::new(), Authority::new());
    // Neither believes the other; then only the server does not.
    let [client, server] = refused(&of(&others, "a"), of(&ours, "b")).await;
    assert!(client.contains("of none of the authorities"), "{client}");
    assert!(server.contains("refuses the certificate of this one"), "{server}");
    let believing = others.files("a");
    believing.believe(&ours);
    let [client, server] = refused(&credentials_with("a", believing.tls()), of(&ours, "b")).await;
    assert!(client.contains("refuses the certificate of this one"), "{client}");
    assert!(server.contains("of none of the authorities"), "{server}");
}

#[tokio::test]
async fn a_certificate_is_valid_in_its_time_only() {
    let authority = Authority::new();
    let old = || authority.files_with("a", |params| params.not_after = date_time_ymd(2001, 1, 1));
    let early = || authority.files_with("a", |params| params.not_before = date_time_ymd(2222, 1, 1));
    for (files, why) in [(old(), "has expired"), (early(), "is not valid yet")] {
        let harmed = credentials_with("a", files.tls());
        let [client, server] = refused(&harmed, of(&authority, "b")).await;
        assert!(client.contains("refuses the certificate") && server.contains(why), "{client} {server}");
        let [client, server] = refused(&of(&authority, "b"), harmed).await;
        assert!(server.contains("refuses the certificate") && client.contains(why), "{client} {server}");
    }
}

#[tokio::test]
async fn a_certificate_is_of_one_host() {
    let authority = Authority::new();
    let posing = credentials_with("a", authority.tls("c"));
    let [client, server] = refused(&of(&authority, "b"), posing.clone()).await;
    assert!(client.contains("is of another host"), "{client}");
    assert!(server.contains("refuses the certificate of this one"), "{server}");
    let [client, server] = refused(&posing, of(&authority, "b")).await;
    assert!(client.contains("is of another host, says the other side"), "{client}");
    assert!(server.contains("is of another host"), "{server}");
    // One that may not be shown by clients.
    let purpose = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let server_only = authority.files_with("a", |params| params.extended_key_usages = purpose);
    let [_, server] = refused(&credentials_with("a", server_only.tls()), of(&authority, "b")).await;
    assert!(server.contains("for servers and clients both"), "{server}");
    let unnamed = of(&authority, "a");
    let (listener, peer) = listen_as(of(&authority, "b"), limits()).await;
    let unnameable = Peer { name: Name::new("no such name").unwrap(), ..peer };
    let error = connect(&unnameable, &unnamed).await.unwrap_err();
    assert!(error.message().contains("by DNS names or IP addresses"), "{error}");
    drop(listener);
}

#[tokio::test]
async fn a_side_with_certificates_and_one_without_do_not_speak_to_each_other() {
    let authority = Authority::new();
    for (client, server) in [(credentials("a"), of(&authority, "b")), (of(&authority, "a"), credentials("b"))]
    {
        let said = refused(&client, server).await;
        assert!(said.iter().any(|said| said.contains("shows a certificate and the other a key")), "{said:?}");
    }
}

#[tokio::test]
async fn a_certificate_does_not_replace_the_secret() {
    let authority = Authority::new();
    let other = Arc::new(authority.files("a").read_with(&[0x5f; 32]).unwrap());
    let [client, server] = refused(&credentials_with("a", other), of(&authority, "b")).await;
    assert!(client.contains("has another secret"), "{client}");
    assert!(server.contains("does not know the secret"), "{server}");
}

#[tokio::test]
async fn the_silent_are_sent_away_in_the_end() {
    let authority = Authority::new();
    let short = Limits { handshake: std::time::Duration::from_millis(20), ..limits() };
    let (mut listener, peer) = listen_as(of(&authority, "b"), short).await;
    let stream = tokio::net::TcpStream::connect(peer.address).await.unwrap();
    while listener.turned_away().1 == 0 {
        nobody_gets_in(&mut listener, tokio::time::sleep(std::time::Duration::from_millis(1))).await;
    }
    drop(stream);
}

async fn agent(authority: &Authority, name: &str) -> Agent {
    agent_with(of(authority, name), memory_directory(), order()).await
}

fn route_with(peer: &Peer, authority: &Authority) -> Route {
    Route { credentials: of(authority, "sender"), ..route(peer) }
}

#[tokio::test]
async fn versions_go_both_ways() {
    let authority = Authority::new();
    let (near, far) = (agent(&authority, "near").await, agent(&authority, "far").await);
    for streams in [1, 3] {
        let key = key("a", streams as u64);
        let sums = seal(&near.store, &key);
        let route = Route { streams, ..route_with(&far.peer, &authority) };
        assert_eq!(replicate(&near.store, &key, &route).await.unwrap(), sums);
        assert_sealed(&far.store, &key);
    }
    let key = key("b", 1);
    let sums = seal(&far.store, &key);
    let route = route_with(&far.peer, &authority);
    assert_eq!(fetch(&near.intake, &key, Some(sums.digest), &route).await.unwrap(), sums);
    assert_sealed(&near.store, &key);
    let missing = fetch(&near.intake, &bulk::key("c", 1), None, &route).await.unwrap_err();
    assert_eq!(missing.kind(), Kind::NotFound, "{missing}");
}

#[tokio::test]
async fn a_transfer_goes_on_after_what_was_cut_and_changed() {
    let authority = Authority::new();
    let (near, far) = (agent(&authority, "near").await, agent(&authority, "far").await);
    let wanted = key("a", 1);
    let sums = seal(&near.store, &wanted);
    let half = DATA_BYTES as usize / 2;
    let harm = move |number, way, at: usize| match (number, way) {
        (0, Way::ToServer) if at == half => Fate::Cut,
        (1, Way::ToServer) if at == half / 2 => Fate::Flip,
        _ => Fate::Pass,
    };
    let (address, mut sent) = proxy(far.peer.address, harm).await;
    let through = Peer { address, ..far.peer.clone() };
    let route = route_with(&through, &authority);
    assert_eq!(replicate(&near.store, &wanted, &route).await.unwrap(), sums);
    assert_sealed(&far.store, &wanted);
    assert_eq!(route.order.pacer.traffic().counts().resumed, 2);
    let mut lengths = Vec::new();
    while lengths.len() < 3 {
        lengths.push(sent.recv().await.unwrap().len());
    }
    // What had come was not sent again.
    assert!(lengths[2] < half * 3 / 5, "{lengths:?}");

    assert_comes_past_store(&wanted, sums, &route_with(&far.peer, &authority)).await;
}

#[tokio::test]
async fn calls_and_versions_go_to_one_address() {
    let (authority, directory) = (Authority::new(), memory_directory());
    let store = bulk::open(directory.path());
    let (intake, order) = (Arc::new(Intake::new(Arc::clone(&store)).unwrap()), order());
    let name = |name| Name::new(name).unwrap();
    let deliver = |from: &Name, message: &[u8]| {
        let is_known = (from.as_str(), message) == ("near", &b"a message"[..]);
        if is_known { Ok(()) } else { Err(Error::new(Kind::InvalidInput, "unknown")) }
    };
    let control = ControlService::new(store, Box::new(deliver));
    let services = Services { bulk: BulkService::new(intake, order), control, turned_away: |_| {} };
    let server = Server::start(any_port(), of(&authority, "far"), limits(), services).unwrap();
    let far = Peer { name: name("far"), address: server.address() };
    let client = ControlClient::new(far.clone(), of(&authority, "near"), LONG);
    client.deliver(b"a message").await.unwrap();
    let near = agent(&authority, "near").await;
    let sums = seal(&near.store, &key("a", 1));
    let sent = replicate(&near.store, &key("a", 1), &route_with(&far, &authority)).await.unwrap();
    assert_eq!(sent, sums);
    assert_eq!(client.find(&key("a", 1)).await.unwrap(), Some(sums.digest));
    assert_eq!(BLOCKS, DATA_BYTES.div_ceil(1 << 18));
    let stranger = ControlClient::new(far, of(&Authority::new(), "near"), LONG);
    let refused = stranger.deliver(b"a message").await.unwrap_err();
    assert_eq!(refused.kind(), Kind::InvalidInput, "{refused}");
}

/// What is wrong with the files of a host, which nobody has connected to.
fn wrong(files: &Files, host: &str) -> String {
    let error = files.read().and_then(|tls| tls.check(&Name::new(host).unwrap())).unwrap_err();
    assert_eq!(error.kind(), Kind::InvalidInput, "{error}");
    error.message().to_owned()
}

#[test]
fn an_agent_knows_what_others_would_refuse() {
    let (authority, other) = (Authority::new(), Authority::new());
    authority.tls("a").check(&Name::new("a").unwrap()).unwrap();
    assert!(
        wrong(&authority.files("a"), "b").contains("would refuse this one: the certificate is of another")
    );
    let old = authority.files_with("a", |params| params.not_after = date_time_ymd(2001, 1, 1));
    assert!(wrong(&old, "a").contains("has expired"));
    let purpose = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let server_only = authority.files_with("a", |params| params.extended_key_usages = purpose);
    assert!(wrong(&server_only, "a").contains("for servers and clients both"));
    let unknown = authority.files("a");
    unknown.believe(&other);
    assert!(wrong(&unknown, "a").contains("of none of the authorities"));
}

#[test]
fn files_that_are_no_certificates_or_keys_are_named() {
    let authority = Authority::new();
    let files = authority.files("a");
    fs::set_permissions(&files.key, Permissions::from_mode(0o644)).unwrap();
    assert!(wrong(&files, "a").contains("can be used by other users"));
    let files = authority.files("a");
    fs::copy(&authority.files("a").key, &files.key).unwrap();
    assert!(wrong(&files, "a").contains("the key is not that of the certificate"));
    let files = authority.files("a");
    write_private(&files.key, &fs::read_to_string(&files.certificate).unwrap());
    assert!(wrong(&files, "a").contains("holds no key"));
    for text in ["", "-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n"] {
        let files = authority.files("a");
        fs::write(&files.authorities, text).unwrap();
        let error = files.read().unwrap_err();
        assert_eq!(error.kind(), Kind::InvalidInput, "{error}");
        assert!(error.context("path").unwrap().ends_with("authorities.pem"));
    }
    let files = authority.files("a");
    fs::remove_file(&files.certificate).unwrap();
    assert_eq!(files.read().unwrap_err().kind(), Kind::NotFound);
}
