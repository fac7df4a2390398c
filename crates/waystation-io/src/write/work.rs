//! What the workers of one job share: the next block, the outputs, checksums and the gather position.
//!
//! Invariants: every staging block is handed out once, in the order of [`Order`]; the gather position never
//! passes a block that a worker still copies from; few files are open at a time, however many there are.

use std::collections::BTreeSet;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use waystation_format::checksum::BLOCK_BYTES;
use waystation_format::{Error, Kind, Result};

use super::choice::staging_bytes;
use super::order::Order;
use super::output::{Manner, Output};
use super::plan::{FilePlan, Plan};
use super::{Options, Statistics};
use crate::files::most_open_files;
use crate::job::{Shared, in_parallel};
use crate::mode::{Mode, Way};
use crate::sync_group::Durability;
use crate::throttle::Throttle;

/// Staging memory of all workers together.
pub(super) const STAGING_BYTES: usize = 64 << 20;
/// Threads that sync. They sleep in the kernel, and syncs that wait together share journal commits.
const SYNC_THREADS: usize = 16;

/// A block of a file that one worker gathers and writes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    /// Its place in the order in which pieces are handed out.
    pub index: u64,
    pub file: usize,
    pub offset: u64,
    pub nbytes: usize,
}

pub(super) struct Work<'a> {
    pub plan: &'a Plan,
    pub shared: &'a Shared<Statistics>,
    pub way: Way,
    pub outputs: Vec<Output>,
    /// Of each file the index of its first piece, then the count of all.
    first_pieces: Vec<u64>,
    order: Order,
    next_piece: AtomicU64,
    staging_bytes: usize,
    throttle: Option<&'a Throttle>,
    gathered: Mutex<Gathered>,
    checksums: Vec<Box<[AtomicU64]>>,
    unfinished: Mutex<Vec<usize>>,
    most_unfinished: usize,
    finish_threads: usize,
    gather_ns: AtomicU64,
    /// Whether the caller insists on the mode.
    is_demanded: bool,
    rings_refused: AtomicBool,
}

/// Pieces before `next` have been gathered, and those in `beyond`.
#[derive(Default)]
struct Gathered {
    next: u64,
    beyond: BTreeSet<u64>,
}

impl<'a> Work<'a> {
    pub fn new(
        plan: &'a Plan,
        shared: &'a Shared<Statistics>,
        way: Way,
        manner: &Manner,
        options: &'a Options,
    ) -> Self {
        let block_bytes = way.block_bytes as u64;
        let mut first_pieces = vec![0];
        let mut count = 0;
        for file in &plan.files {
            count += file.file_bytes.div_ceil(block_bytes);
            first_pieces.push(count);
        }
        // Only syncs share anything: what is not synced here is finished as soon as it is complete.
        let syncs = matches!(manner.durability, Durability::Now);
        let output = |file: &FilePlan| Output::new(&file.path, file.file_bytes, block_bytes, manner.clone());
        let checksums = |file: &FilePlan| {
            (0..file.file_bytes.div_ceil(BLOCK_BYTES as u64)).map(|_| AtomicU64::new(0)).collect()
        };
        Self {
            plan,
            shared,
            way,
            outputs: plan.files.iter().map(output).collect(),
            order: Order::new(&plan.pieces_of(&options.first, block_bytes, &first_pieces), count),
            first_pieces,
            next_piece: AtomicU64::new(0),
            staging_bytes: staging_bytes(options),
            throttle: options.throttle.as_deref(),
            gathered: Mutex::default(),
            checksums: plan.files.iter().map(checksums).collect(),
            // A file without bytes has no last piece to announce it.
            unfinished: Mutex::new(
                (0..plan.files.len()).filter(|&file| plan.files[file].file_bytes == 0).collect(),
            ),
            most_unfinished: if syncs { most_open_files() } else { 1 },
            finish_threads: if syncs { SYNC_THREADS } else { 1 },
            gather_ns: AtomicU64::new(0),
            is_demanded: manner.demanded,
            rings_refused: AtomicBool::new(false),
        }
    }

    /// How many staging blocks one worker may have.
    pub fn slots_per_worker(&self) -> usize {
        let allowed = self.staging_bytes / self.way.threads / self.way.block_bytes;
        let needed =
            self.first_pieces.last().map_or(1, |&count| usize::try_from(count).unwrap_or(usize::MAX));
        allowed.min(needed).max(1)
    }

