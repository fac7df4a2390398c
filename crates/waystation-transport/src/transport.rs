//! One host's transport: one address, its offers, and its connections to others.
//!
//! Invariants: nothing listens but the address that was configured; once it is closed, nobody waits here, and
//! whatever memory it was given is told to be released as soon as no thread of it can touch it.

use std::collections::HashMap;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use tokio::runtime::Builder;
use tokio::sync::oneshot;
use tokio::time::sleep;
use waystation_format::slot::Id;
use waystation_format::{Error, Kind, Result};
use waystation_peers::{
    Connection, Credentials, Encryption, End, Identity, Limits, Listener, Name, Peer, Purpose, Secret, Tls,
};

use crate::asking::Asking;
use crate::connection::split;
use crate::fetch::{Fetch, Target, again};
use crate::held::{Block, Lease, Ledger};
use crate::key::{Key, Scope};
use crate::offers::Offers;
use crate::outbox::Outbox;
use crate::serving;

/// The run that all hosts of a cluster name: their secret tells clusters apart.
const RUN: Id = Id([0; 16]);

/// How often it is looked for what is to be told.
const TICK: Duration = Duration::from_secs(5);

/// A transport that runs.
pub struct Transport {
    shared: Arc<Shared>,
    address: String,
    stop: Mutex<Option<(oneshot::Sender<()>, JoinHandle<()>)>>,
}

struct Shared {
    credentials: Credentials,
    reads_memory: bool,
    ledger: Arc<Ledger>,
    offers: Offers,
    peers: Mutex<Peers>,
    consumers: Mutex<HashMap<u64, End>>,
    next_consumer: AtomicU64,
}

#[derive(Default)]
struct Peers {
    asking: HashMap<String, Arc<Asking>>,
    /// Hosts that are lost, and why.
    lost: HashMap<String, Error>,
    is_closed: bool,
}

/// A fetch that somebody waits for. It is given up when this is dropped.
pub struct Waiting {
    fetch: Arc<Fetch>,
    asking: Option<Arc<Asking>>,
}

impl Transport {
    /// Begins to listen, as a host of that name; whether it reads the memory of other hosts of this machine
    /// is up to the caller.
    ///
    /// InvalidInput if the address is not one that others can connect to, the name is none, or the secret is
    /// too short; Conflict if another process listens there.
    pub fn start(name: &str, secret: &[u8], listen_at: SocketAddr, reads_memory: bool) -> Result<Self> {
        if listen_at.ip().is_unspecified() {
            let message = "a transport listens on one address, by which others reach it, not on all";
            return Err(Error::new(Kind::InvalidInput, message).with("address", listen_at.to_string()));
        }
        let identity = Identity { name: Name::new(name)?, run: RUN };
        let tls = Arc::new(Tls::of_secret(&Secret::new(secret)?)?);
        let credentials = Credentials { identity, tls, encryption: Encryption::default() };
        let ledger = Arc::new(Ledger::default());
        let shared = Arc::new(Shared {
            credentials,
            reads_memory,
            offers: Offers::new(Arc::clone(&ledger)),
            ledger,
            peers: Mutex::default(),
            consumers: Mutex::default(),
            next_consumer: AtomicU64::new(0),
        });
        let (bound, stop, thread) = listen(&shared, listen_at)?;
        let address = format!("{name}@{bound}");
        Ok(Self { shared, address, stop: Mutex::new(Some((stop, thread))) })
    }

    /// What others fetch from here by: the name, and where it listens.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// How many bytes and blocks are offered here and not fetched yet.
    pub fn held(&self) -> (u64, u64) {
        self.shared.ledger.held()
    }

    /// Waits until less is held than a limit.
    pub fn wait_below(&self, limit_bytes: u64, within: Duration) -> Result<()> {
        self.shared.ledger.wait_below(limit_bytes, within)
    }

    /// Waits for numbers of memory that is not needed any more; nothing once it is closed and all have been
    /// told.
    pub fn released(&self) -> Option<Vec<u64>> {
        self.shared.ledger.released()
    }

    /// Offers blocks.
    ///
    /// # Safety
    ///
    /// The memory of each block is readable, and does not change, until its number is released.
    pub unsafe fn offer(&self, blocks: Vec<(Key, Block)>) -> Result<()> {
        if lock(&self.shared.peers).is_closed {
            return Err(closed());
        }
        // SAFETY: the caller's promise.
        unsafe { self.shared.offers.offer(blocks) }
    }

