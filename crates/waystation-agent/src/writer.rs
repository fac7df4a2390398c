//! Filling a slot: in the process whose arrays they are, or in the agent for what a peer sends.
//!
//! One pass copies and checksums, block by block, on several threads; after each block that completes a
//! prefix of blocks the slot says so, so that others can read what is in place. Failures: killed, refused or
//! stopped in the middle, the slot is in writing, and the prefix that it claims is in place; the same writer
//! may go on from there. Invariants: nothing of a slot is touched before the writer's lock is had and the
//! header names this writer with its ticket; a block's checksum is in place before the prefix contains it.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::slice;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use waystation_format::checksum::{BLOCK_BYTES, Crc64, crc64};
use waystation_format::page::PAGE_BYTES;
use waystation_format::slot::{COPIES, Header, PROGRESS_OFFSET, Regions, State, newest};
use waystation_format::{Error, Kind, Result};
use waystation_io::job::in_parallel;
use waystation_io::segment::Segment;

use crate::locks::{self, Part};
use crate::mapping::Mapping;
use crate::prefix::Prefix;
use crate::store::Grant;

const BLOCK: u64 = BLOCK_BYTES as u64;

/// An array (or a box of one) and where its bytes begin in the data of a slot.
#[derive(Clone, Debug)]
pub struct Placed {
    /// Offset in the data.
    pub offset: u64,
    /// The bytes.
    pub segment: Segment,
}

/// What became of a block that was received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Receipt {
    /// It is in place.
    Placed,
    /// It was there, or is being received by somebody else; nothing was read.
    Known,
    /// It is not what its checksum says; it counts as not received.
    Damaged,
}

/// What fills one slot.
#[derive(Debug)]
pub struct SlotWriter {
    mapping: Mapping,
    grant: Grant,
    regions: Regions,
    prefix: Mutex<Prefix>,
    /// The blocks that are being received.
    claimed: Mutex<BTreeSet<u64>>,
    /// Up to where data were written through this mapping, so that their pages are in it.
    populated_bytes: u64,
}

impl SlotWriter {
    /// Opens the slot of a grant.
    ///
    /// Fenced if the slot is not (any more) that of the grant, Conflict if somebody else maps it.
    pub fn open(grant: &Grant) -> Result<Self> {
        Self::open_at(grant, 0)
    }

