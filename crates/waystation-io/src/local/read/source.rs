//! An open file of a plan, and the way in which it is best read.
//!
//! Invariants: the file is as long as the plan says (or longer, where that is allowed); all descriptors of a source refer to one
//! and the same file; direct transfers that the system refuses after all are repeated through the page
//! cache, so a wrong choice costs time and never a load.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use rustix::fs::{Advice, OFlags};
use rustix::io::{Errno, ReadWriteFlags};
use waystation_format::checksum::BLOCK_BYTES;
use waystation_format::{Error, Kind, Result};

use super::gpu_direct::DirectFile;
use crate::directory::{Directory, open_to_read};
use crate::filesystem::direct_alignment;
use crate::local::irregular;
use crate::mode::Mode;
use crate::read::layout::Rules;
use crate::read::plan::FilePlan;
use crate::read::spans::{PAGE_GRANULE_BYTES, span_bytes};

/// Pages that are asked for to learn whether the page cache holds a file.
const SAMPLES: u64 = 24;
/// So many of the samples must be cached for the page cache to be the quicker way.
const SAMPLES_CACHED: u64 = 20;
/// Less than this is read in one or two requests, where nothing is gained past the page cache.
const SMALL_BYTES: u64 = 1 << 20;
/// Where the system does not tell: every device's direct transfers do with pages.
const PAGE_ALIGNMENT: u32 = 4096;

/// Runs below this are copied from scratch where reading in place would need a further request.
const DIRECT_LEAST_BYTES: u64 = 128 << 10;
/// The same where a further run is one more entry of a request's vector.
const BUFFERED_LEAST_BYTES: u64 = 16 << 10;
/// Parts of one unit, each a request: four runs, and the gaps around them.
pub const DIRECT_MOST_PARTS: NonZeroUsize = NonZeroUsize::new(9).unwrap();
/// The same where a part is an entry of a vector: 128 runs, and the gaps around them.
const BUFFERED_MOST_PARTS: NonZeroUsize = NonZeroUsize::new(257).unwrap();

/// How the files of a plan are opened, and how long they may be.
#[derive(Clone, Debug, Default)]
pub struct Opening {
    /// The directory beneath which all of them are opened; without it, by their paths.
    pub root: Option<Arc<Directory>>,
    /// Whether a file may go on after the length that the plan gives.
    pub may_be_longer: bool,
}

/// An open file.
#[derive(Debug)]
pub struct Source {
    root: Option<Arc<Directory>>,
    buffered: File,
    direct: Option<File>,
    mode: Mode,
    direct_rules: Rules,
    sparse: bool,
    refused: AtomicBool,
    /// The file as it is read straight to a device, if it can be; see `gpu_direct`.
    proven: OnceLock<Option<Box<dyn DirectFile>>>,
    refused_directly: AtomicBool,
}

/// What is known of a file before it is opened.
pub struct Wanted<'a> {
    /// The file and what is needed of it.
    pub plan: &'a FilePlan,
    /// What will be read.
    pub spans: &'a [Range<u64>],
    /// The mode that the caller asked for.
    pub mode: Option<Mode>,
    /// The mode that is best for files that are not cached.
    pub cold_mode: Mode,
    /// How it is opened.
    pub opening: &'a Opening,
}

impl Source {
    /// Opens a file and decides how to read it.
    pub fn open(wanted: &Wanted<'_>) -> Result<Self> {
        let path = &wanted.plan.file.path;
        let root = wanted.opening.root.clone();
        let buffered = open_to_read(root.as_deref(), path, OFlags::empty(), "open the file")?;
        check_length(&buffered, path, wanted.plan.file.file_bytes, wanted.opening.may_be_longer)?;
        let extent = match wanted.spans {
            [first, .., last] => last.end - first.start,
            spans => span_bytes(spans),
        };
        let mut source = Self {
            root,
            buffered,
            direct: None,
            mode: Mode::Buffered,
            direct_rules: BUFFERED_RULES,
            sparse: span_bytes(wanted.spans) < extent / 2,
            refused: AtomicBool::new(false),
            proven: OnceLock::new(),
            refused_directly: AtomicBool::new(false),
        };
        let mode = wanted.mode.unwrap_or_else(|| source.choose(wanted));
        if mode.is_direct() {
            source.open_direct(path, mode, wanted.plan.file.checksums.is_some());
        }
        source.advise(&source.buffered);
        Ok(source)
    }

