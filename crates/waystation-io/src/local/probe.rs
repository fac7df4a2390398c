//! What the machine and one file system offer, found out by trying.
//!
//! Invariants: kernels say yes where containers, file systems and mount options say no, so every answer
//! that a load or save depends on comes from doing the thing on a nameless file; what could not be tried
//! is reported as such, with the reason; nothing is left behind.

use std::fs::{self, File};
use std::io::{self, IoSliceMut};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::io::{Errno, ReadWriteFlags};
use rustix::process::Resource;
use serde_json::{Value, json};
use waystation_format::{Error, Kind, Result};

use crate::aligned::AlignedBlock;
use crate::arena::memory_bytes;
use crate::files::{rename_exchange, rename_new};
use crate::filesystem::{FileSystem, direct_alignment, nameless_file, set_direct, unused_name};
use crate::ring::Ring;

/// Bytes of the transfers that are tried: the least that every device's direct I/O can do.
const TRIAL_BYTES: usize = 4096;
/// Directory entries that are looked at for a file to read, where none can be written.
const CANDIDATE_LIMIT: usize = 256;

/// Whether something works.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It was done.
    Yes,
    /// It was tried and refused.
    No(String),
    /// It could not be tried.
    Untried(String),
}

/// What was found.
#[derive(Clone, Debug)]
pub struct Probe {
    /// Where it was tried.
    pub directory: PathBuf,
    /// The file system there.
    pub filesystem: FileSystem,
    /// Release of the running kernel.
    pub kernel: String,
    /// Whether files can be created in the directory.
    pub writable: Answer,
    /// Many requests in flight from one thread.
    pub io_uring: Answer,
    /// Transfers past the page cache.
    pub direct: Answer,
    /// What direct transfers ask of memory addresses, and of file offsets and lengths.
    pub direct_alignment: Option<(u32, u32)>,
    /// Reads that answer at once whether the page cache holds the bytes.
    pub nowait: Answer,
    /// Files created without a name.
    pub nameless_files: Answer,
    /// Atomic renames that never replace.
    pub rename_new: Answer,
    /// Atomic swaps of two names.
    pub rename_exchange: Answer,
    /// When the kernel backs memory by huge pages: `always`, `madvise` or `never`.
    pub huge_pages: Option<String>,
    /// Cores that this process may use.
    pub cores: usize,
    /// Memory of the machine.
    pub memory_total_bytes: u64,
    /// Memory of the machine that is free or can be freed at once.
    pub memory_available_bytes: u64,
    /// Memory that this process may use: less than the machine's inside a control group.
    pub memory_limit_bytes: u64,
    /// Memory that this process may lock; `None` is no limit.
    pub locked_memory_limit_bytes: Option<u64>,
}

/// Tries everything in `directory`, which may be read-only.
pub fn probe(directory: &Path) -> Result<Probe> {
    let filesystem = FileSystem::of(directory)?;
    if !directory.is_dir() {
        return Err(Error::new(Kind::InvalidInput, "a directory was expected, to try things in")
            .with("path", directory.display().to_string()));
    }
    let trial = Trial::begin(directory);
    Ok(Probe {
        directory: directory.to_owned(),
        filesystem,
        kernel: kernel_release(),
        writable: trial.writable(),
        io_uring: answer(Ring::new(2).map(drop)),
        direct_alignment: trial.file.as_ref().and_then(direct_alignment),
        direct: trial.direct(),
        nowait: trial.nowait(),
        nameless_files: trial.nameless(),
        rename_new: trial.named(directory, try_rename_new),
        rename_exchange: trial.named(directory, try_rename_exchange),
        huge_pages: huge_page_setting(),
        cores: std::thread::available_parallelism().map_or(1, usize::from),
        memory_total_bytes: memory_information("MemTotal:"),
        memory_available_bytes: memory_information("MemAvailable:"),
        memory_limit_bytes: memory_bytes(),
        locked_memory_limit_bytes: rustix::process::getrlimit(Resource::Memlock).current,
    })
}

impl Probe {
    /// The findings as a JSON object. An answer is `{"works": true | false | null, "reason": …}`.
    pub fn to_json(&self) -> Value {
        json!({
            "directory": self.directory.to_string_lossy(),
            "filesystem": {
                "kind": self.filesystem.kind,
                "device": format!("{}:{}", self.filesystem.device.0, self.filesystem.device.1),
                "source": self.filesystem.source,
                "mount_point": self.filesystem.mount_point.to_string_lossy(),
                "read_only": self.filesystem.read_only,
                "total_bytes": self.filesystem.total_bytes,
                "available_bytes": self.filesystem.available_bytes,
            },
            "kernel": self.kernel,
            "writable": self.writable.to_json(),
            "io_uring": self.io_uring.to_json(),
            "direct": self.direct.to_json(),
            "direct_memory_alignment_bytes": self.direct_alignment.map(|(memory, _)| memory),
            "direct_offset_alignment_bytes": self.direct_alignment.map(|(_, offset)| offset),
            "nowait": self.nowait.to_json(),
            "nameless_files": self.nameless_files.to_json(),
            "rename_new": self.rename_new.to_json(),
            "rename_exchange": self.rename_exchange.to_json(),
            "huge_pages": self.huge_pages,
            "cores": self.cores,
            "memory_total_bytes": self.memory_total_bytes,
            "memory_available_bytes": self.memory_available_bytes,
            "memory_limit_bytes": self.memory_limit_bytes,
            "locked_memory_limit_bytes": self.locked_memory_limit_bytes,
        })
    }
}

