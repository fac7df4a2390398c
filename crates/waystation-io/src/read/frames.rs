//! Encoded chunks in host memory, decoded to where boxes of them go: zstd frames or the bytes themselves, with
//! or without a CRC-32C after them.
//!
//! Invariants: what does not match its checksum is not used; a chunk has exactly as many bytes as it should have,
//! or the call fails; every chunk is decoded once, by one thread, and threads take the next one when they are
//! done. A chunk that goes to one place as it is needs no memory; of other frames each thread holds one at a time.

use std::sync::atomic::{AtomicUsize, Ordering};

use waystation_format::checksum::crc32c;
use waystation_format::plan::{Decode, each};
use waystation_format::{Error, Kind, Result};
use zstd::bulk::Decompressor;

use crate::copy::{BoxCopy, array_bytes};
use crate::job::in_parallel;

/// Below this, starting another thread takes longer than decoding.
const LEAST_BYTES_PER_THREAD: u64 = 256 << 10;

/// Most bytes that a byte of a frame can stand for: a block of 128 KiB takes at least four.
const MOST_BYTES_PER_BYTE: usize = 32 << 10;
const CHECKSUM_BYTES: usize = 4;

/// An encoded chunk and what becomes of it.
struct Encoded {
    address: usize,
    nbytes: usize,
    is_compressed: bool,
    has_checksum: bool,
    chunk_bytes: usize,
    copies: Vec<BoxCopy>,
}

impl Encoded {
    /// Where the whole chunk goes, if that is one run of memory and the only copy.
    fn place(&self) -> Option<usize> {
        match &self.copies[..] {
            [copy] if copy.is_one_run() && copy.nbytes() == self.chunk_bytes as u64 => Some(copy.address()),
            _ => None,
        }
    }
}

/// Decodes chunks, on up to `threads` threads, by default as many as there are cores. An error says of which it
/// is, counted from the first.
///
/// `words` are records of [`Decode`]; those of one chunk follow each other.
///
/// # Safety
/// Encoded chunks must be readable and destinations writable host memory that nobody else uses meanwhile, without
/// overlap.
pub unsafe fn decode_chunks(words: &[i64], threads: Option<usize>) -> Result<()> {
    let chunks = parse(words)?;
    let next = AtomicUsize::new(0);
    let work = || -> Result<()> {
        let mut decompressor = Decompressor::new().map_err(|error| refused(&error))?;
        let mut scratch = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(chunk) = chunks.get(index) else { return Ok(()) };
            // SAFETY: as the caller promises; no other thread has this chunk.
            let outcome = unsafe { deliver(chunk, &mut decompressor, &mut scratch) };
            if let Err(error) = outcome {
                next.store(chunks.len(), Ordering::Relaxed); // nobody takes another
                return Err(error.with("chunk", index.to_string()));
            }
        }
    };
    in_parallel(worthwhile_threads(&chunks, threads), "waystation-decode", &work)
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
/// As for [`decode_chunks`].
unsafe fn deliver(chunk: &Encoded, decompressor: &mut Decompressor<'_>, scratch: &mut Vec<u8>) -> Result<()> {
    // SAFETY: the caller vouches for the memory.
    let stored = unsafe { std::slice::from_raw_parts(chunk.address as *const u8, chunk.nbytes) };
    let source = if chunk.has_checksum { verified(stored)? } else { stored };
    if !chunk.is_compressed {
        check_length(source.len(), chunk.chunk_bytes)?;
        // SAFETY: the caller vouches for the destinations.
        chunk.copies.iter().for_each(|copy| unsafe { copy.scatter(0, source) });
        return Ok(());
    }
    if chunk.chunk_bytes / MOST_BYTES_PER_BYTE > source.len() {
        let message = format!("{} bytes cannot hold a chunk of {}", source.len(), chunk.chunk_bytes);
        return Err(Error::new(Kind::Corrupt, message)); // before there is memory for the chunk
    }
    if let Some(place) = chunk.place() {
        // SAFETY: the caller vouches for the destination, of which the chunk is one run.
        let target = unsafe { std::slice::from_raw_parts_mut(place as *mut u8, chunk.chunk_bytes) };
        return fill(source, target, decompressor);
    }
    if scratch.len() < chunk.chunk_bytes {
        scratch.resize(chunk.chunk_bytes, 0);
    }
    let content = &mut scratch[..chunk.chunk_bytes];
    fill(source, content, decompressor)?;
    for copy in &chunk.copies {
        // SAFETY: the caller vouches for the destination.
        unsafe { copy.scatter(0, content) };
    }
    Ok(())
}

/// What stands before a checksum, if that matches.
fn verified(stored: &[u8]) -> Result<&[u8]> {
    let Some((source, sum)) = stored.split_last_chunk::<CHECKSUM_BYTES>() else {
        let message = format!("{} bytes cannot hold the checksum of a chunk", stored.len());
        return Err(Error::new(Kind::Corrupt, message));
    };
    let (expected, actual) = (u32::from_le_bytes(*sum), crc32c(source));
    if expected == actual {
        return Ok(source);
    }
    let error =
        Error::new(Kind::Corrupt, "stored bytes are not what was written: the CRC-32C of a chunk differs");
    Err(error.with("expected", format!("{expected:08x}")).with("actual", format!("{actual:08x}")))
}

fn check_length(length: usize, wanted: usize) -> Result<()> {
    if length == wanted {
        return Ok(());
    }
    let message = format!("a chunk holds {length} bytes where {wanted} were written");
    Err(Error::new(Kind::Corrupt, message))
}

fn fill(source: &[u8], target: &mut [u8], decompressor: &mut Decompressor<'_>) -> Result<()> {
    let wanted = target.len();
    let length = decompressor.decompress_to_buffer(source, target).map_err(|error| refused(&error))?;
    check_length(length, wanted)
}

fn parse(words: &[i64]) -> Result<Vec<Encoded>> {
    let mut chunks: Vec<Encoded> = Vec::new();
    each(words, |_, record| {
        let Decode { source, nbytes, is_compressed, has_checksum, part } = record;
        let copy = BoxCopy::of(&part)?;
        if source == 0 || copy.nbytes() == 0 {
            return Err(Error::new(Kind::InvalidInput, "a chunk has no address, or nothing is wanted of it"));
        }
        let chunk_bytes = usize::try_from(array_bytes(&part.chunk_shape, part.item_bytes)?)
            .map_err(|_| Error::new(Kind::InvalidInput, "a chunk is larger than memory could be"))?;
        match chunks.last_mut() {
            Some(last) if (last.address, last.nbytes) == (source, nbytes) => last.copies.push(copy),
            _ => chunks.push(Encoded {
                address: source,
                nbytes,
                is_compressed,
                has_checksum,
                chunk_bytes,
                copies: vec![copy],
            }),
        }
        Ok(())
    })?;
    Ok(chunks)
}

fn worthwhile_threads(chunks: &[Encoded], wanted: Option<usize>) -> usize {
    let total: u64 = chunks.iter().map(|chunk| chunk.chunk_bytes as u64).sum();
    let worthwhile = usize::try_from(total / LEAST_BYTES_PER_THREAD).unwrap_or(usize::MAX).max(1);
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    wanted.unwrap_or_else(cores).clamp(1, worthwhile.min(chunks.len().max(1)))
}

fn refused(error: &std::io::Error) -> Error {
    Error::new(Kind::Corrupt, format!("a zstd frame cannot be decompressed: {error}"))
}
