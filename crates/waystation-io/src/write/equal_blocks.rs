//! Which blocks of files that were written before hold what memory holds now, by their checksums.
//!
//! A block is a row of pieces of arrays. Threads take block after block in the order in which they are given, so a
//! caller that gives one block of each array first learns soon which arrays differ: of an array of which a block
//! differs that has no piece of another one, no further block is looked at, unless it has a piece of an array that
//! may still be equal. Such a block counts as different.
//!
//! Invariants: no file is read and nothing is written; every piece lies in its array; an array that is not
//! contiguous, or is in the memory of a device, is gathered block by block, so that its size does not matter to
//! memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use waystation_format::checksum::{BLOCK_BYTES, Crc64};
use waystation_format::{Error, Kind, Result};

use super::device::{DeviceCopy, DeviceRows, UnderWay, registered};
use super::plan::{PlannedSegment, parse_segments};
use crate::arena::Arena;
use crate::job::{Handle, Shared, in_parallel};
use crate::staging::Staging;

/// Below this, starting another thread takes longer than summing.
const LEAST_BYTES_PER_THREAD: u64 = 4 << 20;
/// Words of a piece: its array, where in that it begins, its bytes.
const PIECE_WORDS: usize = 3;

/// What is compared, as the caller gives it.
#[derive(Clone, Debug, Default)]
pub struct BlocksInput {
    /// Records of [`waystation_format::plan::Segment`], the arrays.
    pub words: Vec<i64>,
    /// Three words for each piece, block after block.
    pub pieces: Vec<i64>,
    /// The number of pieces of each block.
    pub counts: Vec<i64>,
    /// The checksum of each block.
    pub expected: Vec<u64>,
}

#[derive(Clone, Copy, Debug)]
struct Piece {
    array: usize,
    begin: u64,
    nbytes: usize,
}

struct Comparison {
    arrays: Vec<PlannedSegment>,
    pieces: Vec<Piece>,
    /// Of each block its first piece, then the count of all.
    firsts: Vec<usize>,
    expected: Vec<u64>,
    has_devices: bool,
}

/// Starts to compare in the background, on up to `threads` threads, by default as many as there are cores. The
/// result is of each block whether it is equal. The job counts no bytes.
///
/// # Safety
/// Until the job has finished, every array must be readable memory (of its device) that nobody writes.
pub unsafe fn start_comparison(input: BlocksInput, threads: Option<usize>) -> Result<Handle<Vec<bool>>> {
    let comparison = Comparison::parse(input)?;
    let devices = if comparison.has_devices { Some(registered()?) } else { None };
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    let total: u64 = comparison.pieces.iter().map(|piece| piece.nbytes as u64).sum();
    let worthwhile = usize::try_from(total / LEAST_BYTES_PER_THREAD).unwrap_or(usize::MAX).max(1);
    let threads = threads.unwrap_or_else(cores).clamp(1, worthwhile);
    Handle::spawn("waystation-compare", 0, move |shared| {
        // SAFETY: the caller vouches for the arrays as long as the job runs.
        unsafe { comparison.run(devices.as_ref(), threads, shared) }
    })
}

impl Comparison {
    fn parse(input: BlocksInput) -> Result<Self> {
        let arrays = parse_segments(&input.words)?;
        let (rows, rest) = input.pieces.as_chunks::<PIECE_WORDS>();
        if !rest.is_empty() || input.counts.len() != input.expected.len() {
            return Err(invalid("pieces have three words each, and every block a count and a checksum"));
        }
        let piece = |row: &[i64; PIECE_WORDS]| Piece::parse(row, &arrays);
        let pieces = rows.iter().map(piece).collect::<Result<Vec<_>>>()?;
        let mut firsts = vec![0usize];
        for &count in &input.counts {
            let count = usize::try_from(count).map_err(|_| invalid("a block has a negative count"))?;
            let first = firsts[firsts.len() - 1];
            let end = first.checked_add(count).filter(|&end| end <= pieces.len());
            let end = end.ok_or_else(|| invalid("the blocks have more pieces than there are"))?;
            let nbytes: usize = pieces[first..end].iter().map(|piece| piece.nbytes).sum();
            if nbytes > BLOCK_BYTES {
                return Err(invalid("the pieces of a block are longer than a block"));
            }
            firsts.push(end);
        }
        if firsts[firsts.len() - 1] != pieces.len() {
            return Err(invalid("the blocks have fewer pieces than there are"));
        }
        let has_devices = arrays.iter().any(|array| !array.devices.is_empty());
        Ok(Self { arrays, pieces, firsts, expected: input.expected, has_devices })
    }

