//! A version of a shard into a slot: granted, filled, sealed, in the background.
//!
//! Failures, in order: nothing granted (what is kept mapped is let go once and it is tried again; then the
//! error is the save's); a granted slot that cannot be opened, because the store was made anew meanwhile (another
//! one is asked for); killed while filling (the slot is the agent's to free); cancelled, or a source that cannot
//! be read (the slot is given back); the agent dies while the slot is filled (nobody notices) or is sealed (the
//! next agent is asked to). Invariants: the sources are not read any more once the job says that all is
//! gathered; a save that succeeds has been verified by the agent, in the slot.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use waystation_format::checksum::BLOCK_BYTES;
use waystation_format::slot::{Key, Tenant, Version};
use waystation_format::{Error, Kind, Result};
use waystation_io::job::{Handle, Shared};

use super::{Client, unexpected};
use crate::local::message::{Reply, Request, Ticket, Wanted};
use crate::store::Grant;
use crate::writer::{Placed, SlotWriter};

/// How often a slot is asked for when the one that was granted is gone.
const ATTEMPTS: usize = 3;
/// What the agent is waited for beyond patience when it verifies a slot: a second for each so many bytes.
const VERIFIED_PER_SECOND: u64 = 128 << 20;

/// A version of a shard, where its bytes are now.
#[derive(Debug)]
pub struct Shard {
    /// Its name.
    pub name: String,
    /// The version.
    pub version: Version,
    /// Its table of contents.
    pub contents: Vec<u8>,
    /// How long its data are.
    pub data_bytes: u64,
    /// Its arrays, in the order of their data.
    pub parts: Vec<Placed>,
}

/// A version that is sealed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Saved {
    /// The number of its slot.
    pub slot: u32,
    /// Its digest.
    pub digest: u64,
    /// How long it took to be given a slot.
    pub grant_time: Duration,
    /// How long it took to fill it.
    pub fill_time: Duration,
    /// How long it took the agent to verify it.
    pub seal_time: Duration,
}

impl Client {
    /// Begins to save a shard, on so many threads; by default one for each core, up to four.
    ///
    /// # Safety
    /// The memory of the parts must be readable, and nobody may write to it, until the job has finished or
    /// says that everything is gathered.
    pub unsafe fn save(self: &Arc<Self>, shard: Shard, threads: Option<usize>) -> Result<Handle<Saved>> {
        self.check_process()?;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = threads.unwrap_or(cores.min(4));
        let client = Arc::clone(self);
        Handle::spawn("waystation-save", shard.data_bytes, move |job| {
            // SAFETY: the caller of `save` vouches for the memory.
            unsafe { client.run_save(&shard, threads, job) }
        })
    }

    /// # Safety
    /// As for [`Client::save`].
    unsafe fn run_save(&self, shard: &Shard, threads: usize, job: &Shared<Saved>) -> Result<Saved> {
        let begin = Instant::now();
        let mut writer = self.granted_writer(shard, job)?;
        let granted = Instant::now();
        let ticket = Ticket { slot: writer.grant().slot, ticket: writer.grant().ticket };
        // SAFETY: as the caller promises.
        let filled = unsafe { fill(&mut writer, shard, threads, job) };
        job.set_front(shard.data_bytes);
        self.lock_kept().put(writer, self.versions_per_shard);
        let gathered = Instant::now();
        // What is cancelled from here on is cancelled too late.
        let sealed = match filled {
            Ok(()) if job.seal() => self.seal(ticket, shard.data_bytes),
            Ok(()) => Err(super::stopped()),
            Err(error) => Err(error),
        };
        match sealed {
            Ok(digest) => Ok(Saved {
                slot: ticket.slot,
                digest,
                grant_time: granted - begin,
                fill_time: gathered - granted,
                seal_time: gathered.elapsed(),
            }),
            Err(error) => {
                // The error is what there is to report; an agent that cannot be told frees the slot at the latest
                // when this process ends.
                drop(self.ask(&Request::Abandon(ticket), &|| false));
                Err(error)
            }
        }
    }

    fn seal(&self, ticket: Ticket, data_bytes: u64) -> Result<u64> {
        let patience = self.patience + Duration::from_secs(data_bytes / VERIFIED_PER_SECOND);
        match self.ask_for(&Request::Seal(ticket), patience, &|| false)? {
            Reply::Sealed { digest } => Ok(digest),
            _ => Err(unexpected()),
        }
    }

    /// The writer of a slot that was granted for a shard.
    fn granted_writer(&self, shard: &Shard, job: &Shared<Saved>) -> Result<SlotWriter> {
        let mut attempts = 1;
        loop {
            let grant = self.grant(shard, job)?;
            match self.open_writer(&grant) {
                Err(error)
                    if attempts < ATTEMPTS && [Kind::Fenced, Kind::NotFound].contains(&error.kind()) =>
                {
                    attempts += 1;
                }
                Err(error) => {
                    let ticket = Ticket { slot: grant.slot, ticket: grant.ticket };
                    drop(self.ask(&Request::Abandon(ticket), &|| job.should_stop()));
                    return Err(error);
                }
                opened => return opened,
            }
        }
    }

    fn grant(&self, shard: &Shard, job: &Shared<Saved>) -> Result<Grant> {
        let Version { epoch, step } = shard.version;
        let key = Key { run: self.run(), shard: shard.name.clone(), version: shard.version };
        let contents_bytes = shard.contents.len() as u64;
        let data_bytes = shard.data_bytes;
        let tenant = Tenant { key, contents_bytes, data_bytes, writer: self.identity };
        let wanted = Wanted { shard: shard.name.clone(), epoch, step, contents_bytes, data_bytes };
        let request = Request::Grant(wanted);
        let stop = || job.should_stop();
        let reply = match self.ask(&request, &stop) {
            // Slots may be in use because this process keeps them mapped, which a new agent does not know of.
            Err(error) if error.kind() == Kind::Unavailable && self.lock_kept().clear() => {
                self.ask(&request, &stop)
            }
            other => other,
        };
        match reply? {
            Reply::Granted(Ticket { slot, ticket }) => {
                Ok(Grant { slot, path: self.slot_path(slot), ticket, tenant })
            }
            _ => Err(unexpected()),
        }
    }

    fn open_writer(&self, grant: &Grant) -> Result<SlotWriter> {
        if let Some(mut writer) = self.lock_kept().take(&grant.path) {
            // Of a file that has been replaced since, it is of no use.
            if writer.renew(grant).is_ok() {
                return Ok(writer);
            }
        }
        SlotWriter::open(grant).map_err(|error| match error.kind() {
            Kind::Conflict => {
                let message = "another client of this process keeps the slot mapped; use one client for all";
                Error::new(Kind::Conflict, message).with("path", grant.path.display().to_string())
            }
            _ => error,
        })
    }
}

/// # Safety
/// As for [`Client::save`].
unsafe fn fill(writer: &mut SlotWriter, shard: &Shard, threads: usize, job: &Shared<Saved>) -> Result<()> {
    let block_bytes = BLOCK_BYTES as u64;
    let begun_bytes = AtomicU64::new(0);
    let begin_block = || {
        let begun = begun_bytes.fetch_add(block_bytes, Ordering::Relaxed);
        job.add_done(block_bytes.min(shard.data_bytes.saturating_sub(begun)));
        job.should_stop()
    };
    // SAFETY: as the caller promises.
    unsafe { writer.fill(&shard.contents, &shard.parts, threads, &begin_block) }
}
