//! Files that are read straight to the memory of a device, past that of the host (GPUDirect Storage).
//!
//! Storage takes whole pages, and where tensors go fits none: so a worker reads aligned units to a block of
//! the device's memory, and what is needed of them is copied on within the device, which takes next to no
//! time. Invariants: a file is read so only after bytes of it that came this way were found to be those that
//! a plain read gives; bytes that have to be verified, or that go to the host, never come this way; what
//! cannot be read so is read as ever, and the statistics say why.

use std::fmt::Debug;
use std::fs::File;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use waystation_format::{Error, Kind, Result};

use super::source::Source;
use crate::mode::Mode;
use crate::read::device::{Delivery, Devices, HostRows, Landing};
use crate::read::layout::{Layout, Rules};
use crate::read::plan::FilePlan;
use crate::read::spans::PAGE_GRANULE_BYTES;
use crate::write::DeviceCopies;

/// What is read at once: long enough for the library to keep the device's bus busy.
pub const UNIT_BYTES: usize = 4 << 20;
/// While one unit is read, the one before is copied on.
const SLOTS: usize = 2;
/// Memory of the device for all workers.
const MOST_BLOCK_BYTES: usize = 128 << 20;
/// What is compared with a plain read before a file is trusted.
const PROOF_BYTES: usize = 64 << 10;
const LEAST_WORKERS: u64 = 8;

/// Whether files are read straight to devices.
#[derive(Clone, Debug, Default)]
pub enum GpuDirect {
    /// Nobody has asked for it.
    #[default]
    Unwanted,
    /// It is wanted, and cannot be had for this reason.
    Refused(String),
    /// By this, where it can be.
    By(Arc<dyn ReadToDevice>),
}

/// Reads files straight to memory of devices. Called from the threads of read jobs, several at a time.
pub trait ReadToDevice: Send + Sync + Debug {
    /// Prepares a file, which was opened for direct transfers if the system has them for it.
    fn open(&self, file: File) -> Result<Box<dyn DirectFile>>;

    /// Memory of a device that files are read to, at a multiple of a page.
    fn allocate(&self, device: u32, nbytes: usize) -> Result<Box<dyn DeviceBlock>>;

    /// Starts copies whose sources are memory of the same device, in any order, and returns without waiting.
    ///
    /// # Safety
    /// As for [`crate::read::device::CopyToDevice::start`].
    unsafe fn start(&self, copies: &[HostRows]) -> Result<Box<dyn DeviceCopies>>;
}

/// A file that is read to memory of devices.
pub trait DirectFile: Send + Sync + Debug {
    /// Reads a range of the file to a place in a block; returns how many bytes came, fewer at the file's end.
    ///
    /// # Safety
    /// Nobody else may be using that part of the block.
    unsafe fn read(
        &self,
        block: &dyn DeviceBlock,
        position: usize,
        nbytes: usize,
        offset: u64,
    ) -> Result<usize>;
}

/// Memory of a device.
pub trait DeviceBlock: Send {
    /// The device.
    fn device(&self) -> u32;

    /// Where it begins.
    fn address(&self) -> u64;

    /// Copies its first bytes to the host, and waits for that.
    fn fetch(&self, bytes: &mut [u8]) -> Result<()>;
}

/// The files of a job that may be read straight to its device, and what became of that.
pub struct Directly<'a> {
    /// Who reads, and for which device; `None` if nobody can.
    reader: Option<(&'a dyn ReadToDevice, u32)>,
    nbytes: AtomicU64,
    reason: Mutex<Option<String>>,
}

impl<'a> Directly<'a> {
    /// `None` where nobody wants it.
    pub fn new(wanted: &'a GpuDirect, devices: Option<&Devices>) -> Option<Self> {
        let ordinals = devices.map_or(&[][..], Devices::ordinals);
        let (reader, reason) = match (wanted, ordinals) {
            (GpuDirect::Unwanted, _) | (_, []) => return None,
            (GpuDirect::Refused(reason), _) => (None, Some(reason.clone())),
            (GpuDirect::By(reader), &[device]) => (Some((&**reader, device)), None),
            (GpuDirect::By(_), _) => (None, Some("the destinations are on several devices".to_owned())),
        };
        Some(Self { reader, nbytes: AtomicU64::new(0), reason: Mutex::new(reason) })
    }