    /// The same, of a slot that has so many blocks in place, from the first.
    pub fn open_at(grant: &Grant, blocks: u64) -> Result<Self> {
        let path = &grant.path;
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NOFOLLOW)
            .open(path)
            .map_err(|error| Error::from_io(error, "open a slot", path))?;
        let taken = locks::try_exclusive(&file, Part::Writer);
        if !taken.map_err(|error| Error::from_io(error, "lock a slot", path))? {
            return Err(Error::new(Kind::Conflict, "another process still maps the slot")
                .with("path", path.display().to_string()));
        }
        let mut pages = vec![0; COPIES as usize * PAGE_BYTES];
        file.read_exact_at(&mut pages, 0).map_err(|error| Error::from_io(error, "read a slot", path))?;
        let (regions, slot_bytes) = check(&pages, grant)?;
        let mapping = map(&file, slot_bytes, path)?;
        mapping.populate(PROGRESS_OFFSET..regions.checksums.end)?;
        let (prefix, claimed) = (Mutex::new(Prefix::of(blocks)), Mutex::default());
        Ok(Self { mapping, grant: grant.clone(), regions, prefix, claimed, populated_bytes: 0 })
    }

    /// Goes on with the slot for another version that was granted to this process.
    pub fn renew(&mut self, grant: &Grant) -> Result<()> {
        if grant.path != self.grant.path {
            return Err(Error::new(Kind::InvalidInput, "the grant is for another slot; open that")
                .with("path", grant.path.display().to_string()));
        }
        let mut pages = vec![0; COPIES as usize * PAGE_BYTES];
        // SAFETY: the pages are mapped; the agent does not replace the header of a slot that it has granted.
        unsafe { std::ptr::copy_nonoverlapping(self.mapping.at(0), pages.as_mut_ptr(), pages.len()) };
        self.regions = check(&pages, grant)?.0;
        self.mapping.populate(PROGRESS_OFFSET..self.regions.checksums.end)?;
        self.grant = grant.clone();
        *self.prefix.get_mut().unwrap_or_else(PoisonError::into_inner) = Prefix::default();
        Ok(())
    }

    /// The grant that it writes for.
    pub fn grant(&self) -> &Grant {
        &self.grant
    }

    /// How many blocks are in place, from the first.
    pub fn blocks_in_place(&self) -> u64 {
        self.prefix.lock().unwrap_or_else(PoisonError::into_inner).pieces()
    }

    /// Writes the table of contents, and every block that is not in place yet: the bytes of `parts`, which
    /// are in order and do not overlap, with zeros between. Ends early, as Cancelled, once `stop` says so.
    ///
    /// # Safety
    /// The memory of all parts must be readable, and nobody may write to it meanwhile.
    pub unsafe fn fill(
        &mut self,
        contents: &[u8],
        parts: &[Placed],
        threads: usize,
        stop: &(impl Fn() -> bool + Sync),
    ) -> Result<()> {
        self.check_parts(parts)?;
        self.put_contents(contents)?;
        let blocks = self.regions.block_count();
        let next = AtomicU64::new(self.blocks_in_place());
        let threads = threads.clamp(1, usize::try_from(blocks).unwrap_or(usize::MAX).max(1));
        in_parallel(threads, "waystation-fill", &|| {
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= blocks {
                    return Ok(());
                }
                if stop() {
                    return Err(Error::new(Kind::Cancelled, "the operation was cancelled"));
                }
                // SAFETY: the caller vouches for the sources; a block is filled by one thread.
                unsafe { self.fill_block(index, parts) }?;
            }
        })?;
        self.populated_bytes = self.populated_bytes.max(self.regions.data.end);
        Ok(())
    }

    /// Writes the table of contents, which has no checksum until the slot is sealed.
    pub fn put_contents(&mut self, contents: &[u8]) -> Result<()> {
        if contents.len() as u64 != self.grant.tenant.contents_bytes {
            return Err(invalid("the table of contents is not as long as the slot was granted for"));
        }
        let target = self.mapping.at(self.regions.contents.start);
        // SAFETY: the region lies in the mapping, which is this writer's alone.
        unsafe { std::ptr::copy_nonoverlapping(contents.as_ptr(), target, contents.len()) };
        Ok(())
    }

    /// Writes one block, if its bytes are what its checksum says: for what comes from a peer.
    pub fn put_block(&mut self, index: u64, bytes: &[u8], expected: u64) -> Result<()> {
        let block = self.block(index).filter(|block| block.end - block.start == bytes.len() as u64);
        let block =
            block.ok_or_else(|| invalid("a block has another place or length than the slot has for it"))?;
        let actual = crc64(bytes);
        if actual != expected {
            return Err(Error::new(Kind::Corrupt, "a block does not match its checksum; have it sent again")
                .with("block", index.to_string())
                .with("expected", format!("{expected:016x}"))
                .with("actual", format!("{actual:016x}")));
        }
        let offset = self.regions.data.start + block.start;
        self.touch(offset..offset + bytes.len() as u64)?;
        // SAFETY: the block lies in the mapping, which is this writer's alone.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.mapping.at(offset), bytes.len()) };
        // SAFETY: this writer is borrowed alone, so no other thread fills the block.
        unsafe { self.complete(index, actual) };
        Ok(())
    }

    /// Has `read` fill one block where it lies in the slot, and counts it if it is what its checksum says.
    /// Threads may receive blocks at the same time.
    pub fn receive_block(
        &self,
        index: u64,
        expected: u64,
        read: impl FnOnce(&mut [u8]) -> Result<()>,
    ) -> Result<Receipt> {
        let block = self.block(index).ok_or_else(|| invalid("the slot has no block of that number"))?;
        if !self.claim(index) {
            return Ok(Receipt::Known);
        }
        let (offset, nbytes) = (self.regions.data.start + block.start, block.end - block.start);
        let received = self.touch(offset..offset + nbytes).and_then(|()| {
            // SAFETY: the block lies in the mapping, and who has claimed it has it alone.
            let bytes = unsafe { slice::from_raw_parts_mut(self.mapping.at(offset), nbytes as usize) };
            read(bytes)?;
            let actual = crc64(bytes);
            if actual != expected {
                return Ok(Receipt::Damaged);
            }
            // SAFETY: as above.
            unsafe { self.complete(index, actual) };
            Ok(Receipt::Placed)
        });
        self.claimed.lock().unwrap_or_else(PoisonError::into_inner).remove(&index);
        received
    }

    /// Takes a block that is neither in place nor taken.
    fn claim(&self, index: u64) -> bool {
        let mut claimed = self.claimed.lock().unwrap_or_else(PoisonError::into_inner);
        let is_there = self.prefix.lock().unwrap_or_else(PoisonError::into_inner).contains(index);
        !is_there && claimed.insert(index)
    }

    /// Where a block begins and ends in the data.
    fn block(&self, index: u64) -> Option<Range<u64>> {
        let begin = index.checked_mul(BLOCK).filter(|_| index < self.regions.block_count())?;
        Some(begin..(begin + BLOCK).min(self.grant.tenant.data_bytes))
    }

    fn touch(&self, range: Range<u64>) -> Result<()> {
        if range.end <= self.populated_bytes { Ok(()) } else { self.mapping.populate(range) }
    }

    fn check_parts(&self, parts: &[Placed]) -> Result<()> {
        let mut end = 0;
        for part in parts {
            if part.offset < end {
                return Err(invalid("the parts of a shard overlap, or are not in order"));
            }
            end = part.offset.saturating_add(part.segment.nbytes());
        }
        if end > self.grant.tenant.data_bytes {
            return Err(invalid("the parts of a shard reach beyond the data that the slot was granted for"));
        }
        Ok(())
    }

    /// # Safety
    /// As for [`SlotWriter::fill`]; no other thread may fill the same block.
    unsafe fn fill_block(&self, index: u64, parts: &[Placed]) -> Result<()> {
        let Some(block) = self.block(index) else { return Ok(()) };
        let (offset, nbytes) = (self.regions.data.start + block.start, block.end - block.start);
        self.touch(offset..offset + nbytes)?;
        // SAFETY: the block lies in the mapping, and this thread has it alone.
        let bytes = unsafe { slice::from_raw_parts_mut(self.mapping.at(offset), nbytes as usize) };
        // SAFETY: the caller vouches for the sources.
        let sum = unsafe { gather(parts, block.start, bytes) };
        // SAFETY: as the caller promises.
        unsafe { self.complete(index, sum) };
        Ok(())
    }

    /// Writes the checksum of a block that is in place, counts it, and tells others how many there are.
    ///
    /// # Safety
    /// No other thread may fill the same block.
    unsafe fn complete(&self, index: u64, sum: u64) {
        let sum = sum.to_le_bytes();
        let target = self.mapping.at(self.regions.checksums.start + 8 * index);
        // SAFETY: the checksum of this block lies in the mapping, and this thread has it alone.
        unsafe { std::ptr::copy_nonoverlapping(sum.as_ptr(), target, sum.len()) };
        let mut prefix = self.prefix.lock().unwrap_or_else(PoisonError::into_inner);
        let pieces = prefix.complete(index);
        let word = self.mapping.at(PROGRESS_OFFSET).cast::<u64>();
        // SAFETY: the word is mapped and aligned; this process writes it under the lock, others only read it.
        let progress = unsafe { AtomicU64::from_ptr(word) };
        progress.store(pieces.to_le(), Ordering::Release);
    }
}

