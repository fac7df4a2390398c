//! One thread that gathers pieces of files into staging blocks and writes them.
//!
//! A staging slot goes through: free, *filling* (copies from devices under way), gathered and
//! checksummed, *writing* (in flight in the ring), free. Without a ring a write is done before the next
//! piece is gathered. Invariants: a slot's bytes stay unchanged while in flight; whatever way the worker
//! ends, the ring and the device copies have let go of the staging memory before it is given back.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use waystation_format::{Error, Kind, Result};

use super::device::{DeviceCopy, DeviceRows, UnderWay};
use super::work::{Piece, Work};
use crate::aligned::PAGE_BYTES;
use crate::arena::Arena;
use crate::ring::{Completion, Ring};
use crate::staging::Staging;

/// Staging blocks that devices fill ahead of the checksum.
const DEVICE_BLOCKS_AHEAD: usize = 4;

struct Filling {
    slot: usize,
    piece: Piece,
    copies: UnderWay,
}

struct Writing {
    piece: Piece,
    file: Arc<File>,
    length: usize,
    was_direct: bool,
}

// Fields are dropped in this order: first what may still use the staging memory.
pub(super) struct Worker<'a> {
    ring: Option<Ring>,
    writing: Vec<Option<Writing>>,
    filling: VecDeque<Filling>,
    prepared: Option<Prepared>,
    staging: Staging,
    ahead: usize,
    work: &'a Work<'a>,
}

/// Staging memory that a device knows of.
struct Prepared {
    devices: Arc<dyn DeviceCopy>,
    address: usize,
    nbytes: usize,
}

impl Drop for Prepared {
    fn drop(&mut self) {
        self.devices.release_staging(self.address, self.nbytes);
    }
}

impl<'a> Worker<'a> {
    /// A worker that writes by `ring`, or else by itself, with staging blocks for as much in flight.
    pub fn new(work: &'a Work<'a>, ring: Option<Ring>, devices: Option<Arc<dyn DeviceCopy>>) -> Result<Self> {
        let ahead = if devices.is_some() { DEVICE_BLOCKS_AHEAD } else { 1 };
        let slots = (ahead + ring.as_ref().map_or(0, Ring::depth)).min(work.slots_per_worker());
        // Small jobs need less than a block; a piece is padded to whole pages when it is written.
        let largest = work.plan.files.iter().map(|file| file.file_bytes).max().unwrap_or(0);
        let slot_bytes = (work.way.block_bytes as u64).min(largest.max(1)) as usize;
        let staging = Staging::new(&Arena::global(), slots, slot_bytes.next_multiple_of(PAGE_BYTES))?;
        let prepared = devices.map(|devices| prepare(devices, &staging)).transpose()?;
        let writing = (0..slots).map(|_| None).collect();
        Ok(Self { ring, writing, filling: VecDeque::new(), prepared, staging, ahead, work })
    }

    /// Works until there is nothing left to do or the job is to stop.
    ///
    /// # Safety
    /// The sources of the plan must stay readable meanwhile.
    pub unsafe fn run(&mut self) -> Result<()> {
        while !self.work.shared.should_stop() {
            // SAFETY: as the caller promises.
            unsafe { self.begin_filling()? };
            if let Some(filling) = self.filling.pop_front() {
                // SAFETY: as the caller promises.
                unsafe { self.complete_filling(filling)? };
            } else if self.in_flight() > 0 {
                self.reap(1)?;
            } else {
                return Ok(());
            }
        }
        Ok(())
    }

    fn in_flight(&self) -> usize {
        self.ring.as_ref().map_or(0, Ring::in_flight)
    }

    /// # Safety
    /// As for [`Worker::run`].
    unsafe fn begin_filling(&mut self) -> Result<()> {
        while self.filling.len() < self.ahead
            && let Some(slot) = self.staging.take()
        {
            let Some(piece) = self.work.next_piece() else {
                self.staging.put_back(slot);
                return Ok(());
            };
            // SAFETY: as the caller promises.
            let copies = unsafe { self.start_device_copies(&piece, slot)? };
            self.filling.push_back(Filling { slot, piece, copies });
        }
        Ok(())
    }

