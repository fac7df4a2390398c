//! Planned reads: boxes of stored chunks to chosen addresses, verified on the way.
//!
//! A job is handed to its storage as one [`Batch`]. The plan says which spans of which files are needed (`spans`),
//! and the storage reads them unit by unit, as many at a time as it likes: each unit is divided into parts of memory
//! (`layout`) that the storage fills, and is concluded then, in any order. Invariants: no byte reaches the caller
//! unverified without the job failing; a job that has finished, well or not, uses the caller's memory no more;
//! memory beside the destinations is bounded by [`SCRATCH_BYTES`]. Destinations may be on devices ([`device`]).

pub mod device;
pub mod layout;
pub mod plan;
pub mod spans;

mod arrivals;
mod frames;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod tests;

use std::fmt::Debug;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use waystation_format::{Error, Kind, Result};

use self::arrivals::Arrivals;
use self::device::{Delivery, Devices, Landing};
pub use self::frames::{decode_chunks, decompress_one};
use self::layout::{Layout, Mismatch};
use self::plan::{FilePlan, Plan};
use self::spans::{Stripe, span_bytes, spans_of, stripes_of};
use crate::job::{Handle, Shared};
pub use crate::local::read::gpu_direct;
use crate::local::read::gpu_direct::GpuDirect;
use crate::mode::Mode;
use crate::storage::Storage;
use crate::throttle::Throttle;

/// Scratch memory of all workers together.
pub const SCRATCH_BYTES: usize = 128 << 20;
/// Stripes are long, so that each worker has a read-ahead of its own, …
const STRIPE_MOST_BYTES: u64 = 32 << 20;
/// … but not so long that one worker is left with the last, and never a matter of single requests.
const STRIPE_LEAST_BYTES: u64 = 2 << 20;
/// Where somebody waits for the first bytes, all workers should be near these.
const STRIPE_ANNOUNCED_BYTES: u64 = 8 << 20;
/// Stripes that every worker should have.
const STRIPES_PER_WORKER: u64 = 4;

/// What the caller prescribes; the engine chooses the rest.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The mode for every file.
    pub mode: Option<Mode>,
    /// Bytes of one request.
    pub block_bytes: Option<usize>,
    /// Requests in flight.
    pub depth: Option<usize>,
    /// Worker threads.
    pub threads: Option<usize>,
    /// What every read waits for.
    pub throttle: Option<Arc<Throttle>>,
    /// Devices that destinations are on.
    pub devices: Option<Devices>,
    /// Most staging memory for these.
    pub staging_bytes: Option<usize>,
    /// Whether files are read straight to these.
    pub gpu_direct: GpuDirect,
    /// Whether to tell how many of the plan's first records are in place ([`Shared::front`]).
    pub announce: bool,
    /// Of so many processes that read the same through the page cache, which this is, counted from 0: each
    /// begins with another part, so that all of them together read everything from storage once.
    pub among: Option<(usize, usize)>,
    /// Whether a file may go on after the length that the plan gives.
    pub may_be_longer: bool,
}

/// What a finished job has done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Statistics {
    /// Bytes read from files.
    pub bytes_read: u64,
    /// Bytes delivered to destinations.
    pub bytes_needed: u64,
    /// How each file was read; `None` where nothing was needed of it.
    pub modes: Vec<Option<Mode>>,
    /// What the first touch of destinations took of the processors, of all threads together.
    pub first_touch: Duration,
    /// Bytes that were read straight to a device.
    pub gpu_direct_bytes: u64,
    /// Why some were not, where it was wanted.
    pub gpu_direct_reason: Option<String>,
    /// Bytes that came from a cache on this machine, and count as delivered only.
    pub cached_bytes: u64,
    /// Why nothing was put into that, where it was wanted.
    pub cache_problem: Option<String>,
    /// Requests that were sent a second time, because the first took long.
    pub repeated_requests: u64,
}

/// Starts reading from `storage` in the background.
///
/// # Safety
/// Until the job has finished (its handle's drop waits for that), every destination of the plan must be
/// writable memory that nobody else uses: in regions of the options' devices theirs, anywhere else the
/// host's. No two pieces may have a destination byte in common.
pub unsafe fn start(
    storage: Arc<dyn Storage>,
    mut plan: Plan,
    options: Options,
) -> Result<Handle<Statistics>> {
    if let Some(devices) = &options.devices {
        plan.place(devices.regions())?;
    }
    Handle::spawn("waystation-read", plan.needed_bytes(), move |shared| {
        if let Some(devices) = &options.devices {
            devices.stay_near(); // inherited by the helpers
        }
        let arrivals = options.announce.then(|| Arrivals::new(&plan, shared));
        let delivery = Delivery { devices: options.devices.as_ref(), arrivals: arrivals.as_ref() };
        let batch = Batch::new(&plan, &options, delivery, shared);
        // SAFETY: the caller vouches for destinations as long as the job runs.
        unsafe { storage.read(&batch) }
    })
}

/// A job as its storage gets it: what is needed, and who is told of what is there.
#[derive(Clone, Copy)]
pub struct Batch<'a> {
    /// The files, and what is needed of each.
    pub plan: &'a Plan,
    /// What the caller prescribes.
    pub options: &'a Options,
    /// Where units go that have been verified.
    pub delivery: Delivery<'a>,
    shared: &'a Shared<Statistics>,
}

