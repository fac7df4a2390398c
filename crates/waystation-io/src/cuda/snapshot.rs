//! Arrays copied from devices to slabs of the arena, all at once: what an asynchronous save waits for.
//!
//! First the slabs are pinned, where the arena has not handed out pinned ones again, then the copies run in
//! pieces, several in flight on every device. Invariants: pieces that were started are waited for before
//! the job ends, whatever the reason; slabs stay lent (see `pins`) exactly as long as the job runs.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use waystation_format::plan::ArrayCopy;
use waystation_format::{Error, Kind, Result};

use super::driver::Driver;
use super::pins;
use super::transfer::{self, Copies};
use crate::job::{Handle, Shared, in_parallel};
use crate::write::{DeviceCopies, DeviceRows};

/// Bytes that one stream copies at a time: long for the bus, short for someone who cancels.
const PIECE_BYTES: usize = 32 << 20;
/// Small arrays that one stream copies at a time.
const PIECE_COPIES: usize = 256;
/// Pieces that one thread keeps in flight.
const AHEAD: usize = 2;
/// A device's bus is full with two threads that take turns.
const THREADS_PER_DEVICE: usize = 2;
const MOST_THREADS: usize = 16;
/// Bytes that a thread faults in at a time.
const POPULATE_BYTES: usize = 64 << 20;

/// A copy as one row that holds all bytes, where they lie one after another on the device, too.
fn joined(copy: &ArrayCopy) -> ArrayCopy {
    if copy.rows == 1 || copy.source_step != copy.row_bytes as i64 {
        return *copy;
    }
    ArrayCopy { row_bytes: copy.nbytes(), rows: 1, source_step: 0, ..*copy }
}

/// Starts copying in the background to memory that lies in `slabs`. The outcome is the number of bytes.
///
/// # Safety
/// Until the job has finished, sources must be valid memory of their devices that nobody writes, `slabs`
/// whole slabs of the arena, and destinations used by nobody else.
pub unsafe fn start(copies: Vec<ArrayCopy>, mut slabs: Vec<Range<usize>>) -> Result<Handle<u64>> {
    slabs.sort_unstable_by_key(|slab| slab.start);
    slabs.dedup();
    check_destinations(&copies, &slabs)?;
    let driver = Driver::get()?;
    for copy in &copies {
        driver.device(copy.device)?;
    }
    let total = copies.iter().map(|copy| copy.nbytes() as u64).sum();
    // SAFETY: the caller vouches for the memory as long as the job runs.
    Handle::spawn("waystation-snapshot", total, move |shared| unsafe { run(&copies, slabs, shared) })
}

fn check_destinations(copies: &[ArrayCopy], slabs: &[Range<usize>]) -> Result<()> {
    for copy in copies {
        let slab = slabs.partition_point(|slab| slab.start <= copy.destination).checked_sub(1);
        let nbytes = copy.row_bytes.checked_mul(copy.rows);
        let end = nbytes.and_then(|nbytes| copy.destination.checked_add(nbytes));
        if slab.is_none_or(|slab| end.is_none_or(|end| end > slabs[slab].end)) {
            return Err(Error::new(Kind::InvalidInput, "the destination of a copy is not in a slab"));
        }
        if !is_address(copy) {
            return Err(Error::new(Kind::InvalidInput, "the source of a copy is no address"));
        }
    }
    Ok(())
}

/// Whether all rows lie in an address space; 0 is no address.
fn is_address(copy: &ArrayCopy) -> bool {
    let first = i128::from(copy.source);
    let last = first + i128::from(copy.source_step) * copy.rows.saturating_sub(1) as i128;
    first.min(last) > 0 && first.max(last) + (copy.row_bytes as i128) <= i128::from(u64::MAX)
}

/// # Safety
/// As for [`start`].
unsafe fn run(copies: &[ArrayCopy], slabs: Vec<Range<usize>>, shared: &Shared<u64>) -> Result<u64> {
    let Some(first) = copies.first() else { return Ok(0) };
    let lent = Lent::new(slabs);
    lent.pin(first.device, shared)?;
    let pieces = pieces(copies);
    let devices: BTreeSet<u32> = copies.iter().map(|copy| copy.device).collect();
    let threads = (THREADS_PER_DEVICE * devices.len()).min(MOST_THREADS).min(pieces.len());
    let next = AtomicUsize::new(0);
    in_parallel(threads, "waystation-snapshot", &|| {
        // SAFETY: as the caller promises.
        let outcome = unsafe { copy_pieces(&pieces, &next, shared) };
        // Told at once, so that the others stop.
        outcome.map_err(|error| shared.fail(error)).or(Ok(()))
    })?;
    Ok(copies.iter().map(|copy| copy.nbytes() as u64).sum())
}

