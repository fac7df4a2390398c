//! What an agent has to remember beside its slots: some bytes in a file of the store.
//!
//! An agent that is alone notes which versions are committed, slot by slot: of a slot that is gone, or whose header is
//! damaged in both copies, the next one knows by that what was in it. What cannot be noted is not remembered.
//!
//! Killed at any moment, the notes are those from before or those from after, whole. They go when the store does, and a
//! new store has none.

use std::io::{Read, Write};

use serde::{Deserialize, Serialize};
use waystation_format::checksum::crc64;
use waystation_format::slot::{Header, Id, Key, State, Tenant, Version, Writer};
use waystation_format::{Error, Kind, Result};

use super::directory::Directory;
use super::{Known, Store};

/// The file of the notes.
pub(super) const NOTES: &str = "notes";
/// Its name until all of it is there.
pub(super) const NOTES_ASIDE: &str = "notes.new";
/// The notes have at most so many bytes.
const LIMIT_BYTES: u64 = 16 << 20;
const SUM_BYTES: usize = 8;

/// The notes of an agent that is alone.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Alone {
    committed: Vec<Committed>,
}

/// A version that a slot holds.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Committed {
    slot: u32,
    shard: String,
    epoch: u64,
    step: u64,
}

/// Whose slot a slot of which nothing can be read was, as an agent that was alone has noted.
pub(super) fn noted(directory: &Directory, run: Id, slot: u32) -> Option<Tenant> {
    let notes: Alone = serde_json::from_slice(&read(directory).ok()??).ok()?;
    let found = notes.committed.into_iter().find(|committed| committed.slot == slot)?;
    let version = Version { epoch: found.epoch, step: found.step };
    let key = Key { run, shard: found.shard, version };
    Some(Tenant { key, contents_bytes: 0, data_bytes: 0, writer: Writer::default() })
}

fn read(directory: &Directory) -> Result<Option<Vec<u8>>> {
    let Some(file) = directory.open_file(NOTES)? else { return Ok(None) };
    let path = directory.path_of(NOTES);
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

impl Store {
    /// Notes what is committed, if this agent is alone.
    pub(super) fn note_committed(&self, known: &Known) {
        if known.is_shared {
            return;
        }
        let committed = |header: &Header| match &header.state {
            State::Committed(Tenant { key, .. }, _) => Some(Committed {
                slot: header.slot,
                shard: key.shard.clone(),
                epoch: key.version.epoch,
                step: key.version.step,
            }),
            _ => None,
        };
        let notes = Alone { committed: known.headers.iter().filter_map(committed).collect() };
        // What is committed is so without this, which only helps to tell of a loss.
        drop(serde_json::to_vec(&notes).map(|notes| self.write_notes(&notes)));
    }

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
        read(&self.directory)
    }
}
