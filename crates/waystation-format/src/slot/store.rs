//! The record of a store: what all slots of a host have in common, and which epoch fences them.
//!
//! Invariants: at least two versions of a shard have room in it; nothing of it but the epoch and the
//! topology ever changes.

use super::copies::{COPIES, Record, body_of};
use super::fields::Fields;
use super::{Id, VERSION};
use crate::page::{self, PAYLOAD_BYTES};
use crate::{Error, Kind, Result};

const MAGIC: &[u8; 8] = b"WSTSTORE";

/// The record of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreRecord {
    /// Drawn at random when the store was made.
    pub store: Id,
    /// The run whose versions it holds.
    pub run: Id,
    /// What the slots were counted and measured for.
    pub topology: Id,
    /// Writers of a lower epoch are refused.
    pub epoch: u64,
    /// Length of the file of each slot.
    pub slot_bytes: u64,
    /// How many slots there are.
    pub slot_count: u32,
    /// How many versions of one shard there may be at a time.
    pub versions_per_shard: u32,
    /// How many records there were before.
    pub sequence: u64,
}

impl StoreRecord {
    fn payload(&self) -> Vec<u8> {
        let mut to = Vec::with_capacity(PAYLOAD_BYTES);
        to.extend_from_slice(MAGIC);
        to.extend_from_slice(&VERSION.to_le_bytes());
        to.extend_from_slice(&[0; 4]);
        to.extend_from_slice(&self.sequence.to_le_bytes());
        for id in [self.store, self.run, self.topology] {
            to.extend_from_slice(&id.0);
        }
        to.extend_from_slice(&self.epoch.to_le_bytes());
        to.extend_from_slice(&self.slot_bytes.to_le_bytes());
        to.extend_from_slice(&self.slot_count.to_le_bytes());
        to.extend_from_slice(&self.versions_per_shard.to_le_bytes());
        to
    }

    fn read(mut fields: Fields<'_>) -> Option<Self> {
        fields.word()?;
        let sequence = fields.long()?;
        let (store, run, topology) = (Id(fields.array()?), Id(fields.array()?), Id(fields.array()?));
        let (epoch, slot_bytes) = (fields.long()?, fields.long()?);
        let (slot_count, versions_per_shard) = (fields.word()?, fields.word()?);
        Some(Self { store, run, topology, epoch, slot_bytes, slot_count, versions_per_shard, sequence })
    }

    fn check(&self) -> Result<()> {
        if self.versions_per_shard < 2 || self.slot_count < self.versions_per_shard {
            let message = "a store has room for at least two versions of a shard";
            return Err(Error::new(Kind::Corrupt, message));
        }
        Ok(())
    }
}

impl Record for StoreRecord {
    const NAME: &'static str = "the record of a store";

    fn decode(page: &[u8], number: u64) -> Result<Self> {
        let payload = page::open(page, number, PAYLOAD_BYTES)?;
        let contradicts = || Error::new(Kind::Corrupt, "the record of a store contradicts itself");
        let record = Self::read(body_of(payload, MAGIC, Self::NAME)?).ok_or_else(contradicts)?;
        record.check()?;
        if record.encode()? != (number, page.to_vec()) {
            return Err(contradicts());
        }
        Ok(record)
    }

    fn encode(&self) -> Result<(u64, Vec<u8>)> {
        self.check().map_err(|error| error.with_kind(Kind::InvalidInput))?;
        let number = self.sequence % COPIES;
        let mut page = Vec::with_capacity(page::PAGE_BYTES);
        page::push(&mut page, number, &self.payload());
        Ok((number, page))
    }

    fn sequence(&self) -> u64 {
        self.sequence
    }
}