    /// Asks the host at an address for blocks, whose memory has a number.
    ///
    /// InvalidInput if that is no address; whatever else goes wrong, who waits is told.
    ///
    /// # Safety
    ///
    /// The targets are writable, and nobody else uses them, until the number is released.
    pub unsafe fn fetch(
        &self,
        address: &str,
        targets: Vec<Target>,
        number: u64,
        within: Duration,
    ) -> Result<Waiting> {
        let peer = parse(address)?;
        // SAFETY: the caller's promise.
        let fetch = Arc::new(unsafe { Fetch::new(targets, Instant::now() + within) });
        let lease = Arc::new(Lease::new(number, &self.shared.ledger));
        let asking = if fetch.is_over() { None } else { self.ask(address, &peer, &fetch, &lease)? };
        // It may have ended before the request was there to be failed.
        if let Some(error) = self.end_of(&fetch) {
            fetch.fail(error);
        }
        Ok(Waiting { fetch, asking })
    }

    fn end_of(&self, fetch: &Fetch) -> Option<Error> {
        fetch.targets().iter().find_map(|target| self.shared.offers.end_of(&target.key))
    }

    /// Asks through the connection to a host, or a new one; nothing if the fetch has failed.
    fn ask(
        &self,
        address: &str,
        peer: &Peer,
        fetch: &Arc<Fetch>,
        lease: &Arc<Lease>,
    ) -> Result<Option<Arc<Asking>>> {
        loop {
            let mut peers = lock(&self.shared.peers);
            let refusal = if peers.is_closed { Some(closed()) } else { peers.lost.get(address).map(again) };
            if let Some(error) = refusal {
                fetch.fail(error);
                return Ok(None);
            }
            let Some(asking) = peers.asking.get(address).map(Arc::clone) else {
                let asking =
                    Asking::new(peer.clone(), self.shared.credentials.clone(), self.shared.reads_memory);
                return peers.connect(address, asking, fetch, lease).map(Some);
            };
            drop(peers);
            if asking.ask(fetch, lease)? {
                return Ok(Some(asking));
            }
            let mut peers = lock(&self.shared.peers);
            if peers.asking.get(address).is_some_and(|found| Arc::ptr_eq(found, &asking)) {
                peers.asking.remove(address);
            }
        }
    }

    /// A run has ended, or failed: nothing of it is offered any more, and whoever waits for it is told why.
    pub fn end(&self, scope: Scope, error: &Error) {
        self.shared.offers.end(scope, error);
        let all: Vec<_> = lock(&self.shared.peers).asking.values().map(Arc::clone).collect();
        all.iter().for_each(|asking| asking.end_scope(scope, error));
    }

    /// A host is lost: whoever waits for it, or comes to, is told why.
    pub fn lose(&self, address: &str, error: &Error) {
        let mut peers = lock(&self.shared.peers);
        peers.lost.entry(address.to_owned()).or_insert_with(|| again(error));
        let asking = peers.asking.remove(address);
        drop(peers);
        asking.inspect(|asking| asking.end(error));
    }

    /// Ends all connections, lets go of all offers, and fails whoever waits.
    pub fn close(&self) {
        let mut peers = lock(&self.shared.peers);
        peers.is_closed = true;
        let asking = std::mem::take(&mut peers.asking);
        drop(peers);
        asking.values().for_each(|asking| asking.end(&closed()));
        if let Some((stop, thread)) = lock(&self.stop).take() {
            stop.send(()).ok(); // it may have ended by itself
            drop(thread.join()); // one that has panicked has printed why
        }
        lock(&self.shared.consumers).values().for_each(End::now);
        self.shared.offers.clear();
        self.shared.ledger.close();
    }
}

impl Peers {
    /// Begins a connection, and asks for the first blocks through it.
    fn connect(
        &mut self,
        address: &str,
        asking: Asking,
        fetch: &Arc<Fetch>,
        lease: &Arc<Lease>,
    ) -> Result<Arc<Asking>> {
        let asking = Arc::new(asking);
        asking.ask(fetch, lease)?;
        let running = Arc::clone(&asking);
        let failed = |error| Error::new(Kind::Unavailable, format!("a thread cannot be begun: {error}"));
        let builder = thread::Builder::new().name("waystation-fetch".to_owned());
        builder.spawn(move || running.run()).map_err(failed)?;
        self.asking.insert(address.to_owned(), Arc::clone(&asking));
        Ok(asking)
    }
}