    /// The next piece that nobody has taken.
    pub fn next_piece(&self) -> Option<Piece> {
        let index = self.next_piece.fetch_add(1, Ordering::Relaxed);
        let place = self.order.piece(index)?;
        let file = self.file_of(place);
        let plan = &self.plan.files[file];
        let offset = (place - self.first_pieces[file]) * self.way.block_bytes as u64;
        let nbytes = (plan.file_bytes - offset).min(self.way.block_bytes as u64) as usize;
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

    /// Gathers host memory into `bytes`, and checksums each block of the file on the way: past the caches where
    /// no processor but the disk's looks at it next.
    ///
    /// # Safety
    /// The plan's host blocks must be readable, and `bytes`, which are as long as the piece, not among
    /// them.
    pub unsafe fn gather(&self, piece: &Piece, bytes: &mut [u8]) {
        let start = Instant::now();
        let first_block = (piece.offset / BLOCK_BYTES as u64) as usize;
        for (index, block) in bytes.chunks_mut(BLOCK_BYTES).enumerate() {
            let offset = piece.offset + (index * BLOCK_BYTES) as u64;
            // SAFETY: the caller vouches for the sources.
            let checksum =
                unsafe { self.plan.files[piece.file].gather(offset, block, self.way.mode.is_direct()) };
            self.checksums[piece.file][first_block + index].store(checksum, Ordering::Relaxed);
        }
        self.gather_ns.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        self.mark_gathered(piece.index);
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
        let end = (last + 1 - self.first_pieces[file]) * self.way.block_bytes as u64;
        self.shared.set_front(plan.position_at(end.min(plan.file_bytes)));
    }

    /// Counts a piece as written. Too many complete files are finished at once, by this thread.
    pub fn mark_written(&self, piece: &Piece) -> Result<()> {
        self.shared.add_done(piece.nbytes as u64);
        if !self.outputs[piece.file].block_done() {
            return Ok(());
        }
        let overdue = {
            let mut unfinished = self.unfinished.lock().unwrap_or_else(PoisonError::into_inner);
            unfinished.push(piece.file);
            if unfinished.len() >= self.most_unfinished {
                std::mem::take(&mut *unfinished)
            } else {
                Vec::new()
            }
        };
        self.finish_files(&overdue)
    }

    /// Finishes what is complete and not finished yet.
    pub fn finish_rest(&self) -> Result<()> {
        let rest = std::mem::take(&mut *self.unfinished.lock().unwrap_or_else(PoisonError::into_inner));
        self.finish_files(&rest)
    }

    fn finish_files(&self, files: &[usize]) -> Result<()> {
        let next = AtomicUsize::new(0);
        let finish = || -> Result<()> {
            while let Some(&file) = files.get(next.fetch_add(1, Ordering::Relaxed)) {
                self.outputs[file].finish()?;
            }
            Ok(())
        };
        in_parallel(files.len().min(self.finish_threads), "waystation-sync", &finish)
    }

    /// Remembers that the system refused a ring that it had granted; an error if no other mode will do.
    pub fn refuse_rings(&self, error: io::Error) -> Result<()> {
        self.rings_refused.store(true, Ordering::Relaxed);
        if self.is_demanded {
            let message = format!("io_uring failed: {error}; use mode 'direct-threads'");
            return Err(Error::new(Kind::Unavailable, message));
        }
        Ok(())
    }

    /// How the files were written in the end.
    pub fn effective_mode(&self) -> Mode {
        if self.outputs.iter().any(|output| !output.is_direct()) {
            return Mode::Buffered;
        }
        match self.way.mode {
            Mode::DirectRing if self.rings_refused.load(Ordering::Relaxed) => Mode::DirectThreads,
            mode => mode,
        }
    }

    /// Removes every file that was created.
    pub fn remove_files(&self) {
        self.outputs.iter().for_each(Output::remove);
    }

    /// Checksums of each file's blocks.
    pub fn take_checksums(&mut self) -> Vec<Vec<u64>> {
        let of_file = |blocks: Box<[AtomicU64]>| blocks.into_iter().map(AtomicU64::into_inner).collect();
        std::mem::take(&mut self.checksums).into_iter().map(of_file).collect()
    }

    /// Seconds that workers spent gathering, added up.
    pub fn gather_time(&self) -> Duration {
        Duration::from_nanos(self.gather_ns.load(Ordering::Relaxed))
    }
}
