//! What an agent has to remember beside its slots: some bytes in a file of the store.
//!
//! Killed at any moment, the notes are those from before or those from after, whole. They go when the store does, and a
//! new store has none.

use std::io::{Read, Write};

use waystation_format::checksum::crc64;
use waystation_format::{Error, Kind, Result};

use super::Store;

/// The file of the notes.
pub(super) const NOTES: &str = "notes";
/// Its name until all of it is there.
pub(super) const NOTES_ASIDE: &str = "notes.new";
/// The notes have at most so many bytes.
const LIMIT_BYTES: u64 = 16 << 20;
const SUM_BYTES: usize = 8;

impl Store {
    /// Replaces what is noted.
    pub fn write_notes(&self, notes: &[u8]) -> Result<()> {
        self.directory.remove(NOTES_ASIDE)?;
        let mut file = self.directory.create_file(NOTES_ASIDE)?;
        let written = file.write_all(&[&crc64(notes).to_le_bytes(), notes].concat());
        let path = self.directory.path_of(NOTES_ASIDE);
        written.map_err(|error| Error::from_io(error, "write what the agent has to remember", &path))?;
        self.directory.replace(NOTES_ASIDE, NOTES)
    }

    /// What was noted last, if anything was. Corrupt if it is not what was written.
    pub fn notes(&self) -> Result<Option<Vec<u8>>> {
        let Some(file) = self.directory.open_file(NOTES)? else { return Ok(None) };
        let path = self.directory.path_of(NOTES);
        let mut content = Vec::new();
        let read = file.take(LIMIT_BYTES).read_to_end(&mut content);
        read.map_err(|error| Error::from_io(error, "read what the agent has to remember", &path))?;
        match content.split_first_chunk::<SUM_BYTES>() {
            Some((sum, notes)) if u64::from_le_bytes(*sum) == crc64(notes) => Ok(Some(notes.to_vec())),
            _ => {
                let message = "what the agent has to remember is damaged; its host counts as lost";
                Err(Error::new(Kind::Corrupt, message).with("path", path.display().to_string()))
            }
        }
    }
}
