//! Hosts that know the secret and break the rules: whoever deals with them gets a typed error, and nothing is
//! written to where it does not belong.
#![allow(clippy::unwrap_used)]

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tokio::runtime::Runtime;
use waystation_format::checksum::crc64;
use waystation_format::slot::Id;
use waystation_peers::{
    Connection, Credentials, Encryption, End, FrameReader, FrameWriter, Identity, Incoming, Limits, Listener,
    Name, Outgoing, Peer, Purpose, Secret, Tls,
};
use waystation_transport::message::{
    Ask, Frame, FrameKind, Home, Place, decode_asks, encode_asks, encode_words,
};
use waystation_transport::{Block, Error, Key, Kind, Scope, Target, Transport};

const SECRET: [u8; 32] = [0x5e; 32];
const LONG: Duration = Duration::from_secs(60);
const KEY: Key = Key { run: 1, epoch: 2, transfer: 3 };
const NBYTES: usize = 300_000;

fn any_port() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, 0).into()
}

fn credentials(name: &str) -> Credentials {
    let identity = Identity { name: Name::new(name).unwrap(), run: Id([0; 16]) };
    let tls = Arc::new(Tls::of_secret(&Secret::new(SECRET).unwrap()).unwrap());
    Credentials { identity, tls, encryption: Encryption::default() }
}

fn transport() -> Transport {
    Transport::start("honest", &SECRET, any_port(), true).unwrap()
}

/// A connection as the hostile side has it.
struct Wire {
    reader: FrameReader<Incoming>,
    writer: FrameWriter<Outgoing>,
    end: End,
    _runtime: Arc<Runtime>,
}

impl Wire {
    fn new(connection: Connection, runtime: &Arc<Runtime>) -> Self {
        let (incoming, outgoing, end, _) = connection.split(Some(LONG)).unwrap();
        let (reader, writer) = (FrameReader::new(incoming), FrameWriter::new(outgoing));
        Self { reader, writer, end, _runtime: Arc::clone(runtime) }
    }

    fn send(&mut self, kind: FrameKind, number: u64, message: Vec<u8>) {
        self.send_bulk(kind, number, 0, message, &[]);
    }

    fn send_bulk(&mut self, kind: FrameKind, transfer: u64, offset: u64, message: Vec<u8>, bulk: &[u8]) {
        let frame = Frame { kind, transfer, offset, message, bulk_bytes: bulk.len() };
        drop(self.writer.write_with(&frame, bulk)); // the other side may have gone
    }

    fn read(&mut self) -> Result<Frame, Error> {
        self.reader.read()
    }
}

/// What somebody gets who fetches a block from a host that answers so.
fn fetched(answer: impl Fn(&mut Wire, &Ask) + Send + 'static) -> (Result<(), Error>, Vec<u8>) {
    let (sender, address) = std::sync::mpsc::channel();
    let hostile: JoinHandle<()> = thread::spawn(move || {
        let runtime = Arc::new(tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap());
        let connection = runtime.block_on(async {
            let limits = Limits { handshake: LONG, ..Limits::default() };
            let mut listener = Listener::bind(any_port(), credentials("hostile"), limits).await.unwrap();
            sender.send(listener.address().unwrap()).unwrap();
            listener.accept().await
        });
        let mut wire = Wire::new(connection, &runtime);
        wire.send(FrameKind::Home, 0, Home::default().encode());
        let asks = decode_asks(&wire.read().unwrap().message).unwrap();
        answer(&mut wire, &asks[0]);
        while wire.read().is_ok() {}
    });
    let honest = transport();
    let mut memory = vec![0u8; NBYTES + 64];
    let target = Target { key: KEY, address: memory.as_mut_ptr().addr(), nbytes: NBYTES };
    let address = format!("hostile@{}", address.recv().unwrap());
    // SAFETY: the memory lives until the transport has released it, below.
    let waiting = unsafe { honest.fetch(&address, vec![target], 7, LONG) }.unwrap();
    let outcome = waiting.wait(LONG).unwrap();
    drop(waiting);
    honest.close();
    assert_eq!(honest.released(), Some(vec![7]));
    assert_eq!(honest.released(), None);
    hostile.join().unwrap();
    assert!(memory[NBYTES..].iter().all(|&byte| byte == 0), "something was written past the end");
    (outcome, memory)
}

fn sums(bytes: &[u8]) -> Vec<u8> {
    encode_words(bytes.chunks(256 << 10).map(crc64))
}

#[test]
fn a_block_comes_as_it_was_sent() {
    let (outcome, memory) = fetched(|wire, ask| {
        let bytes = vec![9; NBYTES];
        wire.send_bulk(FrameKind::Block, 12_345, 0, sums(&bytes), &bytes); // nobody asked for it
        wire.send_bulk(FrameKind::Block, ask.number, 0, sums(&bytes), &bytes);
    });
    outcome.unwrap();
    assert!(memory[..NBYTES].iter().all(|&byte| byte == 9));
}

