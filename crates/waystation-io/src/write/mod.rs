//! Durable writes of new files, gathered from memory.
//!
//! A job parses its plan (`plan`) and chooses its way (`choice`), then workers (`worker`) take the
//! files' blocks in order (`work`), gather and checksum them in staging memory and write them to outputs
//! (`output`). Failure sequence:
//! bad plan or options (nothing touched); a name that exists, no directory, too little space (known
//! before anything is written); refused direct I/O or io_uring (another mode takes over unless one was
//! demanded); a failing write or sync; cancellation. Invariants: a job that fails or is cancelled removes
//! what it created; a job that succeeds has every byte on stable storage, if that is to be so when it ends.

mod choice;
mod chunk_checksums;
mod compress;
mod device;
mod order;
mod output;
mod plan;
mod work;
mod worker;

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use waystation_format::checksum::BLOCK_BYTES;
use waystation_format::{Error, Kind, Result};

use self::choice::{choose_way, open_ring, ring_depth};
pub use self::chunk_checksums::chunk_checksums;
pub use self::compress::{Compressed, compress};
pub use self::device::{DeviceCopies, DeviceCopy, DeviceRows, register_device_copy};
use self::output::Manner;
use self::plan::Plan;
pub use self::plan::{FileInput, host_segments};
use self::work::Work;
use self::worker::Worker;
use crate::filesystem::FileSystem;
use crate::job::{Handle, Shared, in_parallel};
use crate::mode::Mode;
use crate::ring::Ring;
use crate::sync_group::Durability;
use crate::throttle::Throttle;

const MOST_BLOCK_BYTES: usize = 16 << 20;
const MOST_DEPTH: usize = 64;
const MOST_THREADS: usize = 64;

/// What the caller prescribes; the engine chooses the rest.
#[derive(Clone, Debug)]
pub struct Options {
    /// When the job's bytes are on stable storage; if not when it ends, they are on the way then.
    pub durability: Durability,
    /// The mode; Unsupported if the system refuses it.
    pub mode: Option<Mode>,
    /// Bytes of one request: a multiple of the checksummed block.
    pub block_bytes: Option<usize>,
    /// Requests in flight, all threads together.
    pub depth: Option<usize>,
    /// Worker threads.
    pub threads: Option<usize>,
    /// Staging memory of all threads together, at least one checksummed block; it goes before
    /// `block_bytes` and `threads`.
    pub staging_bytes: Option<usize>,
    /// Plan positions (bytes of segments, in plan order over all files) that are copied out before the rest;
    /// with none, all are in plan order.
    pub first: Vec<Range<u64>>,
    /// What every write waits for.
    pub throttle: Option<Arc<Throttle>>,
}

/// What a finished job has done.
#[derive(Clone, Debug, PartialEq)]
pub struct Statistics {
    /// One checksum per block, of each file.
    pub checksums: Vec<Vec<u64>>,
    /// How the files were written.
    pub mode: Mode,
    /// Bytes of all files.
    pub bytes_written: u64,
    /// Time that workers spent copying and checksumming, added up.
    pub gather_time: Duration,
    /// Time until the last write had been done.
    pub write_time: Duration,
    /// Time of the final syncs.
    pub sync_time: Duration,
}

/// Starts writing in the background. What can be known at once is an error at once.
///
/// # Safety
/// Until the job has finished (its handle's drop waits for that), every source block of the plan must be
/// readable memory (of its device) that nobody writes. The caller may write to what the gather position
/// has passed.
pub unsafe fn start(files: Vec<FileInput>, options: Options) -> Result<Handle<Statistics>> {
    check_options(&options)?;
    let plan = Plan::parse(files)?;
    if plan.has_device_blocks {
        device::registered()?;
    }
    check_names(&plan)?;
    check_space(&plan)?;
    let total = plan.total_bytes;
    // SAFETY: the caller vouches for the sources as long as the job runs.
    Handle::spawn("waystation-write", total, move |shared| unsafe { run(&plan, &options, shared) })
}

