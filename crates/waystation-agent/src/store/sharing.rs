//! A store whose agent decides with those of other hosts what stays in it.
//!
//! Invariants: once it is shared, nothing gives way by itself, whatever comes; a version leaves its slot only when it is
//! released.

use std::sync::Arc;

use waystation_format::Result;
use waystation_format::slot::{Header, State, Sums, Tenant, Version, Writer};

use super::file::SlotFile;
use super::mending::Verified;
use super::verify::verify_sealed;
use super::writing::is_still;
use super::{Slot, Store};
use crate::slots::Event;

/// A slot that is read while it is verified.
struct Held<'a> {
    header: Header,
    slot: &'a Slot,
    file: Arc<SlotFile>,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.slot.hold.release();
    }
}

impl Store {
    /// From now on other agents have a say: slots become free by [`Store::release`] alone, and versions of every epoch
    /// may come.
    pub fn share(&self) {
        self.lock().is_shared = true;
    }

    /// Frees a slot that is sealed or committed; nothing happens if it is neither, or has got another tenant since
    /// `found`.
    ///
    /// Unavailable if it is being read by this process.
    pub fn release(&self, found: &Header) -> Result<()> {
        self.slot(found.slot)?;
        let mut known = self.lock();
        let now = &known.headers[found.slot as usize];
        match now.state {
            State::Sealed(..) | State::Committed(..) if is_still(now, found) => {
                self.free(&mut known, found.slot, Event::Release)
            }
            _ => Ok(()),
        }
    }

    /// Notes that a version is committed, of whatever epoch it is.
    pub fn note_commit(&self, version: Version) -> Result<()> {
        let mut known = self.lock();
        for slot in 0..known.headers.len() {
            let state = &known.headers[slot].state;
            if matches!(state, State::Sealed(tenant, _) if tenant.key.version == version) {
                self.apply(&mut known, slot as u32, Event::Commit)?;
            }
        }
        Ok(())
    }

    /// Takes from all writers but one what they have not sealed. Who is about to is refused afterwards.
    pub fn abort_others(&self, writer: &Writer) -> Result<()> {
        let unfinished = |state: &State| matches!(state, State::Writing(tenant) if tenant.writer != *writer);
        let mut known = self.lock();
        for slot in 0..known.headers.len() {
            let header = &known.headers[slot];
            if unfinished(&header.state) && self.slots[slot].hold.readers() == 0 {
                let ticket = header.sequence;
                self.free(&mut known, slot as u32, Event::Abort { ticket })?;
            }
        }
        Ok(())
    }

    /// Mends files and headers, and reads all that is sealed or committed.
    pub fn verify_all(&self) -> Result<Verified> {
        let mended = self.mend()?;
        let held: Vec<Held<'_>> =
            self.inventory().into_iter().filter_map(|header| self.hold(header)).collect();
        let wanted: Vec<(&SlotFile, &Tenant, Sums)> = held
            .iter()
            .filter_map(|Held { header, file, .. }| {
                Some((&**file, header.state.tenant()?, header.state.sums()?))
            })
            .collect();
        let outcomes = verify_sealed(&wanted, self.threads)?;
        let damaged = |(held, outcome): (&Held<'_>, Result<()>)| Some((held.header.clone(), outcome.err()?));
        let damaged = held.iter().zip(outcomes).filter_map(damaged).collect();
        Ok(Verified { damaged, mended })
    }

    /// Keeps a slot from being overwritten, if it is sealed or committed.
    fn hold(&self, header: Header) -> Option<Held<'_>> {
        header.state.sums()?;
        let slot = self.slots.get(header.slot as usize)?;
        if !slot.hold.acquire() {
            return None;
        }
        let held = Held { header, slot, file: slot.file() };
        // It may have got another tenant before it was held.
        let known = self.lock();
        is_still(&known.headers[held.header.slot as usize], &held.header).then_some(held)
    }
}