impl<'a> Batch<'a> {
    /// A batch of a job that has more to do than to read it.
    pub(crate) fn new(
        plan: &'a Plan,
        options: &'a Options,
        delivery: Delivery<'a>,
        shared: &'a Shared<Statistics>,
    ) -> Self {
        Self { plan, options, delivery, shared }
    }

    /// The spans of each file that are to be read.
    pub fn spans(&self) -> Vec<Vec<Range<u64>>> {
        self.plan.files.iter().map(spans_of).collect()
    }

    /// The spans, in stripes for so many workers.
    pub fn stripes(&self, spans: &[Vec<Range<u64>>], workers: usize) -> Stripes {
        let total: u64 = spans.iter().map(|spans| span_bytes(spans)).sum();
        let most_bytes = if self.options.announce { STRIPE_ANNOUNCED_BYTES } else { STRIPE_MOST_BYTES };
        let share = total / (workers as u64 * STRIPES_PER_WORKER);
        let stripe_bytes = share.clamp(STRIPE_LEAST_BYTES, most_bytes);
        let mut stripes: Vec<Stripe> = spans
            .iter()
            .enumerate()
            .flat_map(|(file, spans)| stripes_of(file, spans, stripe_bytes))
            .collect();
        if let Some((index, count)) = self.options.among.filter(|_| !stripes.is_empty()) {
            let first = stripes.len() * (index % count.max(1)) / count.max(1);
            stripes.rotate_left(first);
        }
        Stripes { stripes, next: AtomicUsize::new(0) }
    }

    /// Whether nothing more is to be begun: the job has failed, or was cancelled.
    pub fn should_stop(&self) -> bool {
        self.shared.should_stop()
    }

    /// Has the job fail, and the others who work on it stop.
    pub fn fail(&self, error: Error) {
        self.shared.fail(error);
    }

    /// Waits until a store that is slow on purpose gives so many bytes.
    pub fn wait_for_store(&self, nbytes: u64) {
        if let Some(throttle) = &self.options.throttle {
            throttle.take(nbytes, || self.should_stop());
        }
    }

    /// Counts bytes that have reached their destinations.
    pub fn add_done(&self, nbytes: u64) {
        self.shared.add_done(nbytes);
    }
}

/// The stripes of a job, which its workers take one after another.
#[derive(Debug)]
pub struct Stripes {
    stripes: Vec<Stripe>,
    next: AtomicUsize,
}

impl Stripes {
    /// All of them.
    pub fn all(&self) -> &[Stripe] {
        &self.stripes
    }

    /// The next that nobody has taken.
    pub fn take(&self) -> Option<&Stripe> {
        self.stripes.get(self.next.fetch_add(1, Ordering::Relaxed))
    }
}

/// Verifies a unit that has been read, and delivers it; what goes to devices is on its way then.
///
/// # Safety
/// Every part must be filled; destinations must be writable and used by nobody else. Until the result is
/// dropped or landed, that is also so for those on devices, and scratch must stay as it is.
pub unsafe fn conclude<'a>(plan: &FilePlan, layout: &Layout, delivery: Delivery<'a>) -> Result<Landing<'a>> {
    if let Some(checksums) = &plan.file.checksums {
        // SAFETY: as the caller promises.
        unsafe { layout.verify(checksums) }.map_err(|mismatch| corrupt(&plan.file.path, &mismatch))?;
    }
    // SAFETY: as the caller promises.
    unsafe { layout.deliver(plan) };
    // SAFETY: as the caller promises.
    unsafe { Landing::start(delivery, plan, layout) }
}

/// The error of a block, or of a whole file, that is not what its checksum says.
pub(crate) fn corrupt(path: &Path, mismatch: &Mismatch) -> Error {
    let message = "stored bytes are not what was written: the checksum of a block differs; use another copy";
    Error::new(Kind::Corrupt, message)
        .with("path", path.display().to_string())
        .with("offset", mismatch.offset.to_string())
        .with("length", mismatch.nbytes.to_string())
        .with("expected", format!("{:016x}", mismatch.expected))
        .with("actual", format!("{:016x}", mismatch.actual))
}

/// Whether a file of `found` bytes is one that has `file_bytes`, or is longer where that is allowed.
pub fn check_length(path: &Path, found: u64, file_bytes: u64, may_be_longer: bool) -> Result<()> {
    if found < file_bytes {
        return Err(truncated(path, found, file_bytes));
    }
    if found > file_bytes && !may_be_longer {
        let message = format!(
            "the file has {found} bytes where {file_bytes} were written: bytes were appended to it; use another copy \
             of it"
        );
        return Err(Error::new(Kind::Corrupt, message).with("path", path.display().to_string()));
    }
    Ok(())
}

/// The error of a file that ends too early.
pub fn truncated(path: &Path, nbytes: u64, file_bytes: u64) -> Error {
    let message =
        format!("the file is truncated: {nbytes} bytes are left of {file_bytes}; use another copy of it");
    Error::new(Kind::Corrupt, message).with("path", path.display().to_string())
}
