//! New files: written in the way that suits the job (`choice`) by workers (`worker`), each file an `output`.
//!
//! Failure sequence: a name that exists, no directory, too little space (known before anything is written); refused
//! direct I/O or io_uring (another mode takes over unless one was demanded); a failing write, sync or close.
//! Invariant: few files are open at a time, however many there are.

mod choice;
mod output;
mod worker;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use waystation_format::{Error, Kind, Result};

use self::choice::{choose_way, open_ring, ring_depth, staging_bytes};
use self::output::{Manner, Output};
use self::worker::Worker;
use crate::files::most_open_files;
use crate::filesystem::FileSystem;
use crate::job::in_parallel;
use crate::mode::{Mode, Way};
use crate::ring::Ring;
use crate::storage::NewFiles;
use crate::sync_group::Durability;
use crate::write::{Blocks, FilePlan, Options, Piece, Plan, device};

/// Staging memory of all workers together.
pub(super) const STAGING_BYTES: usize = 64 << 20;
/// Threads that sync. They sleep in the kernel, and syncs that wait together share journal commits.
const SYNC_THREADS: usize = 16;

/// Refuses a plan that cannot be written: a name is taken, or there is no room.
pub(super) fn check_new(plan: &Plan) -> Result<()> {
    check_names(plan)?;
    check_space(plan)
}

/// The files of one job.
pub(super) struct Files<'a> {
    plan: &'a Plan,
    way: Way,
    outputs: Vec<Output>,
    /// For the first worker.
    first_ring: Mutex<Option<Ring>>,
    has_ring: bool,
    staging_bytes: usize,
    unfinished: Mutex<Vec<usize>>,
    most_unfinished: usize,
    finish_threads: usize,
    /// Whether the caller insists on the mode.
    is_demanded: bool,
    rings_refused: AtomicBool,
}

impl<'a> Files<'a> {
    /// Chooses how the files are written; creates none yet.
    pub fn begin(plan: &'a Plan, options: &Options) -> Result<Self> {
        let (way, ring) = open_ring(choose_way(plan, options), plan, options)?;
        Ok(Self::new(plan, options, way, ring))
    }

    fn new(plan: &'a Plan, options: &Options, way: Way, ring: Option<Ring>) -> Self {
        let is_demanded = options.mode.is_some();
        let durability = options.durability.clone();
        let manner = Manner { direct: way.mode.is_direct(), demanded: is_demanded, durability };
        // Only syncs share anything: what is not synced here is finished as soon as it is complete.
        let syncs = matches!(manner.durability, Durability::Now);
        let output = |file: &FilePlan| {
            Output::new(&file.path, file.file_bytes, way.block_bytes as u64, manner.clone())
        };
        Self {
            plan,
            way,
            outputs: plan.files.iter().map(output).collect(),
            has_ring: ring.is_some(),
            first_ring: Mutex::new(ring),
            staging_bytes: staging_bytes(options),
            // A file without bytes has no last piece to announce it.
            unfinished: Mutex::new(
                (0..plan.files.len()).filter(|&file| plan.files[file].file_bytes == 0).collect(),
            ),
            most_unfinished: if syncs { most_open_files() } else { 1 },
            finish_threads: if syncs { SYNC_THREADS } else { 1 },
            is_demanded,
            rings_refused: AtomicBool::new(false),
        }
    }

    /// How many staging blocks one worker may have.
    fn slots_per_worker(&self, blocks: &Blocks<'_>) -> usize {
        let allowed = self.staging_bytes / self.way.threads / self.way.block_bytes;
        allowed.min(usize::try_from(blocks.count()).unwrap_or(usize::MAX)).max(1)
    }

    /// Counts a piece as written. Too many complete files are finished at once, by this thread.
    fn mark_written(&self, piece: &Piece) -> Result<()> {
        if !self.outputs[piece.file].block_done() {
            return Ok(());
        }
        let overdue = {
            let mut unfinished = self.unfinished.lock().unwrap_or_else(PoisonError::into_inner);
            unfinished.push(piece.file);
            if unfinished.len() >= self.most_unfinished {
                std::mem::take(&mut *unfinished)
            } else {
                Vec::new()
            }
        };
        self.finish_files(&overdue)
    }

    fn finish_files(&self, files: &[usize]) -> Result<()> {
        let next = AtomicUsize::new(0);
        let finish = || -> Result<()> {
            while let Some(&file) = files.get(next.fetch_add(1, Ordering::Relaxed)) {
                self.outputs[file].finish()?;
            }
            Ok(())
        };
        in_parallel(files.len().min(self.finish_threads), "waystation-sync", &finish)
    }

    /// Remembers that the system refused a ring that it had granted; an error if no other mode will do.
    fn refuse_rings(&self, error: io::Error) -> Result<()> {
        self.rings_refused.store(true, Ordering::Relaxed);
        if self.is_demanded {
            let message = format!("io_uring failed: {error}; use mode 'direct-threads'");
            return Err(Error::new(Kind::Unavailable, message));
        }
        Ok(())
    }
}

impl NewFiles for Files<'_> {
    fn block_bytes(&self) -> usize {
        self.way.block_bytes
    }

    unsafe fn write(&self, blocks: &Blocks<'_>) -> Result<()> {
        let devices = if self.plan.has_device_blocks { Some(device::registered()?) } else { None };
        in_parallel(self.way.threads, "waystation-write", &|| {
            let mut ring = self.first_ring.lock().unwrap_or_else(PoisonError::into_inner).take();
            if self.has_ring && ring.is_none() {
                ring = match Ring::new(ring_depth(&self.way)) {
                    Ok(ring) => Some(ring),
                    // The kernel grants no second ring: the first worker does it all.
                    Err(_) => return Ok(()),
                };
            }
            let outcome = Worker::new(self, blocks, ring, devices.clone()).and_then(|mut worker| {
                // SAFETY: as the caller promises.
                unsafe { worker.run() }
            });
            // Told at once, so that the others stop.
            outcome.map_err(|error| blocks.fail(error)).or(Ok(()))
        })
    }

    fn finish(&self) -> Result<()> {
        let rest = std::mem::take(&mut *self.unfinished.lock().unwrap_or_else(PoisonError::into_inner));
        self.finish_files(&rest)
    }

    fn abort(&self) {
        self.outputs.iter().for_each(Output::remove);
    }

    fn mode(&self) -> Option<Mode> {
        if self.outputs.iter().any(|output| !output.is_direct()) {
            return Some(Mode::Buffered);
        }
        Some(match self.way.mode {
            Mode::DirectRing if self.rings_refused.load(Ordering::Relaxed) => Mode::DirectThreads,
            mode => mode,
        })
    }
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
