//! The way in which files that are not cached are read, and how many workers a job gets.
//!
//! What the caller prescribes comes first, then what was measured for the file system, else what suits most
//! disks. Invariants: a worker has megabytes to read; scratch memory stays within [`SCRATCH_BYTES`].
//!
//! There are several workers on few cores, too, also where one keeps the disk busy. On an idle machine that
//! costs nothing. On a busy one each thread that is ready gets its turn: one that has all requests in flight
//! to itself keeps the disk waiting until the programs beside it have had theirs, and loses its time slice to
//! first touches of memory.

use std::sync::atomic::{AtomicU8, Ordering};

use waystation_format::Result;
use waystation_format::checksum::BLOCK_BYTES;

use super::files::Files;
use crate::calibrate;
use crate::mode::{Mode, Way};
use crate::read::plan::Plan;
use crate::read::{Options, SCRATCH_BYTES};
use crate::ring::Ring;

/// Work below which another thread does not pay.
const LEAST_BYTES_PER_WORKER: u64 = 4 << 20;
/// Workers that the engine starts of its own accord, whatever the cores.
const WORKERS: usize = 8;
/// The same, at most one to a core, where they share their way with a device, whose bus takes bytes faster
/// than eight bring them.
const MOST_DEVICE_WORKERS: usize = 16;
/// Requests that each of several rings has in flight, while others wait for their turn.
const LEAST_DEPTH_OF_RING: usize = 4;
/// Threads of a ring to a device where nothing was measured: enough for fast disks.
const MOST_USUAL_RING_THREADS: usize = 4;
/// Threads that keep a device busy with one request each.
const LEAST_DIRECT_THREADS: usize = 4;
const MOST_THREADS: usize = 64;
/// Units that a reader has on their way to a device, and the one that it reads: no more, since pinning the
/// first load's memory takes time.
const READER_SLOTS: usize = 3;
/// Delivering runs shorter than this costs more than reading them.
const SHORT_RUN_BYTES: u64 = 4 << 10;

/// The way for files that are not cached, of which `total` bytes are read. Its threads are those that keep
/// the device busy.
pub fn choose_way(plan: &Plan, options: &Options, total: u64) -> Way {
    let largest = plan.files.iter().max_by_key(|file| file.needed_bytes());
    let remembered =
        largest.and_then(|file| calibrate::remembered(&file.file.path)).map(|choice| choice.read);
    let mode = options.mode.or(remembered.map(|way| way.mode)).unwrap_or(Mode::DirectRing);
    let mode = if mode == Mode::DirectRing && !has_ring() { Mode::DirectThreads } else { mode };
    let way = remembered.filter(|way| way.mode == mode).unwrap_or_else(|| usual(mode));
    let block_bytes = options.block_bytes.unwrap_or(way.block_bytes).clamp(BLOCK_BYTES, 64 << 20);
    let block_bytes = block_bytes.next_multiple_of(BLOCK_BYTES);
    let most_units = (SCRATCH_BYTES / block_bytes).min(total.div_ceil(block_bytes as u64) as usize).max(1);
    Way { block_bytes, depth: options.depth.unwrap_or(way.depth).clamp(1, most_units), ..way }
}

/// What suits most disks that nobody has measured.
fn usual(mode: Mode) -> Way {
    let threads = match mode {
        Mode::DirectRing => (cores(WORKERS) / 2).clamp(1, MOST_USUAL_RING_THREADS),
        Mode::DirectThreads => LEAST_DIRECT_THREADS,
        Mode::Buffered => 1,
    };
    Way { mode, block_bytes: 1 << 20, depth: 16, threads }
}

/// How many workers read `total` bytes of the files. Of rings to devices there are as many as were measured,
/// since each pins memory.
pub fn count_workers(
    way: &Way,
    options: &Options,
    total: u64,
    plan: &Plan,
    files: &Files<'_>,
) -> Result<usize> {
    if let Some(threads) = options.threads {
        return Ok(threads.clamp(1, MOST_THREADS));
    }
    let useful = (total / LEAST_BYTES_PER_WORKER).clamp(1, MOST_THREADS as u64) as usize;
    if useful == 1 {
        return Ok(1);
    }
    let roomy = (SCRATCH_BYTES / way.block_bytes).max(1);
    if options.devices.is_none() {
        return Ok(way.threads.max(WORKERS).min(useful).min(roomy));
    }
    let is_light = way.mode == Mode::DirectRing && !is_scattered(plan) && !files.are_cached()?;
    Ok(if is_light { way.threads } else { way.threads.max(cores(MOST_DEVICE_WORKERS)) }.min(useful))
}

/// Requests in flight on the ring of each worker.
pub fn depth_of_ring(way: &Way, options: &Options) -> usize {
    let share = way.depth.div_ceil(way.threads);
    if options.depth.is_some() || options.devices.is_some() || way.threads == 1 {
        return share;
    }
    share.max(LEAST_DEPTH_OF_RING).min((SCRATCH_BYTES / way.block_bytes / way.threads).max(1))
}

/// Fits blocks and requests in flight to the staging memory that loads to devices may take, half of it for
/// readers and half for rings; returns how many units a reader has at a time.
pub fn stage(way: &mut Way, staging_bytes: Option<usize>) -> usize {
    let own_bytes = staging_bytes.unwrap_or(SCRATCH_BYTES).min(SCRATCH_BYTES) / 2;
    let threads = (own_bytes / (2 * BLOCK_BYTES)).clamp(1, way.threads);
    let most_bytes = own_bytes / threads;
    let block_bytes = way.block_bytes.min(most_bytes / 2).max(BLOCK_BYTES) / BLOCK_BYTES * BLOCK_BYTES;
    let most_slots = (most_bytes / block_bytes).max(2);
    // Of the ring's slots half are read to.
    let depth = way.depth.min(threads * (most_slots / 2));
    *way = Way { block_bytes, depth, threads, ..*way };
    most_slots.min(READER_SLOTS)
}

fn cores(most: usize) -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).min(most)
}

/// Whether most bytes are delivered in short runs.
fn is_scattered(plan: &Plan) -> bool {
    let pieces = plan.files.iter().flat_map(|file| file.pieces());
    let scattered = pieces.filter(|piece| {
        let copy = piece.copy();
        !copy.is_one_run() && copy.run_bytes() < SHORT_RUN_BYTES
    });
    scattered.map(|piece| piece.copy().nbytes()).sum::<u64>() > plan.needed_bytes() / 2
}

/// Whether the system grants this process io_uring. Remembered without a lock, which a forked child
/// could find held for ever.
fn has_ring() -> bool {
    const UNKNOWN: u8 = 0;
    const GRANTED: u8 = 1;
    const REFUSED: u8 = 2;
    static ANSWER: AtomicU8 = AtomicU8::new(UNKNOWN);
    if ANSWER.load(Ordering::Relaxed) == UNKNOWN {
        let answer = if Ring::new(1).is_ok() { GRANTED } else { REFUSED };
        ANSWER.store(answer, Ordering::Relaxed);
    }
    ANSWER.load(Ordering::Relaxed) == GRANTED
}