    /// # Safety
    /// As for [`Worker::run`].
    unsafe fn start_device_copies(&self, piece: &Piece, slot: usize) -> Result<UnderWay> {
        let Some(Prepared { devices, .. }) = &self.prepared else { return Ok(UnderWay::new(None)) };
        let base = self.staging.address(slot) as usize;
        let mut rows = Vec::new();
        let file = &self.work.plan.files[piece.file];
        let range = piece.offset..piece.offset + piece.nbytes as u64;
        file.for_each_device_block(range, |device, block, linear, file_offset| {
            block.for_each_run(linear, |run| {
                rows.push(DeviceRows {
                    device,
                    source: run.address as u64,
                    source_step: run.memory_step,
                    destination: base + (file_offset + run.linear - piece.offset) as usize,
                    destination_step: run.linear_step,
                    row_bytes: run.piece_bytes,
                    rows: run.count,
                });
            });
        });
        if rows.is_empty() {
            return Ok(UnderWay::new(None));
        }
        // SAFETY: the rows lie in a slot that is lent, and sources are as the caller promises; the
        // copies are waited for before either changes.
        Ok(UnderWay::new(Some(unsafe { devices.start(&rows)? })))
    }

    /// # Safety
    /// As for [`Worker::run`].
    unsafe fn complete_filling(&mut self, Filling { slot, piece, copies }: Filling) -> Result<()> {
        copies.wait()?;
        // SAFETY: the slot is lent, the copies into it are done, and no write of it is in flight.
        let bytes = unsafe { self.staging.bytes(slot) };
        // SAFETY: staging memory is not among the sources; those are as the caller promises.
        unsafe { self.work.gather(&piece, &mut bytes[..piece.nbytes]) };
        let padded = piece.nbytes.next_multiple_of(PAGE_BYTES);
        bytes[piece.nbytes..padded].fill(0);
        self.write(slot, piece)
    }

    fn write(&mut self, slot: usize, piece: Piece) -> Result<()> {
        let output = &self.work.outputs[piece.file];
        let file = output.open()?;
        let was_direct = output.is_direct();
        let length = output.length_to_write(piece.nbytes);
        self.work.wait_for_store(length);
        if self.ring.is_none() || !was_direct {
            return self.write_here(slot, &Writing { piece, file, length, was_direct });
        }
        if self.ring.as_ref().is_some_and(|ring| ring.in_flight() >= ring.depth()) {
            self.reap(1)?;
        }
        let Some(ring) = &mut self.ring else { return Ok(()) };
        let address = self.staging.address(slot);
        // SAFETY: the slot is not touched, and the file kept open in `writing`, until completion; both
        // outlive the ring.
        let pushed =
            unsafe { ring.push_write(file.as_raw_fd(), address, length as u32, piece.offset, slot as u64) };
        self.writing[slot] = Some(Writing { piece, file, length, was_direct });
        pushed.and_then(|()| ring.submit()).map_err(ring_failed)?;
        self.reap(0)
    }

    /// Takes completions, of which at least `at_least` are waited for.
    fn reap(&mut self, at_least: usize) -> Result<()> {
        let Some(ring) = &mut self.ring else { return Ok(()) };
        if at_least > 0 {
            ring.wait(at_least).map_err(ring_failed)?;
        }
        while let Some(Completion { token, result }) = self.ring.as_mut().and_then(Ring::next_completion) {
            let slot = token as usize;
            let Some(writing) = self.writing.get_mut(slot).and_then(Option::take) else { continue };
            match result {
                Ok(written) if written >= writing.length => self.written(slot, &writing.piece)?,
                Ok(written) => self.write_rest(slot, &writing, written)?,
                Err(error) => {
                    let output = &self.work.outputs[writing.piece.file];
                    output.recover(&writing.file, error, writing.was_direct, writing.piece.offset)?;
                    self.write_here(slot, &writing)?;
                }
            }
        }
        Ok(())
    }

    fn write_here(&mut self, slot: usize, writing: &Writing) -> Result<()> {
        self.write_rest(slot, writing, 0)
    }

    /// Writes in this thread what is missing after the first `written` bytes of a slot.
    fn write_rest(&mut self, slot: usize, writing: &Writing, written: usize) -> Result<()> {
        let piece = &writing.piece;
        let output = &self.work.outputs[piece.file];
        // SAFETY: the slot is lent, and its write is not in flight (any more).
        let bytes = unsafe { self.staging.bytes(slot) };
        output.write_at(&writing.file, &bytes[written..writing.length], piece.offset + written as u64)?;
        output.begin_write_back(&writing.file, piece.offset, piece.nbytes);
        self.written(slot, piece)
    }

    fn written(&mut self, slot: usize, piece: &Piece) -> Result<()> {
        self.staging.put_back(slot);
        self.work.mark_written(piece)
    }
}

fn prepare(devices: Arc<dyn DeviceCopy>, staging: &Staging) -> Result<Prepared> {
    let range = staging.range();
    devices.prepare_staging(range.start, range.len())?;
    Ok(Prepared { devices, address: range.start, nbytes: range.len() })
}

fn ring_failed(error: io::Error) -> Error {
    Error::new(Kind::Unavailable, format!("io_uring failed: {error}; use mode 'direct-threads'"))
}
