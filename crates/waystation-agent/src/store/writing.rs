//! What becomes of a version in a store: given a slot, sealed, committed, retired.
//!
//! Every change is decided by `slots`, written to the slot's file, and known only then. Nothing here waits
//! for a reader or writer: what is in use stays, and the caller is told.

use std::path::PathBuf;

use waystation_format::slot::{Header, Key, Regions, State, Sums, Tenant, Version};
use waystation_format::{Error, Kind, Result};

use super::verify::verify_written;
use super::{Known, Store, is_readable};
use crate::locks::{self, Part};
use crate::process::{Life, life_of};
use crate::slots::{Event, candidates, newest_committed};

/// The right to write a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The number of the slot.
    pub slot: u32,
    /// Its file.
    pub path: PathBuf,
    /// Tells this right from earlier and later ones.
    pub ticket: u64,
    /// What it is for.
    pub tenant: Tenant,
}

impl Store {
    /// Gives a slot to the writer of `tenant`.
    ///
    /// Fenced if its epoch is over, Conflict if the version is there already or comes too late, InvalidInput
    /// if no slot could hold it, Unavailable if none may be overwritten now. A writer that keeps mappings of
    /// slots from version to version lets them go then: another agent may have come, who does not know of them.
    pub fn begin(&self, tenant: &Tenant) -> Result<Grant> {
        self.mend_free()?;
        let mut known = self.lock();
        self.check_tenant(&known, tenant)?;
        let mut places = candidates(&known.headers, &tenant.key, Self::limits(&known))?;
        if known.is_shared {
            // A writer may still map what it had before: that is quicker to fill, and keeps others from it.
            places.sort_by_key(|&place| match &known.last_writers[place] {
                Some(last) if *last == tenant.writer => 0,
                None => 1,
                Some(_) => 2,
            });
        }
        for place in places {
            let slot = known.headers[place].slot;
            if self.hand_over(&mut known, slot, tenant)? {
                let header = &known.headers[place];
                let path = self.slots[place].file().path().to_owned();
                return Ok(Grant { slot, path, ticket: header.sequence, tenant: tenant.clone() });
            }
        }
        Err(Error::new(
            Kind::Unavailable,
            "every slot that may be overwritten is still in use; save again later",
        )
        .with("shard", &*tenant.key.shard))
    }

    pub(super) fn check_tenant(&self, known: &Known, tenant: &Tenant) -> Result<()> {
        if tenant.key.run != known.record.run {
            return Err(Error::new(Kind::Conflict, "the store is that of another run")
                .with("found", known.record.run.to_string())
                .with("wanted", tenant.key.run.to_string()));
        }
        let end = Regions::new(tenant.contents_bytes, tenant.data_bytes).map(|regions| regions.data.end);
        if end.is_none_or(|end| end > known.record.slot_bytes) {
            let message = "what a process keeps is larger than a slot of its agent; start the agent in a new \
                           directory with more memory (`--agent-memory` of waystation launch, `--data-bytes` \
                           of the agent), or save with more processes";
            return Err(Error::new(Kind::InvalidInput, message)
                .with("shard", &*tenant.key.shard)
                .with("data_bytes", tenant.data_bytes.to_string())
                .with("slot_bytes", known.record.slot_bytes.to_string()));
        }
        Ok(())
    }

    /// Makes a slot free if it is not, and gives it to a writer; false if its bytes are still in use.
    pub(super) fn hand_over(&self, known: &mut Known, slot: u32, tenant: &Tenant) -> Result<bool> {
        let place = slot as usize;
        let of_slot = &self.slots[place];
        if known.headers[place].state != State::Free && !of_slot.hold.close() {
            return Ok(false);
        }
        let done = self.hand_over_closed(known, slot, tenant);
        // Whatever came of it, the hold says what the header does.
        if known.headers[place].state != State::Free {
            of_slot.hold.open();
        }
        done
    }

