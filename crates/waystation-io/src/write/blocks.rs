//! The blocks of the files of one job: which comes next, what it holds, its checksums, and the gather position.
//!
//! Invariants: every block is handed out once, in the order of [`Order`]; the gather position never passes a block
//! that a worker still copies from.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use waystation_format::checksum::BLOCK_BYTES;
use waystation_format::{Error, Result};

use super::device::{DeviceCopy, DeviceRows, UnderWay};
use super::feed::Feed;
use super::order::Order;
use super::plan::{FilePlan, Plan};
use super::{Options, Statistics};
use crate::job::Shared;
use crate::throttle::Throttle;

/// A block of a file that one worker gathers and writes.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// Its place in the order in which pieces are handed out.
    pub index: u64,
    /// The file.
    pub file: usize,
    /// Where it begins there.
    pub offset: u64,
    /// Its length: that of a block, or what the file has left.
    pub nbytes: usize,
}

/// The blocks of a job, as its storage takes and writes them.
pub struct Blocks<'a> {
    plan: &'a Plan,
    shared: &'a Shared<Statistics>,
    block_bytes: u64,
    /// Of each file the index of its first piece, then the count of all.
    first_pieces: Vec<u64>,
    order: Order,
    next_piece: AtomicU64,
    throttle: Option<&'a Throttle>,
    feed: Option<&'a Feed<'a>>,
    gathered: Mutex<Gathered>,
    checksums: Vec<Box<[AtomicU64]>>,
    gather_ns: AtomicU64,
}

/// Pieces before `next` have been gathered, and those in `beyond`.
#[derive(Default)]
struct Gathered {
    next: u64,
    beyond: BTreeSet<u64>,
}

impl<'a> Blocks<'a> {
    /// The blocks of `block_bytes`, a multiple of the checksummed block.
    pub fn new(
        plan: &'a Plan,
        options: &'a Options,
        shared: &'a Shared<Statistics>,
        block_bytes: usize,
    ) -> Self {
        let block_bytes = block_bytes as u64;
        let mut first_pieces = vec![0];
        let mut count = 0;
        for file in &plan.files {
            count += file.file_bytes.div_ceil(block_bytes);
            first_pieces.push(count);
        }
        let checksums = |file: &FilePlan| {
            (0..file.file_bytes.div_ceil(BLOCK_BYTES as u64)).map(|_| AtomicU64::new(0)).collect()
        };
        Self {
            plan,
            shared,
            block_bytes,
            order: Order::new(&plan.pieces_of(&options.first, block_bytes, &first_pieces), count),
            first_pieces,
            next_piece: AtomicU64::new(0),
            throttle: options.throttle.as_deref(),
            feed: None,
            gathered: Mutex::default(),
            checksums: plan.files.iter().map(checksums).collect(),
            gather_ns: AtomicU64::new(0),
        }
    }

    /// The same blocks, whose bytes a feed has.
    pub(super) fn fed_by(self, feed: Option<&'a Feed<'a>>) -> Self {
        Self { feed, ..self }
    }

    /// How many there are.
    pub fn count(&self) -> u64 {
        self.first_pieces.last().copied().unwrap_or(0)
    }

    /// Whether nothing more is to be begun: the job has failed, or was cancelled.
    pub fn should_stop(&self) -> bool {
        self.shared.should_stop()
    }

    /// Has the job fail, and the others who work on it stop.
    pub fn fail(&self, error: Error) {
        self.shared.fail(error);
    }

    /// The next piece that nobody has taken.
    pub fn next_piece(&self) -> Option<Piece> {
        self.piece_at(self.next_piece.fetch_add(1, Ordering::Relaxed))
    }

    /// Whether the next piece can be gathered without waiting for its bytes.
    pub fn is_ready(&self) -> bool {
        let next = self.next_piece.load(Ordering::Relaxed);
        self.feed.is_none_or(|feed| next >= self.count() || feed.has(next))
    }

    /// The piece that is handed out after `index` others.
    pub(super) fn piece_at(&self, index: u64) -> Option<Piece> {
        let place = self.order.piece(index)?;
        let file = self.file_of(place);
        let plan = &self.plan.files[file];
        let offset = (place - self.first_pieces[file]) * self.block_bytes;
        let nbytes = (plan.file_bytes - offset).min(self.block_bytes) as usize;
        Some(Piece { index, file, offset, nbytes })
    }

    /// The last file that begins at or before a piece: files without bytes come before it.
    fn file_of(&self, place: u64) -> usize {
        self.first_pieces.partition_point(|&first| first <= place) - 1
    }

    /// Waits until the store, if it is a slow one, takes so many bytes.
    pub fn wait_for_store(&self, nbytes: usize) {
        if let Some(throttle) = self.throttle {
            throttle.take(nbytes as u64, || self.shared.should_stop());
        }
    }