impl Answer {
    fn to_json(&self) -> Value {
        let (works, reason) = match self {
            Answer::Yes => (Some(true), None),
            Answer::No(reason) => (Some(false), Some(reason)),
            Answer::Untried(reason) => (None, Some(reason)),
        };
        json!({ "works": works, "reason": reason })
    }
}

fn answer(outcome: io::Result<()>) -> Answer {
    outcome.map_or_else(|error| Answer::No(error.to_string()), |()| Answer::Yes)
}

/// The file that transfers are tried on: a nameless one, else any that can be read.
struct Trial {
    file: Option<File>,
    /// Whether it was made without a name; `Err` says why no file could be made.
    created: Result<bool, String>,
}

impl Trial {
    fn begin(directory: &Path) -> Self {
        match nameless_file(directory).and_then(|(file, nameless)| {
            file.write_all_at(&[1; TRIAL_BYTES], 0)?;
            Ok((file, nameless))
        }) {
            Ok((file, nameless)) => Self { file: Some(file), created: Ok(nameless) },
            Err(error) => Self { file: any_readable_file(directory), created: Err(error.to_string()) },
        }
    }

    fn writable(&self) -> Answer {
        self.created.as_ref().map_or_else(|reason| Answer::No(reason.clone()), |_| Answer::Yes)
    }

    fn nameless(&self) -> Answer {
        match &self.created {
            Ok(true) => Answer::Yes,
            Ok(false) => Answer::No("the file system wants a name for every new file".to_owned()),
            Err(reason) => Answer::Untried(format!("no file can be created: {reason}")),
        }
    }

    fn direct(&self) -> Answer {
        self.with_file(|file| {
            set_direct(file, true)?;
            let outcome = direct_round_trip(file, self.created.is_ok());
            set_direct(file, false)?;
            outcome
        })
    }

    fn nowait(&self) -> Answer {
        self.with_file(|file| {
            let mut byte = [0];
            let mut buffers = [IoSliceMut::new(&mut byte)];
            match rustix::io::preadv2(file, &mut buffers, 0, ReadWriteFlags::NOWAIT) {
                Ok(_) | Err(Errno::AGAIN) => Ok(()),
                Err(errno) => Err(errno.into()),
            }
        })
    }

    fn with_file(&self, attempt: impl FnOnce(&File) -> io::Result<()>) -> Answer {
        match (&self.file, &self.created) {
            (Some(file), _) => answer(attempt(file)),
            (None, Err(reason)) => {
                Answer::Untried(format!("no file can be created, and none can be read: {reason}"))
            }
            (None, Ok(_)) => Answer::Untried("there is no file to try it on".to_owned()),
        }
    }

    /// Runs `attempt` with two names that exist, and removes them.
    fn named(&self, directory: &Path, attempt: fn(&Path, &Path) -> io::Result<()>) -> Answer {
        if let Err(reason) = &self.created {
            return Answer::Untried(format!("no file can be created: {reason}"));
        }
        let names = [unused_name(directory), unused_name(directory)];
        let outcome = names
            .iter()
            .try_for_each(|name| File::create_new(name).map(drop))
            .and_then(|()| attempt(&names[0], &names[1]));
        for name in &names {
            // One of them is gone where a rename worked.
            drop(fs::remove_file(name));
        }
        answer(outcome)
    }
}

/// Writes (where that is allowed) and reads a block past the page cache.
fn direct_round_trip(file: &File, write: bool) -> io::Result<()> {
    let block = AlignedBlock::map(TRIAL_BYTES).map_err(io::Error::other)?;
    // SAFETY: a fresh mapping of at least so many bytes that nobody else refers to.
    let bytes = unsafe { std::slice::from_raw_parts_mut(block.address().as_ptr(), TRIAL_BYTES) };
    if write {
        file.write_all_at(bytes, 0)?;
    }
    file.read_at(bytes, 0).map(drop)
}

fn any_readable_file(directory: &Path) -> Option<File> {
    let entries = fs::read_dir(directory).ok()?.take(CANDIDATE_LIMIT).filter_map(io::Result::ok);
    entries
        .filter(|entry| entry.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.len() > 0))
        .find_map(|entry| File::open(entry.path()).ok())
}

fn try_rename_new(first: &Path, second: &Path) -> io::Result<()> {
    match rename_new(first, second) {
        Err(error) if error.kind() == Kind::Conflict => {}
        Err(error) => return Err(io::Error::other(error)),
        Ok(()) => return Err(io::Error::other("a rename that must not replace did")),
    }
    fs::remove_file(second)?;
    rename_new(first, second).map_err(io::Error::other)
}

fn try_rename_exchange(first: &Path, second: &Path) -> io::Result<()> {
    fs::write(first, "x")?;
    rename_exchange(first, second).map_err(io::Error::other)?;
    if fs::read(second)? == b"x" && fs::read(first)?.is_empty() {
        return Ok(());
    }
    Err(io::Error::other("an exchange of names did not exchange them"))
}

/// The release of the running kernel.
pub fn kernel_release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

/// The setting is the bracketed word of `always [madvise] never`.
fn huge_page_setting() -> Option<String> {
    let text = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").ok()?;
    let (_, rest) = text.split_once('[')?;
    rest.split_once(']').map(|(word, _)| word.to_owned())
}

/// A line of the kernel's memory table, in bytes; zero where there is none.
pub(crate) fn memory_information(key: &str) -> u64 {
    let table = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    table
        .lines()
        .find_map(|line| line.strip_prefix(key)?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok())
        .map_or(0, |kib| kib.saturating_mul(1024))
}