    /// The same, of a slot that no thread of this process reads.
    fn hand_over_closed(&self, known: &mut Known, slot: u32, tenant: &Tenant) -> Result<bool> {
        let place = slot as usize;
        let file = self.slots[place].file();
        if self.defect(slot, known.record.slot_bytes)?.is_some() {
            return Ok(false); // whoever verifies the store makes it anew
        }
        // The writer that had the slot last may still map it, and go on with that.
        let is_same_writer = known.last_writers[place] == Some(tenant.writer);
        let part = if is_same_writer { Part::Readers } else { Part::Both };
        let failed = |error| Error::from_io(error, "lock a slot", file.path());
        if !locks::try_exclusive(file.file(), part).map_err(failed)? {
            return Ok(false);
        }
        let given = self.give(known, slot, tenant);
        let unlocked = locks::unlock(file.file(), part).map_err(failed);
        given.and(unlocked).map(|()| true)
    }

    fn give(&self, known: &mut Known, slot: u32, tenant: &Tenant) -> Result<()> {
        if known.headers[slot as usize].state != State::Free {
            let newest = newest_committed(&known.headers, &tenant.key).unwrap_or_default();
            self.apply(known, slot, Event::Retire { newest })?;
        }
        self.slots[slot as usize].file().reset_progress()?;
        self.apply(known, slot, Event::Begin(tenant.clone()))
    }

    /// Verifies all that a writer has put into its slot, and seals it.
    ///
    /// Corrupt if a checksum does not fit, Fenced if the slot is not that writer's any more.
    pub fn seal(&self, slot: u32, ticket: u64) -> Result<Sums> {
        let tenant = self.tenant_of(slot, ticket)?;
        let of_slot = self.slot(slot)?;
        if !of_slot.hold.acquire() {
            return Err(fenced(slot, ticket));
        }
        // Without the lock: other slots change meanwhile. This one does not get free, for it is held.
        let verified = verify_written(&of_slot.file(), &tenant, self.threads).inspect_err(|error| {
            if error.kind() == Kind::Corrupt {
                self.lock().tally.note_damage();
            }
        });
        let sealed = verified
            .and_then(|sums| self.apply(&mut self.lock(), slot, Event::Seal { ticket, sums }).map(|()| sums));
        of_slot.hold.release();
        sealed
    }

    fn tenant_of(&self, slot: u32, ticket: u64) -> Result<Tenant> {
        self.slot(slot)?;
        let known = self.lock();
        let header = &known.headers[slot as usize];
        match &header.state {
            State::Writing(tenant) if header.sequence == ticket => Ok(tenant.clone()),
            _ => Err(fenced(slot, ticket)),
        }
    }

    /// Commits what there is of a version: its slots. Those that were committed before count as well.
    ///
    /// Fenced if its epoch is over.
    pub fn commit(&self, version: Version) -> Result<Vec<u32>> {
        let mut known = self.lock();
        if version.epoch < known.record.epoch {
            let message = format!("epoch {} is over; the epoch is {} now", version.epoch, known.record.epoch);
            return Err(Error::new(Kind::Fenced, message));
        }
        let mut committed = Vec::new();
        for place in 0..known.headers.len() {
            let slot = place as u32;
            match &known.headers[place].state {
                State::Sealed(tenant, _) if tenant.key.version == version => {
                    self.apply(&mut known, slot, Event::Commit)?;
                    committed.push(slot);
                }
                State::Committed(tenant, _) if tenant.key.version == version => committed.push(slot),
                _ => {}
            }
        }
        self.note_committed(&known);
        Ok(committed)
    }

    /// Takes a slot from a writer that gives up, or whose death the caller is certain of.
    pub fn abort(&self, slot: u32, ticket: u64) -> Result<()> {
        self.tenant_of(slot, ticket)?;
        self.free(&mut self.lock(), slot, Event::Abort { ticket })
    }

