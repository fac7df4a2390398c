//! Calibrations on disk: one JSON file per file system in the user's cache directory.
//!
//! Invariants: a file is replaced whole or not at all; whatever cannot be understood, or was measured on
//! another file system, kernel or by another version of this record, is as good as absent.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use waystation_format::checksum::crc64;

use super::Choice;
use crate::filesystem::{FileSystem, unused_name};
use crate::mode::{Mode, Way};
use crate::probe::kernel_release;

/// Changes whenever candidates or fields do, so that old records are measured anew.
const VERSION: u64 = 2;
/// Ways whose speeds differ by fewer percent are equally good: a repetition would rank them anew.
const EQUAL_PERCENT: u64 = 5;
/// Bytes per second that one thread gathers or faults in, and checksums, while the disk is busy. Trials
/// move bytes between the disk and memory that is ready, so this says how many threads a job needs.
const THREAD_BYTES_PER_S: u64 = 4_000_000_000;
/// So many threads serve any disk.
const MOST_THREADS: u64 = 16;
/// No record of ours is larger.
const LIMIT_BYTES: u64 = 1 << 20;

/// One way, and how fast it was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trial {
    /// The way.
    pub way: Way,
    /// Bytes per second of each repetition.
    pub bytes_per_s: Vec<u64>,
    /// Why there are none.
    pub refused: Option<String>,
}

/// Everything measured on one file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Calibration {
    /// Type, device and source of the file system.
    pub key: String,
    /// Release of the kernel.
    pub kernel: String,
    /// Bytes of each transfer.
    pub probe_bytes: u64,
    /// When, in seconds since 1970.
    pub measured_unix_s: u64,
    /// Durable writes.
    pub write: Vec<Trial>,
    /// Cold reads.
    pub read: Vec<Trial>,
    /// Where it is remembered, if it could be stored.
    pub stored: Option<PathBuf>,
}

impl Trial {
    /// The fastest repetition: whatever else the machine does only takes speed away.
    pub fn best_bytes_per_s(&self) -> Option<u64> {
        self.bytes_per_s.iter().max().copied()
    }
}

impl Calibration {
    /// The best way to write and to read; `None` if no way worked.
    pub fn choice(&self) -> Option<Choice> {
        Some(Choice { write: best(&self.write)?, read: best(&self.read)? })
    }

    /// As a JSON object.
    pub fn to_json(&self) -> Value {
        json!({
            "version": VERSION,
            "filesystem": self.key,
            "kernel": self.kernel,
            "probe_bytes": self.probe_bytes,
            "measured_unix_s": self.measured_unix_s,
            "write": side_to_json(&self.write),
            "read": side_to_json(&self.read),
            "stored": self.stored.as_ref().map(|path| path.to_string_lossy()),
        })
    }

    fn from_json(value: &Value) -> Option<Self> {
        if value.get("version")?.as_u64()? != VERSION {
            return None;
        }
        Some(Self {
            key: value.get("filesystem")?.as_str()?.to_owned(),
            kernel: value.get("kernel")?.as_str()?.to_owned(),
            probe_bytes: value.get("probe_bytes")?.as_u64()?,
            measured_unix_s: value.get("measured_unix_s")?.as_u64()?,
            write: side_from_json(value.get("write")?)?,
            read: side_from_json(value.get("read")?)?,
            stored: None,
        })
    }
}

/// The first of the fastest ways, with the threads that its speed needs. Ways that fell behind do not
/// count.
fn best(trials: &[Trial]) -> Option<Way> {
    let turns = trials.iter().map(|trial| trial.bytes_per_s.len()).max()?;
    let speeds = || {
        let finalists = trials.iter().filter(|trial| trial.bytes_per_s.len() == turns);
        finalists.filter_map(|trial| Some((trial.way, trial.best_bytes_per_s()?)))
    };
    let fastest = speeds().map(|(_, speed)| speed).max()?;
    let (mut way, speed) = speeds().find(|(_, speed)| *speed >= fastest / 100 * (100 - EQUAL_PERCENT))?;
    if way.mode == Mode::DirectRing {
        let needed = speed.div_ceil(THREAD_BYTES_PER_S).min(MOST_THREADS);
        way.threads = way.threads.max(needed as usize);
    }
    Some(way)
}

fn side_to_json(trials: &[Trial]) -> Value {
    let measured: Vec<Value> = trials
        .iter()
        .map(|trial| {
            let mut object = way_to_json(&trial.way);
            object.insert("bytes_per_s".to_owned(), json!(trial.bytes_per_s));
            object.insert("refused".to_owned(), json!(trial.refused));
            Value::Object(object)
        })
        .collect();
    json!({ "best": best(trials).map(|way| Value::Object(way_to_json(&way))), "measured": measured })
}

fn side_from_json(value: &Value) -> Option<Vec<Trial>> {
    value.get("measured")?.as_array()?.iter().map(trial_from_json).collect()
}