    /// Starts to copy what devices hold of a piece into memory that begins at `address`.
    ///
    /// # Safety
    /// That memory must be the caller's alone until the result was waited for or dropped; the sources of the plan
    /// must stay as they are.
    pub unsafe fn start_device_copies(
        &self,
        devices: &dyn DeviceCopy,
        piece: &Piece,
        address: usize,
    ) -> Result<UnderWay> {
        let mut rows = Vec::new();
        let range = piece.offset..piece.offset + piece.nbytes as u64;
        self.plan.files[piece.file].for_each_device_block(range, |device, block, linear, file_offset| {
            block.for_each_run(linear, |run| {
                rows.push(DeviceRows {
                    device,
                    source: run.address as u64,
                    source_step: run.memory_step,
                    destination: address + (file_offset + run.linear - piece.offset) as usize,
                    destination_step: run.linear_step,
                    row_bytes: run.piece_bytes,
                    rows: run.count,
                });
            });
        });
        if rows.is_empty() {
            return Ok(UnderWay::new(None));
        }
        // SAFETY: as the caller promises.
        Ok(UnderWay::new(Some(unsafe { devices.start(&rows)? })))
    }

    /// Gathers host memory into `bytes`, and checksums each block of the file on the way: `past_caches` where
    /// no processor but the disk's looks at it next. What devices hold must be there already. What is copied from
    /// another storage is waited for, and verified: Corrupt if a block is not what was written.
    ///
    /// # Safety
    /// The plan's host blocks must be readable, and `bytes`, which are as long as the piece, not among
    /// them.
    pub unsafe fn gather(&self, piece: &Piece, bytes: &mut [u8], past_caches: bool) -> Result<()> {
        let taken = self.feed.map(|feed| feed.take(piece, self)).transpose()?;
        let start = Instant::now();
        let first_block = (piece.offset / BLOCK_BYTES as u64) as usize;
        for (index, block) in bytes.chunks_mut(BLOCK_BYTES).enumerate() {
            let offset = piece.offset + (index * BLOCK_BYTES) as u64;
            let checksum = match &taken {
                Some(taken) => taken.copy_block(offset, block, past_caches)?,
                // SAFETY: the caller vouches for the sources.
                None => unsafe { self.plan.files[piece.file].gather(offset, block, past_caches) },
            };
            self.checksums[piece.file][first_block + index].store(checksum, Ordering::Relaxed);
        }
        self.gather_ns.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        self.mark_gathered(piece.index);
        // It may be whole once this piece is written.
        if piece.nbytes as u64 == self.plan.files[piece.file].file_bytes {
            self.check_file(piece.file)
        } else {
            Ok(())
        }
    }

    /// Verifies a file that is copied from another storage, all of which has been gathered: Corrupt if it is not
    /// what was written. A storage that makes a file whole before the end of the job calls this first.
    pub fn check_file(&self, file: usize) -> Result<()> {
        self.feed.map_or(Ok(()), |feed| feed.check_file(file, self))
    }

    /// The checksums of the blocks of a file, all of which have been gathered.
    pub(super) fn checksums_of(&self, file: usize) -> impl Iterator<Item = u64> {
        self.checksums[file].iter().map(|checksum| checksum.load(Ordering::Relaxed))
    }

    fn mark_gathered(&self, index: u64) {
        let next = {
            let mut gathered = self.gathered.lock().unwrap_or_else(PoisonError::into_inner);
            gathered.beyond.insert(index);
            while gathered.beyond.first() == Some(&gathered.next) {
                gathered.beyond.pop_first();
                gathered.next += 1;
            }
            gathered.next
        };
        let Some(last) = next.checked_sub(1).and_then(|last| self.order.first_piece(last)) else { return };
        let file = self.file_of(last);
        let plan = &self.plan.files[file];
        let end = (last + 1 - self.first_pieces[file]) * self.block_bytes;
        self.shared.set_front(plan.position_at(end.min(plan.file_bytes)));
    }

    /// Counts a piece as written.
    pub fn mark_written(&self, piece: &Piece) {
        self.shared.add_done(piece.nbytes as u64);
    }

    /// Checksums of each file's blocks.
    pub(super) fn take_checksums(&mut self) -> Vec<Vec<u64>> {
        let of_file = |blocks: Box<[AtomicU64]>| blocks.into_iter().map(AtomicU64::into_inner).collect();
        std::mem::take(&mut self.checksums).into_iter().map(of_file).collect()
    }

    /// Time that workers spent gathering, added up.
    pub(super) fn gather_time(&self) -> Duration {
        Duration::from_nanos(self.gather_ns.load(Ordering::Relaxed))
    }
}