/// # Safety
/// As for [`start`].
unsafe fn copy_pieces(pieces: &[Vec<DeviceRows>], next: &AtomicUsize, shared: &Shared<u64>) -> Result<()> {
    let mut in_flight: VecDeque<(Copies, u64)> = VecDeque::new();
    let complete = |under_way: Option<(Copies, u64)>| -> Result<()> {
        let Some((mut copies, nbytes)) = under_way else { return Ok(()) };
        copies.wait()?;
        shared.add_done(nbytes);
        Ok(())
    };
    while !shared.should_stop()
        && let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed))
    {
        if in_flight.len() >= AHEAD {
            complete(in_flight.pop_front())?;
        }
        // SAFETY: as the caller promises; dropping copies waits for them.
        let copies = unsafe { transfer::start(piece)? };
        in_flight.push_back((copies, piece.iter().map(|rows| bytes_of(rows) as u64).sum()));
    }
    in_flight.into_iter().try_for_each(|under_way| complete(Some(under_way)))
}

/// Cuts and groups copies into pieces, each for one device, the devices in turns.
fn pieces(copies: &[ArrayCopy]) -> Vec<Vec<DeviceRows>> {
    let mut by_device: BTreeMap<u32, Vec<Vec<DeviceRows>>> = BTreeMap::new();
    let mut held: BTreeMap<u32, usize> = BTreeMap::new();
    for copy in copies {
        for rows in parts_of(&joined(copy)) {
            let own = by_device.entry(copy.device).or_default();
            let held = held.entry(copy.device).or_default();
            match own.last_mut() {
                Some(piece) if *held + bytes_of(&rows) <= PIECE_BYTES && piece.len() < PIECE_COPIES => {
                    *held += bytes_of(&rows);
                    piece.push(rows);
                }
                _ => {
                    *held = bytes_of(&rows);
                    own.push(vec![rows]);
                }
            }
        }
    }
    let mut queues: Vec<_> = by_device.into_values().map(Vec::into_iter).collect();
    let mut pieces = Vec::new();
    while !queues.is_empty() {
        queues.retain_mut(|queue| queue.next().map(|piece| pieces.push(piece)).is_some());
    }
    pieces
}

/// A copy in parts of at most [`PIECE_BYTES`]: several rows, or parts of one.
fn parts_of(copy: &ArrayCopy) -> Vec<DeviceRows> {
    let most_rows = PIECE_BYTES / copy.row_bytes.max(1);
    if most_rows > 0 && copy.rows > 1 {
        let starts = (0..copy.rows).step_by(most_rows);
        return starts.map(|row| part_of(copy, row, 0, most_rows.min(copy.rows - row))).collect();
    }
    let starts =
        |row| (0..copy.row_bytes).step_by(PIECE_BYTES).map(move |begin| part_of(copy, row, begin, 1));
    (0..copy.rows).flat_map(starts).collect()
}

/// Whole rows from `row` on, or of one what begins at `begin`.
fn part_of(copy: &ArrayCopy, row: usize, begin: usize, rows: usize) -> DeviceRows {
    let row_bytes = (copy.row_bytes - begin).min(PIECE_BYTES);
    let skipped = copy.source_step.wrapping_mul(row as i64).wrapping_add(begin as i64);
    DeviceRows {
        device: copy.device,
        source: copy.source.wrapping_add_signed(skipped),
        source_step: copy.source_step,
        destination: copy.destination + row * copy.row_bytes + begin,
        destination_step: copy.row_bytes as u64,
        row_bytes,
        rows,
    }
}

fn bytes_of(rows: &DeviceRows) -> usize {
    rows.row_bytes * rows.rows
}

/// Slabs that copies may go to; given back when dropped.
struct Lent(Vec<Range<usize>>);

impl Lent {
    fn new(slabs: Vec<Range<usize>>) -> Self {
        for slab in &slabs {
            pins::lend(slab.start, slab.len());
        }
        Self(slabs)
    }

    /// Pins what is not pinned yet, in parallel. What is refused is copied to all the same.
    fn pin(&self, ordinal: u32, shared: &Shared<u64>) -> Result<()> {
        let device = Driver::get()?.device(ordinal)?;
        let unpinned: Vec<_> = self.0.iter().filter_map(|slab| pins::unpinned(slab.start)).collect();
        let parts: Vec<Range<usize>> = unpinned
            .iter()
            .flat_map(|slab| {
                let part = |begin| begin..slab.end.min(begin + POPULATE_BYTES);
                slab.clone().step_by(POPULATE_BYTES).map(part)
            })
            .collect();
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(MOST_THREADS);
        let next = AtomicUsize::new(0);
        in_parallel(threads.min(parts.len()), "waystation-pin", &|| {
            while let Some(part) = take(&parts, &next, shared) {
                pins::populate(part.clone());
            }
            Ok(())
        })?;
        let next = AtomicUsize::new(0);
        in_parallel(threads.min(unpinned.len()), "waystation-pin", &|| {
            let _current = device.make_current()?;
            while let Some(slab) = take(&unpinned, &next, shared) {
                pins::pin(&device, slab.start);
            }
            Ok(())
        })
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        for slab in &self.0 {
            pins::give_back(slab.start, slab.len());
        }
    }
}

