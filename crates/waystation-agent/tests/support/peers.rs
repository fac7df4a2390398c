//! Agents on loopback addresses, and proxies between them, for the tests.
#![allow(clippy::unwrap_used, dead_code)] // each test uses a part of it

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use waystation_agent::peers::{
    Connection, Credentials, Encryption, Identity, Limits, Listener, Name, Peer, Purpose, Secret, Tls,
};
use waystation_format::slot::Id;

pub const RUN: Id = Id([1; 16]);
pub const SECRET: [u8; 32] = [0x5e; 32];
/// For what ends sooner, unless a test is about to fail.
pub const LONG: Duration = Duration::from_secs(60);

/// Any port of this host.
pub fn any_port() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, 0).into()
}

pub fn credentials(name: &str) -> Credentials {
    credentials_of(name, RUN, &SECRET)
}

pub fn credentials_of(name: &str, run: Id, secret: &[u8]) -> Credentials {
    let identity = Identity { name: Name::new(name).unwrap(), run };
    let tls = Arc::new(Tls::of_secret(&Secret::new(secret).unwrap()).unwrap());
    Credentials { identity, tls, encryption: Encryption::Always }
}

/// Credentials by which nothing is encrypted here, since all addresses are loopback.
pub fn plain(credentials: Credentials) -> Credentials {
    Credentials { encryption: Encryption::BetweenMachines, ..credentials }
}

/// How many bytes a client and a server have sent when a connection between them is open, if its credentials are these.
pub async fn handshake_bytes(client: &Credentials, server: Credentials) -> (usize, usize) {
    let (mut listener, peer) = listen_as(server, limits()).await;
    let counts = [Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0))];
    let counting = counts.clone();
    let count = move |_, way, at| {
        counting[usize::from(way == Way::ToClient)].fetch_max(at + 1, Ordering::Relaxed);
        Fate::Pass
    };
    let (address, _sent) = proxy(peer.address, count).await;
    let through = Peer { address, ..peer };
    let connected = Connection::connect(&through, client, Purpose::Control, LONG);
    let (server, client) = gets_in(&mut listener, connected).await;
    drop((client.unwrap(), server));
    counts.map(|count| count.load(Ordering::Relaxed)).into()
}

/// Generous but for a test of them.
pub fn limits() -> Limits {
    Limits { handshake: LONG, ..Limits::default() }
}

pub async fn listen(name: &str, limits: Limits) -> (Listener, Peer) {
    listen_as(credentials(name), limits).await
}

pub async fn listen_as(credentials: Credentials, limits: Limits) -> (Listener, Peer) {
    let name = credentials.identity.name.clone();
    let listener = Listener::bind(any_port(), credentials, limits).await.unwrap();
    let peer = Peer { name, address: listener.address().unwrap() };
    (listener, peer)
}

/// Runs a listener until the future beside it is done, which nobody may get through it.
pub async fn nobody_gets_in<T>(listener: &mut Listener, beside: impl Future<Output = T>) -> T {
    tokio::select! {
        connection = listener.accept() => unreachable!("'{}' was let in", connection.peer()),
        done = beside => done,
    }
}

/// Runs a listener until somebody gets in and the future beside it is done.
pub async fn gets_in<T>(listener: &mut Listener, beside: impl Future<Output = T>) -> (Connection, T) {
    tokio::join!(listener.accept(), beside)
}

/// Which way bytes go through a proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    ToServer,
    ToClient,
}

/// What becomes of a byte on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Pass,
    Flip,
    /// A short message comes a tenth of a second later.
    Late,
    /// Nothing goes on until it has another fate.
    Hold,
    /// The connection ends before it.
    Cut,
}

/// A proxy that knows the fate of each byte: by the number of its connection, its way and its position. Gives
/// its address, and what clients have sent over connections that have ended.
pub async fn proxy(
    target: SocketAddr,
    fate: impl Fn(usize, Way, usize) -> Fate + Clone + Send + 'static,
) -> (SocketAddr, tokio::sync::mpsc::UnboundedReceiver<Vec<u8>>) {
    let listener = TcpListener::bind(any_port()).await.unwrap();
    let address = listener.local_addr().unwrap();
    let (sender, receiver) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        for number in 0.. {
            let Ok((client, _)) = listener.accept().await else { return };
            let Ok(server) = TcpStream::connect(target).await else { continue };
            let (from_client, to_client) = client.into_split();
            let (from_server, to_server) = server.into_split();
            let (there, back) = (fate.clone(), fate.clone());
            let there = move |position| there(number, Way::ToServer, position);
            let back = move |position| back(number, Way::ToClient, position);
            tokio::spawn(pump(from_client, to_server, there, Some(sender.clone())));
            tokio::spawn(pump(from_server, to_client, back, None));
        }
    });
    (address, receiver)
}

/// A proxy that changes the byte at a position of one direction of every connection.
pub async fn changing_proxy(
    target: SocketAddr,
    way: Way,
    position: usize,
) -> (SocketAddr, tokio::sync::mpsc::UnboundedReceiver<Vec<u8>>) {
    let is_meant = move |other: Way, at: usize| (other, at) == (way, position);
    proxy(target, move |_, way, at| if is_meant(way, at) { Fate::Flip } else { Fate::Pass }).await
}

async fn pump(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    fate: impl Fn(usize) -> Fate,
    record: Option<tokio::sync::mpsc::UnboundedSender<Vec<u8>>>,
) {
    let (mut all, mut buffer) = (Vec::new(), vec![0; 65_536]);
    while let Ok(count) = from.read(&mut buffer).await {
        let begin = all.len();
        all.extend_from_slice(&buffer[..count]);
        let mut fates: Vec<Fate> = (begin..begin + count).map(&fate).collect();
        while fates.contains(&Fate::Hold) {
            tokio::time::sleep(Duration::from_millis(5)).await;
            fates = (begin..begin + count).map(&fate).collect();
        }
        if count < 200 && fates.contains(&Fate::Late) {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let end = fates.iter().position(|&fate| fate == Fate::Cut).unwrap_or(count);
        for (byte, fate) in buffer[..end].iter_mut().zip(fates) {
            *byte ^= if fate == Fate::Flip { 0x10 } else { 0 };
        }
        if end == 0 || to.write_all(&buffer[..end]).await.is_err() || end < count {
            break;
        }
    }
    drop(to.shutdown().await);
    if let Some(record) = record {
        drop(record.send(all));
    }
}
