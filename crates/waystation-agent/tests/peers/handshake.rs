//! Who is let in, over real sockets: those who know the secret, mean this host and this run, and nobody else.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use crate::peers::*;
use ring::hkdf::{HKDF_SHA256, Salt};
use rustls::client::AlwaysResolvesClientRawPublicKeys;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::ring::sign::any_eddsa_type;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, ClientConnection, DigitallySignedStruct, SignatureScheme};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::task::JoinSet;
use waystation_agent::peers::{Connection, Credentials, Limits, Listener, Name, Peer, Purpose};
use waystation_agent::{Kind, Result};
use waystation_format::slot::Id;

async fn connect(peer: &Peer, credentials: &Credentials) -> Result<Connection> {
    Connection::connect(peer, credentials, Purpose::Control, LONG).await
}

/// Asserts that two sides hear each other.
async fn assert_speak(client: &mut Connection, server: &mut Connection) {
    client.send(b"a question that nobody overhears").await.unwrap();
    assert_eq!(server.receive(100).await.unwrap(), b"a question that nobody overhears");
    server.send(b"answer").await.unwrap();
    assert_eq!(client.receive(100).await.unwrap(), b"answer");
}

#[tokio::test]
async fn two_agents_of_a_job_speak_to_each_other_and_nobody_overhears_it() {
    for is_plain in [false, true] {
        let of = |name| if is_plain { plain(credentials(name)) } else { credentials(name) };
        let (mut listener, peer) = listen_as(of("b"), limits()).await;
        let (address, mut sent) = proxy(peer.address, |_, _, _| Fate::Pass).await;
        let (through, own) = (Peer { address, ..peer }, of("a"));
        let (mut server, client) = gets_in(&mut listener, connect(&through, &own)).await;
        let mut client = client.unwrap();
        assert_eq!((server.peer().as_str(), server.purpose()), ("a", Purpose::Control));
        assert_eq!((client.peer().as_str(), client.is_encrypted()), ("b", !is_plain));
        assert_speak(&mut client, &mut server).await;
        assert_eq!(listener.connected(), 1);
        drop((server, client));
        assert_eq!(listener.connected(), 0);
        let sent = sent.recv().await.unwrap();
        let overheard = |said: &[u8]| sent.windows(said.len()).any(|window| window == said);
        // Who they are and what they want is not said in the clear even where the rest is.
        assert_eq!((overheard(b"WSTMPEER"), overheard(b"question")), (false, is_plain));
    }
}

#[tokio::test]
async fn a_loopback_address_at_one_end_alone_is_refused() {
    let (mut listener, peer) = listen("b", limits()).await;
    let refused = nobody_gets_in(&mut listener, connect(&peer, &plain(credentials("a")))).await.unwrap_err();
    assert_eq!(refused.kind(), Kind::InvalidInput);
    assert!(refused.message().contains("loopback address at one end alone"), "{refused}");
}

#[tokio::test]
async fn strangers_are_refused_and_told_why() {
    let (mut listener, peer) = listen("b", limits()).await;
    let elsewhere = Peer { name: Name::new("c").unwrap(), ..peer.clone() };
    let cases = [
        (&peer, credentials_of("a", RUN, &[0x5f; 32]), Kind::InvalidInput, "does not know the secret"),
        (&peer, credentials_of("a", RUN, &SECRET[..31]), Kind::InvalidInput, "does not know the secret"),
        (&peer, credentials_of("a", Id([2; 16]), &SECRET), Kind::Conflict, "belongs to another run"),
        (&elsewhere, credentials("a"), Kind::InvalidInput, "is another host"),
    ];
    for (peer, credentials, kind, message) in cases {
        let refused = nobody_gets_in(&mut listener, connect(peer, &credentials)).await.unwrap_err();
        assert_eq!(refused.kind(), kind, "{refused}");
        assert!(refused.message().contains(message), "{refused}");
        assert_eq!(refused.context("peer"), Some(peer.name.as_str()));
    }
    // The listener has been polled until each of them was answered, so at most the last is not counted yet.
    let (errors, count) = listener.turned_away();
    assert!(count >= 3 && errors.len() as u64 == count);
    assert!(errors[0].message().contains("the other side refuses"), "{}", errors[0]);
    assert_eq!(errors[2].context("client"), Some("a"));
}

/// What a false server makes of what it was sent.
type Answer = fn(&[u8]) -> Vec<u8>;