    /// # Safety
    /// As for [`start_comparison`].
    unsafe fn run(
        &self,
        devices: Option<&Arc<dyn DeviceCopy>>,
        threads: usize,
        shared: &Shared<Vec<bool>>,
    ) -> Result<Vec<bool>> {
        let equal: Vec<AtomicBool> = self.expected.iter().map(|_| AtomicBool::new(false)).collect();
        let differs: Vec<AtomicBool> = self.arrays.iter().map(|_| AtomicBool::new(false)).collect();
        let next = AtomicUsize::new(0);
        let work = || -> Result<()> {
            let mut gathering = Gathering::new(devices.cloned());
            loop {
                let block = next.fetch_add(1, Ordering::Relaxed);
                if block >= self.expected.len() || shared.should_stop() {
                    return Ok(());
                }
                let pieces = &self.pieces[self.firsts[block]..self.firsts[block + 1]];
                let is_known = |piece: &Piece| differs[piece.array].load(Ordering::Relaxed);
                if !pieces.is_empty() && pieces.iter().all(is_known) {
                    continue;
                }
                let mut sum = Crc64::new();
                for piece in pieces {
                    // SAFETY: the caller vouches for the arrays.
                    unsafe { gathering.add(piece, &self.arrays[piece.array], &mut sum)? };
                }
                let is_equal = sum.finish() == self.expected[block];
                equal[block].store(is_equal, Ordering::Relaxed);
                if let ([piece], false) = (pieces, is_equal) {
                    differs[piece.array].store(true, Ordering::Relaxed);
                }
            }
        };
        in_parallel(threads, "waystation-compare", &work)?;
        Ok(equal.into_iter().map(AtomicBool::into_inner).collect())
    }
}

impl Piece {
    fn parse(&[array, begin, nbytes]: &[i64; PIECE_WORDS], arrays: &[PlannedSegment]) -> Result<Self> {
        let outside = || invalid("a piece lies outside of its array");
        let array = usize::try_from(array).map_err(|_| outside())?;
        let begin = u64::try_from(begin).map_err(|_| outside())?;
        let nbytes = usize::try_from(nbytes).map_err(|_| outside())?;
        let whole = arrays.get(array).ok_or_else(outside)?.host.nbytes();
        match begin.checked_add(nbytes as u64) {
            Some(end) if end <= whole => Ok(Self { array, begin, nbytes }),
            _ => Err(outside()),
        }
    }
}

/// What one thread gathers pieces into that do not lie in one piece in host memory. Made when it is first needed.
struct Gathering {
    devices: Option<Arc<dyn DeviceCopy>>,
    staging: Option<Staging>,
}

impl Gathering {
    fn new(devices: Option<Arc<dyn DeviceCopy>>) -> Self {
        Self { devices, staging: None }
    }

    fn address(&mut self) -> Result<*mut u8> {
        if self.staging.is_none() {
            let staging = Staging::new(&Arena::global(), 1, BLOCK_BYTES)?;
            if let Some(devices) = &self.devices {
                devices.prepare_staging(staging.address(0) as usize, BLOCK_BYTES)?;
            }
            self.staging = Some(staging);
        }
        let staging = self.staging.as_ref();
        staging.map(|staging| staging.address(0)).ok_or_else(|| invalid("there is no staging memory"))
    }

    /// Appends a piece to a checksum.
    ///
    /// # Safety
    /// The array must be readable memory of its device.
    unsafe fn add(&mut self, piece: &Piece, array: &PlannedSegment, sum: &mut Crc64) -> Result<()> {
        if piece.nbytes == 0 {
            return Ok(());
        }
        if array.devices.is_empty()
            && let Some(address) = array.host.contiguous()
        {
            let source = (address as *const u8).wrapping_add(piece.begin as usize);
            // SAFETY: the piece lies in the array, whose bytes are there from the first to the last.
            sum.update(unsafe { std::slice::from_raw_parts(source, piece.nbytes) });
            return Ok(());
        }
        let target = self.address()?;
        // SAFETY: the staging memory has room for a block, is this thread's alone, and was initialised by the system.
        let bytes = unsafe { std::slice::from_raw_parts_mut(target, piece.nbytes) };
        let rows = device_rows(piece, array, target as usize);
        if let (false, Some(devices)) = (rows.is_empty(), &self.devices) {
            // SAFETY: the sources are readable, as the caller promises; the target is waited for at once.
            UnderWay::new(Some(unsafe { devices.start(&rows)? })).wait()?;
        }
        // SAFETY: as the caller promises.
        unsafe { array.host.gather(piece.begin, bytes) };
        sum.update(bytes);
        Ok(())
    }
}

