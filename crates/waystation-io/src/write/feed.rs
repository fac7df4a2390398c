//! Files of another storage as the sources of a write: what makes it a copy.
//!
//! A new file is put together from a header and extents of these; a file that is copied whole is one extent.
//! Readers fetch the pieces of the job in their order, several at a time, each into a slot of one slab. Whoever
//! gathers a piece waits until it is there, copies it on and verifies each of its blocks in the same pass. Failure
//! sequence: a read fails, or a block is not what its checksum says: the job fails before the piece is written; a
//! file is not what its own checksum says: the job fails before the file is finished. Invariants: memory is bounded
//! by the slots; a slot is filled for one piece, and again only once that was gathered; no reader is at work once the
//! write has ended.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::Builder;
use std::time::Duration;

use waystation_format::checksum::{BLOCK_BYTES, Crc64, joined};
use waystation_format::{Error, Kind, Result};

use super::blocks::{Blocks, Piece};
use super::plan::{FileInput, Plan};
use crate::arena::{Arena, Slab};
use crate::job::{Shared, panicked};
use crate::read;
use crate::read::device::Delivery;
use crate::read::layout::Mismatch;
use crate::read::plan::ReadFile;
use crate::storage::Storage;

/// Memory of all slots together, unless the caller bounds it; there are two slots at least.
const FEED_BYTES: usize = 128 << 20;
const LEAST_SLOTS: usize = 2;
/// How often whoever waits looks whether the job is to stop.
const SLICE: Duration = Duration::from_millis(20);

/// One file that is made of others.
#[derive(Clone, Debug)]
pub struct CopiedFile {
    /// Where it is to be; nothing may be there yet.
    pub path: PathBuf,
    /// Its first bytes.
    pub header: Vec<u8>,
    /// What follows them, in order.
    pub extents: Vec<Extent>,
    /// How long header and extents are together.
    pub file_bytes: u64,
    /// One checksum per block, by which it is verified before it is written.
    pub checksums: Option<Vec<u64>>,
    /// The checksum of all of it, by which it is verified before it is finished.
    pub crc64: Option<u64>,
}

impl CopiedFile {
    /// Calls with each part of an extent that is in a range of the file: the extent's source, where the part begins
    /// in that, and where in the file it is to be.
    fn for_each_part(&self, range: Range<u64>, mut visit: impl FnMut(usize, u64, Range<u64>)) {
        let first = self.extents.partition_point(|extent| extent.end() <= range.start);
        for extent in self.extents[first..].iter().take_while(|extent| extent.at < range.end) {
            let part = extent.at.max(range.start)..extent.end().min(range.end);
            if !part.is_empty() {
                visit(extent.source, extent.offset + (part.start - extent.at), part);
            }
        }
    }
}

/// A part of a source, and where in the new file it goes.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    source: usize,
    offset: u64,
    nbytes: u64,
    at: u64,
}

impl Extent {
    /// The extents of a file from rows of source, offset and bytes: they follow its header and each other.
    ///
    /// InvalidInput if a number is negative or the sum overflows.
    pub fn all_after(header_bytes: usize, rows: &[[i64; 3]]) -> Result<Vec<Self>> {
        let mut at = header_bytes as u64;
        let extent = |&[source, offset, nbytes]: &[i64; 3]| {
            let (source, offset) = (usize::try_from(source).ok()?, u64::try_from(offset).ok()?);
            let extent = Self { source, offset, nbytes: u64::try_from(nbytes).ok()?, at };
            at = at.checked_add(extent.nbytes).filter(|&end| i64::try_from(end).is_ok())?;
            Some(extent)
        };
        let extents: Option<Vec<Self>> = rows.iter().map(extent).collect();
        extents.ok_or_else(|| Error::new(Kind::InvalidInput, "an extent is beyond what a file can have"))
    }

    fn end(&self) -> u64 {
        self.at + self.nbytes
    }
}

