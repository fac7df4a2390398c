//! A process of the program, as the agent of its host knows it: saves shards to slots, and finds them again.
//!
//! `link` is one connection, `saving` how a version gets into a slot, `kept` the mappings that the next version
//! uses again. Failures: no agent (a call waits for one, so long and no longer); an agent that dies (the next
//! one is asked again: requests may be repeated); an agent that was replaced by that of another run (Conflict);
//! a slot that is given away between being found and being opened (it is looked for again). Invariants: nothing
//! of a slot is touched but through [`SlotWriter`](crate::writer::SlotWriter) and [`SlotReader`], which hold the
//! locks; a forked child has no part in its parent's client. Nothing here needs more than threads that wait.

mod kept;
mod link;
mod saving;

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use waystation_format::slot::{Id, Key, Version, Writer};
use waystation_format::{Error, Kind, Result};

use self::kept::Kept;
use self::link::{Failure, Link};
pub use self::saving::{Saved, Shard};
use crate::local::message::{Beginning, Reply, Request, SlotReport, Standing, Status, Wish};
use crate::process;
use crate::reader::SlotReader;
use crate::store::SlotFile;

/// Pauses between two attempts to reach an agent: the first, and the longest.
const PAUSES: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(250)];
/// How often a version is looked for that is found in a slot and gone when that is opened.
const SEARCHES: usize = 8;

/// The agent of a store, seen from a process of its host. Threads share it, and do not wait for each other.
#[derive(Debug)]
pub struct Client {
    directory: PathBuf,
    run: Option<Id>,
    versions_per_shard: usize,
    patience: Duration,
    identity: Writer,
    idle: Mutex<Vec<Link>>,
    kept: Mutex<Kept>,
}

impl Client {
    /// Greets the agent of the store in a directory; waits as long as `patience` for one to be there, here
    /// and in all later calls. `stop` is asked now and then whether to give up.
    ///
    /// Unavailable if there is none, Conflict if it is that of another run, Unsupported if it is of another
    /// release that speaks otherwise.
    pub fn connect(
        directory: &Path,
        run: Option<Id>,
        patience: Duration,
        stop: &dyn Fn() -> bool,
    ) -> Result<Self> {
        let directory = std::path::absolute(directory)
            .map_err(|error| Error::from_io(error, "find the directory of an agent", directory))?;
        let identity = process::current()?;
        let (idle, kept) = (Mutex::default(), Mutex::default());
        let mut client = Self { directory, run, versions_per_shard: 0, patience, identity, idle, kept };
        let link = client.link(Instant::now() + patience, stop)?;
        // From now on it is this run's agent, or none.
        client.run = Some(link.welcome().run.0);
        client.versions_per_shard = link.welcome().versions_per_shard as usize;
        client.lock_idle().push(link);
        Ok(client)
    }

    /// The run that the agent serves.
    pub fn run(&self) -> Id {
        self.run.unwrap_or_default()
    }

    /// The store, and how its agent found it.
    pub fn status(&self, stop: &dyn Fn() -> bool) -> Result<Status> {
        match self.ask(&Request::Status {}, stop)? {
            Reply::Status(status) => Ok(status),
            _ => Err(unexpected()),
        }
    }

    /// The numbers of the agent, in Prometheus' exposition format.
    pub fn metrics(&self, stop: &dyn Fn() -> bool) -> Result<String> {
        match self.ask(&Request::Metrics {}, stop)? {
            Reply::Metrics(text) => Ok(text),
            _ => Err(unexpected()),
        }
    }

    /// All slots.
    pub fn inventory(&self, stop: &dyn Fn() -> bool) -> Result<Vec<SlotReport>> {
        match self.ask(&Request::Inventory {}, stop)? {
            Reply::Inventory(slots) => Ok(slots),
            _ => Err(unexpected()),
        }
    }

    /// Asks for something that concerns slots; returns them.
    pub fn change(&self, request: &Request, stop: &dyn Fn() -> bool) -> Result<Vec<u32>> {
        match self.ask(request, stop)? {
            Reply::Slots(slots) => Ok(slots),
            Reply::Done {} => Ok(Vec::new()),
            _ => Err(unexpected()),
        }
    }

    /// Refuses writers of lower epochs from now on; returns the epoch that holds.
    pub fn raise_epoch(&self, epoch: u64, stop: &dyn Fn() -> bool) -> Result<u64> {
        match self.ask(&Request::RaiseEpoch { epoch }, stop)? {
            Reply::Epoch(epoch) => Ok(epoch),
            _ => Err(unexpected()),
        }
    }

    /// How things stand between the agents of several hosts. Unsupported if there are no others.
    pub fn standing(&self, stop: &dyn Fn() -> bool) -> Result<Standing> {
        match self.ask(&Request::Standing {}, stop)? {
            Reply::Standing(standing) => Ok(standing),
            _ => Err(unexpected()),
        }
    }

    /// Has the agents begin a program; done once [`Client::standing`] says that its orders are here.
    ///
    /// Fenced if a newer program is known.
    pub fn begin(&self, beginning: Beginning, stop: &dyn Fn() -> bool) -> Result<Standing> {
        match self.ask(&Request::Begin(beginning), stop)? {
            Reply::Standing(standing) => Ok(standing),
            _ => Err(unexpected()),
        }
    }