    fn choose(&self, wanted: &Wanted<'_>) -> Mode {
        let cached = || is_memory(&self.buffered) || is_cached(&self.buffered, wanted.spans);
        if span_bytes(wanted.spans) <= SMALL_BYTES || cached() { Mode::Buffered } else { wanted.cold_mode }
    }

    /// Stays with the page cache where the system refuses, or wants more alignment than units have.
    fn open_direct(&mut self, path: &Path, mode: Mode, verified: bool) {
        let Ok(file) = self.reopen(path, OFlags::DIRECT) else { return };
        let (memory, offset) = direct_alignment(&file).unwrap_or((PAGE_ALIGNMENT, PAGE_ALIGNMENT));
        let granule = if verified { BLOCK_BYTES as u64 } else { PAGE_GRANULE_BYTES };
        if !offset.is_power_of_two() || !memory.is_power_of_two() || u64::from(offset) > granule {
            return;
        }
        if memory > PAGE_ALIGNMENT {
            return; // scratch is aligned to pages
        }
        self.direct_rules = Rules {
            offset_alignment: u64::from(offset),
            memory_alignment: memory as usize,
            least_bytes: DIRECT_LEAST_BYTES,
            most_parts: DIRECT_MOST_PARTS,
        };
        self.direct = Some(file);
        self.mode = mode;
    }

    /// A further descriptor of the same file.
    fn reopen(&self, path: &Path, flags: OFlags) -> Result<File> {
        let file = open_to_read(self.root.as_deref(), path, flags, "open the file")?;
        let examined =
            |file: &File| file.metadata().map_err(|error| Error::from_io(error, "examine the file", path));
        let (ours, theirs) = (examined(&self.buffered)?, examined(&file)?);
        if (ours.dev(), ours.ino()) != (theirs.dev(), theirs.ino()) {
            return Err(Error::new(Kind::Unavailable, "the file was replaced while it was read".to_owned())
                .with("path", path.display().to_string()));
        }
        Ok(file)
    }

    /// A further descriptor, for direct transfers where the system has them for this file.
    pub fn another(&self, path: &Path) -> Result<File> {
        self.reopen(path, OFlags::DIRECT).or_else(|_| self.reopen(path, OFlags::empty()))
    }

    /// A descriptor with a read-ahead of its own, for a worker that reads a distant part of the file;
    /// `None` where there is none to be had.
    pub fn stream(&self, path: &Path) -> Option<File> {
        let file = self.reopen(path, OFlags::empty()).ok()?;
        self.advise(&file);
        Some(file)
    }

    /// Read-ahead helps where most of the file is needed, and reads in vain where little is.
    fn advise(&self, file: &File) {
        let advice = if self.sparse { Advice::Random } else { Advice::Sequential };
        // Advice: without it, reads are as right.
        let _ = rustix::fs::fadvise(file, 0, None, advice);
    }

    /// The descriptor to read by, and what it asks of parts.
    pub fn access(&self) -> (&File, &Rules) {
        match &self.direct {
            Some(file) if !self.is_refused() => (file, &self.direct_rules),
            _ => (&self.buffered, &BUFFERED_RULES),
        }
    }

    /// The descriptor that serves any offset, length and address.
    pub fn buffered(&self) -> &File {
        &self.buffered
    }

    /// Remembers that the system refused a direct transfer.
    pub fn refuse(&self) {
        self.refused.store(true, Ordering::Relaxed);
    }

    /// Whether it is known if the file can be read straight to a device.
    pub fn was_proven(&self) -> bool {
        self.proven.get().is_some()
    }

    /// The file as it is read straight to a device; at the first call it is proven that it can be.
    pub fn proven(&self, prove: impl FnOnce() -> Option<Box<dyn DirectFile>>) -> Option<&dyn DirectFile> {
        let found = self.proven.get_or_init(prove).as_deref();
        found.filter(|_| !self.refused_directly.load(Ordering::Relaxed))
    }

    /// Remembers that such a read failed.
    pub fn refuse_directly(&self) {
        self.refused_directly.store(true, Ordering::Relaxed);
    }

