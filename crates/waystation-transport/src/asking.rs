//! The end of a connection that wants blocks: who fetches asks through it, one thread takes what comes.
//!
//! Failures: the connection is lost (it is made anew, and what has not come whole is asked for again; if that
//! brings nothing either, all who wait fail); the producer breaks the rules (all fail). Invariant: once it
//! has ended, nobody can begin to wait here.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::runtime::Builder;
use waystation_format::{Error, Kind, Result};
use waystation_peers::{Connection, Credentials, End, Peer, Purpose};

mod answers;

use self::answers::Answers;
use crate::connection::{Outgoing, split};
use crate::fetch::{Fetch, again};
use crate::held::Lease;
use crate::key::Scope;
use crate::memory::OtherMemory;
use crate::message::{Ask, FrameKind, Home, MOST_ASKS, MOST_NUMBERS, encode_asks, encode_words, unexpected};
use crate::serving::MOST_OPEN;

/// How long a host may take to answer a connection.
const CONNECT: Duration = Duration::from_secs(10);

/// What this side wants of one other host.
pub struct Asking {
    peer: Peer,
    credentials: Credentials,
    reads_memory: bool,
    /// Taken before `state` where both are.
    outgoing: Mutex<Option<Outgoing>>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    wanted: HashMap<u64, Wanted>,
    next: u64,
    can_read: bool,
    end: Option<End>,
    /// Why nobody can wait here any more.
    failure: Option<Error>,
}

struct Wanted {
    fetch: Arc<Fetch>,
    lease: Arc<Lease>,
    target: usize,
    received: usize,
    is_asked: bool,
    can_read: bool,
}

impl Asking {
    /// What is wanted of a host; nothing yet, and no connection.
    pub fn new(peer: Peer, credentials: Credentials, reads_memory: bool) -> Self {
        Self { peer, credentials, reads_memory, outgoing: Mutex::default(), state: Mutex::default() }
    }

    /// Asks for all blocks of a fetch, whose memory comes with a lease. False if this has ended, so that another is to be asked.
    ///
    /// InvalidInput if that is more than one host may be asked for at a time.
    pub fn ask(&self, fetch: &Arc<Fetch>, lease: &Arc<Lease>) -> Result<bool> {
        let mut outgoing = lock(&self.outgoing);
        let mut state = self.lock();
        if state.failure.is_some() {
            return Ok(false);
        }
        if state.wanted.len() + fetch.targets().len() > MOST_OPEN {
            let message = format!("more than {MOST_OPEN} blocks of one host would be asked for at a time");
            return Err(Error::new(Kind::InvalidInput, message));
        }
        for target in 0..fetch.targets().len() {
            let number = state.next;
            state.next += 1;
            let (fetch, lease) = (Arc::clone(fetch), Arc::clone(lease));
            state.wanted.insert(
                number,
                Wanted { fetch, lease, target, received: 0, is_asked: false, can_read: true },
            );
        }
        if let Some(outgoing) = &mut *outgoing {
            let asks = state.take_asks();
            drop(state);
            // A connection that is lost is noticed by the thread that reads it, which asks again.
            drop(send_asks(outgoing, &asks));
        }
        Ok(true)
    }

    /// A fetch has failed, or nobody wants it any more: gives up its requests.
    pub fn give_up(&self, fetch: &Arc<Fetch>) {
        let mut outgoing = lock(&self.outgoing);
        let mut state = self.lock();
        let is_of_it = |wanted: &Wanted| Arc::ptr_eq(&wanted.fetch, fetch);
        let numbers: Vec<u64> =
            state.wanted.iter().filter(|(_, wanted)| is_of_it(wanted)).map(|(number, _)| *number).collect();
        numbers.iter().for_each(|number| drop(state.wanted.remove(number)));
        drop(state);
        if let Some(outgoing) = &mut *outgoing {
            drop(send_numbers(outgoing, FrameKind::Cancel, &numbers));
        }
    }