/// What is copied, and how it is read.
pub struct Sources {
    /// Where the sources are.
    pub storage: Arc<dyn Storage>,
    /// The files that extents are of. What has checksums is verified where it is read.
    pub sources: Vec<ReadFile>,
    /// The new files, in the order of the plan.
    pub files: Vec<CopiedFile>,
    /// How each piece is read. The bound on bytes per second of a copy is here.
    pub options: read::Options,
    /// Pieces that are read at a time.
    pub readers: usize,
    /// Most memory for pieces that have been read.
    pub memory_bytes: Option<usize>,
}

impl Sources {
    /// The plan of the new files. InvalidInput if there are not as many checksums as blocks, or the extents do not make
    /// up the file.
    pub fn plan(&self) -> Result<Plan> {
        let input = |file: &CopiedFile| {
            self.check(file).map_err(|error| error.with("path", file.path.display().to_string()))?;
            let blocks = file.file_bytes.div_ceil(BLOCK_BYTES as u64);
            match &file.checksums {
                Some(checksums) if checksums.len() as u64 != blocks => {
                    let message =
                        format!("{} checksums were given for a file of {blocks} blocks", checksums.len());
                    Err(Error::new(Kind::InvalidInput, message)
                        .with("path", self.named(file).display().to_string()))
                }
                _ => Ok(FileInput {
                    path: file.path.clone(),
                    header: Vec::new(),
                    file_bytes: file.file_bytes,
                    words: Vec::new(),
                }),
            }
        };
        Plan::fed(self.files.iter().map(input).collect::<Result<_>>()?)
    }

    fn check(&self, file: &CopiedFile) -> Result<()> {
        let invalid = |message: String| Err(Error::new(Kind::InvalidInput, message));
        for extent in &file.extents {
            let source = self.sources.get(extent.source).map_or(0, |source| source.file_bytes);
            if extent.offset.checked_add(extent.nbytes).is_none_or(|end| end > source) {
                return invalid(format!(
                    "an extent of {} bytes at offset {} reaches beyond source {} of {source} bytes",
                    extent.nbytes, extent.offset, extent.source
                ));
            }
        }
        let end = file.extents.last().map_or(file.header.len() as u64, Extent::end);
        if end == file.file_bytes {
            return Ok(());
        }
        invalid(format!("header and extents end at {end}, the file at {}", file.file_bytes))
    }

    /// What errors of a file's own checksums name: the first that it is made of.
    fn named<'a>(&'a self, file: &'a CopiedFile) -> &'a Path {
        let source = file.extents.first().and_then(|extent| self.sources.get(extent.source));
        source.map_or(&file.path, |source| &source.path)
    }
}

/// The pieces of a job that have been read, or are being read.
pub struct Feed<'a> {
    sources: &'a Sources,
    slab: Slab,
    slot_bytes: usize,
    slots: u64,
    /// Of each slot: twice the number of the piece that it is free for, or one more once it holds that.
    turns: Mutex<Vec<u64>>,
    changed: Condvar,
    next_piece: AtomicU64,
    is_over: AtomicBool,
    /// What stops the reads of each reader.
    reads: Vec<Arc<Shared<read::Statistics>>>,
}

impl<'a> Feed<'a> {
    /// The feed of a job whose pieces have up to `block_bytes`.
    pub fn new(sources: &'a Sources, block_bytes: usize) -> Result<Self> {
        let largest = sources.files.iter().map(|file| file.file_bytes).max().unwrap_or(0);
        let slot_bytes = (block_bytes as u64).min(largest.max(1)) as usize;
        let slot_bytes = slot_bytes.next_multiple_of(BLOCK_BYTES);
        let readers = sources.readers.max(1);
        let affordable = sources.memory_bytes.unwrap_or(FEED_BYTES) / slot_bytes;
        let slots = affordable.clamp(LEAST_SLOTS, LEAST_SLOTS.max(2 * readers));
        let too_large = || Error::new(Kind::InvalidInput, "the blocks of a copy are too large");
        let slab = Arena::global().allocate(slots.checked_mul(slot_bytes).ok_or_else(too_large)?)?;
        Ok(Self {
            sources,
            slab,
            slot_bytes,
            slots: slots as u64,
            turns: Mutex::new((0..slots as u64).map(|piece| 2 * piece).collect()),
            changed: Condvar::new(),
            next_piece: AtomicU64::new(0),
            is_over: AtomicBool::new(false),
            reads: (0..readers.min(slots)).map(|_| Shared::new(0)).collect(),
        })
    }