#[test]
fn who_breaks_the_rules_is_not_believed() {
    type Answer = fn(&mut Wire, &Ask);
    let hostile: [(Answer, Kind); 9] = [
        (
            |wire, ask| {
                wire.send_bulk(FrameKind::Block, ask.number, 0, sums(&[1; NBYTES + 1]), &[1; NBYTES + 1])
            },
            Kind::Corrupt,
        ),
        (
            |wire, ask| wire.send_bulk(FrameKind::Block, ask.number, 1, sums(&[1; 100]), &[1; 100]),
            Kind::Corrupt,
        ),
        (
            |wire, ask| wire.send_bulk(FrameKind::Block, ask.number, u64::MAX, sums(&[1; 100]), &[1; 100]),
            Kind::Corrupt,
        ),
        (|wire, ask| wire.send_bulk(FrameKind::Block, ask.number, 0, Vec::new(), &[1; 100]), Kind::Corrupt),
        (|wire, ask| wire.send(FrameKind::Block, ask.number, Vec::new()), Kind::Corrupt),
        (
            |wire, ask| wire.send_bulk(FrameKind::Block, ask.number, 0, sums(&[2; NBYTES]), &[1; NBYTES]),
            Kind::Corrupt,
        ),
        (
            |wire, ask| wire.send(FrameKind::Place, ask.number, Place { address: 8, mark: [8, 8] }.encode()),
            Kind::Corrupt,
        ),
        (|wire, _| wire.send(FrameKind::Ask, 0, Vec::new()), Kind::Corrupt),
        (|wire, ask| wire.send(FrameKind::Failed, ask.number, b"\x01gone".to_vec()), Kind::NotFound),
    ];
    for (number, (answer, kind)) in hostile.into_iter().enumerate() {
        let (outcome, _) = fetched(answer);
        assert_eq!(outcome.unwrap_err().kind(), kind, "{number}");
    }
}

#[test]
fn a_connection_that_is_cut_within_a_block_fails_who_waits() {
    let (outcome, _) = fetched(|wire, ask| {
        wire.send_bulk(FrameKind::Block, ask.number, 0, sums(&[1; 1000]), &[1; 1000]);
        wire.end.now();
    });
    // It is asked for again; nobody listens there any more, or the handshake is not answered.
    assert_eq!(outcome.unwrap_err().kind(), Kind::Unavailable);
}

/// What a host sees of a connection on which it says something.
fn said(kind: FrameKind, message: Vec<u8>, bulk: &[u8]) -> Result<Frame, Error> {
    let honest = transport();
    let (_, at) = honest.address().split_once('@').unwrap();
    let peer = Peer { name: Name::new("honest").unwrap(), address: at.parse().unwrap() };
    let runtime = Arc::new(tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap());
    let credentials = credentials("hostile");
    let connected = Connection::connect(&peer, &credentials, Purpose::Blocks, LONG);
    let connection = runtime.block_on(connected).unwrap();
    let mut wire = Wire::new(connection, &runtime);
    assert_eq!(wire.read().unwrap().kind, FrameKind::Home);
    wire.send_bulk(kind, 0, 0, message, bulk);
    wire.send(FrameKind::Got, 0, encode_words([77])); // what was never asked for is passed over
    let bytes = [5u8; 10];
    let block = Block { address: bytes.as_ptr().addr(), nbytes: bytes.len(), number: 1 };
    // SAFETY: the bytes live until the transport is closed.
    unsafe { honest.offer(vec![(KEY, block)]) }.unwrap();
    wire.send(FrameKind::Ask, 0, encode_asks(&[Ask { number: 1, key: KEY, nbytes: 10, can_read: false }]));
    let answer = wire.read();
    honest.end(Scope { run: KEY.run, epoch: None }, &Error::new(Kind::Cancelled, "over"));
    drop(wire);
    honest.close();
    // Whoever sends the block has it until it is sent, which the other side may know before.
    while honest.released().is_some() {}
    assert_eq!(honest.held(), (0, 0));
    answer
}

#[test]
fn a_consumer_that_breaks_the_rules_loses_its_connection() {
    let cancelled = said(FrameKind::Cancel, encode_words([1, 2, 3]), &[]).unwrap();
    assert_eq!((cancelled.kind, cancelled.transfer, cancelled.bulk_bytes), (FrameKind::Block, 1, 10));
    for (kind, message, bulk) in [
        (FrameKind::Ask, vec![0; 47], &b""[..]),
        (FrameKind::Ask, Vec::new(), b"bulk"),
        (FrameKind::Got, vec![0; 9], b""),
        (FrameKind::Home, Vec::new(), b""),
        (FrameKind::Place, Vec::new(), b""),
    ] {
        assert_eq!(said(kind, message, bulk).unwrap_err().kind(), Kind::Unavailable);
    }
}
