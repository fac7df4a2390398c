//! The file of one slot: made, opened, its header and its parts read and written.
//!
//! Invariants: a header is replaced by one write of the page of the older copy; whoever shortens a slot's file
//! does no more harm to the agent than to make reads and looks (`viewed`) fail.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::FallocateFlags;
use waystation_format::checksum::crc64;
use waystation_format::page::PAGE_BYTES;
use waystation_format::slot::{
    self, COPIES, Entry, Header, Newest, PROGRESS_OFFSET, Record, Sums, Tenant, decode_contents,
};
use waystation_format::{Error, Kind, Result};
use waystation_io::job::in_parallel;

use super::viewed::View;
use crate::mapping::Mapping;

/// The bytes that a record in two copies takes.
const RECORD_BYTES: usize = COPIES as usize * PAGE_BYTES;

/// What one thread has huge pages made of at a time.
const COLLAPSED_BYTES: u64 = 16 << 20;

/// A file that begins with a record in two copies.
#[derive(Debug)]
pub struct SlotFile {
    file: File,
    path: PathBuf,
    view: Mutex<Option<Arc<View>>>,
}

impl SlotFile {
    /// A file that is open.
    pub fn new(file: File, path: PathBuf) -> Self {
        Self { file, path, view: Mutex::default() }
    }

    /// The name of the file of a slot.
    pub fn name(slot: u32) -> String {
        format!("slot-{slot:05}")
    }

    /// The open file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes it so long, in huge pages as far as there are any; `allocate` takes the rest of its memory.
    pub fn make_huge(&self, nbytes: u64, threads: usize) -> Result<()> {
        let failed = |error| Error::from_io(error, "make a slot", &self.path);
        self.file.set_len(nbytes).map_err(failed)?;
        let mapping = Mapping::new(&self.file, nbytes, &self.path)?;
        let next = AtomicU64::new(0);
        let parts = (nbytes / COLLAPSED_BYTES).max(1) as usize;
        in_parallel(threads.clamp(1, parts), "waystation-touch", &|| {
            loop {
                let begin = next.fetch_add(COLLAPSED_BYTES, Ordering::Relaxed);
                if begin >= nbytes {
                    return Ok(());
                }
                mapping.collapse(begin..begin + COLLAPSED_BYTES);
            }
        })
    }

    /// Takes `nbytes` of memory for it, or as Unavailable says that there are none.
    pub fn allocate(&self, nbytes: u64) -> Result<()> {
        // In tmpfs a signal ends it, and takes back what it had.
        let allocate = || rustix::fs::fallocate(&self.file, FallocateFlags::empty(), 0, nbytes);
        rustix::io::retry_on_intr(allocate).map_err(|errno| {
            Error::from_io(errno.into(), "take memory for a slot", &self.path)
                .with("slot_bytes", nbytes.to_string())
        })
    }

    /// How long it is.
    pub fn nbytes(&self) -> Result<u64> {
        let metadata = self.file.metadata();
        metadata.map(|metadata| metadata.len()).map_err(|error| Error::from_io(error, "examine", &self.path))
    }

    /// The record that it begins with.
    pub fn record<R: Record>(&self) -> Result<Newest<R>> {
        let mut pages = vec![0; RECORD_BYTES];
        let found = self.read_at(&mut pages, 0).and_then(|()| slot::newest(&pages));
        found.map_err(|error| error.with("path", self.path.display().to_string()))
    }

    /// Writes a record over the copy of the one before the last.
    pub fn write_record<R: Record>(&self, record: &R) -> Result<()> {
        let (number, page) = record.encode()?;
        self.write_at(&page, number * PAGE_BYTES as u64)
    }

