//! The slots of one host: a directory on tmpfs that one agent owns.
//!
//! Failures, in the order of a slot's life: killed while the store is made (no record names it, the next
//! agent begins anew); between two headers (the older copy holds); while a slot is written (the agent: its
//! writer goes on; the writer: the slot is freed); with versions sealed or committed (they are verified and
//! kept). Invariants: memory is taken when the store is made and never more; a slot is given to a writer
//! only when neither a thread of this process nor any mapping of another writer can use its bytes; nothing
//! is handed out that was not verified; what belongs to another run is never taken for this one's.

mod adoption;
mod creation;
mod directory;
mod file;
mod mending;
mod notes;
mod reading;
mod resuming;
mod sharing;
mod tally;
mod verify;
mod viewed;
mod writing;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use waystation_format::slot::{Header, Id, Regions, State, StoreRecord, Writer};
use waystation_format::{Error, Kind, Result};

pub use self::adoption::{Adoption, Found};
pub use self::creation::discard;
use self::directory::Directory;
pub use self::file::SlotFile;
pub use self::mending::Verified;
pub use self::reading::Reading;
use self::resuming::Left;
use self::tally::Tally;
pub use self::tally::{Counts, Observation, tenant_bytes};
pub use self::writing::Grant;
use crate::slots::{Event, Hold, Limits, next};

/// What a store is to be.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where: a directory on tmpfs, of this user alone. It is made if its parent is there.
    pub directory: PathBuf,
    /// The run whose versions it holds.
    pub run: Id,
    /// What the slots were counted and measured for: the same as long as placement is the same.
    pub topology: Id,
    /// How many slots.
    pub slot_count: u32,
    /// How long the file of each is; see [`slot_bytes`].
    pub slot_bytes: u64,
    /// How many versions of a shard there may be at a time, at least two.
    pub versions_per_shard: u32,
    /// What the store may take of the host's memory. A store that needs more is refused.
    pub cap_bytes: u64,
    /// Whether the directory may be on a disk.
    pub allow_disk: bool,
    /// Threads for touching memory and for verifying it.
    pub threads: usize,
}

/// How long a slot must be for shards of up to these sizes; `None` if that cannot be expressed.
pub fn slot_bytes(contents_bytes: u64, data_bytes: u64) -> Option<u64> {
    Regions::new(contents_bytes, data_bytes)?.data.end.checked_next_multiple_of(4096)
}

/// The slots of one host.
#[derive(Debug)]
pub struct Store {
    directory: Directory,
    record_file: SlotFile,
    slots: Vec<Slot>,
    state: Mutex<Known>,
    /// Held by whoever makes a slot's file anew.
    mending: Mutex<()>,
    cap_bytes: u64,
    threads: usize,
}

/// A slot's file, and who uses its bytes here.
#[derive(Debug)]
struct Slot {
    /// Another one is put in its place only by `mending`.
    file: RwLock<Arc<SlotFile>>,
    hold: Arc<Hold>,
}

