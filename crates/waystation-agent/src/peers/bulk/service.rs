//! What an agent does with the connections for bytes that others make to it: one thread for each.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use waystation_format::slot::{Id, Key, Sums};
use waystation_format::{Error, Kind, Result};

use super::channel::{Channel, unexpected};
use super::frame::{Frame, FrameKind};
use super::intake::{Incoming, Intake, Opened};
use super::message::{Fetch, Offer, decode_exactly, encode_longs, encode_sums, transfer_of};
use super::receive::{Sink, receive};
use super::send::{Order, Work};
use crate::peers::Name;
use crate::peers::{Connection, End};
use crate::writer::Receipt;

/// Who decides which versions are taken of those that other agents offer.
pub trait Admission: fmt::Debug + Send + Sync {
    /// Whether to take a version, before any of it comes.
    fn expect(&self, from: &Name, key: &Key) -> Result<()>;

    /// Takes a version that lies verified and sealed in its slot, before the other agent is told. Who refuses it frees the
    /// slot.
    fn keep(&self, from: &Name, key: &Key, sums: Sums) -> Result<()>;
}

/// Takes everything.
#[derive(Debug)]
struct TakeAll;

impl Admission for TakeAll {
    fn expect(&self, _: &Name, _: &Key) -> Result<()> {
        Ok(())
    }

    fn keep(&self, _: &Name, _: &Key, _: Sums) -> Result<()> {
        Ok(())
    }
}

/// What takes and gives versions.
#[derive(Debug)]
pub struct BulkService {
    intake: Arc<Intake>,
    order: Order,
    admission: Arc<dyn Admission>,
    run: Id,
    threads: Mutex<Threads>,
}

#[derive(Debug, Default)]
struct Threads {
    running: HashMap<u64, (End, JoinHandle<()>)>,
    next: u64,
}

impl BulkService {
    /// Takes versions into the store of an intake, and gives those of the store by an order.
    pub fn new(intake: Arc<Intake>, order: Order) -> Arc<Self> {
        Self::admitting(intake, order, Arc::new(TakeAll))
    }

    /// The same, of the versions that somebody admits.
    pub fn admitting(intake: Arc<Intake>, order: Order, admission: Arc<dyn Admission>) -> Arc<Self> {
        let run = intake.store().record().run;
        Arc::new(Self { intake, order, admission, run, threads: Mutex::default() })
    }

    /// What comes in.
    pub fn intake(&self) -> &Arc<Intake> {
        &self.intake
    }

    /// Serves a connection for bytes, in a thread of its own.
    pub fn serve(self: &Arc<Self>, connection: Connection) -> Result<()> {
        let mut channel = Channel::new(connection)?;
        let end = channel.end();
        let mut threads = self.threads();
        threads.running.retain(|_, (_, thread)| !thread.is_finished());
        let number = threads.next;
        threads.next += 1;
        let service = Arc::clone(self);
        let serve = move || {
            if let Err(error) = service.serve_channel(&mut channel) {
                channel.tell_failure(&error);
            }
        };
        let spawned = thread::Builder::new().name("waystation-bulk".to_owned()).spawn(serve);
        let thread = spawned.map_err(|error| {
            Error::new(Kind::Unavailable, format!("no thread could be started for a connection: {error}"))
        })?;
        threads.running.insert(number, (end, thread));
        Ok(())
    }

    /// Ends all connections and waits for their threads.
    pub fn stop(&self) {
        let running = std::mem::take(&mut self.threads().running);
        running.values().for_each(|(end, _)| end.now());
        // A thread that has panicked has printed why.
        running.into_values().for_each(|(_, thread)| drop(thread.join()));
    }

    fn threads(&self) -> MutexGuard<'_, Threads> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve_channel(&self, channel: &mut Channel) -> Result<()> {
        let frame = channel.receive()?;
        match frame.kind {
            FrameKind::Offer => self.take(channel, &frame),
            FrameKind::Fetch => self.give(channel, &frame).map(drop),
            kind => Err(unexpected(kind)),
        }
    }

    fn take(&self, channel: &mut Channel, frame: &Frame) -> Result<()> {
        let offer = Offer::decode(&frame.message, self.run)?;
        carry(channel, frame, transfer_of(&offer.key))?;
        let from = channel.peer().clone();
        self.admission.expect(&from, &offer.key)?;
        let keep = |sums| self.admission.keep(&from, &offer.key, sums);
        let taken = take_offer(&self.intake, channel, &offer, &keep).map(drop);
        taken.inspect_err(|_| self.intake.traffic().note_failed())
    }

    fn give(&self, channel: &mut Channel, frame: &Frame) -> Result<Sums> {
        let fetch = Fetch::decode(&frame.message, self.run)?;
        carry(channel, frame, transfer_of(&fetch.key))?;
        let reading = self.intake.store().read(&fetch.key)?;
        let found = reading.sums().map(|sums| sums.digest);
        if fetch.digest.is_some() && fetch.digest != found {
            return Err(Error::new(Kind::NotFound, "this version of the shard is here with another digest")
                .with("shard", &*fetch.key.shard));
        }
        let tenant = reading.tenant();
        let (contents_bytes, data_bytes) = (tenant.contents_bytes, tenant.data_bytes);
        let offer = Offer { key: fetch.key, contents_bytes, data_bytes };
        channel.send(FrameKind::Offer, offer.encode())?;
        let [first] = decode_exactly(&channel.expect(FrameKind::Ready)?)?;
        let given = Work::new(&reading, &self.order, first)?.run(std::slice::from_mut(channel));
        given.inspect_err(|_| self.order.pacer.traffic().note_failed())
    }
}

/// Receives a version that is offered into a slot, and says so if it is there already. Nothing if the
/// transfer ends on another connection. `keep` is asked before the other side is told that it is here.
pub fn take_offer(
    intake: &Intake,
    channel: &mut Channel,
    offer: &Offer,
    keep: &(dyn Fn(Sums) -> Result<()> + Sync),
) -> Result<Option<Sums>> {
    match intake.open(offer)? {
        Opened::Whole(sums) => {
            keep(sums)?;
            channel.send(FrameKind::Sealed, encode_sums(sums))?;
            Ok(Some(sums))
        }
        Opened::Going(incoming) => {
            let attached = incoming.attach(channel.end());
            let sink = Kept { incoming: &incoming, keep };
            let received = channel
                .send(FrameKind::Ready, encode_longs(&[incoming.blocks_in_place()]))
                .and_then(|()| receive(channel, offer, &sink));
            drop(attached);
            intake.close(&offer.key);
            received
        }
    }
}

/// A version that comes in and is finished only if somebody keeps it.
struct Kept<'a> {
    incoming: &'a Incoming,
    keep: &'a (dyn Fn(Sums) -> Result<()> + Sync),
}

impl Sink for Kept<'_> {
    fn block(&self, index: u64, sum: u64, read: &mut dyn FnMut(&mut [u8]) -> Result<()>) -> Result<Receipt> {
        self.incoming.block(index, sum, read)
    }

    fn contents(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.incoming.contents(offset, bytes)
    }

    fn finish(&self, sums: Sums) -> Result<Sums> {
        let sealed = self.incoming.finish(sums)?;
        (self.keep)(sealed).map(|()| sealed)
    }
}

fn carry(channel: &mut Channel, frame: &Frame, transfer: u64) -> Result<()> {
    channel.carry(transfer);
    if frame.transfer == transfer {
        return Ok(());
    }
    Err(Error::new(Kind::Corrupt, "a transfer is named for another version than its own"))
}
