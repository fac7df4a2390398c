//! Durable writes of new files, gathered from memory, or copied from another storage (`feed`).
//!
//! A job parses its plan (`plan`) and hands it to its storage, whose workers take the files' blocks in order
//! (`blocks`), gather and checksum them, and write them. Failure sequence: bad plan or options (nothing touched); a
//! name that exists, no directory, too little space (known before anything is written); a failing write or sync;
//! cancellation. Invariants: a job that fails or is cancelled removes what it created; a job that succeeds has every
//! byte on stable storage, if that is to be so when it ends.

mod blocks;
mod chunk_checksums;
mod compress;
pub(crate) mod device;
mod equal_blocks;
mod feed;
mod order;
mod plan;

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use waystation_format::checksum::BLOCK_BYTES;
use waystation_format::{Error, Kind, Result};

pub use self::blocks::{Blocks, Piece};
pub use self::chunk_checksums::chunk_checksums;
pub use self::compress::{Compressed, compress};
pub use self::device::{
    DeviceCopies, DeviceCopy, DeviceRows, register_device_copy, registered as registered_device_copy,
};
pub use self::equal_blocks::{BlocksInput, start_comparison};
use self::feed::Feed;
pub use self::feed::{CopiedFile, Extent, Sources};
pub use self::plan::{FileInput, FilePlan, Plan, host_segments};
use crate::job::{Handle, Shared};
use crate::mode::Mode;
use crate::storage::Storage;
use crate::sync_group::Durability;
use crate::throttle::Throttle;

const MOST_BLOCK_BYTES: usize = 16 << 20;
pub(crate) const MOST_DEPTH: usize = 64;
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

impl Options {
    /// The engine chooses everything.
    pub const AUTOMATIC: Self = Self {
        durability: Durability::Now,
        mode: None,
        block_bytes: None,
        depth: None,
        threads: None,
        staging_bytes: None,
        first: Vec::new(),
        throttle: None,
    };
}

/// What a finished job has done.
#[derive(Clone, Debug, PartialEq)]
pub struct Statistics {
    /// One checksum per block, of each file.
    pub checksums: Vec<Vec<u64>>,
    /// How the files were written, where the storage has several modes.
    pub mode: Option<Mode>,
    /// Bytes of all files.
    pub bytes_written: u64,
    /// Time that workers spent copying and checksumming, added up.
    pub gather_time: Duration,
    /// Time until the last write had been done.
    pub write_time: Duration,
    /// Time of the final syncs.
    pub sync_time: Duration,
}

/// Starts writing to `storage` in the background. What can be known at once is an error at once.
///
/// # Safety
/// Until the job has finished (its handle's drop waits for that), every source block of the plan must be
/// readable memory (of its device) that nobody writes. The caller may write to what the gather position
/// has passed.
pub unsafe fn start(
    storage: Arc<dyn Storage>,
    files: Vec<FileInput>,
    options: Options,
) -> Result<Handle<Statistics>> {
    check_options(&options)?;
    let plan = Plan::parse(files)?;
    if plan.has_device_blocks {
        device::registered()?;
    }
    storage.check_new(&plan)?;
    let total = plan.total_bytes;
    Handle::spawn("waystation-write", total, move |shared| {
        // SAFETY: the caller vouches for the sources as long as the job runs.
        unsafe { run(&*storage, &plan, &options, None, shared) }
    })
}

/// Starts to make files in `storage` of those of another, in the background. What can be known at once is an error at
/// once.
///
/// No file is whole before all of it has been verified by its checksums; what is damaged is Corrupt.
pub fn start_copy(
    storage: Arc<dyn Storage>,
    sources: Sources,
    options: Options,
) -> Result<Handle<Statistics>> {
    check_options(&options)?;
    let plan = sources.plan()?;
    storage.check_new(&plan)?;
    let options = Options { first: Vec::new(), ..options }; // the feed has its pieces in the order of the files
    Handle::spawn("waystation-copy", plan.total_bytes, move |shared| {
        // SAFETY: the plan has no sources in memory.
        unsafe { run(&*storage, &plan, &options, Some(&sources), shared) }
    })
}

/// # Safety
/// As for [`start`].
unsafe fn run(
    storage: &dyn Storage,
    plan: &Plan,
    options: &Options,
    sources: Option<&Sources>,
    shared: &Shared<Statistics>,
) -> Result<Statistics> {
    let started = Instant::now();
    let files = storage.begin(plan, options)?;
    let feed = sources.map(|sources| Feed::new(sources, files.block_bytes())).transpose();
    let feed = feed.inspect_err(|_| files.abort())?;
    let mut blocks = Blocks::new(plan, options, shared, files.block_bytes()).fed_by(feed.as_ref());
    let mut outcome = match &feed {
        // SAFETY: as the caller promises.
        None => unsafe { files.write(&blocks) },
        // SAFETY: there are no sources in memory.
        Some(feed) => feed.during(&blocks, || unsafe { files.write(&blocks) }),
    };
    let write_time = started.elapsed();
    if outcome.is_ok() && !shared.should_stop() {
        outcome = (0..plan.files.len()).try_for_each(|file| blocks.check_file(file));
    }
    if outcome.is_ok() && !shared.should_stop() {
        outcome = files.finish();
    }
    if outcome.is_err() || !shared.seal() {
        files.abort();
    }
    outcome?;
    Ok(Statistics {
        checksums: blocks.take_checksums(),
        mode: files.mode(),
        bytes_written: plan.total_bytes,
        gather_time: blocks.gather_time(),
        write_time,
        sync_time: started.elapsed() - write_time,
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
