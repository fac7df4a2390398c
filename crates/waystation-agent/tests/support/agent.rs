//! The agent as a process, and processes that talk to it.
#![allow(clippy::unwrap_used, dead_code)] // each test uses a part of it

use std::io::{BufRead, BufReader, Read};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use waystation_agent::client::{Client, Saved, Shard};
use waystation_agent::local::frame::{self, REPLY_LIMIT_BYTES, REQUEST_LIMIT_BYTES};
use waystation_agent::local::message::{Hello, PROTOCOL, Reply, Request};
use waystation_agent::local::place;
use waystation_agent::process;
use waystation_agent::reader::SlotReader;
use waystation_format::slot::Version;
use waystation_io::local::Local;
use waystation_io::read::plan::Plan;
use waystation_io::read::{self, Options};

use super::{arrays, config, data_of, key, layout, parts};

/// Long enough for anything that does happen, on a machine that is busy.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// An agent that runs.
pub struct Agent {
    child: Child,
    pub ready: serde_json::Value,
}

/// How it is started for the store of the tests.
pub fn agent_command(directory: &Path) -> Command {
    let wanted = config(directory);
    let mut command = Command::new(env!("CARGO_BIN_EXE_waystation-agent"));
    command
        .arg("run")
        .arg("--directory")
        .arg(directory)
        .arg(format!("--run-id={}", wanted.run))
        .arg(format!("--topology={}", wanted.topology))
        .arg(format!("--slots={}", wanted.slot_count))
        .arg(format!("--versions={}", wanted.versions_per_shard - 1))
        .arg(format!("--slot-bytes={}", wanted.slot_bytes))
        .arg(format!("--memory-cap-bytes={}", wanted.cap_bytes))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    command
}

impl Agent {
    /// Starts one, and waits until it is ready.
    pub fn start(directory: &Path) -> Self {
        let mut child = agent_command(directory).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let ready = serde_json::from_str(&line).unwrap_or_else(|error| unreachable!("{error}: {line}"));
        Self { child, ready }
    }

    pub fn process(&self) -> u32 {
        self.child.id()
    }

    pub fn adoption(&self, kind: &str) -> u64 {
        self.ready["status"]["adoption"][kind].as_u64().unwrap()
    }

    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Tells it to end.
    pub fn end(mut self) -> ExitStatus {
        signal(&self.child, libc::SIGTERM);
        self.child.wait().unwrap()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // It may have been waited for.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// How an agent ends that cannot do its work: its exit code, and what it says.
pub fn refusal(mut command: Command) -> (Option<i32>, String) {
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    (child.wait().unwrap().code(), said)
}

pub fn signal(child: &Child, signal: i32) {
    // SAFETY: the child was not waited for, so the id is its own.
    assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
}

pub fn never() -> impl Fn() -> bool {
    || false
}

pub fn client(directory: &Path) -> Arc<Client> {
    Arc::new(Client::connect(directory, None, PATIENCE, &never()).unwrap())
}

/// Saves the arrays of a shard and step.
pub fn save(client: &Arc<Client>, shard: &str, at: Version) -> waystation_agent::Result<Saved> {
    let arrays = arrays(shard, at.step);
    let (contents, data_bytes) = layout();
    let wanted = Shard { name: shard.to_owned(), version: at, contents, data_bytes, parts: parts(&arrays) };
    // SAFETY: the arrays live until the job is joined.
    let job = unsafe { client.save(wanted, Some(2)) }?;
    job.join();
    job.shared().take_outcome().unwrap()
}

/// Asserts that a version can be held and read, to the last bit.
pub fn assert_readable(client: &Client, shard: &str, at: Version) {
    let reader = client.hold(shard, at, &never()).unwrap();
    assert_eq!(load(&reader), data_of(&arrays(shard, at.step)), "{shard} at {at:?}");
}

/// All data of a slot, read by the engine.
pub fn load(reader: &SlotReader) -> Vec<u8> {
    let mut target = vec![0; reader.tenant().data_bytes as usize];
    let words: Vec<i64> = reader
        .entries()
        .iter()
        .flat_map(|entry| {
            let address = target.as_mut_ptr() as usize + entry.offset as usize;
            [0, reader.chunk_offset(entry) as i64, entry.length as i64, 0, address as i64]
        })
        .collect();
    let plan = Plan::new(vec![reader.read_file()], &words).unwrap();
    // The file of a slot goes on after the data.
    let options = Options { may_be_longer: true, ..Options::default() };
    // SAFETY: the target outlives the job, which is joined here.
    let job = unsafe { read::start(Local::by_path(), plan, options) }.unwrap();
    job.join();
    job.shared().take_outcome().unwrap().unwrap();
    target
}

/// The states of all slots, as the agent says.
pub fn slot_states(client: &Client) -> Vec<String> {
    client.inventory(&never()).unwrap().into_iter().map(|slot| slot.state).collect()
}

/// Waits until something is so that will be.
pub fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < PATIENCE, "{what}: not so after {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// One end of a connection, without a client.
pub struct Conversation(pub UnixStream);

impl Conversation {
    pub fn open(directory: &Path) -> Self {
        let stream = place::connect(directory).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Self(stream)
    }

    /// Opens one and greets.
    pub fn greeted(directory: &Path) -> Self {
        let mut conversation = Self::open(directory);
        let hello = Hello { protocol: PROTOCOL, process: process::current().unwrap().into(), run: None };
        assert!(matches!(conversation.ask(&Request::Hello(hello)), Reply::Welcome(_)));
        conversation
    }

    pub fn ask(&mut self, request: &Request) -> Reply {
        frame::write(&mut self.0, request, REQUEST_LIMIT_BYTES).unwrap();
        self.hear().unwrap()
    }

    /// The next answer; `None` if the agent has closed the connection, also on what it has not read.
    pub fn hear(&mut self) -> Option<Reply> {
        match frame::read(&mut self.0, REPLY_LIMIT_BYTES) {
            Ok(body) => Some(frame::parse(&body?).unwrap()),
            Err(error) if error.context("errno") == Some("104") => None,
            Err(error) => unreachable!("{error}"),
        }
    }
}

/// What is in the store at the end: the newest committed version of a shard, which must be whole.
pub fn newest_committed(directory: &Path, shard: &str) -> Option<u64> {
    let (store, _) = waystation_agent::store::Store::open(&config(directory)).unwrap();
    let newest = store.newest_committed(&key(shard, 0)).map(|version| version.step);
    if let Some(step) = newest {
        super::assert_whole(&store, shard, step);
    }
    newest
}
