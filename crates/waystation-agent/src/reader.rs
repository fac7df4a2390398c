//! Loading from a slot in another process than the agent: what the engine's planned reads need of it.
//!
//! Invariants: as long as a [`SlotReader`] exists the slot is not given to a writer; the tables were verified,
//! and the engine verifies every block that it reads. So strided destinations, threads and cancellation are
//! the engine's, as for any file.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use waystation_format::checksum::BLOCK_BYTES;
use waystation_format::slot::{Entry, Header, Key, Regions, Tenant};
use waystation_format::{Error, Kind, Result};
use waystation_io::read::plan::ReadFile;

use crate::locks::{self, Part};
use crate::store::SlotFile;

/// A version in a slot, kept while it is loaded.
#[derive(Debug)]
pub struct SlotReader {
    file: SlotFile,
    tenant: Tenant,
    regions: Regions,
    entries: Vec<Entry>,
    block_sums: Vec<u64>,
}

impl SlotReader {
    /// Opens a slot that holds the version `key`, sealed or committed.
    ///
    /// NotFound if it holds something else by now, Corrupt if its tables are damaged.
    pub fn open(path: &Path, key: &Key) -> Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NOFOLLOW)
            .open(path)
            .map_err(|error| Error::from_io(error, "open a slot", path))?;
        let gone = || {
            Error::new(Kind::NotFound, "the slot does not hold this version any more")
                .with("path", path.display().to_string())
                .with("shard", &*key.shard)
        };
        let taken = locks::try_shared(&file, Part::Readers);
        if !taken.map_err(|error| Error::from_io(error, "lock a slot", path))? {
            return Err(gone()); // it is being handed over
        }
        let file = SlotFile::new(file, path.to_owned());
        let state = file.record::<Header>()?.record.state;
        let held = state.tenant().filter(|tenant| tenant.key == *key).zip(state.sums());
        let (tenant, sums) = held.ok_or_else(gone)?;
        let regions = tenant.regions().ok_or_else(gone)?;
        let (entries, block_sums) = file.tables(tenant, sums)?;
        Ok(Self { tenant: tenant.clone(), file, regions, entries, block_sums })
    }

    /// What the slot holds.
    pub fn tenant(&self) -> &Tenant {
        &self.tenant
    }

    /// The boxes of arrays in it.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Where the bytes of an entry begin in the file: the offset of its chunk in a read plan.
    pub fn chunk_offset(&self, entry: &Entry) -> u64 {
        self.regions.data.start + entry.offset
    }

    /// The file as a read plan wants it. The blocks before the data have no checksums; no entry lies there.
    pub fn read_file(&self) -> ReadFile {
        let before = (self.regions.data.start / BLOCK_BYTES as u64) as usize;
        let mut checksums = vec![0; before];
        checksums.extend_from_slice(&self.block_sums);
        ReadFile {
            path: self.file.path().to_owned(),
            file_bytes: self.regions.data.end,
            checksums: Some(checksums),
            version: None,
        }
    }
}