impl Drop for Transport {
    fn drop(&mut self) {
        self.close();
    }
}

impl Waiting {
    /// Whether there is an outcome.
    pub fn is_over(&self) -> bool {
        self.fetch.is_over() || self.fetch.deadline() <= Instant::now()
    }

    /// Waits for the outcome, at most so long; nothing if there is none yet.
    pub fn wait(&self, within: Duration) -> Option<Result<()>> {
        let left = self.fetch.deadline().saturating_duration_since(Instant::now());
        if let Some(outcome) = self.fetch.wait(within.min(left)) {
            return Some(outcome);
        }
        if within < left {
            return None;
        }
        let targets = self.fetch.targets();
        let first = targets.first().map_or_else(String::new, |target| target.key.to_string());
        let message = format!("{} blocks have not come before their deadline", targets.len());
        self.fetch.fail(Error::new(Kind::Unavailable, message).with("first", first));
        self.fetch.wait(Duration::ZERO)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if let Some(asking) = self.asking.as_ref().filter(|_| !self.fetch.is_whole()) {
            self.fetch.fail(Error::new(Kind::Cancelled, "nobody waits for these blocks any more"));
            asking.give_up(&self.fetch);
        }
    }
}

/// Listens in a thread of its own until it is told to stop.
fn listen(
    shared: &Arc<Shared>,
    listen_at: SocketAddr,
) -> Result<(SocketAddr, oneshot::Sender<()>, JoinHandle<()>)> {
    let failed = |error| Error::new(Kind::Unavailable, format!("a transport cannot be started: {error}"));
    let runtime = Builder::new_current_thread().enable_all().build().map_err(failed)?;
    let (stop, mut stopped) = oneshot::channel();
    let (sender, bound) = mpsc::sync_channel(1);
    let shared = Arc::clone(shared);
    let run = move || {
        runtime.block_on(async move {
            let bound = Listener::bind(listen_at, shared.credentials.clone(), Limits::default()).await;
            let mut listener = match bound {
                Ok(listener) => listener,
                Err(error) => return drop(sender.send(Err(error))),
            };
            drop(sender.send(listener.address()));
            loop {
                tokio::select! {
                    _ = &mut stopped => return,
                    connection = listener.accept() => accept(&shared, connection),
                    () = sleep(TICK) => {}
                }
                if let Some(error) = listener.turned_away_to_tell() {
                    // Of a host of a cluster that is its log; there is nobody to tell that it failed.
                    let line = format!("waystation: the transport has turned a client away: {error}\n");
                    drop(io::stderr().lock().write_all(line.as_bytes()));
                }
            }
        });
    };
    let builder = thread::Builder::new().name("waystation-offer".to_owned());
    let thread = builder.spawn(run).map_err(failed)?;
    let panicked = || Error::new(Kind::Internal, "the thread of a listener has panicked; please report this");
    let address = bound.recv().unwrap_or_else(|_| Err(panicked()))?;
    Ok((address, stop, thread))
}

/// Serves a host that has proven itself, in a thread of its own. What fails, that host sees and says.
fn accept(shared: &Arc<Shared>, connection: Connection) {
    if connection.purpose() != Purpose::Blocks {
        return;
    }
    let Ok((incoming, outgoing, end, place)) = split(connection) else { return };
    let id = shared.next_consumer.fetch_add(1, Ordering::Relaxed);
    lock(&shared.consumers).insert(id, end.clone());
    let own = Arc::clone(shared);
    let serve = move || {
        let outbox = Arc::new(Outbox::new(id));
        serving::serve(&own.offers, &outbox, incoming, outgoing, &end);
        lock(&own.consumers).remove(&id);
        drop(place);
    };
    if thread::Builder::new().name("waystation-serve".to_owned()).spawn(serve).is_err() {
        lock(&shared.consumers).remove(&id);
    }
}

/// The host of an address: `NAME@IP:PORT`.
fn parse(address: &str) -> Result<Peer> {
    let parts = address.rsplit_once('@');
    let parsed =
        parts.and_then(|(name, at)| Some(Peer { name: Name::new(name).ok()?, address: at.parse().ok()? }));
    parsed.ok_or_else(|| {
        Error::new(Kind::InvalidInput, format!("'{address}' is no address of a transport: NAME@IP:PORT"))
    })
}

fn closed() -> Error {
    Error::new(Kind::Cancelled, "the transport is closed")
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each change is whole, so what a poisoned lock has is right.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
