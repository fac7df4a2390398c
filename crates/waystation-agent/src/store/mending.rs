//! Files of slots that are not as this agent left them, and what can be mended of them without another host.
//!
//! The agent knows every header, so it writes again what is damaged of one. A file that is gone, cut off or replaced
//! is made anew; what a file that only lost its name holds is copied. Failures: no memory for the new file (the slot stays
//! as it is, and whoever verifies it finds that out); killed meanwhile (the new file still has its name aside, and the
//! next agent removes it). Invariants: a slot that is being written is left to its writer; the new file gets the slot's
//! name only while the slot is what it was when the file was begun; nothing that takes long is done while the store is
//! locked.

use std::os::unix::fs::MetadataExt;

use waystation_format::slot::{Header, State};
use waystation_format::{Error, Kind, Result};

use super::creation::{make_file, touch};
use super::directory::Directory;
use super::file::SlotFile;
use super::{Known, Store};

/// How much is copied at a time.
const COPY_BYTES: u64 = 1 << 20;
/// How often a file is made for a slot that changes meanwhile.
const ATTEMPTS: usize = 3;

/// What came of verifying a store.
#[derive(Debug, Default)]
pub struct Verified {
    /// Slots that do not hold what their headers say, and why.
    pub damaged: Vec<(Header, Error)>,
    /// Slots in which something was damaged that this agent has put right, and what that was.
    pub mended: Vec<(u32, Error)>,
}

/// The name of a slot's new file until it is complete.
pub(super) fn aside(slot: u32) -> String {
    format!("{}.new", SlotFile::name(slot))
}

impl Store {
    /// Writes again the headers that are damaged, and makes anew the files that are gone; returns what was wrong.
    pub(super) fn mend(&self) -> Result<Vec<(u32, Error)>> {
        let mut mended = Vec::new();
        for slot in 0..self.slots.len() as u32 {
            mended.extend(self.mend_file(slot)?.map(|error| (slot, error)));
            mended.extend(self.mend_header(slot)?.map(|error| (slot, error)));
        }
        Ok(mended)
    }

    /// Makes the files of free slots anew that are gone, so that a writer can be given them.
    pub(super) fn mend_free(&self) -> Result<()> {
        let free = |header: &&Header| header.state == State::Free;
        let slots: Vec<u32> = self.lock().headers.iter().filter(free).map(|header| header.slot).collect();
        slots.into_iter().try_for_each(|slot| self.mend_file(slot).map(drop))
    }

    /// What is wrong with the file that the directory has for a slot; None if it is the one that this agent has.
    pub(super) fn defect(&self, slot: u32, slot_bytes: u64) -> Result<Option<Error>> {
        let file = self.slot(slot)?.file();
        if file.nbytes()? < slot_bytes {
            return Ok(Some(file.corrupt("the file of a slot has been cut off")));
        }
        let named = match self.directory.open_file(&SlotFile::name(slot)) {
            Ok(None) => return Ok(Some(file.corrupt("the file of a slot is gone"))),
            Err(error) if error.kind() == Kind::Corrupt => return Ok(Some(error)),
            named => named?,
        };
        let identity = |file: &std::fs::File| file.metadata().map(|found| (found.dev(), found.ino()));
        let is_same = named.map(|named| Ok((identity(&named)?, identity(file.file())?)));
        let is_same = is_same.transpose().map_err(|error| Error::from_io(error, "examine", file.path()))?;
        let is_same = is_same.is_some_and(|(named, own)| named == own);
        Ok((!is_same).then(|| file.corrupt("the file of a slot has been replaced by another one")))
    }

    fn mend_file(&self, slot: u32) -> Result<Option<Error>> {
        let slot_bytes = self.record().slot_bytes;
        let Some(defect) = self.defect(slot, slot_bytes)? else { return Ok(None) };
        let _one = self.mending.lock();
        for _ in 0..ATTEMPTS {
            let before = self.header_of(&self.lock(), slot);
            if matches!(before.state, State::Writing(_)) {
                return Ok(None);
            }
            match self.made_anew(&before) {
                Ok(true) => return Ok(Some(defect)),
                Ok(false) => {}
                Err(error) if error.kind() == Kind::Unavailable => return Ok(None),
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// Puts a new file in the place of a slot's; false if the slot has changed meanwhile.
    fn made_anew(&self, before: &Header) -> Result<bool> {
        let slot = before.slot;
        let (name, aside, old) = (SlotFile::name(slot), aside(slot), self.slot(slot)?.file());
        self.directory.remove(&aside)?;
        let done = self.new_file(&aside, &name, &old, before).and_then(|new| {
            let known = self.lock();
            let is_same = self.header_of(&known, slot) == *before;
            if is_same {
                self.directory.replace(&aside, &name)?;
                self.slot(slot)?.replace(new);
            }
            Ok(is_same)
        });
        if !matches!(done, Ok(true)) {
            // The error is what there is to report; what cannot be removed now, the next agent removes.
            drop(self.directory.remove(&aside));
        }
        done
    }

    /// A file with the header of a slot, and with what the old one holds if that is all there.
    fn new_file(&self, aside: &str, name: &str, old: &SlotFile, header: &Header) -> Result<SlotFile> {
        let new = make_file(&self.directory, aside, name, header.slot_bytes, self.threads)?;
        touch(std::slice::from_ref(&new), header.slot_bytes, self.threads)?;
        if header.state != State::Free && old.nbytes()? >= header.slot_bytes {
            let mut buffer = vec![0; COPY_BYTES.min(header.slot_bytes) as usize];
            for offset in (0..header.slot_bytes).step_by(buffer.len()) {
                let part = &mut buffer[..COPY_BYTES.min(header.slot_bytes - offset) as usize];
                old.read_at(part, offset)?;
                new.write_at(part, offset)?;
            }
        }
        write_twice(&new, header)?;
        Ok(new)
    }

    /// Writes the header of a slot again, in both copies, if either is not what this agent knows.
    fn mend_header(&self, slot: u32) -> Result<Option<Error>> {
        let known = self.lock();
        let header = self.header_of(&known, slot);
        let file = self.slot(slot)?.file();
        let wrong = match file.record::<Header>() {
            Ok(found) if found.record != header => "the header of a slot is not the one that was written",
            Ok(found) if found.other_is_damaged => "a copy of the header of a slot is damaged",
            Ok(_) => return Ok(None),
            Err(_) => "the header of a slot is damaged in both copies",
        };
        write_twice(&file, &header)?;
        Ok(Some(file.corrupt(wrong)))
    }

    fn header_of(&self, known: &Known, slot: u32) -> Header {
        known.headers[slot as usize].clone()
    }
}

/// Removes what a killed agent had begun to make for slots.
pub(super) fn remove_asides(directory: &Directory, slot_count: u32) -> Result<()> {
    (0..slot_count).try_for_each(|slot| directory.remove(&aside(slot)))
}

/// Writes a header in both copies, so that the older one says the same.
fn write_twice(file: &SlotFile, header: &Header) -> Result<()> {
    file.write_record(header)?;
    match header.sequence.checked_sub(1) {
        Some(sequence) => file.write_record(&Header { sequence, ..header.clone() }),
        None => Ok(()),
    }
}
