//! The seam to memory that is not the host's: pieces of a plan whose destinations are on devices.
//!
//! A worker reads their bytes to staging memory, verifies them there, starts to copy them to their devices,
//! and reads the next unit to another slot meanwhile. Failure sequence: a device or staging memory that is
//! not to be had fails the job before anything is read; a copy that fails is told when its slot is needed
//! again or the worker is done. Invariants: a slot is reused only after the copies out of it have been
//! waited for, and none is left under way when a job has finished, well or not.

use std::ops::Range;
use std::sync::Arc;

use waystation_format::{Error, Kind, Result};

use super::arrivals::{Arrivals, Share};
use super::layout::Layout;
use super::plan::FilePlan;
use crate::aligned::AlignedBlock;
use crate::arena::{Arena, Slab};
use crate::write::DeviceCopies;

/// Rows of memory that go to rows of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostRows {
    /// Ordinal of the device.
    pub device: u32,
    /// Address of the first row in host memory, or in memory of the same device that was read to.
    pub source: usize,
    /// Bytes from one row to the next there.
    pub source_step: u64,
    /// Address of the first row on the device.
    pub destination: u64,
    /// Bytes from one row to the next on the device.
    pub destination_step: i64,
    /// Contiguous bytes of each row.
    pub row_bytes: usize,
    /// Number of rows; the steps matter only if there are several.
    pub rows: usize,
}

/// Copies host memory to device memory asynchronously. Called from the threads of read jobs, several at a
/// time.
pub trait CopyToDevice: Send + Sync {
    /// Prepares staging memory for copies to a device, as by pinning it. It comes from a pool, so the same
    /// addresses return, and may then be prepared still.
    fn prepare_staging(&self, address: usize, nbytes: usize, device: u32) -> Result<()>;

    /// Undoes [`CopyToDevice::prepare_staging`] before the memory goes back to its pool.
    fn release_staging(&self, address: usize, nbytes: usize);

    /// Has the calling thread, and those that it starts, run near a device where that is known to matter.
    fn stay_near(&self, device: u32);

    /// Starts copies, in any order and at once, and returns without waiting.
    ///
    /// # Safety
    /// Sources must stay as they are, and destinations be valid device memory that nobody else uses, until
    /// the copies have been waited for.
    unsafe fn start(&self, copies: &[HostRows]) -> Result<Box<dyn DeviceCopies>>;
}

/// Memory of a device that pieces may go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Ordinal of the device.
    pub device: u32,
    /// Its first byte.
    pub address: usize,
    /// How long it is.
    pub nbytes: usize,
}

/// Regions by address; they do not overlap.
#[derive(Clone, Debug)]
pub struct Regions(Vec<Region>);

impl Regions {
    /// Sorts regions. InvalidInput if two overlap, or one leaves the address space.
    pub fn new(mut regions: Vec<Region>) -> Result<Self> {
        let invalid = |message| Err(Error::new(Kind::InvalidInput, message));
        regions.retain(|region| region.nbytes > 0);
        regions.sort_unstable_by_key(|region| region.address);
        if regions.iter().any(|region| region.address.checked_add(region.nbytes).is_none()) {
            return invalid("a region of device memory leaves the address space");
        }
        if regions.windows(2).any(|pair| pair[0].address + pair[0].nbytes > pair[1].address) {
            return invalid("two regions of device memory overlap");
        }
        Ok(Self(regions))
    }

    /// The device whose memory a range is; `None` for host memory. InvalidInput for a range that is only
    /// partly in a region.
    pub fn device_of(&self, range: &Range<usize>) -> Result<Option<u32>> {
        let next = self.0.partition_point(|region| region.address + region.nbytes <= range.start);
        let Some(region) = self.0.get(next).filter(|region| region.address < range.end) else {
            return Ok(None);
        };
        if region.address <= range.start && range.end <= region.address + region.nbytes {
            return Ok(Some(region.device));
        }
        Err(Error::new(Kind::InvalidInput, "a destination reaches beyond its region of device memory"))
    }

    fn devices(&self) -> Vec<u32> {
        let mut devices: Vec<u32> = self.0.iter().map(|region| region.device).collect();
        devices.sort_unstable();
        devices.dedup();
        devices
    }
}

/// The devices of a job, and who copies to them.
#[derive(Clone)]
pub struct Devices {
    copier: Arc<dyn CopyToDevice>,
    ordinals: Vec<u32>,
    regions: Regions,
}

impl std::fmt::Debug for Devices {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Devices").field("regions", &self.regions).finish_non_exhaustive()
    }
}

impl Devices {
    /// Those that have the given regions.
    pub fn new(copier: Arc<dyn CopyToDevice>, regions: Vec<Region>) -> Result<Self> {
        let regions = Regions::new(regions)?;
        let ordinals = regions.devices();
        Ok(Self { copier, ordinals, regions })
    }

    /// Those that have regions, in order.
    pub fn ordinals(&self) -> &[u32] {
        &self.ordinals
    }