/// A server that answers as the test says, once.
async fn false_server(answer: Answer) -> SocketAddr {
    let listener = TcpListener::bind(any_port()).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut heard = vec![0; 4096];
        let count = stream.read(&mut heard).await.unwrap();
        stream.write_all(&answer(&heard[..count])).await.unwrap();
        drop(stream.read_u8().await);
    });
    address
}

#[tokio::test]
async fn who_does_not_know_the_secret_cannot_pose_as_a_server() {
    // With what the client has said, with an answer without TLS, with records that are none, and longer than any may be.
    let answers: [Answer; 4] = [
        |heard| heard.to_vec(),
        |_| b"WSTMPEER\x04\0\0\0\0\0\0\0".repeat(3),
        |_| b"\x17\x03\x03\0\x05hello".to_vec(),
        |_| b"\x16\x03\x03\xff\xff".to_vec(),
    ];
    for answer in answers {
        let peer = Peer { name: Name::new("b").unwrap(), address: false_server(answer).await };
        let refused = connect(&peer, &credentials("a")).await.unwrap_err();
        assert_eq!(refused.kind(), Kind::InvalidInput, "{refused}");
    }
    let (mut listener, peer) = listen_as(credentials_of("b", RUN, &[0x5f; 32]), limits()).await;
    let refused = nobody_gets_in(&mut listener, connect(&peer, &credentials("a"))).await.unwrap_err();
    assert!(refused.message().contains("does not know the secret"), "{refused}");
}

#[tokio::test]
async fn what_a_client_has_sent_opens_nothing_again() {
    let (mut listener, peer) = listen("b", limits()).await;
    let (address, mut recorded) = proxy(peer.address, |_, _, _| Fate::Pass).await;
    let credentials = credentials("a");
    let through = Peer { address, ..peer.clone() };
    let (mut server, client) = gets_in(&mut listener, connect(&through, &credentials)).await;
    let mut client = client.unwrap();
    assert_speak(&mut client, &mut server).await;
    drop((server, client));
    let recorded = recorded.recv().await.unwrap();
    let replayed = async {
        let mut stream = TcpStream::connect(peer.address).await.unwrap();
        stream.write_all(&recorded).await.unwrap();
        // The server may have closed the connection before it has read all.
        drop(stream.read_to_end(&mut Vec::new()).await);
    };
    nobody_gets_in(&mut listener, replayed).await;
}

/// Whether two notice, or one of them, that a byte of their handshake was changed; otherwise they must understand each
/// other.
async fn is_change_noticed(way: Way, position: usize) -> bool {
    let short = Limits { handshake: Duration::from_secs(5), ..limits() };
    let (mut listener, peer) = listen("b", short).await;
    let (address, _recorded) = changing_proxy(peer.address, way, position).await;
    let through = Peer { address, ..peer };
    let credentials = credentials("a");
    let connecting = Connection::connect(&through, &credentials, Purpose::Control, Duration::from_secs(5));
    tokio::pin!(connecting);
    let connected = tokio::select! {
        server = listener.accept() => (&mut connecting).await.map(|client| (client, server)),
        refused = &mut connecting => refused.map(|client| unreachable!("{client:?}")),
    };
    match connected {
        // Bytes that are only there for the look of older versions.
        Ok((mut client, mut server)) => {
            assert_speak(&mut client, &mut server).await;
            false
        }
        Err(_) => true,
    }
}

#[tokio::test]
async fn whoever_changes_a_byte_on_the_way_is_noticed_or_changes_nothing() {
    let (there, back) = handshake_bytes(&credentials("a"), credentials("b")).await;
    let positions = (0..there).step_by(13).map(|at| (Way::ToServer, at));
    let positions = positions.chain((0..back).step_by(13).map(|at| (Way::ToClient, at)));
    // At the same time, since a changed length is noticed only when the handshake has taken too long.
    let changes: JoinSet<_> = positions.map(|(way, position)| is_change_noticed(way, position)).collect();
    let noticed = changes.join_all().await;
    let count = noticed.iter().filter(|&&is_noticed| is_noticed).count();
    assert!(count > noticed.len() * 9 / 10, "{count} of {}", noticed.len());
}