impl Drop for Gathering {
    fn drop(&mut self) {
        if let (Some(devices), Some(staging)) = (&self.devices, &self.staging) {
            devices.release_staging(staging.address(0) as usize, BLOCK_BYTES);
        }
    }
}

/// What devices hold of a piece, and where it goes in memory that begins at `address`.
fn device_rows(piece: &Piece, array: &PlannedSegment, address: usize) -> Vec<DeviceRows> {
    let range = piece.begin..piece.begin + piece.nbytes as u64;
    let mut rows = Vec::new();
    for (device, blocks) in &array.devices {
        for block in blocks.blocks_in(range.clone()) {
            block.for_each_run(range.clone(), |run| {
                rows.push(DeviceRows {
                    device: *device,
                    source: run.address as u64,
                    source_step: run.memory_step,
                    destination: address + (run.linear - piece.begin) as usize,
                    destination_step: run.linear_step,
                    row_bytes: run.piece_bytes,
                    rows: run.count,
                });
            });
        }
    }
    rows
}

fn invalid(message: &'static str) -> Error {
    Error::new(Kind::InvalidInput, message)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use waystation_format::checksum::crc64;

    use super::*;

    /// A segment of bytes that lie one after another.
    fn bytes_of(data: &[u8]) -> [i64; 6] {
        [0, data.len() as i64, 0, 1, -1, data.as_ptr() as i64]
    }

    fn compare(input: BlocksInput, threads: usize) -> Result<Vec<bool>> {
        // SAFETY: the tests keep the arrays until the job is over.
        let job = unsafe { start_comparison(input, Some(threads)) }?;
        job.join();
        job.shared().take_outcome().unwrap()
    }

    #[test]
    fn blocks_of_several_arrays_are_compared_whatever_their_strides() {
        let plain: Vec<u8> = (0..1000u32).map(|number| number as u8).collect();
        // Two columns of a matrix of four: 100 rows of two bytes, four apart.
        let matrix: Vec<u8> = (0..400u32).map(|number| (number * 7) as u8).collect();
        let columns: Vec<u8> = matrix.chunks(4).flat_map(|row| [row[0], row[1]]).collect();
        let strided = [0, 1, 2, 100, 2, 1, -1, matrix.as_ptr() as i64, 0, 0, 100, 2, 4, 1];
        let words = [&bytes_of(&plain)[..], &strided].concat();
        let both = [&plain[10..500], &columns[3..99]].concat();
        let pieces = vec![0, 10, 490, 1, 3, 96, 0, 0, 1000, 1, 0, 200];
        let expected = vec![crc64(&both), crc64(&plain) ^ 1, crc64(&columns)];
        for threads in [1, 3] {
            let input = BlocksInput {
                words: words.clone(),
                pieces: pieces.clone(),
                counts: vec![2, 1, 1],
                expected: expected.clone(),
            };
            let found = compare(input, threads).unwrap();
            assert_eq!(found, [true, false, true]);
        }
    }

    #[test]
    fn an_array_that_differs_is_not_looked_at_again() {
        let data = [1u8, 2, 3, 4];
        let input = BlocksInput {
            words: bytes_of(&data).to_vec(),
            pieces: vec![0, 0, 2, 0, 2, 2],
            counts: vec![1, 1],
            expected: vec![0, crc64(&data[2..])],
        };
        assert_eq!(compare(input, 1).unwrap(), [false, false]);
    }

    #[test]
    fn what_does_not_fit_together_is_refused() {
        let data = [0u8; 8];
        let whole = BlocksInput {
            words: bytes_of(&data).to_vec(),
            pieces: vec![0, 0, 8],
            counts: vec![1],
            expected: vec![0],
        };
        let wrong: [fn(&mut BlocksInput); 8] = [
            |input| input.pieces[2] = 9,
            |input| input.pieces[1] = 1,
            |input| input.pieces[1] = i64::MAX,
            |input| input.pieces[0] = 1,
            |input| input.pieces[0] = -1,
            |input| input.counts = vec![2],
            |input| input.counts = vec![0],
            |input| input.expected.clear(),
        ];
        assert!(compare(whole.clone(), 1).is_ok());
        for spoil in wrong {
            let mut input = whole.clone();
            spoil(&mut input);
            assert_eq!(compare(input, 1).unwrap_err().kind(), Kind::InvalidInput);
        }
    }
}