fn take<'a, T>(items: &'a [T], next: &AtomicUsize, shared: &Shared<u64>) -> Option<&'a T> {
    if shared.should_stop() { None } else { items.get(next.fetch_add(1, Ordering::Relaxed)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copy(device: u32, destination: usize, nbytes: usize) -> ArrayCopy {
        ArrayCopy { device, destination, source: 1 << 40, row_bytes: nbytes, rows: 1, source_step: 0 }
    }

    #[test]
    fn pieces_are_bounded_complete_and_take_turns() {
        let small = (0..1000).map(|index| copy(0, index << 10, 1 << 10));
        let copies: Vec<_> = small.chain([copy(1, 1 << 30, 5 * PIECE_BYTES / 2), copy(1, 1, 0)]).collect();
        let pieces = pieces(&copies);
        for piece in &pieces {
            assert!(piece.iter().map(|rows| rows.row_bytes).sum::<usize>() <= PIECE_BYTES);
            assert!(piece.len() <= PIECE_COPIES && piece.iter().all(|rows| rows.device == piece[0].device));
        }
        let devices: Vec<_> = pieces.iter().map(|piece| piece[0].device).collect();
        assert_eq!(devices, [0, 1, 0, 1, 0, 1, 0]);
        for device in 0..2 {
            let rows = pieces.iter().flatten().filter(|rows| rows.device == device);
            let offsets = rows.clone().map(|rows| rows.source - (1 << 40)).max();
            let total: usize = rows.map(|rows| rows.row_bytes).sum();
            assert_eq!(total, [1000 << 10, 5 * PIECE_BYTES / 2][device as usize]);
            assert_eq!(offsets, Some([0, 2 * PIECE_BYTES as u64][device as usize]));
        }
    }

    #[test]
    fn destinations_must_lie_in_a_slab() {
        let slabs = [4096..8192, 16384..20480];
        for good in [copy(0, 4096, 4096), copy(0, 16384, 1), copy(0, 20479, 1)] {
            assert!(check_destinations(&[good], &slabs).is_ok());
        }
        for bad in [copy(0, 0, 1), copy(0, 4097, 4096), copy(0, 9000, 1), copy(0, 20000, usize::MAX)] {
            assert!(check_destinations(&[bad], &slabs).is_err());
        }
        let rows = ArrayCopy { rows: 4, source_step: 1 << 20, ..copy(0, 4096, 1024) };
        assert!(check_destinations(&[rows], &slabs).is_ok());
        for (rows, row_bytes, source_step) in
            [(5, 1024, 1 << 20), (usize::MAX, 2, 2), (4, 1024, i64::MAX), (4, 1024, -(1 << 39))]
        {
            let bad = ArrayCopy { rows, source_step, ..copy(0, 4096, row_bytes) };
            assert!(check_destinations(&[bad], &slabs).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn rows_are_cut_between_rows_or_within_large_ones() {
        let cut = |row_bytes, rows, source_step| {
            let copy = ArrayCopy { rows, source_step, ..copy(0, 1 << 30, row_bytes) };
            let pieces = pieces(&[copy]);
            let mut next = copy.destination;
            for part in pieces.iter().flatten() {
                assert!(bytes_of(part) <= PIECE_BYTES);
                for row in 0..part.rows {
                    // Where each byte comes from, whatever part it is in.
                    assert_eq!(part.destination + row * part.destination_step as usize, next);
                    let at = next - copy.destination;
                    let from = (at / row_bytes) as i64 * source_step + (at % row_bytes) as i64;
                    let source = part.source as i64 + row as i64 * part.source_step;
                    assert_eq!(source, (1 << 40) + from);
                    next += part.row_bytes;
                }
            }
            assert_eq!(next, copy.destination + copy.nbytes());
            pieces.iter().map(Vec::len).sum::<usize>()
        };
        assert_eq!(cut(1 << 10, 100, 4 << 10), 1);
        assert_eq!(cut(PIECE_BYTES / 4, 10, PIECE_BYTES as i64), 3);
        assert_eq!(cut(3 * PIECE_BYTES / 2, 2, 1 << 30), 4);
        assert_eq!(cut(1 << 10, 100, 1 << 10), 1);
    }
}
