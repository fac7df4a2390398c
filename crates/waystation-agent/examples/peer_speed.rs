//! A version from the slot of one agent to that of another, in another process, beside a plain loop of
//! `sendfile` and `recv` that verifies nothing, in turns, over loopback.
//!
//! `cargo run --release -p waystation-agent --example peer_speed -- [DIRECTORY] [MIB] [ROUNDS]` prints the
//! median and the worst of each in GB/s, its ratio to the plain loop, and the CPU seconds of both processes
//! for a GB. A transfer is timed from the call until the other agent has verified all of it in its slot,
//! sealed it and said so; the plain loop until the other process has received the last byte.
#![allow(clippy::unwrap_used)]

use std::env;
use std::fs::{self, DirBuilder, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use waystation_agent::peers::bulk::{BulkService, Intake, Order, Pacer, Route, replicate};
use waystation_agent::peers::{
    ControlClient, ControlService, Credentials, Encryption, Identity, Limits, Name, Peer, Secret, Server,
    Services, Tls,
};
use waystation_agent::process;
use waystation_agent::store::{Config, Store, slot_bytes};
use waystation_agent::writer::{Placed, SlotWriter};
use waystation_format::slot::{Entry, Id, ItemBox, Key, State, Tenant, Version, encode_contents};
use waystation_io::aligned::AlignedBlock;
use waystation_io::copy::BoxCopy;
use waystation_io::segment::Segment;

const ROLE: &str = "WAYSTATION_PEER_SPEED_ROLE";
const RUN: Id = Id([1; 16]);
const CHUNK_BYTES: u64 = 4 << 20;

fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let number = |index: usize| arguments.get(index).map(|text| text.parse::<usize>().unwrap());
    let parent = PathBuf::from(arguments.first().map_or("/dev/shm", String::as_str));
    let nbytes = (number(1).unwrap_or(1024) as u64) << 20;
    match env::var(ROLE).ok().as_deref() {
        None => measure(&parent, nbytes, number(2).unwrap_or(5)),
        Some("plain") => receive(&parent, nbytes, Encryption::BetweenMachines),
        Some("encrypted") => receive(&parent, nbytes, Encryption::Always),
        Some("sink") => sink(nbytes),
        Some(other) => unreachable!("{other}"),
    }
}

/// Another process of this program, which tells its address.
struct Other {
    child: Child,
    address: SocketAddr,
}

impl Other {
    fn start(role: &str, directory: &Path, nbytes: u64) -> Self {
        let mut command = Command::new(env::current_exe().unwrap());
        command.arg(directory).arg((nbytes >> 20).to_string()).env(ROLE, role);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        Self { child, address: line.trim_end().parse().unwrap() }
    }

    fn cpu(&self) -> Duration {
        cpu_of(&format!("/proc/{}/stat", self.child.id()))
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        drop(self.child.stdin.take()); // which it waits for
        self.child.wait().unwrap();
    }
}

fn any_port() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, 0).into()
}

/// Tells the address, and waits until nobody needs it any more.
fn serve_until_closed(address: SocketAddr) {
    println!("{address}");
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}

/// User and system time of a process, from the kernel's table.
fn cpu_of(path: &str) -> Duration {
    let text = fs::read_to_string(path).unwrap();
    let fields = text.rsplit_once(')').unwrap().1.split_ascii_whitespace();
    let ticks: u64 = fields.skip(11).take(2).map(|field| field.parse::<u64>().unwrap()).sum();
    Duration::from_millis(10 * ticks)
}

fn contents(nbytes: u64) -> Vec<u8> {
    let item_box = ItemBox { array_shape: vec![nbytes], offset: vec![0], shape: vec![nbytes] };
    let (path, dtype) = ("state".to_owned(), "uint8".to_owned());
    encode_contents(&[Entry { path, dtype, item_box, offset: 0, length: nbytes }], nbytes).unwrap()
}

