//! Where the bytes of one unit are read to, and what happens to them then.
//!
//! A unit is divided into *parts*, each a run of file bytes and the memory that receives it: the final
//! destination where a run of needed bytes is long and aligned enough (no copy is made), else scratch
//! memory, from which needed bytes are copied on. What goes to devices always goes through scratch.
//! Invariants: the parts cover the unit without hole or overlap, in file order; a destination part belongs
//! to exactly one piece and no other piece needs its bytes (otherwise all of the unit goes through scratch),
//! so copies never overlap; there are never more parts, gaps included, than the caller has room for.

use std::num::NonZeroUsize;
use std::ops::Range;

use waystation_format::checksum::{BLOCK_BYTES, Crc64, crc64};

use super::arrivals::Share;
use super::device::HostRows;
use super::plan::FilePlan;
use crate::first_touch;

/// When a run of bytes may be read to its destination.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// File offsets and lengths must be multiples of this.
    pub offset_alignment: u64,
    /// Memory addresses must be multiples of this.
    pub memory_alignment: usize,
    /// Shorter runs are cheaper to copy than to ask for.
    pub least_bytes: u64,
    /// More parts than this are cheaper to read as one.
    pub most_parts: NonZeroUsize,
}

/// A run of file bytes and the memory that receives it.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// File offset of its first byte.
    pub begin: u64,
    /// Its length.
    pub nbytes: usize,
    /// The first byte of the memory.
    pub address: *mut u8,
    is_scratch: bool,
}

// SAFETY: the memory of a part belongs to its job, of which any thread may fill it.
unsafe impl Send for Part {}

/// A block that is not what its checksum says.
#[derive(Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// File offset of the block.
    pub offset: u64,
    /// Its length.
    pub nbytes: u64,
    /// The checksum that was stored.
    pub expected: u64,
    /// The checksum of the bytes that were read.
    pub actual: u64,
}

/// The division of one unit; reused for the next, so that units cost no allocation.
#[derive(Debug, Default)]
pub struct Layout {
    unit: Range<u64>,
    parts: Vec<Part>,
    needed_bytes: u64,
}

impl Layout {
    /// Divides `unit` of a file into at most `room` parts. Scratch memory begins at `scratch`, is at least as
    /// long as the unit rounded up to the offset alignment, and is aligned as the rules say.
    pub fn divide(
        &mut self,
        plan: &FilePlan,
        unit: Range<u64>,
        rules: &Rules,
        room: NonZeroUsize,
        scratch: *mut u8,
    ) {
        self.parts.clear();
        self.needed_bytes = 0;
        for piece in plan.pieces_in(&unit) {
            self.claim(piece, &unit, rules);
        }
        self.unit = unit;
        self.parts.sort_unstable_by_key(|part| part.begin);
        let most_parts = rules.most_parts.min(room).get();
        if self.parts.len() > most_parts || self.has_rivals(plan) {
            self.parts.clear();
        }
        self.fill_gaps(rules, scratch);
        if self.parts.len() > most_parts {
            // The gaps were one too many: a single part always fits.
            self.parts.clear();
            self.fill_gaps(rules, scratch);
        }
    }

    /// Takes the long runs of a piece as parts.
    fn claim(&mut self, piece: &super::plan::Piece, unit: &Range<u64>, rules: &Rules) {
        let base = piece.chunk_offset();
        let linear = unit.start.saturating_sub(base)..unit.end.saturating_sub(base);
        piece.copy().for_each_run(linear, |run| {
            self.needed_bytes += run.piece_bytes as u64 * run.count as u64;
            if (run.piece_bytes as u64) < rules.least_bytes || piece.device().is_some() {
                return;
            }
            for index in 0..run.count {
                let begin = base + run.linear + index as u64 * run.linear_step;
                let end = begin + run.piece_bytes as u64;
                let aligned = begin.next_multiple_of(rules.offset_alignment)
                    ..end / rules.offset_alignment * rules.offset_alignment;
                let skipped = (aligned.start - begin) as i64 + index as i64 * run.memory_step;
                let address = run.address.wrapping_add_signed(skipped as isize);
                if aligned.start.saturating_add(rules.least_bytes) <= aligned.end
                    && address.is_multiple_of(rules.memory_alignment)
                {
                    self.parts.push(Part {
                        begin: aligned.start,
                        nbytes: (aligned.end - aligned.start) as usize,
                        address: address as *mut u8,
                        is_scratch: false,
                    });
                }
            }
        });
    }

    /// Whether bytes of a part are needed by another piece than the one whose memory it fills.
    fn has_rivals(&self, plan: &FilePlan) -> bool {
        if self.parts.windows(2).any(|pair| pair[0].begin + pair[0].nbytes as u64 > pair[1].begin) {
            return true;
        }
        self.parts.iter().any(|part| {
            let range = part.begin..part.begin + part.nbytes as u64;
            let claimants = plan
                .pieces_in(&range)
                .filter(|piece| piece.next_stretch(range.start).is_some_and(|run| run.start < range.end));
            claimants.take(2).count() > 1
        })
    }

    /// Gives everything that is not a part yet to scratch.
    fn fill_gaps(&mut self, rules: &Rules, scratch: *mut u8) {
        let asked_end = self.unit.end.next_multiple_of(rules.offset_alignment);
        let scratch_part = |range: Range<u64>| Part {
            begin: range.start,
            nbytes: (range.end - range.start) as usize,
            address: scratch.wrapping_add((range.start - self.unit.start) as usize),
            is_scratch: true,
        };
        let claimed = self.parts.len();
        let mut position = self.unit.start;
        for index in 0..claimed {
            let part = self.parts[index];
            if position < part.begin {
                self.parts.push(scratch_part(position..part.begin));
            }
            position = part.begin + part.nbytes as u64;
        }
        if position < asked_end {
            self.parts.push(scratch_part(position..asked_end));
        }
        if self.parts.len() > claimed {
            self.parts.sort_unstable_by_key(|part| part.begin);
        }
    }