    /// Frees the slots whose writers are dead beyond doubt; returns them.
    pub fn reap(&self) -> Result<Vec<u32>> {
        let mut known = self.lock();
        let mut freed = Vec::new();
        for place in 0..known.headers.len() {
            let header = &known.headers[place];
            let State::Writing(tenant) = &header.state else { continue };
            if life_of(&tenant.writer)? == Life::Dead && self.slots[place].hold.readers() == 0 {
                let (slot, ticket) = (header.slot, header.sequence);
                self.free(&mut known, slot, Event::Abort { ticket })?;
                freed.push(slot);
            }
        }
        Ok(freed)
    }

    /// Frees the slots of a version that is sealed but will not be committed; returns them.
    pub fn give_up(&self, version: Version) -> Result<Vec<u32>> {
        let is_meant =
            |state: &State| matches!(state, State::Sealed(tenant, _) if tenant.key.version == version);
        self.free_all(is_meant, || Event::GiveUp)
    }

    /// Frees the slots of all sealed and committed versions before `newest`, of every shard; returns them. The
    /// caller vouches that `newest` is committed and whole, on this host or others.
    pub fn retire_before(&self, newest: Version) -> Result<Vec<u32>> {
        let is_meant = |state: &State| match state {
            State::Sealed(tenant, _) | State::Committed(tenant, _) => tenant.key.version < newest,
            _ => false,
        };
        self.free_all(is_meant, || Event::Retire { newest })
    }

    /// Marks a slot whose bytes were found damaged; nobody is given them any more. False, and nothing happens, if it has
    /// got another tenant since `found`.
    pub fn quarantine(&self, found: &Header) -> Result<bool> {
        self.slot(found.slot)?;
        let mut known = self.lock();
        let is_same = is_still(&known.headers[found.slot as usize], found);
        if is_same {
            self.free(&mut known, found.slot, Event::Quarantine)?;
        }
        Ok(is_same)
    }

    /// Frees a slot that is quarantined.
    pub fn discard_quarantined(&self, slot: u32) -> Result<()> {
        self.slot(slot)?;
        let mut known = self.lock();
        self.apply(&mut known, slot, Event::Discard)?;
        self.note_committed(&known); // what was in it is to be missed no more
        Ok(())
    }

    fn free_all(&self, is_meant: impl Fn(&State) -> bool, event: impl Fn() -> Event) -> Result<Vec<u32>> {
        let mut known = self.lock();
        let meant: Vec<u32> =
            known.headers.iter().filter(|header| is_meant(&header.state)).map(|header| header.slot).collect();
        for &slot in &meant {
            self.free(&mut known, slot, event())?;
        }
        Ok(meant)
    }

    /// Lets an event happen after which nobody may read the slot.
    pub(super) fn free(&self, known: &mut Known, slot: u32, event: Event) -> Result<()> {
        let of_slot = self.slot(slot)?;
        let was_readable = is_readable(&known.headers[slot as usize].state);
        if was_readable && !of_slot.hold.close() {
            return Err(Error::new(Kind::Unavailable, "the slot is being read; try again later")
                .with("slot", slot.to_string())
                .with("readers", of_slot.hold.readers().to_string()));
        }
        let done = self.apply(known, slot, event);
        if done.is_err() && was_readable {
            of_slot.hold.open();
        }
        done
    }

    /// The newest committed version of a shard.
    pub fn newest_committed(&self, key: &Key) -> Option<Version> {
        newest_committed(&self.lock().headers, key)
    }
}

/// Whether a slot holds what it held when its header was `then`; a commit meanwhile is none.
pub(super) fn is_still(now: &Header, then: &Header) -> bool {
    match (&then.state, &now.state) {
        (State::Sealed(..), State::Committed(tenant, sums)) => {
            then.state.tenant() == Some(tenant) && then.state.sums() == Some(*sums)
        }
        _ => then == now,
    }
}

fn fenced(slot: u32, ticket: u64) -> Error {
    Error::new(Kind::Fenced, "the slot is not (any more) that of this writer")
        .with("slot", slot.to_string())
        .with("ticket", ticket.to_string())
}