    /// Has the source ask for direct transfers as other rules would have it.
    #[cfg(test)]
    pub fn believe(&mut self, rules: Rules) {
        self.direct_rules = rules;
    }

    fn is_refused(&self) -> bool {
        self.refused.load(Ordering::Relaxed)
    }

    /// The way in which the file is read now.
    pub fn mode(&self) -> Mode {
        if self.is_refused() { Mode::Buffered } else { self.mode }
    }
}

/// The page cache serves everything.
const BUFFERED_RULES: Rules = Rules {
    offset_alignment: 1,
    memory_alignment: 1,
    least_bytes: BUFFERED_LEAST_BYTES,
    most_parts: BUFFERED_MOST_PARTS,
};

fn check_length(file: &File, path: &Path, file_bytes: u64, may_be_longer: bool) -> Result<()> {
    let metadata = file.metadata().map_err(|error| Error::from_io(error, "examine the file", path))?;
    if !metadata.is_file() {
        return Err(irregular(path));
    }
    crate::read::check_length(path, metadata.len(), file_bytes, may_be_longer)
}

fn is_memory(file: &File) -> bool {
    const TMPFS: u32 = 0x0102_1994;
    const RAMFS: u32 = 0x8584_58f6;
    // The field's type differs between architectures, its 32 bits do not.
    rustix::fs::fstatfs(file).is_ok_and(|status| matches!(status.f_type as u32, TMPFS | RAMFS))
}

/// Whether the page cache holds (most of) what is to be read. The answer is a guess from samples: only
/// speed depends on it.
fn is_cached(file: &File, spans: &[Range<u64>]) -> bool {
    let total = span_bytes(spans);
    let mut spans = spans.iter();
    let mut span = spans.next().cloned().unwrap_or(0..0);
    let mut before = 0; // bytes of the spans before this one
    let mut cached = 0;
    for sample in 0..SAMPLES {
        let position = (u128::from(total) * u128::from(sample) / u128::from(SAMPLES)) as u64;
        while position - before >= span.end - span.start {
            before += span.end - span.start;
            match spans.next() {
                Some(next) => span = next.clone(),
                None => return false,
            }
        }
        match is_byte_cached(file, span.start + (position - before)) {
            Ok(is_there) => cached += u64::from(is_there),
            Err(_) => return false, // the file system cannot tell
        }
    }
    cached >= SAMPLES_CACHED
}

fn is_byte_cached(file: &File, offset: u64) -> io::Result<bool> {
    if let Ok(pages) = pages_cached(file, offset, 1) {
        return Ok(pages > 0);
    }
    // The question itself may bring what is not there, even before it is answered where a machine is busy.
    rustix::fs::fadvise(file, 0, None, Advice::Random)?; // what is brought must not grow
    let mut byte = [0];
    match rustix::io::preadv2(file, &mut [IoSliceMut::new(&mut byte)], offset, ReadWriteFlags::NOWAIT) {
        Ok(_) => Ok(true),
        Err(Errno::AGAIN) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// How many pages of a range the page cache holds: cachestat(2), of Linux 6.5 and later, which reads nothing.
fn pages_cached(file: &File, offset: u64, nbytes: u64) -> io::Result<u64> {
    const SYS_CACHESTAT: libc::c_long = 451; // on all architectures
    let range = [offset, nbytes];
    let mut counts = [0u64; 5]; // cached, dirty, in writeback, evicted, recently evicted
    // SAFETY: the range and the counts are as large as the system call says, and live while it runs.
    let outcome = unsafe {
        libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), range.as_ptr(), counts.as_mut_ptr(), 0 as libc::c_uint)
    };
    if outcome == 0 { Ok(counts[0]) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn to_ask_for_what_is_cached_brings_nothing() {
        const NBYTES: u64 = 8 << 20;
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![1; NBYTES as usize]).unwrap();
        file.sync_all().unwrap();
        let spans = [0..NBYTES / 4, NBYTES / 2..NBYTES];
        assert!(is_cached(&file, &spans));
        rustix::fs::fadvise(&file, 0, None, Advice::DontNeed).unwrap();
        let Ok(pages) = pages_cached(&file, 0, NBYTES) else { return }; // an older system
        if pages == 0 {
            assert!(!is_cached(&file, &spans));
            assert_eq!(pages_cached(&file, 0, NBYTES).unwrap(), 0);
        }
    }
}
