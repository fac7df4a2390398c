//! The versions that come in from other agents: a slot for each, which outlives the connections that fill it.
//!
//! Failures: a connection is lost (the slot keeps what is in place, and the next connection goes on there);
//! nobody comes back ([`Intake::expire`] frees the slot); a newer version of the shard is offered (the older
//! one is given up); the process is killed (the next one goes on with the slot, if the same version is offered before that is
//! needed). Invariants: a version has one slot, however many connections fill it; a slot is sealed
//! only when its digest is the one that the sender has signed; an intake that ends without a seal frees its
//! slot.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use waystation_format::slot::{Key, State, Sums, Tenant, Writer, digest};
use waystation_format::{Error, Kind, Result};

use super::message::Offer;
use super::receive::Sink;
use super::traffic::Traffic;
use crate::peers::End;
use crate::process;
use crate::store::{Grant, Store};
use crate::writer::{Receipt, SlotWriter};

/// All that comes in to one store.
#[derive(Debug)]
pub struct Intake {
    store: Arc<Store>,
    writer: Writer,
    incoming: Mutex<HashMap<Key, Arc<Incoming>>>,
    traffic: Arc<Traffic>,
}

/// What an offered version is met with.
#[derive(Debug)]
pub enum Opened {
    /// It is here already, whole.
    Whole(Sums),
    /// It goes here.
    Going(Arc<Incoming>),
}

/// One version that comes in.
#[derive(Debug)]
pub struct Incoming {
    store: Arc<Store>,
    offer: Offer,
    grant: Grant,
    stage: RwLock<Stage>,
    contents: Mutex<Vec<u8>>,
    connections: Mutex<Connections>,
    traffic: Arc<Traffic>,
}

#[derive(Debug)]
enum Stage {
    Filling(Box<SlotWriter>),
    /// Its slot is being verified.
    Sealing,
    /// Its slot is sealed.
    Sealed,
    /// Its slot is to be freed, or is.
    GivenUp,
}

#[derive(Debug)]
struct Connections {
    ends: HashMap<u64, End>,
    next: u64,
    /// When the last one left.
    idle_since: Instant,
}

/// A connection that fills a slot, as long as it does.
#[derive(Debug)]
pub struct Attached {
    incoming: Arc<Incoming>,
    number: u64,
}

impl Intake {
    /// What comes in to a store, filled by this process.
    pub fn new(store: Arc<Store>) -> Result<Self> {
        let (incoming, traffic) = (Mutex::default(), Arc::default());
        Ok(Self { store, writer: process::current()?, incoming, traffic })
    }

    /// The store.
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// What has come from other agents.
    pub fn traffic(&self) -> &Traffic {
        &self.traffic
    }

    /// Makes ready for a version: its slot, as far as it has come, or a new one.
    ///
    /// Conflict if something else of that name is here, Cancelled if a newer version of the shard comes in, and
    /// what [`Store::begin`] says if there is no slot.
    pub fn open(&self, offer: &Offer) -> Result<Opened> {
        let mut incoming = self.lock();
        if let Some(going) = incoming.get(&offer.key) {
            if going.offer == *offer && going.is_open() {
                return Ok(Opened::Going(Arc::clone(going)));
            }
            let message = "the version is being received with another size, or has just ended; try again";
            return Err(Error::new(Kind::Unavailable, message).with("shard", &*offer.key.shard));
        }
        if let Some(sums) = self.whole(offer)? {
            return Ok(Opened::Whole(sums));
        }
        let is_of_shard = |key: &Key| key.run == offer.key.run && key.shard == offer.key.shard;
        if incoming.keys().any(|key| is_of_shard(key) && key.version > offer.key.version) {
            let message = "a newer version of the shard comes in already";
            return Err(Error::new(Kind::Cancelled, message).with("shard", &*offer.key.shard));
        }
        incoming.retain(|key, older| !is_of_shard(key) || older.give_up().is_err());
        let tenant = Tenant {
            key: offer.key.clone(),
            contents_bytes: offer.contents_bytes,
            data_bytes: offer.data_bytes,
            writer: self.writer,
        };
        let (grant, blocks) = self.store.begin_incoming(&tenant)?;
        let writer = SlotWriter::open_at(&grant, blocks).inspect_err(|_| {
            // The first error is the one to report; a slot that stays is freed when this process ends.
            drop(self.store.abort(grant.slot, grant.ticket));
        })?;
        let going = Arc::new(Incoming {
            store: Arc::clone(&self.store),
            offer: offer.clone(),
            grant,
            stage: RwLock::new(Stage::Filling(Box::new(writer))),
            contents: Mutex::default(),
            connections: Mutex::new(Connections {
                ends: HashMap::new(),
                next: 0,
                idle_since: Instant::now(),
            }),
            traffic: Arc::clone(&self.traffic),
        });
        incoming.insert(offer.key.clone(), Arc::clone(&going));
        Ok(Opened::Going(going))
    }

