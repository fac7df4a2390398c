//! One thread that gathers pieces of files into staging blocks and writes them.
//!
//! A staging slot goes through: free, *filling* (copies from devices under way), gathered and
//! checksummed, *writing* (in flight in the ring), free. Without a ring a write is done before the next
//! piece is gathered. Invariants: a slot's bytes stay unchanged while in flight; whatever way the worker
//! ends, the ring and the device copies have let go of the staging memory before it is given back. A ring that
//! the system refuses in the middle of a job is given up: this thread writes again what was in flight, and the
//! rest without a ring, unless the caller insists on one.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use waystation_format::Result;

use super::Files;
use crate::aligned::PAGE_BYTES;
use crate::arena::Arena;
use crate::ring::{Completion, Ring};
use crate::staging::Staging;
use crate::write::device::{DeviceCopy, UnderWay};
use crate::write::{Blocks, Piece};

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
    files: &'a Files<'a>,
    blocks: &'a Blocks<'a>,
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
    pub fn new(
        files: &'a Files<'a>,
        blocks: &'a Blocks<'a>,
        ring: Option<Ring>,
        devices: Option<Arc<dyn DeviceCopy>>,
    ) -> Result<Self> {
        let ahead = if devices.is_some() { DEVICE_BLOCKS_AHEAD } else { 1 };
        let slots = (ahead + ring.as_ref().map_or(0, Ring::depth)).min(files.slots_per_worker(blocks));
        // Small jobs need less than a block; a piece is padded to whole pages when it is written.
        let largest = files.plan.files.iter().map(|file| file.file_bytes).max().unwrap_or(0);
        let slot_bytes = (files.way.block_bytes as u64).min(largest.max(1)) as usize;
        let staging = Staging::new(&Arena::global(), slots, slot_bytes.next_multiple_of(PAGE_BYTES))?;
        let prepared = devices.map(|devices| prepare(devices, &staging)).transpose()?;
        let writing = (0..slots).map(|_| None).collect();
        Ok(Self { ring, writing, filling: VecDeque::new(), prepared, staging, ahead, files, blocks })
    }

    /// Works until there is nothing left to do or the job is to stop.
    ///
    /// # Safety
    /// The sources of the plan must stay readable meanwhile.
    pub unsafe fn run(&mut self) -> Result<()> {
        while !self.blocks.should_stop() {
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
            let Some(piece) = self.blocks.next_piece() else {
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
        // SAFETY: the slot is lent, and left alone until the copies have been waited for; sources are as the
        // caller promises.
        unsafe { self.blocks.start_device_copies(&**devices, piece, self.staging.address(slot) as usize) }
    }

    /// # Safety
    /// As for [`Worker::run`].
    unsafe fn complete_filling(&mut self, Filling { slot, piece, copies }: Filling) -> Result<()> {
        copies.wait()?;
        let past_caches = self.files.way.mode.is_direct();
        // SAFETY: the slot is lent, the copies into it are done, and no write of it is in flight.
        let bytes = unsafe { self.staging.bytes(slot) };
        // SAFETY: staging memory is not among the sources; those are as the caller promises.
        unsafe { self.blocks.gather(&piece, &mut bytes[..piece.nbytes], past_caches)? };
        let padded = piece.nbytes.next_multiple_of(PAGE_BYTES);
        bytes[piece.nbytes..padded].fill(0);
        self.write(slot, piece)
    }

    fn write(&mut self, slot: usize, piece: Piece) -> Result<()> {
        let output = &self.files.outputs[piece.file];
        let file = output.open()?;
        let was_direct = output.is_direct();
        let length = output.length_to_write(piece.nbytes);
        self.blocks.wait_for_store(length);
        if self.ring.is_none() || !was_direct {
            return self.write_rest(slot, Writing { piece, file, length, was_direct }, 0);
        }
        if self.ring.as_ref().is_some_and(|ring| ring.in_flight() >= ring.depth()) {
            self.reap(1)?;
        }
        let Some(ring) = &mut self.ring else {
            return self.write_rest(slot, Writing { piece, file, length, was_direct }, 0);
        };
        let address = self.staging.address(slot);
        // SAFETY: the slot is not touched, and the file kept open in `writing`, until completion; both
        // outlive the ring.
        let pushed = unsafe { ring.push_write(file.as_raw_fd(), address, length, piece.offset, slot as u64) };
        self.writing[slot] = Some(Writing { piece, file, length, was_direct });
        match pushed.and_then(|()| ring.submit()) {
            Ok(()) => self.reap(0),
            Err(error) => self.give_up(error),
        }
    }

    /// Does without the ring from now on. Writes again what was in flight.
    fn give_up(&mut self, error: io::Error) -> Result<()> {
        self.files.refuse_rings(error)?;
        self.ring = None; // waits until the kernel has let go of all memory
        for slot in 0..self.writing.len() {
            if let Some(writing) = self.writing[slot].take() {
                self.write_rest(slot, writing, 0)?;
            }
        }
        Ok(())
    }

    /// Takes completions, of which at least `at_least` are waited for.
    fn reap(&mut self, at_least: usize) -> Result<()> {
        let Some(ring) = &mut self.ring else { return Ok(()) };
        if at_least > 0
            && let Err(error) = ring.wait(at_least)
        {
            return self.give_up(error);
        }
        while let Some(Completion { token, result }) = self.ring.as_mut().and_then(Ring::next_completion) {
            let slot = token as usize;
            let Some(writing) = self.writing.get_mut(slot).and_then(Option::take) else { continue };
            match result {
                Ok(written) => self.write_rest(slot, writing, written)?,
                Err(error) => {
                    let output = &self.files.outputs[writing.piece.file];
                    output.recover(&writing.file, error, writing.was_direct, writing.piece.offset)?;
                    self.write_rest(slot, writing, 0)?;
                }
            }
        }
        Ok(())
    }

    /// Writes in this thread what is missing after the first `written` bytes of a slot, which is free then.
    fn write_rest(&mut self, slot: usize, writing: Writing, written: usize) -> Result<()> {
        let Writing { piece, file, length, .. } = writing;
        if written < length {
            let output = &self.files.outputs[piece.file];
            // SAFETY: the slot is lent, and its write is not in flight (any more).
            let bytes = unsafe { self.staging.bytes(slot) };
            output.write_at(&file, &bytes[written..length], piece.offset + written as u64)?;
            output.begin_write_back(&file, piece.offset, piece.nbytes);
        }
        self.staging.put_back(slot);
        drop(file); // whoever writes the last piece closes it
        self.blocks.mark_written(&piece);
        self.files.mark_written(&piece)
    }
}

fn prepare(devices: Arc<dyn DeviceCopy>, staging: &Staging) -> Result<Prepared> {
    let range = staging.range();
    devices.prepare_staging(range.start, range.len())?;
    Ok(Prepared { devices, address: range.start, nbytes: range.len() })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs;

    use super::super::choice;
    use super::*;
    use crate::job::Shared;
    use crate::local::Local;
    use crate::mode::Mode;
    use crate::refusals::{in_a_thread, refuse};
    use crate::storage::NewFiles;
    use crate::sync_group::Durability;
    use crate::write::{FileInput, Options, Plan, start};
    use waystation_format::Kind;

    /// Writes a file by a ring that is taken away before anything is sent, or once something is in flight.
    fn write_without_ring(content: &[u8], demanded: bool, pieces_before: usize) -> Result<(Vec<u8>, Mode)> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let words = vec![0, content.len() as i64, 0, 1, -1, content.as_ptr() as i64];
        let file =
            FileInput { path: path.clone(), header: Vec::new(), file_bytes: content.len() as u64, words };
        let plan = Plan::parse(vec![file])?;
        let mode = demanded.then_some(Mode::DirectRing);
        let options = Options { mode, block_bytes: Some(1 << 20), depth: Some(2), ..Options::AUTOMATIC };
        let way = choice::choose_way(&plan, &Options { mode: Some(Mode::DirectRing), ..options.clone() });
        let shared = Shared::new(plan.total_bytes);
        let files = Files::new(&plan, &options, way, None);
        let blocks = Blocks::new(&plan, &options, &shared, way.block_bytes);
        let Ok(ring) = Ring::new(2) else { return Ok((content.to_vec(), Mode::DirectThreads)) };
        let mut worker = Worker::new(&files, &blocks, Some(ring), None)?;
        for _ in 0..pieces_before {
            // SAFETY: the content outlives the worker.
            unsafe {
                worker.begin_filling()?;
                let filling = worker.filling.pop_front().unwrap();
                worker.complete_filling(filling)?;
            }
        }
        refuse(&[libc::SYS_io_uring_enter], libc::EPERM);
        // SAFETY: as above.
        unsafe { worker.run() }?;
        drop(worker);
        files.finish()?;
        Ok((fs::read(path).unwrap(), files.mode().unwrap()))
    }

    #[test]
    fn a_ring_that_is_taken_away_in_the_middle_of_a_file_is_done_without() {
        let content: Vec<u8> = (0..(5 << 20) + 77).map(|index: usize| (index * 11 / 3) as u8).collect();
        for pieces_before in 0..3 {
            in_a_thread(|| {
                let (written, mode) = write_without_ring(&content, false, pieces_before).unwrap();
                assert!(written == content);
                assert_ne!(mode, Mode::DirectRing);
            });
            in_a_thread(|| match write_without_ring(&content, true, pieces_before) {
                Err(error) => assert!(matches!(error.kind(), Kind::Unavailable | Kind::Unsupported)),
                Ok((_, mode)) => assert_eq!(mode, Mode::DirectThreads), // no ring was ever granted here
            });
        }
    }

    #[test]
    fn an_error_of_closing_fails_the_job_and_leaves_nothing() {
        let content = vec![7; (3 << 20) + 5];
        let both = [Durability::Now, Durability::Whenever];
        for (mode, durability) in Mode::ALL.into_iter().flat_map(|mode| both.iter().map(move |it| (mode, it)))
        {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("file");
            let words = vec![0, content.len() as i64, 0, 1, -1, content.as_ptr() as i64];
            let file =
                FileInput { path: path.clone(), header: Vec::new(), file_bytes: content.len() as u64, words };
            in_a_thread(|| {
                refuse(&[libc::SYS_close], libc::EIO);
                let options =
                    Options { mode: Some(mode), durability: durability.clone(), ..Options::AUTOMATIC };
                // SAFETY: the content outlives the job, which is joined here.
                let job = unsafe { start(Local::by_path(), vec![file], options) }.unwrap();
                job.join();
                let error = job.shared().take_outcome().unwrap().unwrap_err();
                assert!(error.message().contains("close the file"), "{mode}: {error}");
                assert_eq!(error.context("path"), path.to_str());
            });
            assert!(!path.exists());
        }
    }
}