    /// How many blocks its writer says to be in place.
    pub fn progress(&self) -> Result<u64> {
        let mut bytes = [0; 8];
        self.read_at(&mut bytes, PROGRESS_OFFSET)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Takes back what an earlier writer said.
    pub fn reset_progress(&self) -> Result<()> {
        self.set_progress(0)
    }

    /// Says how many blocks are in place.
    pub fn set_progress(&self, blocks: u64) -> Result<()> {
        self.write_at(&blocks.to_le_bytes(), PROGRESS_OFFSET)
    }

    /// The table of contents of a tenant, and its checksum.
    pub fn contents(&self, tenant: &Tenant) -> Result<(Vec<Entry>, u64)> {
        let regions = tenant.regions().ok_or_else(|| self.corrupt("the sizes of a shard overflow"))?;
        let mut contents = self.buffer(tenant.contents_bytes)?;
        self.read_at(&mut contents, regions.contents.start)?;
        let entries = decode_contents(&contents, tenant.data_bytes);
        Ok((entries.map_err(|error| self.named(error))?, crc64(&contents)))
    }

    /// The checksums of the blocks of a tenant.
    pub fn block_sums(&self, tenant: &Tenant) -> Result<Vec<u64>> {
        let regions = tenant.regions().ok_or_else(|| self.corrupt("the sizes of a shard overflow"))?;
        let mut bytes = self.buffer(8 * regions.block_count())?;
        self.read_at(&mut bytes, regions.checksums.start)?;
        let longs = bytes.chunks_exact(8);
        Ok(longs.map(|long| long.first_chunk().copied().map_or(0, u64::from_le_bytes)).collect())
    }

    /// The entries and block checksums of a tenant that `sums` vouch for.
    pub fn tables(&self, tenant: &Tenant, sums: Sums) -> Result<(Vec<Entry>, Vec<u64>)> {
        let (entries, contents) = self.contents(tenant)?;
        if contents != sums.contents {
            return Err(self.corrupt("the table of contents of a slot does not match its checksum"));
        }
        let block_sums = self.block_sums(tenant)?;
        if slot::digest(contents, block_sums.iter().copied()) != sums.digest {
            return Err(self.corrupt("the checksums of a slot do not match its digest"));
        }
        Ok((entries, block_sums))
    }

    /// Fills `bytes` with what is there from `offset` on. Corrupt if the file ends before.
    pub fn read_at(&self, bytes: &mut [u8], offset: u64) -> Result<()> {
        self.file.read_exact_at(bytes, offset).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => self.corrupt("the file has been cut off"),
            _ => Error::from_io(error, "read a slot", &self.path),
        })
    }

    /// Lets `look` see a range where it lies. Corrupt if the file ends before.
    pub fn look<T>(&self, range: Range<u64>, look: impl FnOnce(&[u8]) -> T) -> Result<T> {
        let view = self.view(range.end)?;
        view.look(range, look).ok_or_else(|| {
            // The next look is at what is there then.
            self.lock_view().take_if(|known| Arc::ptr_eq(known, &view));
            self.corrupt("the file has been cut off")
        })
    }

    /// The file as memory, at least so much of it as far as there is that; it stays mapped.
    fn view(&self, nbytes: u64) -> Result<Arc<View>> {
        let mut known = self.lock_view();
        if let Some(view) = &*known {
            return Ok(Arc::clone(view));
        }
        let there = self.nbytes()?;
        if there < nbytes {
            return Err(self.corrupt("the file has been cut off"));
        }
        let view = View::new(&self.file, there);
        let view = view.map_err(|error| Error::from_io(error, "map a slot", &self.path))?;
        Ok(Arc::clone(known.insert(Arc::new(view))))
    }

    fn lock_view(&self) -> MutexGuard<'_, Option<Arc<View>>> {
        self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes bytes from `offset` on.
    pub fn write_at(&self, bytes: &[u8], offset: u64) -> Result<()> {
        let written = self.file.write_all_at(bytes, offset);
        written.map_err(|error| Error::from_io(error, "write a slot", &self.path))
    }

    /// Memory for what a header claims, which the file must be long enough for.
    fn buffer(&self, nbytes: u64) -> Result<Vec<u8>> {
        if nbytes > self.nbytes()? {
            return Err(self.corrupt("the file has been cut off"));
        }
        Ok(vec![0; nbytes as usize])
    }

    /// An error that says which slot is damaged, and how.
    pub fn corrupt(&self, message: &'static str) -> Error {
        self.named(Error::new(Kind::Corrupt, message))
    }

    fn named(&self, error: Error) -> Error {
        error.with("path", self.path.display().to_string())
    }
}

/// The headers that a new slot begins with: the same twice, so that both copies exist.
pub fn first_headers(store: slot::Id, slot: u32, slot_bytes: u64, state: slot::State) -> [Header; 2] {
    [0, 1].map(|sequence| Header { store, slot, slot_bytes, sequence, state: state.clone() })
}