#[tokio::test]
async fn the_silent_and_the_many_keep_nobody_out() {
    let few = Limits { unproven: 8, unproven_per_address: 4, ..limits() };
    let (mut listener, peer) = listen("b", few).await;
    let flood = async {
        let mut streams = Vec::new();
        for _ in 0..50 {
            let socket = TcpSocket::new_v4().unwrap();
            socket.bind((Ipv4Addr::new(127, 0, 0, 2), 0).into()).unwrap();
            streams.push(socket.connect(peer.address).await.unwrap());
        }
        // All but those who were given a place are told at once, without a word.
        let mut ended = 0;
        let mut waiting = Vec::new();
        for mut stream in streams {
            if ended + 4 >= 50 {
                waiting.push(stream);
                continue;
            }
            let mut byte = [0];
            tokio::select! {
                read = stream.read(&mut byte) => { assert!(matches!(read, Ok(0) | Err(_))); ended += 1; },
                () = tokio::time::sleep(Duration::from_millis(300)) => waiting.push(stream),
            }
        }
        assert_eq!((ended, waiting.len()), (46, 4));
        waiting
    };
    let mut waiting = nobody_gets_in(&mut listener, flood).await;
    // One of them even begins, and stops in the middle of its first record.
    waiting[0].write_all(b"\x16\x03\x01\x01\x00\x01").await.unwrap();
    let credentials = credentials("a");
    let (_server, client) = gets_in(&mut listener, connect(&peer, &credentials)).await;
    client.unwrap();
    // A log hears of all of them once, and of others later.
    let told = listener.turned_away_to_tell().unwrap();
    assert_eq!((told.kind(), told.context("clients")), (Kind::Unavailable, Some("46")));
    let again = TcpSocket::new_v4().unwrap();
    again.bind((Ipv4Addr::new(127, 0, 0, 2), 0).into()).unwrap();
    let mut again = again.connect(peer.address).await.unwrap();
    drop(nobody_gets_in(&mut listener, again.read_u8()).await);
    assert!(listener.turned_away_to_tell().is_none());
    assert_eq!(listener.turned_away().1, 1);
    drop(waiting);
}

#[tokio::test]
async fn the_silent_are_sent_away_in_the_end() {
    let short = Limits { handshake: Duration::from_millis(20), unproven: 1, ..limits() };
    let (mut listener, peer) = listen("b", short).await;
    let mut silent = TcpStream::connect(peer.address).await.unwrap();
    silent.write_all(b"\x16\x03\x01\x40").await.unwrap();
    let ended = nobody_gets_in(&mut listener, silent.read_u8()).await;
    assert!(ended.is_err());
    // The client may see its end before the listener has noted why.
    let mut errors = Vec::new();
    for _ in 0..10_000 {
        errors = listener.turned_away().0;
        if !errors.is_empty() {
            break;
        }
        nobody_gets_in(&mut listener, tokio::time::sleep(Duration::from_millis(1))).await;
    }
    assert!(errors.iter().any(|error| error.message().contains("did not prove itself")), "{errors:?}");
}

#[tokio::test]
async fn more_than_there_are_places_for_are_told_to_come_again() {
    let (mut listener, peer) = listen("b", Limits { proven: 1, ..limits() }).await;
    let credentials = credentials("a");
    let (server, client) = gets_in(&mut listener, connect(&peer, &credentials)).await;
    client.unwrap();
    let busy = nobody_gets_in(&mut listener, connect(&peer, &credentials)).await.unwrap_err();
    assert_eq!(busy.kind(), Kind::Unavailable);
    assert!(busy.message().contains("too many connections"), "{busy}");
    drop(server);
    let (_server, client) = gets_in(&mut listener, connect(&peer, &credentials)).await;
    client.unwrap();
}

#[tokio::test]
async fn it_listens_where_it_was_told_to_and_nowhere_else() {
    let (listener, peer) = listen("b", limits()).await;
    assert_eq!(peer.address.ip(), Ipv4Addr::LOCALHOST);
    let elsewhere = SocketAddr::from((Ipv4Addr::new(127, 0, 0, 2), peer.address.port()));
    let nobody = Peer { address: elsewhere, ..peer.clone() };
    assert_eq!(connect(&nobody, &credentials("a")).await.unwrap_err().kind(), Kind::Unavailable);
    let taken = Listener::bind(peer.address, credentials("c"), limits()).await.unwrap_err();
    assert_eq!(taken.kind(), Kind::Conflict);
    drop(listener);
}

/// Believes any key: what a stranger does who wants to be let in, and a client that looks at it later.
#[derive(Debug)]
struct Anybody;

