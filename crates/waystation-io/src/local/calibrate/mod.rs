//! Which way to write and read is best on a file system: measured once, remembered.
//!
//! Invariants: a measurement leaves nothing behind in the directory; what is remembered is only advice,
//! so a record that is damaged, foreign or of another kernel counts as none; looking it up is cheap, and
//! never waits for a lock (a forked child may inherit one that is held for ever).

mod measure;
mod record;

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use waystation_format::{Error, Kind, Result};

pub use self::record::{Calibration, Trial};
use crate::filesystem::FileSystem;
use crate::mode::Way;

/// Below this, a measurement says nothing.
const LEAST_PROBE_BYTES: u64 = 4 << 20;
/// Above this, it only takes longer.
const MOST_PROBE_BYTES: u64 = 4 << 30;

/// The best ways on one file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// For durable writes of new files.
    pub write: Way,
    /// For reads of files that are not in the page cache.
    pub read: Way,
}

/// What this process looked up before.
static LOOKED_UP: Mutex<Vec<LookedUp>> = Mutex::new(Vec::new());

struct LookedUp {
    device: u64,
    /// Where calibrations were kept then.
    place: Option<PathBuf>,
    choice: Option<Choice>,
}

/// Measures the ways to write and read under `directory` with files of `probe_bytes`, and remembers the
/// best. Without `force`, what is remembered already is the answer.
pub fn calibrate(directory: &Path, probe_bytes: u64, force: bool) -> Result<Calibration> {
    if !(LEAST_PROBE_BYTES..=MOST_PROBE_BYTES).contains(&probe_bytes) {
        let message = format!(
            "probe_bytes is {probe_bytes}; give {LEAST_PROBE_BYTES} to {MOST_PROBE_BYTES}, for example {}",
            64 << 20
        );
        return Err(Error::new(Kind::InvalidInput, message));
    }
    let filesystem = FileSystem::of(directory)?;
    if !force && let Some(calibration) = record::load(&filesystem) {
        return Ok(calibration);
    }
    let mut calibration = measure::measure(directory, &filesystem, probe_bytes)?;
    calibration.stored = record::store(&calibration).ok();
    remember(directory, calibration.choice());
    Ok(calibration)
}

/// What is remembered for the file system of `directory`.
pub fn calibration(directory: &Path) -> Result<Option<Calibration>> {
    Ok(record::load(&FileSystem::of(directory)?))
}

/// The best ways for files at `path`, which may not exist yet in a directory that does. `None` where
/// nothing was measured. Looks on disk once per process and file system.
pub fn remembered(path: &Path) -> Option<Choice> {
    let path = std::path::absolute(path).ok()?;
    let existing = path.ancestors().find(|path| path.exists())?;
    let device = std::fs::metadata(existing).ok()?.dev();
    let place = record::directory();
    if let Ok(known) = LOOKED_UP.try_lock()
        && let Some(entry) = known.iter().find(|entry| entry.device == device && entry.place == place)
    {
        return entry.choice;
    }
    let choice = FileSystem::of(existing).ok().and_then(|filesystem| record::load(&filesystem)?.choice());
    remember(existing, choice);
    choice
}

fn remember(path: &Path, choice: Option<Choice>) {
    let Ok(metadata) = std::fs::metadata(path) else { return };
    let (device, place) = (metadata.dev(), record::directory());
    if let Ok(mut known) = LOOKED_UP.try_lock() {
        known.retain(|entry| entry.device != device || entry.place != place);
        known.push(LookedUp { device, place, choice });
    }
}
