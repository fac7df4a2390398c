//! Compressed chunks: zstd frames in host memory, decompressed to where boxes of them go.
//!
//! Invariants: a frame gives exactly as many bytes as its chunk has, or the call fails; every frame is
//! decompressed once, by one thread, and threads take the next frame when they are done. A chunk that goes to
//! one place as it is needs no memory; of others each thread holds one at a time.

use std::sync::atomic::{AtomicUsize, Ordering};

use waystation_format::{Error, Kind, Result};
use zstd::bulk::Decompressor;

use super::plan::Words;
use crate::copy::{BoxCopy, array_bytes};
use crate::job::in_parallel;

/// Below this, starting another thread takes longer than decompressing.
const LEAST_BYTES_PER_THREAD: u64 = 256 << 10;

/// Most bytes that a byte of a frame can stand for: a block of 128 KiB takes at least four.
const MOST_BYTES_PER_BYTE: usize = 32 << 10;

/// A frame and what becomes of its chunk.
struct Frame {
    address: usize,
    nbytes: usize,
    chunk_bytes: usize,
    copies: Vec<BoxCopy>,
}

impl Frame {
    /// Where the whole chunk goes, if that is one run of memory and the only copy.
    fn place(&self) -> Option<usize> {
        match &self.copies[..] {
            [copy] if copy.is_one_run() && copy.nbytes() == self.chunk_bytes as u64 => Some(copy.address()),
            _ => None,
        }
    }
}

/// Decompresses frames, on up to `threads` threads, by default as many as there are cores.
///
/// `words` are records
/// `address, nbytes, item_bytes, ndim, chunk_shape[ndim], box_offset[ndim], box_shape[ndim],
/// destination_address, destination_strides_bytes[ndim]`; those of one frame follow each other.
///
/// # Safety
/// Frames must be readable and destinations writable host memory that nobody else uses meanwhile, without
/// overlap.
pub unsafe fn decompress(words: &[i64], threads: Option<usize>) -> Result<()> {
    let frames = parse(words)?;
    let next = AtomicUsize::new(0);
    let work = || -> Result<()> {
        let mut decompressor = Decompressor::new().map_err(|error| refused(&error))?;
        let mut scratch = Vec::new();
        while let Some(frame) = frames.get(next.fetch_add(1, Ordering::Relaxed)) {
            // SAFETY: as the caller promises; no other thread has this frame.
            let outcome = unsafe { deliver(frame, &mut decompressor, &mut scratch) };
            if outcome.is_err() {
                next.store(frames.len(), Ordering::Relaxed); // nobody takes another
                return outcome;
            }
        }
        Ok(())
    };
    in_parallel(worthwhile_threads(&frames, threads), "waystation-decompress", &work)
}

/// Decompresses one frame that says how long its content is.
pub fn decompress_one(frame: &[u8], most_bytes: usize) -> Result<Vec<u8>> {
    let corrupt = |message: String| Error::new(Kind::Corrupt, message);
    let nbytes = match zstd::zstd_safe::get_frame_content_size(frame) {
        Ok(Some(nbytes)) => usize::try_from(nbytes).unwrap_or(usize::MAX),
        Ok(None) => most_bytes,
        Err(_) => return Err(corrupt("the bytes are no zstd frame".to_owned())),
    };
    if nbytes > most_bytes {
        return Err(corrupt(format!("a zstd frame holds {nbytes} bytes where {most_bytes} are allowed")));
    }
    let mut content = vec![0; nbytes];
    let mut decompressor = Decompressor::new().map_err(|error| refused(&error))?;
    let length =
        decompressor.decompress_to_buffer(frame, &mut content[..]).map_err(|error| refused(&error))?;
    content.truncate(length);
    Ok(content)
}

/// # Safety
/// As for [`decompress`].
unsafe fn deliver(frame: &Frame, decompressor: &mut Decompressor<'_>, scratch: &mut Vec<u8>) -> Result<()> {
    // SAFETY: the caller vouches for the memory of the frame.
    let source = unsafe { std::slice::from_raw_parts(frame.address as *const u8, frame.nbytes) };
    if frame.chunk_bytes / MOST_BYTES_PER_BYTE > frame.nbytes {
        let message = format!("{} bytes cannot hold a chunk of {}", frame.nbytes, frame.chunk_bytes);
        return Err(Error::new(Kind::Corrupt, message)); // before there is memory for the chunk
    }
    if let Some(place) = frame.place() {
        // SAFETY: the caller vouches for the destination, of which the chunk is one run.
        let target = unsafe { std::slice::from_raw_parts_mut(place as *mut u8, frame.chunk_bytes) };
        return fill(source, target, decompressor);
    }
    if scratch.len() < frame.chunk_bytes {
        scratch.resize(frame.chunk_bytes, 0);
    }
    let chunk = &mut scratch[..frame.chunk_bytes];
    fill(source, chunk, decompressor)?;
    for copy in &frame.copies {
        // SAFETY: the caller vouches for the destination.
        unsafe { copy.scatter(0, chunk) };
    }
    Ok(())
}

fn fill(source: &[u8], target: &mut [u8], decompressor: &mut Decompressor<'_>) -> Result<()> {
    let wanted = target.len();
    let length = decompressor.decompress_to_buffer(source, target).map_err(|error| refused(&error))?;
    if length == wanted {
        return Ok(());
    }
    let message = format!("a compressed chunk holds {length} bytes where {wanted} were written");
    Err(Error::new(Kind::Corrupt, message))
}

fn parse(words: &[i64]) -> Result<Vec<Frame>> {
    let mut words = Words::new(words);
    let mut frames: Vec<Frame> = Vec::new();
    while !words.is_empty() {
        let address = words.size("address")?;
        let nbytes = words.size("nbytes")?;
        let item_bytes = words.unsigned("item_bytes")?;
        let ndim = words.unsigned("ndim")?;
        let chunk_shape = words.unsigned_list("chunk_shape", ndim)?;
        let box_offset = words.unsigned_list("box_offset", ndim)?;
        let box_shape = words.unsigned_list("box_shape", ndim)?;
        let destination = words.size("destination_address")?;
        let strides = words.list("destination_strides_bytes", ndim)?;
        let chunk_bytes = array_bytes(&chunk_shape, item_bytes)?;
        let copy = BoxCopy::new(&chunk_shape, item_bytes, &box_offset, &box_shape, destination, strides)?;
        if address == 0 || copy.nbytes() == 0 {
            return Err(Error::new(Kind::InvalidInput, "a frame has no address, or nothing is wanted of it"));
        }
        let chunk_bytes = usize::try_from(chunk_bytes)
            .map_err(|_| Error::new(Kind::InvalidInput, "a chunk is larger than memory could be"))?;
        match frames.last_mut() {
            Some(last) if (last.address, last.nbytes) == (address, nbytes) => last.copies.push(copy),
            _ => frames.push(Frame { address, nbytes, chunk_bytes, copies: vec![copy] }),
        }
    }
    Ok(frames)
}

fn worthwhile_threads(frames: &[Frame], wanted: Option<usize>) -> usize {
    let total: u64 = frames.iter().map(|frame| frame.chunk_bytes as u64).sum();
    let worthwhile = usize::try_from(total / LEAST_BYTES_PER_THREAD).unwrap_or(usize::MAX).max(1);
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    wanted.unwrap_or_else(cores).clamp(1, worthwhile.min(frames.len().max(1)))
}

fn refused(error: &std::io::Error) -> Error {
    Error::new(Kind::Corrupt, format!("a zstd frame cannot be decompressed: {error}"))
}