impl Slot {
    fn file(&self) -> Arc<SlotFile> {
        Arc::clone(&self.file.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn replace(&self, file: SlotFile) {
        *self.file.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(file);
    }
}

/// What the agent knows; files say the same.
#[derive(Debug)]
struct Known {
    record: StoreRecord,
    headers: Vec<Header>,
    /// Who was given each slot last: may still map it, and may have it again.
    last_writers: Vec<Option<Writer>>,
    /// What dead writers have left in slots that were freed when the store was opened.
    left: Vec<Left>,
    /// Whether the agents of several hosts decide together what stays.
    is_shared: bool,
    tally: Tally,
}

impl Store {
    /// Opens the store of a directory: makes it if there is none, else takes over what is there.
    ///
    /// Conflict if another agent has it or it is another run's, InvalidInput if the directory will not do,
    /// Unavailable if there is not enough memory.
    pub fn open(config: &Config) -> Result<(Self, Adoption)> {
        let directory = Directory::open(&config.directory, config.allow_disk)?;
        if directory.open_file(creation::RECORD)?.is_some() {
            return adoption::adopt(directory, config);
        }
        let store = creation::create(directory, config)?;
        Ok((store, Adoption::of_new_store()))
    }

    fn new(
        directory: Directory,
        record: (SlotFile, StoreRecord),
        slots: Vec<(SlotFile, Header)>,
        config: &Config,
    ) -> Self {
        let (files, headers): (Vec<SlotFile>, Vec<Header>) = slots.into_iter().unzip();
        let last_writers = headers.iter().map(|header| header.state.tenant().map(|tenant| tenant.writer));
        let hold_of = |header: &Header| {
            let hold = Hold::closed();
            if is_readable(&header.state) {
                hold.open();
            }
            Arc::new(hold)
        };
        let holds: Vec<Arc<Hold>> = headers.iter().map(hold_of).collect();
        let slot = |(file, hold)| Slot { file: RwLock::new(Arc::new(file)), hold };
        Self {
            directory,
            record_file: record.0,
            slots: files.into_iter().zip(holds).map(slot).collect(),
            state: Mutex::new(Known {
                record: record.1,
                last_writers: last_writers.collect(),
                left: Vec::new(),
                is_shared: false,
                tally: Tally::new(headers.len()),
                headers,
            }),
            mending: Mutex::default(),
            cap_bytes: config.cap_bytes,
            threads: config.threads.max(1),
        }
    }

    /// The headers of all slots, as they are now.
    pub fn inventory(&self) -> Vec<Header> {
        self.lock().headers.clone()
    }

    /// Slots, and what has happened to them since this store was opened.
    pub fn observe(&self) -> Observation {
        let known = self.lock();
        known.tally.observe(&known.record, &known.headers)
    }

    /// What all slots have in common.
    pub fn record(&self) -> StoreRecord {
        self.lock().record.clone()
    }

    /// What it may take of the host's memory.
    pub fn cap_bytes(&self) -> u64 {
        self.cap_bytes
    }

    /// Where it is.
    pub fn path(&self) -> &std::path::Path {
        self.directory.path()
    }

    /// Refuses writers of epochs before `epoch` from now on, also after a restart. Never goes back.
    pub fn raise_epoch(&self, epoch: u64) -> Result<()> {
        let mut known = self.lock();
        if epoch > known.record.epoch {
            let record = StoreRecord { epoch, ..known.record.clone() };
            self.replace_record(&mut known, record)?;
        }
        Ok(())
    }

    /// Says that the slots serve another topology from now on. What they hold stays, by its keys.
    pub fn rebind(&self, topology: Id) -> Result<()> {
        let mut known = self.lock();
        let record = StoreRecord { topology, ..known.record.clone() };
        self.replace_record(&mut known, record)
    }

    fn replace_record(&self, known: &mut Known, record: StoreRecord) -> Result<()> {
        let sequence = record.sequence.checked_add(1);
        let sequence = sequence
            .ok_or_else(|| Error::new(Kind::Corrupt, "the record of a store has the last sequence"))?;
        let record = StoreRecord { sequence, ..record };
        self.record_file.write_record(&record)?;
        known.record = record;
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        // Files and what is known of them change together or not at all, so a poisoned lock is still usable.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn slot(&self, slot: u32) -> Result<&Slot> {
        self.slots.get(slot as usize).ok_or_else(|| {
            Error::new(
                Kind::NotFound,
                format!("the store has {} slots, none of number {slot}", self.slots.len()),
            )
        })
    }

    /// Lets an event happen to a slot: in its file, then in what is known.
    fn apply(&self, known: &mut Known, slot: u32, event: Event) -> Result<()> {
        let place = slot as usize;
        let header = next(&known.headers[place], event)?;
        self.slot(slot)?.file().write_record(&header)?;
        known.tally.note(place, &known.headers[place].state, &header.state);
        if let Some(tenant) = header.state.tenant() {
            known.last_writers[place] = Some(tenant.writer);
        }
        known.headers[place] = header;
        Ok(())
    }

    fn limits(known: &Known) -> Limits {
        Limits {
            epoch: known.record.epoch,
            versions_per_shard: known.record.versions_per_shard as usize,
            is_shared: known.is_shared,
        }
    }
}

/// Whether the bytes of a slot may be read by those who know what they do.
fn is_readable(state: &State) -> bool {
    matches!(state, State::Writing(_) | State::Sealed(..) | State::Committed(..))
}