fn trial_from_json(value: &Value) -> Option<Trial> {
    let speeds = value.get("bytes_per_s")?.as_array()?;
    let speeds: Option<Vec<u64>> = speeds.iter().map(Value::as_u64).collect();
    Some(Trial {
        way: way_from_json(value)?,
        bytes_per_s: speeds?,
        refused: value.get("refused").and_then(Value::as_str).map(str::to_owned),
    })
}

fn way_to_json(way: &Way) -> Map<String, Value> {
    let fields = [
        ("mode", json!(way.mode.name())),
        ("block_bytes", json!(way.block_bytes)),
        ("depth", json!(way.depth)),
        ("threads", json!(way.threads)),
    ];
    fields.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

/// Numbers outside of what this engine ever measures are damage.
fn way_from_json(value: &Value) -> Option<Way> {
    let number = |key: &str, range: std::ops::RangeInclusive<u64>| {
        let number = value.get(key)?.as_u64().filter(|number| range.contains(number))?;
        usize::try_from(number).ok()
    };
    Some(Way {
        mode: value.get("mode")?.as_str()?.parse::<Mode>().ok()?,
        block_bytes: number("block_bytes", 4096..=64 << 20).filter(|bytes| bytes.is_multiple_of(4096))?,
        depth: number("depth", 1..=1024)?,
        threads: number("threads", 1..=64)?,
    })
}

/// What tells file systems apart, also after a restart.
pub fn key_of(filesystem: &FileSystem) -> String {
    let (major, minor) = filesystem.device;
    format!("{} {major}:{minor} {}", filesystem.kind, filesystem.source)
}

/// The directory of calibrations; `None` where the environment names no place for one.
pub fn directory() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("WAYSTATION_CACHE_DIR")
        .or_else(|| Some(set("XDG_CACHE_HOME")?.join("waystation")))
        .or_else(|| Some(set("HOME")?.join(".cache/waystation")))
}

fn path_of(key: &str) -> Option<PathBuf> {
    Some(directory()?.join(format!("calibration-{:016x}.json", crc64(key.as_bytes()))))
}

/// What is remembered for a file system.
pub fn load(filesystem: &FileSystem) -> Option<Calibration> {
    let key = key_of(filesystem);
    let path = path_of(&key)?;
    let bytes = crate::files::read_small_files(&[(&path, LIMIT_BYTES)], None).ok()?.pop()?;
    let mut calibration = Calibration::from_json(&serde_json::from_slice(&bytes).ok()?)?;
    calibration.stored = Some(path);
    (calibration.key == key && calibration.kernel == kernel_release()).then_some(calibration)
}

/// Stores a calibration; returns where.
pub fn store(calibration: &Calibration) -> io::Result<PathBuf> {
    let path = path_of(&calibration.key).ok_or(io::ErrorKind::NotFound)?;
    let directory = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(directory)?;
    let text = serde_json::to_vec_pretty(&calibration.to_json())?;
    let temporary = unused_name(directory);
    let outcome = fs::write(&temporary, text).and_then(|()| fs::rename(&temporary, &path));
    if outcome.is_err() {
        drop(fs::remove_file(&temporary)); // the error that matters is the first
    }
    outcome.map(|()| path)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn trial(mode: Mode, threads: usize, bytes_per_s: &[u64]) -> Trial {
        let way = Way { mode, block_bytes: 1 << 20, depth: 4, threads };
        Trial { way, bytes_per_s: bytes_per_s.to_vec(), refused: None }
    }

    #[test]
    fn the_fastest_way_wins_and_of_equal_ones_the_first() {
        let slow = trial(Mode::Buffered, 1, &[1100, 1100, 1100]);
        let first = trial(Mode::DirectThreads, 2, &[1000, 1150, 1000]);
        let fastest = trial(Mode::DirectRing, 1, &[900, 1000, 1200]);
        assert_eq!(best(&[slow.clone(), first.clone(), fastest.clone()]), Some(first.way));
        assert_eq!(best(&[slow.clone(), fastest.clone(), first]), Some(fastest.way));
        assert_eq!(best(std::slice::from_ref(&slow)), Some(slow.way));
        assert_eq!(best(&[]), None);
        assert_eq!(best(&[trial(Mode::DirectRing, 1, &[])]), None);
    }

    #[test]
    fn a_way_that_fell_behind_does_not_win_by_its_one_turn() {
        let behind = trial(Mode::Buffered, 1, &[1000]);
        let other = trial(Mode::DirectRing, 1, &[800, 800, 800]);
        assert_eq!(best(&[behind, other.clone()]), Some(other.way));
    }

    #[test]
    fn fast_disks_get_threads_to_keep_up_with_them() {
        let threads = |mode, bytes_per_s| best(&[trial(mode, 1, &[bytes_per_s])]).unwrap().threads;
        assert_eq!(threads(Mode::DirectRing, 2_500_000_000), 1);
        assert_eq!(threads(Mode::DirectRing, 9_000_000_000), 3);
        assert_eq!(threads(Mode::DirectRing, u64::MAX), MOST_THREADS as usize);
        assert_eq!(threads(Mode::Buffered, 9_000_000_000), 1);
    }
}