    fn whole(&self, offer: &Offer) -> Result<Option<Sums>> {
        for header in self.store.inventory() {
            let (State::Sealed(tenant, sums) | State::Committed(tenant, sums)) = &header.state else {
                continue;
            };
            if tenant.key != offer.key {
                continue;
            }
            if (tenant.contents_bytes, tenant.data_bytes) != (offer.contents_bytes, offer.data_bytes) {
                let message = "another version of that name is here, of another size";
                return Err(Error::new(Kind::Conflict, message).with("slot", header.slot.to_string()));
            }
            return Ok(Some(*sums));
        }
        Ok(None)
    }

    /// Lets go of a version that has ended.
    pub fn close(&self, key: &Key) {
        let mut incoming = self.lock();
        if incoming.get(key).is_some_and(|going| !going.is_open() && going.give_up().is_ok()) {
            incoming.remove(key);
        }
    }

    /// Gives up a version that is not wanted any more; nothing happens if it does not come in.
    pub fn cancel(&self, key: &Key) -> Result<()> {
        let mut incoming = self.lock();
        incoming.get(key).map_or(Ok(()), |going| going.give_up())?;
        incoming.remove(key);
        Ok(())
    }

    /// Gives up what nobody has sent anything of for so long; returns which versions.
    pub fn expire(&self, after: Duration) -> Vec<Key> {
        let mut given_up = Vec::new();
        self.lock().retain(|key, going| {
            let is_over = going.idle().is_some_and(|idle| idle >= after) && going.give_up().is_ok();
            if is_over {
                given_up.push(key.clone());
            }
            !is_over
        });
        given_up
    }

    /// What comes in: each version, and how many of its blocks are in place.
    pub fn progress(&self) -> Vec<(Key, u64)> {
        self.lock().iter().map(|(key, going)| (key.clone(), going.blocks_in_place())).collect()
    }

