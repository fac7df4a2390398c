//! Reading what a slot holds, within the agent: for replication, and for whoever asks it for a version.
//!
//! Invariants: as long as a [`Reading`] exists, its slot's bytes are not overwritten; no block is given out
//! that does not match its checksum; a slot that is still being written gives the blocks that are in place.

use std::sync::Arc;

use waystation_format::checksum::BLOCK_BYTES;
use waystation_format::slot::{Entry, Key, State, Sums, Tenant};
use waystation_format::{Error, Kind, Result};

use super::file::SlotFile;
use super::verify::verify_block;
use super::{Store, is_readable};
use crate::slots::Hold;

/// A slot that is kept while it is read.
#[derive(Debug)]
pub struct Reading {
    slot: u32,
    tenant: Tenant,
    sums: Option<Sums>,
    file: Arc<SlotFile>,
    hold: Arc<Hold>,
}

impl Store {
    /// Begins to read a version. NotFound if it is not here.
    pub fn read(&self, key: &Key) -> Result<Reading> {
        let known = self.lock();
        let header = known.headers.iter().find(|header| {
            is_readable(&header.state) && header.state.tenant().is_some_and(|tenant| tenant.key == *key)
        });
        let found = header.and_then(|header| Some((header, header.state.tenant()?)));
        let (header, tenant) = found.ok_or_else(|| not_here(key))?;
        let of_slot = self.slot(header.slot)?;
        if !of_slot.hold.acquire() {
            return Err(not_here(key));
        }
        Ok(Reading {
            slot: header.slot,
            tenant: tenant.clone(),
            sums: match &header.state {
                State::Sealed(_, sums) | State::Committed(_, sums) => Some(*sums),
                _ => None,
            },
            file: of_slot.file(),
            hold: Arc::clone(&of_slot.hold),
        })
    }
}

impl Reading {
    /// The number of the slot.
    pub fn slot(&self) -> u32 {
        self.slot
    }

    /// What it holds.
    pub fn tenant(&self) -> &Tenant {
        &self.tenant
    }

    /// What vouches for it; nothing does while it is still written.
    pub fn sums(&self) -> Option<Sums> {
        self.sums
    }

    /// Its file, for sending parts of it.
    pub fn file(&self) -> &SlotFile {
        &self.file
    }

    /// The entries and the checksums of all blocks, verified.
    ///
    /// Conflict while it is still written.
    pub fn tables(&self) -> Result<(Vec<Entry>, Vec<u64>)> {
        let sums = self.sums.ok_or_else(|| {
            Error::new(Kind::Conflict, "the slot is not sealed yet; read the blocks that are in place")
                .with("slot", self.slot.to_string())
        })?;
        self.file.tables(&self.tenant, sums)
    }

    /// How many blocks are in place, from the first.
    pub fn blocks_in_place(&self) -> Result<u64> {
        let regions = self.tenant.regions();
        let all = regions.map_or(0, |regions| regions.block_count());
        if self.sums.is_some() { Ok(all) } else { Ok(self.file.progress()?.min(all)) }
    }

    /// The checksums of the first `count` blocks, as their writer says; they must be in place.
    pub fn block_sums(&self, count: u64) -> Result<Vec<u64>> {
        if count > self.blocks_in_place()? {
            return Err(Error::new(Kind::InvalidInput, "blocks are asked for that are not in place yet"));
        }
        let mut sums = self.file.block_sums(&self.tenant)?;
        sums.truncate(count as usize);
        Ok(sums)
    }

    /// Reads a block to the beginning of `buffer`, verified; returns how long it is.
    pub fn read_block(&self, index: u64, expected: u64, buffer: &mut [u8; BLOCK_BYTES]) -> Result<usize> {
        if index >= self.blocks_in_place()? {
            return Err(Error::new(Kind::InvalidInput, "a block is asked for that is not in place yet"));
        }
        verify_block(&self.file, &self.tenant, index as usize, expected, buffer)?;
        let left = self.tenant.data_bytes - index * BLOCK_BYTES as u64;
        Ok(left.min(BLOCK_BYTES as u64) as usize)
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.hold.release();
    }
}

fn not_here(key: &Key) -> Error {
    Error::new(Kind::NotFound, "this version of the shard is not in the store")
        .with("shard", &*key.shard)
        .with("epoch", key.version.epoch.to_string())
        .with("step", key.version.step.to_string())
}