fn open(directory: &Path, nbytes: u64) -> Arc<Store> {
    let config = Config {
        directory: directory.to_owned(),
        run: RUN,
        topology: Id([0; 16]),
        slot_count: 2,
        slot_bytes: slot_bytes(contents(nbytes).len() as u64, nbytes).unwrap(),
        versions_per_shard: 2,
        cap_bytes: u64::MAX,
        allow_disk: false,
        threads: 1,
    };
    Arc::new(Store::open(&config).unwrap().0)
}

fn credentials(name: &str, encryption: Encryption) -> Credentials {
    let secret = Secret::new(*b"no secret at all").unwrap();
    let identity = Identity { name: Name::new(name).unwrap(), run: RUN };
    Credentials { identity, tls: Arc::new(Tls::of_secret(&secret).unwrap()), encryption }
}

fn order() -> Order {
    Order { chunk_bytes: CHUNK_BYTES, pacer: Pacer::new(), stall: Duration::from_secs(60) }
}

/// An agent that takes versions; they are committed by the next that is offered.
fn receive(directory: &Path, nbytes: u64, encryption: Encryption) {
    let store = open(directory, nbytes);
    let intake = Arc::new(Intake::new(Arc::clone(&store)).unwrap());
    let order = order();
    let committing = Arc::clone(&store);
    let deliver = move |_: &Name, _: &[u8]| {
        for header in committing.inventory() {
            if let State::Sealed(tenant, _) = &header.state {
                committing.commit(tenant.key.version)?;
            }
        }
        Ok(())
    };
    let control = ControlService::new(store, Box::new(deliver));
    let services = Services { bulk: BulkService::new(intake, order), control, turned_away: |_| {} };
    let server =
        Server::start(any_port(), credentials("receiver", encryption), Limits::default(), services).unwrap();
    serve_until_closed(server.address());
}

/// Receives as many bytes as there are, into memory that was used before, for each connection.
fn sink(nbytes: u64) {
    let listener = TcpListener::bind(any_port()).unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let memory = AlignedBlock::map(nbytes as usize).unwrap();
        memory.populate(nbytes as usize, 1);
        // SAFETY: the block is mapped, and nobody else knows of it.
        let bytes = unsafe { std::slice::from_raw_parts_mut(memory.address().as_ptr(), nbytes as usize) };
        loop {
            let mut stream = listener.accept().unwrap().0;
            stream.read_exact(bytes).unwrap();
            stream.write_all(&[1]).unwrap();
        }
    });
    serve_until_closed(address);
}

/// The version of a step in the sender's store, committed.
fn save(store: &Store, source: &AlignedBlock, nbytes: u64, step: u64) -> Key {
    let key = Key { run: RUN, shard: "0/1".to_owned(), version: Version { epoch: 0, step } };
    let contents = contents(nbytes);
    let contents_bytes = contents.len() as u64;
    let writer = process::current().unwrap();
    let tenant = Tenant { key: key.clone(), contents_bytes, data_bytes: nbytes, writer };
    let grant = store.begin(&tenant).unwrap();
    let mut writer = SlotWriter::open(&grant).unwrap();
    let address = source.address().as_ptr() as usize;
    let whole = BoxCopy::new(&[nbytes], 1, &[0], &[nbytes], address, &[1]).unwrap();
    let part = Placed { offset: 0, segment: Segment::new(nbytes, vec![whole]) };
    // SAFETY: the source outlives the call, and nobody writes to it.
    unsafe { writer.fill(&contents, &[part], 2, &|| false) }.unwrap();
    drop(writer);
    store.seal(grant.slot, grant.ticket).unwrap();
    store.commit(key.version).unwrap();
    key
}

/// What one way of sending came to: seconds, and CPU seconds of both processes.
#[derive(Default)]
struct Series(Vec<(f64, f64)>);

fn timed(series: &mut Series, other: &Other, body: impl FnOnce()) {
    let cpu = || (cpu_of("/proc/self/stat") + other.cpu()).as_secs_f64();
    let (before, start) = (cpu(), Instant::now());
    body();
    series.0.push((start.elapsed().as_secs_f64(), cpu() - before));
}