/// # Safety
/// As for [`start`].
unsafe fn run(plan: &Plan, options: &Options, shared: &Shared<Statistics>) -> Result<Statistics> {
    let started = Instant::now();
    let (way, ring) = open_ring(choose_way(plan, options), plan, options)?;
    let manner = Manner {
        direct: way.mode.is_direct(),
        demanded: options.mode.is_some(),
        durability: options.durability.clone(),
    };
    let mut work = Work::new(plan, shared, way, &manner, options);
    // SAFETY: as the caller promises.
    let mut outcome = unsafe { write_all(&work, ring) };
    let write_time = started.elapsed();
    if outcome.is_ok() && !shared.should_stop() {
        outcome = work.finish_rest();
    }
    if outcome.is_err() || !shared.seal() {
        work.remove_files();
    }
    outcome?;
    Ok(Statistics {
        checksums: work.take_checksums(),
        mode: work.effective_mode(),
        bytes_written: plan.total_bytes,
        gather_time: work.gather_time(),
        write_time,
        sync_time: started.elapsed() - write_time,
    })
}

/// # Safety
/// As for [`start`].
unsafe fn write_all(work: &Work<'_>, ring: Option<Ring>) -> Result<()> {
    let devices = if work.plan.has_device_blocks { Some(device::registered()?) } else { None };
    let has_ring = ring.is_some();
    let first_ring = Mutex::new(ring);
    in_parallel(work.way.threads, "waystation-write", &|| {
        let mut ring = first_ring.lock().unwrap_or_else(PoisonError::into_inner).take();
        if has_ring && ring.is_none() {
            ring = match Ring::new(ring_depth(&work.way)) {
                Ok(ring) => Some(ring),
                // The kernel grants no second ring: the first worker does it all.
                Err(_) => return Ok(()),
            };
        }
        let outcome = Worker::new(work, ring, devices.clone()).and_then(|mut worker| {
            // SAFETY: as the caller promises.
            unsafe { worker.run() }
        });
        // Told at once, so that the others stop.
        outcome.map_err(|error| work.shared.fail(error)).or(Ok(()))
    })
}

fn check_options(options: &Options) -> Result<()> {
    let invalid = |message: String| Err(Error::new(Kind::InvalidInput, message));
    if let Some(bytes) = options.block_bytes
        && (bytes == 0 || bytes > MOST_BLOCK_BYTES || !bytes.is_multiple_of(BLOCK_BYTES))
    {
        return invalid(format!(
            "block_bytes is {bytes}; give a multiple of {BLOCK_BYTES} up to {MOST_BLOCK_BYTES}"
        ));
    }
    for (name, value, most) in
        [("depth", options.depth, MOST_DEPTH), ("threads", options.threads, MOST_THREADS)]
    {
        if let Some(value) = value.filter(|value| !(1..=most).contains(value)) {
            return invalid(format!("{name} is {value}; give 1 to {most}"));
        }
    }
    Ok(())
}

/// Nothing may be where the files are to be. Creation makes sure again; this tells earlier.
fn check_names(plan: &Plan) -> Result<()> {
    for file in &plan.files {
        if file.path.symlink_metadata().is_ok() {
            return Err(Error::new(Kind::Conflict, "the file to be written exists already")
                .with("path", file.path.display().to_string()));
        }
    }
    Ok(())
}

/// There must be room for the files, as far as the file systems can tell.
fn check_space(plan: &Plan) -> Result<()> {
    let mut needed_by_directory: BTreeMap<&Path, u64> = BTreeMap::new();
    for file in &plan.files {
        *needed_by_directory.entry(directory_of(&file.path)).or_default() += file.file_bytes;
    }
    // By the numbers of their devices: with a directory for each array, asking more of each would take longer
    // than writing them.
    let mut needs: BTreeMap<u64, (&Path, u64)> = BTreeMap::new();
    for (directory, needed) in needed_by_directory {
        let failed = |error| Error::from_io(error, "examine the directory", directory);
        let device = fs::metadata(directory).map_err(failed)?.dev();
        needs.entry(device).or_insert((directory, 0)).1 += needed;
    }
    for (directory, needed) in needs.into_values() {
        let filesystem = FileSystem::of(directory)?;
        let free = filesystem.available_bytes;
        // Some file systems do not know their size.
        if filesystem.total_bytes > 0 && needed > free {
            let message = format!(
                "the file system has no room: {needed} bytes are needed, {free} are free; delete something \
                 or write elsewhere"
            );
            return Err(Error::new(Kind::Unavailable, message)
                .with("path", directory.display().to_string())
                .with("errno", libc::ENOSPC.to_string()));
        }
    }
    Ok(())
}

fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