/// Fills `bytes` with what parts have from `begin` of the data on, and zeros where there is none. Returns the
/// checksum of that.
///
/// # Safety
/// The memory of all parts must be readable and not overlap `bytes`.
unsafe fn gather(parts: &[Placed], begin: u64, bytes: &mut [u8]) -> u64 {
    let end = begin + bytes.len() as u64;
    let mut sum = Crc64::new();
    let clear = |sum: &mut Crc64, gap: &mut [u8]| {
        gap.fill(0);
        sum.update(gap);
    };
    let mut position = begin;
    let first = parts.partition_point(|part| part.offset + part.segment.nbytes() <= begin);
    for part in parts[first..].iter().take_while(|part| part.offset < end) {
        let (from, to) = (part.offset.max(begin), (part.offset + part.segment.nbytes()).min(end));
        clear(&mut sum, &mut bytes[(position - begin) as usize..(from - begin) as usize]);
        let target = &mut bytes[(from - begin) as usize..(to - begin) as usize];
        // SAFETY: as the caller promises.
        unsafe { part.segment.gather_summed(from - part.offset, target, &mut sum) };
        position = to;
    }
    clear(&mut sum, &mut bytes[(position - begin) as usize..]);
    sum.finish()
}

fn map(file: &File, slot_bytes: u64, path: &Path) -> Result<Mapping> {
    let length = file.metadata().map_err(|error| Error::from_io(error, "examine a slot", path))?.len();
    if length < slot_bytes {
        return Err(
            Error::new(Kind::Corrupt, "a slot has been cut off").with("path", path.display().to_string())
        );
    }
    Mapping::new(file, slot_bytes, path)
}

/// The regions of the slot and its length, if its header says what the grant does.
fn check(pages: &[u8], grant: &Grant) -> Result<(Regions, u64)> {
    let header = newest::<Header>(pages)?.record;
    let is_ours = header.sequence == grant.ticket
        && matches!(&header.state, State::Writing(tenant) if *tenant == grant.tenant);
    let regions = grant.tenant.regions().filter(|_| is_ours);
    regions.map(|regions| (regions, header.slot_bytes)).ok_or_else(|| {
        Error::new(Kind::Fenced, "the slot is not (any more) that of this writer")
            .with("path", grant.path.display().to_string())
            .with("ticket", grant.ticket.to_string())
    })
}

fn invalid(message: &'static str) -> Error {
    Error::new(Kind::InvalidInput, message)
}