    /// Where pieces may go.
    pub fn regions(&self) -> &Regions {
        &self.regions
    }

    /// Has the job run near its device, if it has one alone.
    pub fn stay_near(&self) {
        if let [device] = self.ordinals[..] {
            self.copier.stay_near(device);
        }
    }
}

// ---- memory that units are read to -------------------------------------------------------------

/// Slots for units: what does not go to its destination at once is read to one of them.
pub struct Scratch {
    memory: Memory,
    slot_bytes: usize,
}

enum Memory {
    Plain(AlignedBlock),
    Staging { slab: Slab, copier: Arc<dyn CopyToDevice> },
}

impl Scratch {
    /// `slots` slots of `slot_bytes`, good for copies to devices if there are any. Without, their memory is
    /// large enough for huge pages, and touched only where it is needed.
    pub fn new(slots: usize, slot_bytes: usize, devices: Option<&Devices>) -> Result<Self> {
        let nbytes = slots.saturating_mul(slot_bytes);
        let memory = match devices.filter(|devices| !devices.ordinals.is_empty()) {
            None => Memory::Plain(AlignedBlock::map(nbytes)?),
            Some(devices) => {
                let slab = Arena::global().allocate(nbytes)?;
                let address = slab.address().as_ptr() as usize;
                devices.copier.prepare_staging(address, nbytes, devices.ordinals[0])?;
                Memory::Staging { slab, copier: Arc::clone(&devices.copier) }
            }
        };
        Ok(Self { memory, slot_bytes })
    }

    /// Where a slot begins.
    pub fn address(&self, slot: usize) -> *mut u8 {
        let start = match &self.memory {
            Memory::Plain(block) => block.address(),
            Memory::Staging { slab, .. } => slab.address(),
        };
        start.as_ptr().wrapping_add(slot * self.slot_bytes)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Memory::Staging { slab, copier } = &self.memory {
            copier.release_staging(slab.address().as_ptr() as usize, slab.nbytes());
        }
    }
}

// ---- units whose bytes are on their way --------------------------------------------------------

/// What becomes of a unit that was read and verified.
#[derive(Clone, Copy, Default)]
pub struct Delivery<'a> {
    /// The devices that some of it goes to.
    pub devices: Option<&'a Devices>,
    /// Who is told of what is in place.
    pub arrivals: Option<&'a Arrivals<'a>>,
}

/// A unit that was read and verified, and what of it is still being copied; dropping it waits.
pub struct Landing<'a> {
    copies: Option<Box<dyn DeviceCopies>>,
    nbytes: u64,
    shares: Vec<Share>,
    arrivals: Option<&'a Arrivals<'a>>,
}

impl<'a> Landing<'a> {
    /// Starts to copy a unit's bytes to devices; others have been delivered.
    ///
    /// # Safety
    /// The scratch memory of the layout must stay as it is, and destinations be used by nobody else, until
    /// the result is dropped or landed.
    pub unsafe fn start(delivery: Delivery<'a>, plan: &FilePlan, layout: &Layout) -> Result<Self> {
        let mut rows = Vec::new();
        if delivery.devices.is_some() {
            layout.device_rows(plan, &mut rows);
        }
        let copies = match delivery.devices {
            // SAFETY: as the caller promises.
            Some(devices) if !rows.is_empty() => Some(unsafe { devices.copier.start(&rows) }?),
            _ => None,
        };
        Ok(Self::of(copies, delivery.arrivals, plan, layout))
    }

    /// A unit whose copies have been started, if there are any.
    pub fn of(
        copies: Option<Box<dyn DeviceCopies>>,
        arrivals: Option<&'a Arrivals<'a>>,
        plan: &FilePlan,
        layout: &Layout,
    ) -> Self {
        let mut shares = Vec::new();
        if arrivals.is_some() {
            layout.shares(plan, &mut shares);
        }
        Self { copies, nbytes: layout.needed_bytes(), shares, arrivals }
    }

    /// Whether its slot may be used again at once.
    pub fn is_over(&self) -> bool {
        self.copies.is_none()
    }

    /// Whether somebody waits for it, and it need not be waited for.
    pub fn is_expected(&self) -> bool {
        self.arrivals.is_some() && self.copies.as_ref().is_none_or(|copies| copies.are_over())
    }

    /// The first of the records that it has something of, if somebody waits for records.
    pub fn first_record(&self) -> Option<usize> {
        self.shares.iter().map(|share| share.record).min()
    }

    /// Waits; returns the bytes that have reached their destinations.
    pub fn land(mut self) -> Result<u64> {
        if let Some(mut copies) = self.copies.take() {
            copies.wait()?;
        }
        if let Some(arrivals) = self.arrivals {
            arrivals.count(&self.shares);
        }
        Ok(self.nbytes)
    }
}

impl Drop for Landing<'_> {
    fn drop(&mut self) {
        if let Some(mut copies) = self.copies.take() {
            // The job has failed for another reason, which is the one to report.
            drop(copies.wait());
        }
    }
}
