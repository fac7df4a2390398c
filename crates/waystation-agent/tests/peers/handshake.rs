//! Who is let in, over real sockets: those who know the secret, mean this host and this run, and nobody else.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use crate::peers::*;
use hkdf::Hkdf;
use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use waystation_agent::peers::{Connection, Credentials, Limits, Listener, Name, Peer, Purpose};
use waystation_agent::{Kind, Result};
use waystation_format::slot::Id;

async fn connect(peer: &Peer, credentials: &Credentials) -> Result<Connection> {
    Connection::connect(peer, credentials, Purpose::Control, LONG).await
}

/// A hello as `docs/protocol-peers.md` has it.
fn hello(client: &str, server: &str) -> Vec<u8> {
    let mut hello = b"WSTMPEER\x03\0\x03\0\x01\0\0\0".to_vec();
    hello.extend(RUN.0);
    hello.extend([0x11; 32]);
    for (name, end) in [(client, 320), (server, 576)] {
        hello.push(name.len() as u8);
        hello.extend(name.as_bytes());
        hello.resize(end, 0);
    }
    hello
}

#[tokio::test]
async fn two_agents_of_a_job_speak_to_each_other() {
    let (mut listener, peer) = listen("b", limits()).await;
    let credentials = credentials("a");
    let (mut server, client) = gets_in(&mut listener, connect(&peer, &credentials)).await;
    let mut client = client.unwrap();
    assert_eq!((server.peer().as_str(), server.purpose()), ("a", Purpose::Control));
    assert_eq!(client.peer().as_str(), "b");
    client.write_all(b"question").await.unwrap();
    client.shutdown().await.unwrap();
    let mut said = String::new();
    server.read_to_string(&mut said).await.unwrap();
    assert_eq!(said, "question");
    server.write_all(b"answer").await.unwrap();
    server.shutdown().await.unwrap();
    said.clear();
    client.read_to_string(&mut said).await.unwrap();
    assert_eq!(said, "answer");
    assert_eq!(listener.connected(), 1);
    drop(server);
    assert_eq!(listener.connected(), 0);
}

#[tokio::test]
async fn strangers_are_refused_and_told_why() {
    let (mut listener, peer) = listen("b", limits()).await;
    let elsewhere = Peer { name: Name::new("c").unwrap(), ..peer.clone() };
    let cases = [
        (&peer, credentials_of("a", RUN, &[0x5f; 32]), Kind::InvalidInput, "has another secret"),
        (&peer, credentials_of("a", RUN, &SECRET[..31]), Kind::InvalidInput, "has another secret"),
        (&peer, credentials_of("a", Id([2; 16]), &SECRET), Kind::Conflict, "belongs to another run"),
        (&elsewhere, credentials("a"), Kind::InvalidInput, "that of another host"),
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
    assert!(errors[0].message().contains("does not know the secret"), "{}", errors[0]);
    assert_eq!(errors[0].context("client"), Some("a"));
}

#[tokio::test]
async fn another_version_is_told_from_nonsense() {
    let (mut listener, peer) = listen("b", limits()).await;
    let mut newer = hello("a", "b");
    newer[8] = 4;
    newer[10] = 5;
    let mut garbled = hello("a", "b");
    garbled[13] = 1;
    for (bytes, status) in [(newer, 1), (garbled, 6), (vec![b'x'; 576], 6)] {
        let answer = async {
            let mut stream = TcpStream::connect(peer.address).await.unwrap();
            stream.write_all(&bytes).await.unwrap();
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer).await.unwrap();
            answer
        };
        let answer = nobody_gets_in(&mut listener, answer).await;
        assert_eq!((answer.len(), &answer[..8], answer[10]), (48, &b"WSTMPEER"[..], status));
    }
}

/// What a false server makes of the proof that it was sent.
type Answer = fn(&[u8]) -> Vec<u8>;

/// A server that answers as the test says, once.
async fn false_server(answer: Answer) -> SocketAddr {
    let listener = TcpListener::bind(any_port()).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut heard = vec![0; 576];
        stream.read_exact(&mut heard).await.unwrap();
        let mut challenge = b"WSTMPEER\x03\0".to_vec();
        challenge.resize(48, 0);
        stream.write_all(&challenge).await.unwrap();
        let mut proof = [0; 32];
        stream.read_exact(&mut proof).await.unwrap();
        stream.write_all(&answer(&proof)).await.unwrap();
        drop(stream.read_u8().await);
    });
    address
}

#[tokio::test]
async fn who_does_not_know_the_secret_cannot_pose_as_a_server() {
    // With a proof of its own making, with the client's own, reflected, and as one that changes its mind.
    let answers: [Answer; 4] = [
        |_| vec![0; 48],
        |proof| [&[0; 16], proof].concat(),
        |proof| [&[0, 1], &[0; 14][..], proof].concat(),
        |proof| [&[77], &[0; 15][..], proof].concat(),
    ];
    for answer in answers {
        let peer = Peer { name: Name::new("b").unwrap(), address: false_server(answer).await };
        let refused = connect(&peer, &credentials("a")).await.unwrap_err();
        assert!(matches!(refused.kind(), Kind::InvalidInput | Kind::Corrupt), "{refused}");
    }
}