fn send_plainly(path: &Path, sink: &Other, nbytes: u64) {
    let file = File::open(path).unwrap();
    let mut stream = TcpStream::connect(sink.address).unwrap();
    let mut offset = 0;
    while offset < nbytes {
        let left = (nbytes - offset).min(CHUNK_BYTES) as usize;
        rustix::fs::sendfile(&stream, &file, Some(&mut offset), left).unwrap();
    }
    stream.read_exact(&mut [0]).unwrap();
}

fn measure(parent: &Path, nbytes: u64, rounds: usize) {
    let directories =
        ["sender", "plain", "encrypted"].map(|name| parent.join(format!("waystation-peer-speed-{name}")));
    for directory in &directories {
        DirBuilder::new().mode(0o700).create(directory).unwrap();
    }
    let receivers = ["plain", "encrypted"];
    let receivers = [0, 1].map(|way| Other::start(receivers[way], &directories[1 + way], nbytes));
    let sink = Other::start("sink", &directories[1], nbytes);
    let store = open(&directories[0], nbytes);
    let source = AlignedBlock::map(nbytes as usize).unwrap();
    for offset in (0..nbytes as usize).step_by(8) {
        let value = (offset as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17);
        // SAFETY: within the block, which is page-aligned.
        unsafe { source.address().as_ptr().add(offset).cast::<u64>().write(value) };
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let ways = [Encryption::BetweenMachines, Encryption::Always].map(|way| credentials("sender", way));
    let mut series = [
        "sendfile and recv, nothing verified",
        "one connection, plain",
        "one connection, encrypted",
        "two connections, plain",
        "two connections, encrypted",
    ]
    .map(|name| (name, Series::default()));
    let mut step = 0;
    for _ in 0..rounds {
        let plain = directories[0].join("slot-00000");
        timed(&mut series[0].1, &sink, || send_plainly(&plain, &sink, nbytes));
        for (number, (_, series)) in series.iter_mut().skip(1).enumerate() {
            step += 1;
            let key = save(&store, &source, nbytes, step);
            let receiver = &receivers[number % 2];
            let peer = Peer { name: Name::new("receiver").unwrap(), address: receiver.address };
            let route = Route {
                peer: peer.clone(),
                credentials: ways[number % 2].clone(),
                order: order(),
                streams: 1 + number / 2,
                attempts: 1,
                connect_within: Duration::from_secs(10),
            };
            timed(series, receiver, || {
                runtime.block_on(replicate(&store, &key, &route)).unwrap();
            });
            // Nothing is compared here: what was acknowledged has the digest of what was sent.
            let calls = ControlClient::new(peer, ways[number % 2].clone(), Duration::from_secs(60));
            runtime.block_on(calls.deliver(b"commit")).unwrap();
        }
    }
    drop((receivers, sink, store));
    directories.iter().for_each(|directory| fs::remove_dir_all(directory).unwrap());
    report(&mut series, nbytes);
}

fn report(series: &mut [(&str, Series)], nbytes: u64) {
    let gigabytes = nbytes as f64 / 1e9;
    println!("{} MiB over loopback, two processes: median (worst) in GB/s", nbytes >> 20);
    println!("{:36} {:>6} {:>8}  {:>5}  CPU s/GB", "", "GB/s", "", "ratio");
    let mut limit = f64::NAN;
    for (name, Series(rounds)) in series {
        rounds.sort_by(|one, other| one.0.total_cmp(&other.0));
        let speed = |index: usize| gigabytes / rounds[index].0;
        let (median, worst) = (speed(rounds.len() / 2), speed(rounds.len() - 1));
        limit = if limit.is_nan() { median } else { limit };
        let mut cpu: Vec<f64> = rounds.iter().map(|round| round.1 / gigabytes).collect();
        cpu.sort_by(f64::total_cmp);
        let ratio = median / limit;
        println!("{name:36} {median:6.2} ({worst:6.2})  {ratio:5.2}  {:8.2}", cpu[cpu.len() / 2]);
    }
}
