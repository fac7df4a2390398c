//! The way in which a job is written.
//!
//! What the caller prescribes comes first, then what was measured for the file system, else what suits most
//! disks. Invariants: a job gets no more threads than its bytes deserve, so many blocks that gathering and
//! writing overlap, and never more staging memory than all jobs may have; small files go through the page
//! cache, where one request is all they need.

use std::path::Path;

use waystation_format::checksum::BLOCK_BYTES;
use waystation_format::{Error, Kind, Result};

use super::{STAGING_BYTES, directory_of};
use crate::calibrate;
use crate::filesystem::FileSystem;
use crate::mode::{Mode, Way};
use crate::ring::Ring;
use crate::write::{MOST_DEPTH, Options, Plan};

/// Threads that write synchronously: while some gather, others have to keep the disk busy.
const SYNCHRONOUS_THREADS: usize = 4;
/// Jobs and files below this go through the page cache: one request per file gains nothing from more.
const SMALL_BYTES: u64 = 1 << 20;
/// Work below which another thread does not pay.
const LEAST_BYTES_PER_THREAD: u64 = 8 << 20;
/// The same of small files, of which it is the creation that takes the time.
const LEAST_FILES_PER_THREAD: usize = 256;
/// Nothing is written while the first block is gathered, so blocks are a small part of the job, …
const LEAST_BLOCKS: u64 = 16;
/// … but not so small that requests cost more than they carry.
const LEAST_BLOCK_BYTES: usize = 1 << 20;
/// Small blocks in flight that are worth the memory.
const MOST_SMALL_BLOCKS: usize = 8;
/// Blocks that staging memory holds at least, if it can.
const LEAST_STAGED_BLOCKS: usize = 4;

/// What suits most disks that nobody has measured.
fn usual(mode: Mode) -> Way {
    let (block_bytes, depth, threads) = match mode {
        Mode::DirectRing => (8 << 20, 2, 1),
        Mode::DirectThreads => (4 << 20, 1, SYNCHRONOUS_THREADS),
        // The page cache takes what still lies in the core's own.
        Mode::Buffered => (1 << 20, 1, SYNCHRONOUS_THREADS),
    };
    Way { mode, block_bytes, depth, threads }
}

/// The way for a job.
pub(super) fn choose_way(plan: &Plan, options: &Options) -> Way {
    let average = plan.total_bytes / plan.files.len().max(1) as u64;
    let first = plan.files.first().map(|file| file.path.as_path());
    let measured = || first.and_then(calibrate::remembered).map(|choice| choice.write);
    let way = match options.mode {
        Some(mode) => measured().filter(|way| way.mode == mode).unwrap_or_else(|| usual(mode)),
        None if average < SMALL_BYTES || first.is_some_and(is_in_memory) => usual(Mode::Buffered),
        None => measured().unwrap_or_else(|| usual(Mode::DirectRing)),
    };
    fit(way, plan.total_bytes, plan.files.len(), options)
}

/// Cuts a way to the size of a job, and to what the caller prescribes.
fn fit(mut way: Way, total_bytes: u64, file_count: usize, options: &Options) -> Way {
    if way.mode != Mode::DirectRing {
        way.threads = way.threads.max(SYNCHRONOUS_THREADS);
    }
    let staging_bytes = staging_bytes(options);
    let most_bytes = largest_block(staging_bytes);
    let is_too_large = |block_bytes: usize| match options.block_bytes {
        _ if block_bytes > most_bytes => true,
        Some(prescribed) => block_bytes > prescribed,
        None => block_bytes > LEAST_BLOCK_BYTES && total_bytes / (block_bytes as u64) < LEAST_BLOCKS,
    };
    while is_too_large(way.block_bytes) {
        way.block_bytes /= 2;
        way.depth = way.depth.max(MOST_SMALL_BLOCKS.min(way.depth * 2));
    }
    way.block_bytes = options.block_bytes.unwrap_or(way.block_bytes).next_multiple_of(BLOCK_BYTES);
    way.block_bytes = way.block_bytes.min(most_bytes);
    way.depth = options.depth.unwrap_or(way.depth).clamp(1, MOST_DEPTH);
    way.threads = options.threads.unwrap_or(way.threads.min(worthwhile_threads(total_bytes, file_count)));
    way.threads = way.threads.min((staging_bytes / way.block_bytes).max(1));
    way
}

/// Staging memory of all workers of a job together.
pub(super) fn staging_bytes(options: &Options) -> usize {
    options.staging_bytes.map_or(STAGING_BYTES, |bytes| bytes.clamp(BLOCK_BYTES, STAGING_BYTES))
}

/// The largest block of which some fit into staging memory: while one is written others are gathered.
fn largest_block(staging_bytes: usize) -> usize {
    (staging_bytes / LEAST_STAGED_BLOCKS / BLOCK_BYTES).max(1) * BLOCK_BYTES
}

fn worthwhile_threads(total_bytes: u64, file_count: usize) -> usize {
    ((total_bytes / LEAST_BYTES_PER_THREAD) as usize).max(file_count / LEAST_FILES_PER_THREAD).max(1)
}