    /// Keeps a version from being overwritten, as long as the reader exists.
    ///
    /// NotFound if it is not here, Corrupt if its header or its tables are damaged, or its file is gone.
    pub fn hold(&self, shard: &str, version: Version, stop: &dyn Fn() -> bool) -> Result<SlotReader> {
        self.hold_found(Request::Find, shard, version, stop)
    }

    /// The same, of a version that is brought from another host if it is not here; as long as that takes.
    pub fn bring(&self, shard: &str, version: Version, stop: &dyn Fn() -> bool) -> Result<SlotReader> {
        self.hold_found(Request::Bring, shard, version, stop)
    }

    fn hold_found(
        &self,
        request: fn(Wish) -> Request,
        shard: &str,
        version: Version,
        stop: &dyn Fn() -> bool,
    ) -> Result<SlotReader> {
        let Version { epoch, step } = version;
        let request = request(Wish { shard: shard.to_owned(), epoch, step });
        let key = Key { run: self.run(), shard: shard.to_owned(), version };
        let mut searches = 1;
        loop {
            let slot = match self.ask(&request, stop)? {
                Reply::Found { slot } => slot,
                Reply::Coming {} => continue,
                _ => return Err(unexpected()),
            };
            match SlotReader::open(&self.slot_path(slot), &key) {
                // It is on its way to another tenant; the agent knows by now whether there is another copy.
                Err(error) if error.kind() == Kind::NotFound && searches < SEARCHES => searches += 1,
                // The agent goes on saying that it is there: then its file is gone, or another one.
                Err(error) if error.kind() == Kind::NotFound => {
                    let message = format!(
                        "the agent says that a slot holds this version, and its file does not ({})",
                        error.message()
                    );
                    return Err(self.at(Error::new(Kind::Corrupt, message).with("shard", shard)));
                }
                other => return other,
            }
        }
    }

    fn slot_path(&self, slot: u32) -> PathBuf {
        self.directory.join(SlotFile::name(slot))
    }

    /// Asks until somebody answers or patience is at its end.
    fn ask(&self, request: &Request, stop: &dyn Fn() -> bool) -> Result<Reply> {
        self.ask_for(request, self.patience, stop)
    }

    fn ask_for(&self, request: &Request, patience: Duration, stop: &dyn Fn() -> bool) -> Result<Reply> {
        self.check_process()?;
        let until = Instant::now() + patience;
        loop {
            let link = self.lock_idle().pop();
            let mut link = match link {
                Some(link) => link,
                None => self.link(until, stop)?,
            };
            match link.ask(request, until, stop) {
                Ok(reply) => {
                    self.lock_idle().push(link);
                    return Ok(reply);
                }
                Err(Failure::Refused(error)) => {
                    self.lock_idle().push(link);
                    return Err(error);
                }
                // The agent is gone, and with it all other links that were made to it.
                Err(Failure::Lost(error)) if Instant::now() >= until => return Err(self.at(error)),
                Err(Failure::Lost(_)) => self.lock_idle().clear(),
                Err(Failure::Stopped) => return Err(stopped()),
            }
        }
    }

    /// A new connection, as soon as there is somebody to connect to.
    fn link(&self, until: Instant, stop: &dyn Fn() -> bool) -> Result<Link> {
        let mut pause = PAUSES[0];
        loop {
            match Link::open(&self.directory, &self.identity, self.run, until, stop) {
                Ok(link) => return Ok(link),
                Err(Failure::Refused(error)) => return Err(self.at(error)),
                Err(Failure::Lost(error)) if Instant::now() + pause >= until => {
                    let message = format!(
                        "no agent answers in '{}'; start one there with 'waystation agent run' ({})",
                        self.directory.display(),
                        error.message()
                    );
                    return Err(self.at(Error::new(Kind::Unavailable, message)));
                }
                Err(Failure::Lost(_)) => {}
                Err(Failure::Stopped) => return Err(stopped()),
            }
            if stop() {
                return Err(stopped());
            }
            sleep(pause);
            pause = PAUSES[1].min(2 * pause);
        }
    }

    fn check_process(&self) -> Result<()> {
        if std::process::id() == self.identity.process {
            return Ok(());
        }
        let message = "this client belongs to the parent of this forked process; make one here";
        Err(Error::new(Kind::InvalidInput, message))
    }

    fn at(&self, error: Error) -> Error {
        error.with("path", self.directory.display().to_string())
    }

    fn lock_idle(&self) -> MutexGuard<'_, Vec<Link>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        if self.check_process().is_err() {
            // Not this process's: what was mapped there is not mapped here, and something else may be.
            std::mem::forget(std::mem::take(self.kept.get_mut().unwrap_or_else(PoisonError::into_inner)));
        }
    }
}

fn unexpected() -> Error {
    Error::new(Kind::Internal, "the agent gave an answer to another question; please report this")
}

fn stopped() -> Error {
    Error::new(Kind::Cancelled, "the operation was cancelled")
}