    /// Has readers at work while `write` takes the pieces of `blocks`.
    pub fn during(&self, blocks: &Blocks<'_>, write: impl FnOnce() -> Result<()>) -> Result<()> {
        std::thread::scope(|scope| {
            let readers = self.reads.iter().map_while(|reads| {
                let builder = Builder::new().name("waystation-copy".to_owned());
                builder.spawn_scoped(scope, move || self.read_pieces(blocks, reads)).ok()
            });
            if readers.count() == 0 {
                return Err(Error::new(Kind::Unavailable, "the system starts no thread to read with"));
            }
            let _end = End(self); // also where `write` panics, or the scope would wait for readers for ever
            write()
        })
    }

    fn read_pieces(&self, blocks: &Blocks<'_>, reads: &Shared<read::Statistics>) {
        let read_all = || {
            while let Some(piece) = blocks.piece_at(self.next_piece.fetch_add(1, Ordering::Relaxed)) {
                let (slot, turn) = self.place(piece.index);
                if !self.wait_for(slot, turn, blocks) {
                    return Ok(());
                }
                self.read(&piece, reads)?;
                self.set(slot, turn + 1);
            }
            Ok(())
        };
        let outcome = catch_unwind(AssertUnwindSafe(read_all)).unwrap_or_else(|_| Err(panicked()));
        if let Err(error) = outcome {
            blocks.fail(error);
        }
    }

    fn read(&self, piece: &Piece, reads: &Shared<read::Statistics>) -> Result<()> {
        let file = &self.sources.files[piece.file];
        let address = self.address(piece.index);
        if let Some(header) = file.header.get(piece.offset as usize..) {
            let header = &header[..header.len().min(piece.nbytes)];
            // SAFETY: the slot is this reader's until its turn is over, and at least as long as a piece.
            unsafe { std::ptr::copy_nonoverlapping(header.as_ptr(), address, header.len()) };
        }
        let mut used: Vec<usize> = Vec::new(); // a file is read again and again: its number is of this piece
        let mut words = Vec::new();
        file.for_each_part(piece.offset..piece.offset + piece.nbytes as u64, |source, offset, part| {
            let number = used.iter().position(|&known| known == source).unwrap_or_else(|| {
                used.push(source);
                used.len() - 1
            });
            let target = address.wrapping_add((part.start - piece.offset) as usize);
            let nbytes = part.end - part.start;
            words.extend([number as i64, offset as i64, nbytes as i64, 0, target as i64]);
        });
        if words.is_empty() {
            return Ok(());
        }
        let files = used.iter().map(|&source| self.sources.sources[source].clone()).collect();
        let plan = read::plan::Plan::new(files, &words)?;
        let delivery = Delivery { devices: None, arrivals: None };
        let batch = read::Batch::new(&plan, &self.sources.options, delivery, reads);
        // SAFETY: the slot is this reader's until its turn is over, and at least as long as a piece.
        let outcome = unsafe { self.sources.storage.read(&batch) };
        if outcome.is_ok() && !reads.should_stop() {
            return Ok(());
        }
        // The first error of the batch is the one that was recorded.
        reads.finish(outcome);
        match reads.take_outcome() {
            Some(Err(error)) => Err(error),
            _ => Err(stopped()),
        }
    }