    /// Workers that keep storage busy with one request each.
    pub fn least_workers(&self, total: u64) -> usize {
        match self.reader {
            Some(_) => (total / (SLOTS * UNIT_BYTES) as u64).clamp(1, LEAST_WORKERS) as usize,
            None => 1,
        }
    }

    /// Bytes of files that were read so.
    pub fn nbytes(&self) -> u64 {
        self.nbytes.load(Ordering::Relaxed)
    }

    /// Why something was not, if anything was not.
    pub fn reason(&self) -> Option<String> {
        self.reason.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn refuse(&self, reason: &str) {
        let mut first = self.reason.lock().unwrap_or_else(PoisonError::into_inner);
        first.get_or_insert_with(|| reason.to_owned());
    }
}

/// What a worker needs to read files so.
pub struct DirectReader<'a> {
    directly: &'a Directly<'a>,
    reader: &'a dyn ReadToDevice,
    delivery: Delivery<'a>,
    layout: Layout,
    // Dropped before the block: waits for copies out of it.
    landing: [Option<Landing<'a>>; SLOTS],
    block: Box<dyn DeviceBlock>,
    next: usize,
    /// Delivered, and not told yet.
    landed_bytes: u64,
}

impl<'a> DirectReader<'a> {
    /// One of `workers` readers; `None` where there is none to be had.
    pub fn new(directly: &'a Directly<'a>, workers: usize, delivery: Delivery<'a>) -> Option<Self> {
        let (reader, device) = directly.reader?;
        let nbytes = SLOTS * UNIT_BYTES;
        if workers * nbytes > MOST_BLOCK_BYTES {
            directly.refuse("there are more workers than memory of the device is taken for");
            return None;
        }
        match reader.allocate(device, nbytes) {
            Ok(block) => {
                let (layout, landing) = (Layout::default(), [const { None }; SLOTS]);
                Some(Self { directly, reader, delivery, layout, landing, block, next: 0, landed_bytes: 0 })
            }
            Err(error) => {
                directly.refuse(error.message());
                None
            }
        }
    }