impl ServerCertVerifier for Anybody {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        unreachable!("TLS 1.3 only")
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

/// The key of whoever knows a secret, as `docs/protocol-peers.md` has it.
fn key(secret: &[u8]) -> Arc<CertifiedKey> {
    let mut seed = [0; 32];
    let root = Salt::new(HKDF_SHA256, b"waystation peers 2").extract(secret);
    root.expand(&[b"agents"], HKDF_SHA256).unwrap().fill(&mut seed).unwrap();
    let pkcs8 = [b"\x30\x2e\x02\x01\0\x30\x05\x06\x03\x2b\x65\x70\x04\x22\x04\x20", &seed[..]].concat();
    let signing = any_eddsa_type(&PrivatePkcs8KeyDer::from(pkcs8)).unwrap();
    let public = signing.public_key().unwrap().to_vec();
    Arc::new(CertifiedKey::new(vec![CertificateDer::from(public)], signing))
}

/// Does what a client does that shows a key, and says something first; returns what it hears, and from whom.
fn heard(address: SocketAddr, shown: Option<Arc<CertifiedKey>>, said: &[u8]) -> (Vec<u8>, Option<Vec<u8>>) {
    use std::io::{Read, Write};
    let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Anybody));
    let config = match shown {
        Some(key) => config.with_client_cert_resolver(Arc::new(AlwaysResolvesClientRawPublicKeys::new(key))),
        None => config.with_no_client_auth(),
    };
    let mut tls = ClientConnection::new(Arc::new(config), ServerName::from(Ipv4Addr::LOCALHOST)).unwrap();
    let mut socket = std::net::TcpStream::connect(address).unwrap();
    socket.set_read_timeout(Some(LONG)).unwrap();
    let mut heard = vec![0; 48 + 8];
    let mut stream = rustls::Stream::new(&mut tls, &mut socket);
    let mut count = 0;
    if stream.write_all(said).is_ok() {
        while let Ok(read @ 1..) = stream.read(&mut heard[count..]) {
            count += read;
        }
    }
    heard.truncate(count);
    (heard, tls.peer_certificates().map(|shown| shown[0].to_vec()))
}

/// A hello as `docs/protocol-peers.md` has it.
fn hello(client: &str, server: &str) -> Vec<u8> {
    let mut hello = b"WSTMPEER\x04\0\x04\0\x01\0\0\0".to_vec();
    hello.extend(RUN.0);
    hello.extend([0; 32]);
    for (name, end) in [(client, 320), (server, 576)] {
        hello.push(name.len() as u8);
        hello.extend(name.as_bytes());
        hello.resize(end, 0);
    }
    hello
}

#[tokio::test]
async fn who_does_not_check_and_shows_another_key_or_none_hears_nothing() {
    let (mut listener, peer) = listen("b", limits()).await;
    for shown in [Some(key(&[9; 32])), None] {
        let stranger = tokio::task::spawn_blocking(move || heard(peer.address, shown, &hello("a", "b")));
        let (heard, _) = nobody_gets_in(&mut listener, stranger).await.unwrap();
        assert_eq!(heard, b"");
    }
    // The last may not be counted yet.
    let (errors, _) = listener.turned_away();
    assert!(errors[0].message().contains("does not know the secret"), "{}", errors[0]);
}

#[tokio::test]
async fn another_version_is_told_from_nonsense() {
    let (mut listener, peer) = listen("b", limits()).await;
    let mut newer = hello("a", "b");
    newer[8] = 5;
    newer[10] = 6;
    let mut garbled = hello("a", "b");
    garbled[13] = 2;
    let mut posing = hello("a", "b");
    posing[40] = 1; // a membership, where there are no certificates
    for (bytes, status) in [(newer, 1), (garbled, 6), (vec![b'x'; 576], 6), (posing, 4)] {
        let said = tokio::task::spawn_blocking(move || heard(peer.address, Some(key(&SECRET)), &bytes));
        let (answer, _) = nobody_gets_in(&mut listener, said).await.unwrap();
        assert_eq!((answer.len(), &answer[..8], answer[10]), (48, &b"WSTMPEER"[..], status));
    }
}

/// A client written from the specification alone.
#[tokio::test]
async fn the_wire_is_as_specified() {
    let (mut listener, peer) = listen("b", limits()).await;
    let said = [&hello("somebody", "b")[..], b"\x05\0\0\0hello"].concat();
    let client = tokio::task::spawn_blocking(move || heard(peer.address, Some(key(&SECRET)), &said));
    let mut server = listener.accept().await;
    assert_eq!(server.peer().as_str(), "somebody");
    assert_eq!(server.receive(5).await.unwrap(), b"hello");
    server.send(b"ok").await.unwrap();
    drop(server);
    let (heard, from) = client.await.unwrap();
    let answer = [&b"WSTMPEER\x04\0\0"[..], &[0; 37], b"\x02\0\0\0ok"].concat();
    assert_eq!((heard, from.unwrap()), (answer, key(&SECRET).cert[0].to_vec()));
}