    /// How many blocks of a version are in place, from the first, while it comes in.
    pub fn blocks_in_place(&self, key: &Key) -> u64 {
        self.lock().get(key).map_or(0, |going| going.blocks_in_place())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Arc<Incoming>>> {
        // Entries are put in and taken out whole.
        self.incoming.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Incoming {
    /// How large it is.
    pub fn offer(&self) -> &Offer {
        &self.offer
    }

    /// How many blocks are in place, from the first.
    pub fn blocks_in_place(&self) -> u64 {
        match &*self.stage() {
            Stage::Filling(writer) => writer.blocks_in_place(),
            Stage::Sealing | Stage::Sealed | Stage::GivenUp => 0,
        }
    }

    /// Counts a connection that is going to fill it.
    pub fn attach(self: &Arc<Self>, end: End) -> Attached {
        let mut connections = self.connections();
        let number = connections.next;
        connections.next += 1;
        connections.ends.insert(number, end);
        Attached { incoming: Arc::clone(self), number }
    }

    /// Ends its connections and frees its slot. If that cannot be freed now, it may be tried again. What is sealed,
    /// or about to be, keeps its connections: one of them has yet to tell the sender.
    fn give_up(&self) -> Result<()> {
        let sealed = |stage: &Stage| match stage {
            Stage::Sealed => Some(Ok(())),
            Stage::Sealing => Some(Err(self.ended(stage))),
            Stage::Filling(_) | Stage::GivenUp => None,
        };
        if let Some(outcome) = sealed(&self.stage()) {
            return outcome;
        }
        // Before the lock for writing, which waits for whoever receives a block.
        self.connections().ends.values().for_each(End::now);
        let mut stage = self.stage_mut();
        if let Some(outcome) = sealed(&stage) {
            return outcome;
        }
        *stage = Stage::GivenUp; // first, since nobody is given a slot that this process maps for writing
        match self.store.abort(self.grant.slot, self.grant.ticket) {
            // It was freed before.
            Err(error) if error.kind() == Kind::Fenced => Ok(()),
            freed => freed,
        }
    }

    fn is_open(&self) -> bool {
        matches!(*self.stage(), Stage::Filling(_))
    }

    fn stage(&self) -> RwLockReadGuard<'_, Stage> {
        // Stages are replaced whole.
        self.stage.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn stage_mut(&self) -> RwLockWriteGuard<'_, Stage> {
        self.stage.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn idle(&self) -> Option<Duration> {
        let connections = self.connections();
        connections.ends.is_empty().then(|| connections.idle_since.elapsed())
    }

    fn connections(&self) -> MutexGuard<'_, Connections> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why nothing more comes in.
    fn ended(&self, stage: &Stage) -> Error {
        let (kind, message) = match stage {
            Stage::GivenUp => (Kind::Cancelled, "the version is not wanted any more"),
            _ => (Kind::Unavailable, "the version is about to be sealed; ask again"),
        };
        Error::new(kind, message).with("shard", &*self.offer.key.shard)
    }

    fn check_whole(&self, writer: &SlotWriter) -> Result<()> {
        let regions = self.grant.tenant.regions();
        if regions.is_some_and(|regions| regions.block_count() == writer.blocks_in_place()) {
            return Ok(());
        }
        Err(Error::new(Kind::Corrupt, "the sender says that it has sent all, but blocks are missing")
            .with("blocks_in_place", writer.blocks_in_place().to_string()))
    }

    /// Verifies what is in the slot, as a whole, and seals it.
    fn seal(&self, sums: Sums) -> Result<Sums> {
        let reading = self.store.read(&self.offer.key)?;
        let regions = self.grant.tenant.regions();
        let blocks = regions.map_or(0, |regions| regions.block_count());
        let (_, contents) = reading.file().contents(&self.grant.tenant)?;
        let found = Sums { contents, digest: digest(contents, reading.block_sums(blocks)?) };
        if found != sums {
            return Err(Error::new(Kind::Corrupt, "what has come is not what the sender says to have sent")
                .with("slot", self.grant.slot.to_string()));
        }
        drop(reading);
        self.store.seal(self.grant.slot, self.grant.ticket)
    }
}

impl Sink for Incoming {
    fn block(&self, index: u64, sum: u64, read: &mut dyn FnMut(&mut [u8]) -> Result<()>) -> Result<Receipt> {
        match &*self.stage() {
            Stage::Filling(writer) => {
                let mut nbytes = 0;
                let received = writer.receive_block(index, sum, |bytes| {
                    nbytes = bytes.len() as u64;
                    read(bytes)
                })?;
                self.traffic.note_bytes(nbytes);
                if received == Receipt::Damaged {
                    self.traffic.note_damaged_block();
                }
                Ok(received)
            }
            ended => Err(self.ended(ended)),
        }
    }

    fn contents(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let mut contents = self.contents.lock().unwrap_or_else(PoisonError::into_inner);
        // A sender begins anew after its connection was lost.
        if offset == 0 {
            contents.clear();
        }
        if offset != contents.len() as u64 {
            return Err(Error::new(Kind::Corrupt, "pieces of the table of contents are out of order"));
        }
        contents.extend_from_slice(bytes);
        self.traffic.note_bytes(bytes.len() as u64);
        Ok(())
    }

    fn finish(&self, sums: Sums) -> Result<Sums> {
        let mut stage = self.stage_mut();
        let mut writer = match std::mem::replace(&mut *stage, Stage::Sealing) {
            Stage::Filling(writer) => writer,
            ended => {
                let error = self.ended(&ended);
                *stage = ended;
                return Err(error);
            }
        };
        drop(stage);
        let contents = std::mem::take(&mut *self.contents.lock().unwrap_or_else(PoisonError::into_inner));
        let filled = self.check_whole(&writer).and_then(|()| writer.put_contents(&contents));
        drop(writer);
        let sealed = filled.and_then(|()| self.seal(sums));
        // What is not whole now never will be.
        *self.stage_mut() = if sealed.is_ok() { Stage::Sealed } else { Stage::GivenUp };
        if sealed.is_ok() {
            self.traffic.note_whole();
        }
        sealed
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        let mut connections = self.incoming.connections();
        connections.ends.remove(&self.number);
        connections.idle_since = Instant::now();
    }
}