    /// Fails the fetches that want a block of a scope.
    pub fn end_scope(&self, scope: Scope, error: &Error) {
        let state = self.lock();
        let is_in = |wanted: &&Wanted| scope.contains(&wanted.fetch.targets()[wanted.target].key);
        let fetches: Vec<_> =
            state.wanted.values().filter(is_in).map(|wanted| Arc::clone(&wanted.fetch)).collect();
        drop(state);
        for fetch in fetches.iter().filter(|fetch| !fetch.is_over()) {
            fetch.fail(again(error));
            self.give_up(fetch);
        }
    }

    /// Ends the connection; whoever waits fails, and nobody can wait here any more.
    pub fn end(&self, error: &Error) {
        let mut state = self.lock();
        state.failure.get_or_insert_with(|| again(error));
        let left = std::mem::take(&mut state.wanted);
        state.end.take().inspect(End::now);
        drop(state);
        left.values().for_each(|wanted| wanted.fetch.fail(again(error)));
    }

    /// Connects, takes what comes until the connection ends, and connects again as long as that brings
    /// anything.
    pub fn run(&self) {
        loop {
            let mut has_brought = false;
            let error = match self.connect() {
                Ok(mut answers) => loop {
                    match answers.take() {
                        Ok(()) => has_brought = true,
                        Err(error) => break error,
                    }
                },
                Err(error) => error,
            };
            *lock(&self.outgoing) = None;
            let mut state = self.lock();
            let is_over = state.failure.is_some();
            if is_over || state.wanted.is_empty() || !has_brought || error.kind() != Kind::Unavailable {
                drop(state);
                return self.end(&self.named(error));
            }
            for wanted in state.wanted.values_mut() {
                (wanted.received, wanted.is_asked) = (0, false);
            }
        }
    }

    fn named(&self, error: Error) -> Error {
        let (name, address) = (self.peer.name.as_str(), self.peer.address);
        let message = format!("host '{name}' at {address} gives no blocks: {}", error.message());
        Error::new(error.kind(), message)
    }

    /// Makes a connection, and asks for everything that is wanted.
    fn connect(&self) -> Result<Answers<'_>> {
        let failed = |error| Error::new(Kind::Unavailable, format!("a connection cannot be begun: {error}"));
        let runtime = Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let (mut incoming, mut outgoing, end, _) = runtime.block_on(async {
            split(Connection::connect(&self.peer, &self.credentials, Purpose::Blocks, CONNECT).await?)
        })?;
        let mut state = self.lock();
        if let Some(error) = &state.failure {
            return Err(again(error));
        }
        state.end = Some(end);
        drop(state);
        let first = incoming.frame()?;
        if first.kind != FrameKind::Home || first.bulk_bytes > 0 {
            return Err(unexpected(first.kind));
        }
        let home = Home::decode(&first.message)?;
        let memory = if self.reads_memory { OtherMemory::open(&home) } else { None };
        let mut own = lock(&self.outgoing);
        let mut state = self.lock();
        state.can_read = memory.is_some();
        let asks = state.take_asks();
        drop(state);
        send_asks(&mut outgoing, &asks)?;
        *own = Some(outgoing);
        Ok(Answers::new(self, incoming, memory))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl State {
    /// The requests that are to be sent.
    fn take_asks(&mut self) -> Vec<Ask> {
        let can_read = self.can_read;
        let mut asks: Vec<Ask> = Vec::new();
        for (&number, wanted) in self.wanted.iter_mut().filter(|(_, wanted)| !wanted.is_asked) {
            wanted.is_asked = true;
            let target = &wanted.fetch.targets()[wanted.target];
            let nbytes = target.nbytes as u64;
            asks.push(Ask { number, key: target.key, nbytes, can_read: can_read && wanted.can_read });
        }
        asks.sort_unstable_by_key(|ask| ask.number);
        asks
    }
}

fn send_asks(outgoing: &mut Outgoing, asks: &[Ask]) -> Result<()> {
    asks.chunks(MOST_ASKS).try_for_each(|asks| outgoing.send(FrameKind::Ask, 0, encode_asks(asks)))
}

fn send_numbers(outgoing: &mut Outgoing, kind: FrameKind, numbers: &[u64]) -> Result<()> {
    let send = |numbers: &[u64]| outgoing.send(kind, 0, encode_words(numbers.iter().copied()));
    numbers.chunks(MOST_NUMBERS).try_for_each(send)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each change is whole, so what a poisoned lock has is right.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