/// Requests in flight of each worker's ring.
pub(super) fn ring_depth(way: &Way) -> usize {
    way.depth.div_ceil(way.threads)
}

/// The first worker's ring, if the way has one; the way without one where the system refuses it.
pub(super) fn open_ring(way: Way, plan: &Plan, options: &Options) -> Result<(Way, Option<Ring>)> {
    if way.mode != Mode::DirectRing {
        return Ok((way, None));
    }
    match Ring::new(ring_depth(&way)) {
        Ok(ring) => Ok((way, Some(ring))),
        Err(error) if options.mode.is_some() => {
            let message = format!("the system refuses io_uring: {error}; use mode 'direct-threads'");
            Err(Error::new(Kind::Unsupported, message))
        }
        Err(_) => Ok((fit(usual(Mode::DirectThreads), plan.total_bytes, plan.files.len(), options), None)),
    }
}

fn is_in_memory(path: &Path) -> bool {
    FileSystem::of(directory_of(path)).is_ok_and(|filesystem| filesystem.is_memory())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    fn fitted(way: Way, total_mib: usize, options: Options) -> (usize, usize, usize) {
        let way = fit(way, (total_mib * MIB) as u64, 1, &options);
        (way.block_bytes / MIB, way.depth, way.threads)
    }

    #[test]
    fn large_jobs_are_written_as_was_measured() {
        let measured = Way { mode: Mode::DirectRing, block_bytes: 16 * MIB, depth: 2, threads: 3 };
        assert_eq!(fitted(measured, 4096, Options::AUTOMATIC), (16, 2, 3));
        assert_eq!(fitted(usual(Mode::DirectRing), 4096, Options::AUTOMATIC), (8, 2, 1));
        assert_eq!(fitted(usual(Mode::DirectThreads), 4096, Options::AUTOMATIC), (4, 1, 4));
    }

    #[test]
    fn blocks_are_a_small_part_of_the_job() {
        let ring = usual(Mode::DirectRing);
        assert_eq!(fitted(ring, 128, Options::AUTOMATIC), (8, 2, 1));
        assert_eq!(fitted(ring, 127, Options::AUTOMATIC), (4, 4, 1));
        assert_eq!(fitted(ring, 17, Options::AUTOMATIC), (1, 8, 1));
        assert_eq!(fitted(ring, 1, Options::AUTOMATIC), (1, 8, 1));
        let deep = Way { depth: 32, ..ring };
        assert_eq!(fitted(deep, 64, Options::AUTOMATIC), (4, 32, 1));
    }

    #[test]
    fn threads_are_what_the_bytes_deserve_and_staging_affords() {
        assert_eq!(fitted(usual(Mode::Buffered), 17, Options::AUTOMATIC), (1, 1, 2));
        assert_eq!(fitted(usual(Mode::Buffered), 1024, Options::AUTOMATIC), (1, 1, 4));
        assert_eq!(fit(usual(Mode::Buffered), 1 << 20, 512, &Options::AUTOMATIC).threads, 2);
        let many = Options { threads: Some(8), block_bytes: Some(16 * MIB), ..Options::AUTOMATIC };
        assert_eq!(fitted(usual(Mode::DirectThreads), 4096, many), (16, 1, 4));
    }

    #[test]
    fn a_bound_on_staging_memory_is_kept_by_smaller_blocks_and_fewer_threads() {
        let bounded = |staging_bytes| Options { staging_bytes: Some(staging_bytes), ..Options::AUTOMATIC };
        assert_eq!(fitted(usual(Mode::DirectRing), 4096, bounded(5 * MIB)), (1, 8, 1));
        assert_eq!(fitted(usual(Mode::DirectThreads), 4096, bounded(8 * MIB)), (2, 2, 4));
        for staging_bytes in [1, BLOCK_BYTES, 3 * BLOCK_BYTES, 700_000, 5 * MIB, 1 << 40] {
            for mode in Mode::ALL {
                let asked =
                    Options { threads: Some(16), block_bytes: Some(16 * MIB), ..bounded(staging_bytes) };
                let way = fit(usual(mode), 1 << 40, 1, &asked);
                assert!(way.threads * way.block_bytes <= staging_bytes.max(BLOCK_BYTES));
                assert!(way.block_bytes.is_multiple_of(BLOCK_BYTES));
            }
        }
    }

    #[test]
    fn the_caller_has_the_last_word() {
        let prescribed =
            Options { threads: Some(2), depth: Some(3), block_bytes: Some(2 * MIB), ..Options::AUTOMATIC };
        assert_eq!(fitted(usual(Mode::DirectRing), 8, prescribed), (2, 3, 2));
        // Where only the blocks are prescribed, about as many bytes stay in flight.
        let small_blocks = Options { block_bytes: Some(2 * MIB), ..Options::AUTOMATIC };
        assert_eq!(fitted(usual(Mode::DirectRing), 4096, small_blocks), (2, 8, 1));
    }
}