    /// The file bytes that were divided.
    pub fn unit(&self) -> &Range<u64> {
        &self.unit
    }

    /// The parts, in file order. The last may reach beyond the unit, by less than the alignment.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Touches the memory that is about to be filled.
    pub fn prepare(&self) {
        self.parts.iter().for_each(|part| first_touch::prepare(part.address as usize, part.nbytes));
    }

    /// Bytes that the unit contributes to destinations.
    pub fn needed_bytes(&self) -> u64 {
        self.needed_bytes
    }

    /// Adds to `shares` what the unit has of each record of the plan.
    pub fn shares(&self, plan: &FilePlan, shares: &mut Vec<Share>) {
        for piece in plan.pieces_in(&self.unit) {
            let base = piece.chunk_offset();
            let linear = self.unit.start.saturating_sub(base)..self.unit.end.saturating_sub(base);
            let mut nbytes = 0;
            piece.copy().for_each_run(linear, |run| nbytes += run.piece_bytes as u64 * run.count as u64);
            if nbytes > 0 {
                shares.push(Share { record: piece.record(), nbytes });
            }
        }
    }

    /// Verifies every block of a unit that has been read. Units of verified files are whole blocks.
    ///
    /// # Safety
    /// The memory of every part must be filled, and nobody may be writing to it.
    pub unsafe fn verify(&self, checksums: &[u64]) -> Result<(), Mismatch> {
        let block_bytes = BLOCK_BYTES as u64;
        for offset in (self.unit.start..self.unit.end).step_by(BLOCK_BYTES) {
            let end = (offset + block_bytes).min(self.unit.end);
            // SAFETY: as the caller promises.
            let actual = unsafe { self.checksum(offset..end) };
            let expected = checksums.get((offset / block_bytes) as usize).copied().unwrap_or(!actual);
            if actual != expected {
                return Err(Mismatch { offset, nbytes: end - offset, expected, actual });
            }
        }
        Ok(())
    }

    /// # Safety
    /// As for [`Layout::verify`].
    unsafe fn checksum(&self, range: Range<u64>) -> u64 {
        let first = self.parts.partition_point(|part| part.begin + part.nbytes as u64 <= range.start);
        // SAFETY: `overlap` lies in its part, which is filled.
        let bytes = |part: &Part| unsafe { (*part).overlap(&range) };
        let whole = self.parts.get(first).map_or(&[][..], bytes);
        if whole.len() as u64 == range.end - range.start {
            return crc64(whole);
        }
        let mut checksum = Crc64::new();
        for part in self.parts[first..].iter().take_while(|part| part.begin < range.end) {
            checksum.update(bytes(part));
        }
        checksum.finish()
    }

    /// Adds to `rows` what is to be copied from scratch to devices.
    pub fn device_rows(&self, plan: &FilePlan, rows: &mut Vec<HostRows>) {
        for part in self.parts.iter().filter(|part| part.is_scratch) {
            let end = (part.begin + part.nbytes as u64).min(self.unit.end);
            for piece in plan.pieces_in(&(part.begin..end)) {
                let Some(device) = piece.device() else { continue };
                let base = piece.chunk_offset();
                piece.copy().for_each_run(part.begin.saturating_sub(base)..end - base, |run| {
                    rows.push(HostRows {
                        device,
                        source: part.address as usize + (base + run.linear - part.begin) as usize,
                        source_step: run.linear_step,
                        destination: run.address as u64,
                        destination_step: run.memory_step,
                        row_bytes: run.piece_bytes,
                        rows: run.count,
                    });
                });
            }
        }
    }

    /// Copies what pieces on the host need from scratch to their destinations.
    ///
    /// # Safety
    /// The memory of every part must be filled, destinations must be writable, and nobody else may be
    /// using either.
    pub unsafe fn deliver(&self, plan: &FilePlan) {
        for part in self.parts.iter().filter(|part| part.is_scratch) {
            let end = (part.begin + part.nbytes as u64).min(self.unit.end);
            for piece in plan.pieces_in(&(part.begin..end)).filter(|piece| piece.device().is_none()) {
                let begin = part.begin.max(piece.chunk_offset());
                // SAFETY: scratch is filled, and no destination.
                let bytes = unsafe { part.overlap(&(begin..end)) };
                // SAFETY: the caller vouches for destinations.
                unsafe { piece.copy().scatter(begin - piece.chunk_offset(), bytes) };
            }
        }
    }
}

impl Part {
    /// The memory of the part's bytes in a file range.
    ///
    /// # Safety
    /// It must be initialised, and for as long as the slice is used nobody may write to or free it.
    unsafe fn overlap<'a>(self, range: &Range<u64>) -> &'a [u8] {
        let begin = range.start.clamp(self.begin, self.begin + self.nbytes as u64);
        let end = range.end.clamp(begin, self.begin + self.nbytes as u64);
        let first = self.address.wrapping_add((begin - self.begin) as usize);
        // SAFETY: begin to end lies in the part, whose memory the caller vouches for.
        unsafe { std::slice::from_raw_parts(first, (end - begin) as usize) }
    }
}
