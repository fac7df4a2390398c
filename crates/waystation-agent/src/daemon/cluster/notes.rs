//! What an agent remembers beyond its process, beside the copies in its slots: in the notes of its store.
//!
//! They are of one boot: a store on a disk outlives the machine's memory, but might lack what was noted last. They are
//! written before anything that follows from them leaves the host.

use serde::{Deserialize, Serialize};
use waystation_format::slot::Id;
use waystation_format::{Error, Kind, Result};

use super::founding::Blank;
use crate::local::message::HexId;
use crate::protocol::memory::Memory;

/// The notes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Notes {
    /// Of the machine.
    pub boot: HexId,
    /// The name of this host among those of the run.
    pub host: String,
    /// The digest of the names of all.
    pub hosts: u64,
    /// What is remembered.
    pub stage: Stage,
}

/// How far an agent has come.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Stage {
    /// It does not know yet whether there is something to remember.
    Blank(Blank),
    /// It takes part.
    Member {
        /// The incarnations that have founded the run.
        founders: Vec<u64>,
        /// Without the copies, which the slots tell of.
        memory: Memory,
    },
}

impl Notes {
    /// As they are written.
    pub fn encode(&self) -> Result<Vec<u8>> {
        serde_json::to_vec(self).map_err(|error| {
            Error::new(Kind::Internal, format!("what is to be remembered cannot be written: {error}"))
        })
    }

    /// What was written, if it is of this boot.
    ///
    /// Corrupt if it means nothing, Conflict if it is of another host, or of one among others.
    pub fn decode(notes: &[u8], boot: Id, host: &str, hosts: u64) -> Result<Option<Self>> {
        let notes: Self = serde_json::from_slice(notes).map_err(|error| {
            Error::new(Kind::Corrupt, format!("what the agent has to remember means nothing: {error}"))
        })?;
        if notes.boot.0 != boot {
            return Ok(None);
        }
        if (notes.host.as_str(), notes.hosts) != (host, hosts) {
            let message = "the store was kept for another host, or among other hosts; which there are, and their order, \
                           stay as they are for a run: discard the store to begin another";
            return Err(Error::new(Kind::Conflict, message).with("found", notes.host).with("wanted", host));
        }
        Ok(Some(notes))
    }
}