    /// A file, if it can be read so: proven at the first call for all workers.
    pub fn file<'s>(&mut self, plan: &FilePlan, source: &'s Source) -> Result<Option<&'s dyn DirectFile>> {
        if !source.was_proven() {
            // What is under way uses the block, whose beginning the proof takes.
            self.landed_bytes += self.land()?;
        }
        Ok(source.proven(|| match self.prove(plan, source) {
            Ok(file) => Some(file),
            Err(error) => {
                self.directly.refuse(error.message());
                None
            }
        }))
    }

    fn prove(&self, plan: &FilePlan, source: &Source) -> Result<Box<dyn DirectFile>> {
        let unsupported = |message: &'static str| Err(Error::new(Kind::Unsupported, message));
        if plan.file.checksums.is_some() {
            return unsupported("the bytes have checksums, which are verified in the memory of the host");
        }
        if plan.pieces().iter().any(|piece| piece.device().is_none()) {
            return unsupported("some of the bytes go to the memory of the host");
        }
        if source.mode() == Mode::Buffered {
            return unsupported("the files are in memory already, or short");
        }
        let path: &Path = &plan.file.path;
        let reopened = source.another(path)?;
        let file = self.reader.open(reopened)?;
        let begin = plan.pieces().first().map_or(0, |piece| piece.file_range().start);
        self.compare(&*file, source.buffered(), begin / PAGE_GRANULE_BYTES * PAGE_GRANULE_BYTES)?;
        Ok(file)
    }

    /// Unsupported unless the file's bytes come as a plain read gives them.
    fn compare(&self, file: &dyn DirectFile, plain: &File, offset: u64) -> Result<()> {
        let mut expected = vec![0; PROOF_BYTES];
        let mut found = vec![0; PROOF_BYTES];
        let failed =
            |error| Error::new(Kind::Unavailable, format!("a plain read of the file failed: {error}"));
        let count = plain.read_at(&mut expected, offset).map_err(failed)?;
        // SAFETY: the block is this reader's, and nothing is under way in it.
        let filled = unsafe { file.read(&*self.block, 0, PROOF_BYTES, offset) }?.min(count);
        self.block.fetch(&mut found[..filled])?;
        if filled < count.min(PAGE_GRANULE_BYTES as usize) || found[..filled] != expected[..filled] {
            let message = "bytes that came straight to the device differ from those of a plain read";
            return Err(Error::new(Kind::Unsupported, message));
        }
        Ok(())
    }

    /// Waits for everything that is still being copied, the oldest first. Returns the bytes of that.
    pub fn land(&mut self) -> Result<u64> {
        self.landing.rotate_left(self.next);
        self.next = 0;
        let told = std::mem::take(&mut self.landed_bytes);
        self.landing.iter_mut().filter_map(Option::take).try_fold(told, |sum, unit| Ok(sum + unit.land()?))
    }

    /// Reads a unit of at most [`UNIT_BYTES`], whose bytes are on their way then. `None` if that failed: it
    /// must be read otherwise, as all of this file from now on. Else returns the bytes that have been
    /// delivered meanwhile.
    ///
    /// # Safety
    /// Until [`DirectReader::land`] returned or the reader is dropped, destinations of the plan must be
    /// writable and used by nobody else.
    pub unsafe fn read(
        &mut self,
        plan: &FilePlan,
        source: &Source,
        file: &dyn DirectFile,
        unit: Range<u64>,
    ) -> Result<Option<u64>> {
        let slot = self.next;
        let mut delivered = self.landing[slot].take().map_or(Ok(0), Landing::land)?;
        let other = &mut self.landing[(slot + 1) % SLOTS];
        if other.as_ref().is_some_and(Landing::is_expected) {
            delivered += other.take().map_or(Ok(0), Landing::land)?;
        }
        let nbytes = unit.end - unit.start;
        // SAFETY: what was copied out of the slot has landed.
        if let Err(error) = unsafe { self.fill(file, slot, unit.clone()) } {
            self.directly.refuse(error.message());
            source.refuse_directly();
            return Ok(None);
        }
        let start = self.block.address() + (slot * UNIT_BYTES) as u64;
        self.layout.divide(plan, unit, &RULES, NonZeroUsize::MIN, start as usize as *mut u8);
        let mut rows = Vec::new();
        self.layout.device_rows(plan, &mut rows);
        // SAFETY: the slot is filled, and left alone until its copies have landed; the caller vouches for
        // destinations.
        let copies = unsafe { self.reader.start(&rows) }?;
        self.landing[slot] = Some(Landing::of(Some(copies), self.delivery.arrivals, plan, &self.layout));
        self.next = (slot + 1) % SLOTS;
        self.directly.nbytes.fetch_add(nbytes, Ordering::Relaxed);
        Ok(Some(delivered))
    }

    /// # Safety
    /// Nobody else may be using the slot.
    unsafe fn fill(&self, file: &dyn DirectFile, slot: usize, unit: Range<u64>) -> Result<()> {
        let expected = (unit.end - unit.start) as usize;
        let mut filled = 0;
        while filled < expected {
            // Whole pages, also of the last that the file has only a part of.
            let asked = (expected - filled).next_multiple_of(PAGE_GRANULE_BYTES as usize);
            let position = slot * UNIT_BYTES + filled;
            // SAFETY: as the caller promises.
            let count = unsafe { file.read(&*self.block, position, asked, unit.start + filled as u64) }?;
            let is_aligned = count.is_multiple_of(PAGE_GRANULE_BYTES as usize);
            if count == 0 || (filled + count < expected && !is_aligned) {
                let message = "a read straight to the device ended early";
                return Err(Error::new(Kind::Unavailable, message));
            }
            filled += count;
        }
        Ok(())
    }
}

/// One part for all of a unit.
const RULES: Rules = Rules {
    offset_alignment: PAGE_GRANULE_BYTES,
    memory_alignment: PAGE_GRANULE_BYTES as usize,
    least_bytes: u64::MAX,
    most_parts: NonZeroUsize::MIN,
};
