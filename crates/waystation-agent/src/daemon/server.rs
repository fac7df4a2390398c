//! The agent's socket and who is connected: a thread for each connection, and one for each process.
//!
//! A host has few trainers, each with few connections, and an answer may take as long as it takes to verify a
//! slot: so threads that wait, rather than events. Failures: no greeting, a frame that is not one, a message
//! without meaning (the connection is told and ends, no other notices); a process that dies (its slots are
//! freed); one that stops reading (its connection ends when an answer does not get through). Invariants: so
//! many connections and no more; nobody waits for another's answer.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle, sleep};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use waystation_format::slot::{State, Writer};
use waystation_format::{Error, Kind, Result};

use super::answer::Answers;
use super::cluster::Cluster;
use super::log;
use super::processes::{Processes, await_death, check_peer, death_of};
use super::stop::{Stop, Woken};
use crate::local::frame::{self, REPLY_LIMIT_BYTES, REQUEST_LIMIT_BYTES};
use crate::local::message::{
    AdoptionReport, Hello, HexId, PROTOCOL, Refusal, Reply, Request, Status, Welcome,
};
use crate::local::place::{self, SOCKET};
use crate::local::timed::Timed;
use crate::store::Store;

/// How many connections there may be at a time.
const MOST_CONNECTIONS: usize = 512;
/// How long a message may be on its way once it has begun.
const MESSAGE_TIME: Duration = Duration::from_secs(10);
/// How long to wait when the system has no more descriptors or threads.
const PAUSE: Duration = Duration::from_millis(50);

/// An agent at work.
#[derive(Debug)]
pub struct Server {
    shared: Arc<Shared>,
}

/// What all threads have in common.
#[derive(Debug)]
struct Shared {
    answers: Answers,
    processes: Processes,
    stop: Stop,
    connection_count: AtomicUsize,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Server {
    /// Serves a store, which agents of other hosts have a say in, if there are any.
    pub fn start(store: Arc<Store>, adoption: AdoptionReport, cluster: Option<Cluster>) -> Result<Self> {
        let listener = place::listen(store.path())?;
        listener
            .set_nonblocking(true)
            .map_err(|error| Error::from_io(error, "listen on", &store.path().join(SOCKET)))?;
        let shared = Arc::new(Shared {
            answers: Answers::new(store, adoption, cluster),
            processes: Processes::default(),
            stop: Stop::new()?,
            connection_count: AtomicUsize::new(0),
            threads: Mutex::default(),
        });
        shared.watch_writers()?;
        let inner = Arc::clone(&shared);
        shared.spawn("waystation-accept", move || inner.accept(&listener))?;
        Ok(Self { shared })
    }

    /// Where it listens.
    pub fn socket(&self) -> PathBuf {
        self.shared.answers.store().path().join(SOCKET)
    }

    /// What it says of itself.
    pub fn status(&self) -> Status {
        self.shared.answers.status(self.shared.processes.count())
    }

    /// What makes the text of its numbers, as long as somebody has that.
    pub(super) fn metrics(&self) -> Arc<dyn Fn() -> String + Send + Sync> {
        let shared = Arc::clone(&self.shared);
        Arc::new(move || shared.answers.metrics(shared.processes.count()))
    }

    /// Ends: finishes what is being answered, and leaves the store as it is.
    pub fn stop(self) {
        self.shared.stop.now();
        loop {
            let threads = std::mem::take(&mut *self.shared.lock_threads());
            if threads.is_empty() {
                return;
            }
            for thread in threads {
                // A thread that panicked has ended as well; its connection is gone.
                drop(thread.join());
            }
        }
    }
}

impl Shared {
    fn lock_threads(&self) -> std::sync::MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn spawn(&self, name: &str, body: impl FnOnce() + Send + 'static) -> Result<()> {
        let mut threads = self.lock_threads();
        threads.retain(|thread| !thread.is_finished());
        let thread = Builder::new().name(name.to_owned()).spawn(body).map_err(|error| {
            Error::new(Kind::Unavailable, format!("the system grants no more threads: {error}"))
        })?;
        threads.push(thread);
        Ok(())
    }

    /// Watches those who were writing when an earlier agent died: they may go on without saying anything.
    fn watch_writers(self: &Arc<Self>) -> Result<()> {
        for header in self.answers.store().inventory() {
            if let State::Writing(tenant) = &header.state {
                match self.watch(tenant.writer) {
                    Err(error) if error.kind() == Kind::NotFound => self.bury(&tenant.writer),
                    other => other?,
                }
            }
        }
        Ok(())
    }

    /// Has the death of a process noticed, unless it cannot be or is already.
    fn watch(self: &Arc<Self>, process: Writer) -> Result<()> {
        let Some(death) = death_of(&process)? else { return Ok(()) };
        if !self.processes.add(process)? {
            return Ok(());
        }
        let inner = Arc::clone(self);
        let spawned = self.spawn("waystation-watch", move || {
            if await_death(&death, &inner.stop) {
                inner.bury(&process);
            }
        });
        if spawned.is_err() {
            self.processes.remove(&process);
        }
        spawned
    }