#[tokio::test]
async fn what_a_client_has_sent_opens_nothing_again() {
    let (mut listener, peer) = listen("b", limits()).await;
    // A position that is never reached: nothing is changed.
    let (address, mut recorded) = changing_proxy(peer.address, Way::ToServer, usize::MAX).await;
    let credentials = credentials("a");
    let through = Peer { address, ..peer.clone() };
    let (mut server, client) = gets_in(&mut listener, connect(&through, &credentials)).await;
    let mut client = client.unwrap();
    client.write_all(b"order").await.unwrap();
    client.shutdown().await.unwrap();
    server.read_to_end(&mut Vec::new()).await.unwrap();
    drop((server, client));
    let recorded = recorded.recv().await.unwrap();
    assert!(recorded.len() > 576 + 32);
    let replayed = async {
        let mut stream = TcpStream::connect(peer.address).await.unwrap();
        stream.write_all(&recorded).await.unwrap();
        let mut answers = Vec::new();
        // The server may have closed the connection before it has read all.
        drop(stream.read_to_end(&mut answers).await);
        answers
    };
    let answers = nobody_gets_in(&mut listener, replayed).await;
    assert!(answers.len() <= 48 + 48 && answers.get(48).is_none_or(|&status| status == 4), "{answers:?}");
}

#[tokio::test]
async fn whoever_changes_a_byte_on_the_way_is_noticed() {
    // Versions, purpose, run, random number, names and their padding; the proof; the answers.
    let to_server = [0, 8, 10, 12, 14, 16, 40, 64, 65, 200, 320, 321, 575, 576, 607];
    let to_client = [0, 8, 10, 12, 16, 47, 48, 50, 64, 95];
    let positions = to_server.map(|at| (Way::ToServer, at)).into_iter();
    for (way, position) in positions.chain(to_client.map(|at| (Way::ToClient, at))) {
        let (mut listener, peer) = listen("b", limits()).await;
        let (address, _recorded) = changing_proxy(peer.address, way, position).await;
        let through = Peer { address, ..peer };
        let credentials = credentials("a");
        let connected = async {
            // Where the client fails last, the server has let it in by then.
            tokio::select! {
                connected = connect(&through, &credentials) => connected,
                () = async { loop { drop(listener.accept().await) } } => unreachable!(),
            }
        };
        let refused = connected.await;
        assert!(refused.is_err(), "{way:?} at {position}");
    }
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
    // One of them even begins, and stops in the middle of its first message.
    waiting[0].write_all(&hello("a", "b")[..575]).await.unwrap();
    let credentials = credentials("a");
    let (_server, client) = gets_in(&mut listener, connect(&peer, &credentials)).await;
    client.unwrap();
    let (errors, count) = listener.turned_away();
    assert_eq!((count, errors.len()), (46, 16));
    assert_eq!(errors[0].kind(), Kind::Unavailable);
}

#[tokio::test]
async fn the_silent_are_sent_away_in_the_end() {
    let short = Limits { handshake: Duration::from_millis(20), unproven: 1, ..limits() };
    let (mut listener, peer) = listen("b", short).await;
    let mut silent = TcpStream::connect(peer.address).await.unwrap();
    silent.write_all(b"WSTM").await.unwrap();
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

fn derive(transcript: Option<&[u8]>, purpose: &[u8]) -> Hmac<Sha256> {
    let mut key = [0; 32];
    let info = [purpose, transcript.unwrap_or_default()].concat();
    Hkdf::<Sha256>::new(Some(b"waystation peers 1"), &SECRET).expand(&info, &mut key).unwrap();
    Hmac::new_from_slice(&key).unwrap()
}

fn sign(mut key: Hmac<Sha256>, parts: &[&[u8]]) -> Vec<u8> {
    parts.iter().for_each(|part| key.update(part));
    key.finalize().into_bytes().to_vec()
}

/// A client written from the specification alone.
#[tokio::test]
async fn the_wire_is_as_specified() {
    let (mut listener, peer) = listen("b", limits()).await;
    let client = async {
        let mut stream = TcpStream::connect(peer.address).await.unwrap();
        let hello = hello("somebody", "b");
        stream.write_all(&hello).await.unwrap();
        let mut challenge = [0; 48];
        stream.read_exact(&mut challenge).await.unwrap();
        assert_eq!(&challenge[..16], b"WSTMPEER\x03\0\0\0\0\0\0\0");
        let transcript = Sha256::digest([&b"waystation peers 1"[..], &hello, &challenge].concat());
        let proof = |side: &[u8]| sign(derive(None, b"proof"), &[side, &transcript]);
        stream.write_all(&proof(b"client")).await.unwrap();
        let mut answer = [0; 48];
        stream.read_exact(&mut answer).await.unwrap();
        assert_eq!(answer, *[&[0; 16], &proof(b"server")[..]].concat());
        let key = |side: &[u8]| derive(Some(&transcript), &[b"session ", side, b" "].concat());
        let mut record = b"\x05\0\0\0hello".to_vec();
        record.extend(&sign(key(b"client"), &[&0u64.to_le_bytes(), &record])[..16]);
        stream.write_all(&record).await.unwrap();
        let end = sign(key(b"client"), &[&1u64.to_le_bytes(), &[0; 4]]);
        stream.write_all(&[&[0; 4], &end[..16]].concat()).await.unwrap();
        let mut said = Vec::new();
        stream.read_to_end(&mut said).await.unwrap();
        let expected = sign(key(b"server"), &[&0u64.to_le_bytes(), b"\x02\0\0\0ok"]);
        assert_eq!(said[..22], [b"\x02\0\0\0ok", &expected[..16]].concat());
        assert_eq!(said.len(), 22 + 20);
    };
    let server = async {
        let mut connection = listener.accept().await;
        assert_eq!(connection.peer().as_str(), "somebody");
        let mut said = String::new();
        connection.read_to_string(&mut said).await.unwrap();
        assert_eq!(said, "hello");
        connection.write_all(b"ok").await.unwrap();
        connection.shutdown().await.unwrap();
    };
    tokio::join!(client, server);
}
