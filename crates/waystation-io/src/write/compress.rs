//! Arrays compressed by zstd, each to a frame of its own, before a writer stores them.
//!
//! Invariants: a frame says how long its content is and can be read by itself; its CRC-32C follows it where that
//! is asked for; every array is compressed by one thread, and threads take the next array when they are done;
//! memory for frames is reserved for the worst case, of which only what is used is ever touched.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use waystation_format::checksum::crc32c;
use waystation_format::{Error, Kind, Result};
use zstd::bulk::Compressor;
use zstd::zstd_safe::compress_bound;

use super::plan::{PlannedSegment, parse_segments};
use crate::arena::{Arena, Slab};
use crate::job::in_parallel;

/// Below this, starting another thread takes longer than compressing.
const LEAST_BYTES_PER_THREAD: u64 = 256 << 10;
/// Frames do not share cache lines.
const ALIGN_BYTES: usize = 64;
const CHECKSUM_BYTES: usize = 4;

/// Frames, and the memory that holds them.
pub struct Compressed {
    /// The memory.
    pub memory: Slab,
    /// Where each frame is in it, in the order of the arrays.
    pub values: Vec<Range<usize>>,
}

/// Compresses every array of `words` (records of [`waystation_format::plan::Segment`]) on up to `threads` threads,
/// by default as many as there are cores. With `checksum`, the CRC-32C of each frame follows it, little-endian,
/// as a part of its value.
///
/// # Safety
/// The blocks of the arrays must be readable host memory that nobody writes.
pub unsafe fn compress(
    words: &[i64],
    level: i32,
    checksum: bool,
    threads: Option<usize>,
) -> Result<Compressed> {
    let segments = parse_segments(words)?;
    if segments.iter().any(|segment| !segment.devices.is_empty()) {
        let message = "only host memory can be compressed; copy arrays of devices first";
        return Err(Error::new(Kind::InvalidInput, message));
    }
    let (places, total) = reserve(&segments)?;
    let memory = Arena::global().allocate(total)?;
    let lengths: Vec<AtomicUsize> = segments.iter().map(|_| AtomicUsize::new(0)).collect();
    let next = AtomicUsize::new(0);
    let work = || -> Result<()> {
        let mut compressor = Compressor::new(level).map_err(|error| refused(&error))?;
        while let Some(index) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|&i| i < segments.len()) {
            let place = places[index].clone();
            // SAFETY: the place is within the slab, and no other thread has this index.
            let target = unsafe {
                std::slice::from_raw_parts_mut(memory.address().as_ptr().add(place.start), place.len())
            };
            // SAFETY: the caller vouches for the sources.
            let source = unsafe { content(&segments[index]) };
            let room = target.len() - CHECKSUM_BYTES;
            match compressor.compress_to_buffer(&source, &mut target[..room]) {
                Ok(length) if checksum => {
                    let sum = crc32c(&target[..length]).to_le_bytes();
                    target[length..length + CHECKSUM_BYTES].copy_from_slice(&sum);
                    lengths[index].store(length + CHECKSUM_BYTES, Ordering::Relaxed);
                }
                Ok(length) => lengths[index].store(length, Ordering::Relaxed),
                Err(error) => {
                    next.store(segments.len(), Ordering::Relaxed); // nobody takes another
                    return Err(refused(&error));
                }
            }
        }
        Ok(())
    };
    in_parallel(worthwhile_threads(&segments, threads), "waystation-compress", &work)?;
    let values = places
        .iter()
        .zip(lengths)
        .map(|(place, length)| place.start..place.start + length.into_inner())
        .collect();
    Ok(Compressed { memory, values })
}

/// Room for the worst case of each array, and the sum.
fn reserve(segments: &[PlannedSegment]) -> Result<(Vec<Range<usize>>, usize)> {
    let too_large = || Error::new(Kind::InvalidInput, "the arrays are too large to be compressed at once");
    let mut end = 0usize;
    let mut places = Vec::with_capacity(segments.len());
    for segment in segments {
        let nbytes = usize::try_from(segment.host.nbytes()).map_err(|_| too_large())?;
        let room = compress_bound(nbytes).checked_add(CHECKSUM_BYTES).ok_or_else(too_large)?;
        places.push(end..end.checked_add(room).ok_or_else(too_large)?);
        end = (end + room).checked_next_multiple_of(ALIGN_BYTES).ok_or_else(too_large)?;
    }
    Ok((places, end))
}

/// The linear bytes of an array: where they are, or gathered.
///
/// # Safety
/// As for [`compress`].
unsafe fn content(segment: &PlannedSegment) -> Cow<'_, [u8]> {
    let nbytes = segment.host.nbytes() as usize;
    if let Some(address) = segment.host.contiguous() {
        // SAFETY: the caller vouches for the memory.
        return Cow::Borrowed(unsafe { std::slice::from_raw_parts(address as *const u8, nbytes) });
    }
    let mut linear = vec![0; nbytes];
    // SAFETY: as above; the vector is new.
    unsafe { segment.host.gather(0, &mut linear) };
    Cow::Owned(linear)
}

fn worthwhile_threads(segments: &[PlannedSegment], wanted: Option<usize>) -> usize {
    let total: u64 = segments.iter().map(|segment| segment.host.nbytes()).sum();
    let worthwhile = usize::try_from(total / LEAST_BYTES_PER_THREAD).unwrap_or(usize::MAX).max(1);
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    wanted.unwrap_or_else(cores).clamp(1, worthwhile.min(segments.len().max(1)))
}

fn refused(error: &std::io::Error) -> Error {
    Error::new(Kind::Internal, format!("zstd could not compress an array: {error}"))
}