    /// Where a piece is read to: its slot, and the turn in which that is free for it.
    fn place(&self, index: u64) -> (usize, u64) {
        ((index % self.slots) as usize, 2 * index)
    }

    fn address(&self, index: u64) -> *mut u8 {
        self.slab.address().as_ptr().wrapping_add(self.place(index).0 * self.slot_bytes)
    }

    /// Waits for a turn of a slot; false if the job ends before.
    fn wait_for(&self, slot: usize, turn: u64, blocks: &Blocks<'_>) -> bool {
        let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        while turns[slot] != turn {
            if self.is_over.load(Ordering::Acquire) || blocks.should_stop() {
                return false;
            }
            turns = self.changed.wait_timeout(turns, SLICE).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    fn set(&self, slot: usize, turn: u64) {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)[slot] = turn;
        self.changed.notify_all();
    }

    /// Whether a piece has been read.
    pub fn has(&self, index: u64) -> bool {
        let (slot, turn) = self.place(index);
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)[slot] == turn + 1
    }

    /// Waits for a piece. Cancelled if the job is to stop.
    pub fn take(&self, piece: &Piece, blocks: &Blocks<'_>) -> Result<Taken<'_>> {
        let (slot, turn) = self.place(piece.index);
        if self.wait_for(slot, turn + 1, blocks) {
            return Ok(Taken { feed: self, piece: *piece });
        }
        Err(stopped())
    }

    /// Compares a file that has a checksum of its own with it, by the checksums of its blocks. Corrupt if it
    /// differs.
    pub fn check_file(&self, number: usize, blocks: &Blocks<'_>) -> Result<()> {
        let file = &self.sources.files[number];
        let Some(expected) = file.crc64 else { return Ok(()) };
        let actual = joined(blocks.checksums_of(number), file.file_bytes);
        if actual == expected {
            return Ok(());
        }
        let mismatch = Mismatch { offset: 0, nbytes: file.file_bytes, expected, actual };
        Err(read::corrupt(self.sources.named(file), &mismatch))
    }

    fn end(&self) {
        self.is_over.store(true, Ordering::Release);
        self.reads.iter().for_each(|reads| reads.cancel());
        self.changed.notify_all();
    }
}

struct End<'a>(&'a Feed<'a>);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// A piece that has been read; its slot is free for another one once this is dropped.
pub struct Taken<'a> {
    feed: &'a Feed<'a>,
    piece: Piece,
}

impl Taken<'_> {
    /// Copies one block of the piece, and verifies it; returns its checksum.
    pub fn copy_block(&self, offset: u64, block: &mut [u8], past_caches: bool) -> Result<u64> {
        let within = (offset - self.piece.offset) as usize;
        assert!(within + block.len() <= self.piece.nbytes, "the block is one of the piece");
        let source = self.feed.address(self.piece.index).wrapping_add(within);
        let mut sum = Crc64::new();
        if past_caches {
            // SAFETY: the slot holds the piece until this is dropped, and is not among the targets.
            unsafe { sum.copy(source, block) };
        } else {
            // SAFETY: as above.
            block.copy_from_slice(unsafe { std::slice::from_raw_parts(source, block.len()) });
            sum.update(block);
        }
        let actual = sum.finish();
        let file = &self.feed.sources.files[self.piece.file];
        let number = (offset / BLOCK_BYTES as u64) as usize;
        match file.checksums.as_ref().and_then(|checksums| checksums.get(number)) {
            Some(&expected) if expected != actual => {
                let mismatch = Mismatch { offset, nbytes: block.len() as u64, expected, actual };
                Err(read::corrupt(self.feed.sources.named(file), &mismatch))
            }
            _ => Ok(actual),
        }
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        let (slot, turn) = self.feed.place(self.piece.index);
        self.feed.set(slot, turn + 2 * self.feed.slots);
    }
}

fn stopped() -> Error {
    Error::new(Kind::Cancelled, "the operation was cancelled")
}
