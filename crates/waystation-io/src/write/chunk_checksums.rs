//! The CRC-32C of arrays that are stored as they are, before a writer stores them.
//!
//! Invariants: every array is summed by one thread, and threads take the next array when they are done; an array
//! that is not contiguous is gathered piece by piece, so that its size does not matter to memory.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use waystation_format::Result;
use waystation_format::checksum::{Crc32c, crc32c};

use super::plan::host_segments;
use crate::job::in_parallel;
use crate::segment::Segment;

/// Below this, starting another thread takes longer than summing.
const LEAST_BYTES_PER_THREAD: u64 = 4 << 20;
const PIECE_BYTES: u64 = 256 << 10;

/// The CRC-32C of every array of `words` (records of [`waystation_format::plan::Segment`]), on up to `threads` threads,
/// by default as many as there are cores.
///
/// # Safety
/// The blocks of the arrays must be readable host memory that nobody writes.
pub unsafe fn chunk_checksums(words: &[i64], threads: Option<usize>) -> Result<Vec<u32>> {
    let segments = host_segments(words)?;
    let sums: Vec<AtomicU32> = segments.iter().map(|_| AtomicU32::new(0)).collect();
    let next = AtomicUsize::new(0);
    let work = || -> Result<()> {
        while let Some((index, (_, segment))) =
            Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|index| Some((index, segments.get(index)?)))
        {
            // SAFETY: as the caller promises.
            sums[index].store(unsafe { checksum_of(segment) }, Ordering::Relaxed);
        }
        Ok(())
    };
    let total: u64 = segments.iter().map(|(_, segment)| segment.nbytes()).sum();
    let worthwhile = usize::try_from(total / LEAST_BYTES_PER_THREAD).unwrap_or(usize::MAX).max(1);
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    let count = threads.unwrap_or_else(cores).clamp(1, worthwhile.min(segments.len().max(1)));
    in_parallel(count, "waystation-checksum", &work)?;
    Ok(sums.into_iter().map(AtomicU32::into_inner).collect())
}

/// # Safety
/// As for [`chunk_checksums`].
unsafe fn checksum_of(segment: &Segment) -> u32 {
    let nbytes = segment.nbytes();
    if let Some(address) = segment.contiguous() {
        // SAFETY: the caller vouches for the memory.
        return crc32c(unsafe { std::slice::from_raw_parts(address as *const u8, nbytes as usize) });
    }
    let mut sum = Crc32c::new();
    let mut piece = vec![0; PIECE_BYTES.min(nbytes) as usize];
    for begin in (0..nbytes).step_by(PIECE_BYTES as usize) {
        let own = &mut piece[..PIECE_BYTES.min(nbytes - begin) as usize];
        // SAFETY: as above; the piece is new.
        unsafe { segment.gather(begin, own) };
        sum.update(own);
    }
    sum.finish()
}