    /// Frees what a dead process was writing.
    fn bury(&self, process: &Writer) {
        self.processes.remove(process);
        let told =
            |slots: &str| [("process", process.process.to_string()), ("freed_slots", slots.to_owned())];
        match self.answers.store().reap() {
            Ok(slots) => log::line("process_died", &told(&format!("{slots:?}"))),
            // They are tried again when somebody wants a slot.
            Err(error) => log::error("process_died", &error.with("process", process.process.to_string())),
        }
    }

    fn accept(self: &Arc<Self>, listener: &UnixListener) {
        while self.stop.wait_for(listener.as_fd()) == Woken::Ready {
            match listener.accept() {
                Ok((stream, _)) => self.admit(stream),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    log::line("not_accepted", &[("message", error.to_string())]);
                    sleep(PAUSE);
                }
            }
        }
    }

    fn admit(self: &Arc<Self>, stream: UnixStream) {
        let seat = Seat::take(self);
        let Some(seat) = seat else {
            let full = Error::new(Kind::Unavailable, "the agent has too many connections; close some");
            return refuse(&stream, &full.with("limit", MOST_CONNECTIONS.to_string()));
        };
        let spawned = self.spawn("waystation-serve", move || {
            if let Err(error) = seat.0.converse(&stream) {
                refuse(&stream, &error);
                log::error("connection_ended", &error);
            }
        });
        if let Err(error) = spawned {
            log::error("not_accepted", &error);
            sleep(PAUSE);
        }
    }

    /// Answers until the other side, or the agent, is done.
    fn converse(self: &Arc<Self>, stream: &UnixStream) -> Result<()> {
        stream
            .set_nonblocking(false)
            .map_err(|error| Error::from_io(error, "set up a connection", &PathBuf::from(SOCKET)))?;
        check_peer(stream, None)?;
        let Some(process) = self.greet(stream)? else { return Ok(()) };
        let is_there = || is_connected(stream);
        while self.stop.wait_for(stream.as_fd()) == Woken::Ready {
            let Some(request) = receive(stream)? else { return Ok(()) };
            let count = self.processes.count();
            let reply = self.answers.answer(&process, count, request, &is_there);
            send(stream, &reply.unwrap_or_else(|error| Reply::Refused(Refusal::from(&error))))?;
        }
        Ok(())
    }

    /// Learns who is there; `None` if nobody is any more.
    fn greet(self: &Arc<Self>, stream: &UnixStream) -> Result<Option<Writer>> {
        let hello = match receive(stream)? {
            None => return Ok(None),
            Some(Request::Hello(hello)) => hello,
            Some(_) => {
                return Err(Error::new(Kind::InvalidInput, "a connection begins with a greeting"));
            }
        };
        let record = self.answers.store().record();
        check_hello(&hello, HexId(record.run))?;
        let process = Writer::from(hello.process);
        check_peer(stream, Some(&process))?;
        self.watch(process)?;
        let versions_per_shard = record.versions_per_shard;
        send(
            stream,
            &Reply::Welcome(Welcome { protocol: PROTOCOL, run: HexId(record.run), versions_per_shard }),
        )?;
        Ok(Some(process))
    }
}

/// The right to be connected.
struct Seat(Arc<Shared>);

impl Seat {
    fn take(shared: &Arc<Shared>) -> Option<Self> {
        let taken = shared.connection_count.fetch_add(1, Ordering::Relaxed);
        let seat = Self(Arc::clone(shared));
        (taken < MOST_CONNECTIONS).then_some(seat)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.connection_count.fetch_sub(1, Ordering::Relaxed);
    }
}

fn check_hello(hello: &Hello, run: HexId) -> Result<()> {
    if hello.protocol != PROTOCOL {
        let message = format!(
            "the process speaks version {} of the agent's protocol, this agent version {PROTOCOL}; install \
             the same release of both",
            hello.protocol
        );
        return Err(Error::new(Kind::Unsupported, message));
    }
    match hello.run {
        Some(wanted) if wanted != run => Err(Error::new(
            Kind::Conflict,
            "the agent is that of another run; give each run its own directory",
        )
        .with("found", run.0.to_string())
        .with("wanted", wanted.0.to_string())),
        _ => Ok(()),
    }
}

fn receive(stream: &UnixStream) -> Result<Option<Request>> {
    let body = frame::read(&mut Timed::new(stream, MESSAGE_TIME), REQUEST_LIMIT_BYTES)?;
    body.map(|body| frame::parse(&body)).transpose()
}

fn send(stream: &UnixStream, reply: &Reply) -> Result<()> {
    frame::write(&mut Timed::new(stream, MESSAGE_TIME), reply, REPLY_LIMIT_BYTES)
}

/// Whether the other side has not closed its end.
fn is_connected(stream: &UnixStream) -> bool {
    let mut polled = [PollFd::from_borrowed_fd(stream.as_fd(), PollFlags::RDHUP)];
    poll(&mut polled, Some(&Timespec::default())).is_ok() && polled[0].revents().is_empty()
}

/// Says why a connection ends, if that still gets through.
fn refuse(stream: &UnixStream, error: &Error) {
    drop(send(stream, &Reply::Refused(Refusal::from(error))));
}
