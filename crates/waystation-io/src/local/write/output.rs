//! One file that a job creates.
//!
//! What can fail, in order: creation (exists, no permission), direct I/O (refused when asked for or at
//! the first write), writing (no space), the exact size, durability, closing. Invariants: an output never touches
//! a file that it did not create; unless direct I/O was demanded, its refusal turns this file to the
//! page cache and nothing is lost; a file that is finished is closed, or held by the group that it is synced with.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use waystation_format::{Error, Kind, Result};

use crate::aligned::PAGE_BYTES;
use crate::files::close;
use crate::filesystem::set_direct;
use crate::sync_group::Durability;

/// Smaller blocks are written back with all others of their kind, in fewer requests.
const LEAST_WRITE_BACK_BYTES: usize = 256 << 10;

/// How an output is written.
#[derive(Clone, Debug)]
pub(super) struct Manner {
    /// Past the page cache.
    pub direct: bool,
    /// Whether the caller insists on that.
    pub demanded: bool,
    /// When its bytes are durable.
    pub durability: Durability,
}

pub(super) struct Output {
    path: PathBuf,
    file_bytes: u64,
    manner: Manner,
    state: Mutex<State>,
    is_direct: AtomicBool,
    blocks_left: AtomicU64,
}

#[derive(Default)]
struct State {
    file: Option<Arc<File>>,
    created: bool,
}

impl Output {
    pub fn new(path: &Path, file_bytes: u64, block_bytes: u64, manner: Manner) -> Self {
        Self {
            path: path.to_owned(),
            file_bytes,
            state: Mutex::default(),
            is_direct: AtomicBool::new(manner.direct),
            manner,
            blocks_left: AtomicU64::new(file_bytes.div_ceil(block_bytes)),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failed(&self, action: &'static str) -> impl Fn(io::Error) -> Error {
        move |error| Error::from_io(error, action, &self.path)
    }

    /// The open file, created on the first call.
    pub fn open(&self) -> Result<Arc<File>> {
        let mut state = self.lock();
        if let Some(file) = &state.file {
            return Ok(Arc::clone(file));
        }
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&self.path)
            .map_err(self.failed("create the file"))?;
        let file = Arc::new(file);
        *state = State { file: Some(Arc::clone(&file)), created: true };
        drop(state);
        if self.is_direct()
            && let Err(error) = set_direct(&file, true)
        {
            self.leave_direct(&file, error)?;
        }
        Ok(file)
    }

    /// Whether the file is still written past the page cache.
    pub fn is_direct(&self) -> bool {
        self.is_direct.load(Ordering::Acquire)
    }

    /// Goes on through the page cache after `refusal`.
    fn leave_direct(&self, file: &File, refusal: io::Error) -> Result<()> {
        if self.manner.demanded {
            let message = format!("the file system refuses direct writes: {refusal}; use mode 'buffered'");
            return Err(Error::new(Kind::Unsupported, message).with("path", self.path.display().to_string()));
        }
        set_direct(file, false).map_err(self.failed("turn off direct writes"))?;
        self.is_direct.store(false, Ordering::Release);
        Ok(())
    }

    /// How many of the staged bytes to write: whole pages past the page cache, else the file's own.
    pub fn length_to_write(&self, nbytes: usize) -> usize {
        if self.is_direct() { nbytes.next_multiple_of(PAGE_BYTES) } else { nbytes }
    }

    /// Whether an attempt that failed with `error` is to be made again; `was_direct` is what
    /// [`Output::is_direct`] said before it.
    pub fn recover(&self, file: &File, error: io::Error, was_direct: bool, offset: u64) -> Result<()> {
        match error.raw_os_error() {
            // EAGAIN: the kernel would have had to wait where io_uring did not want it to.
            Some(libc::EINTR | libc::EAGAIN) => Ok(()),
            Some(libc::EINVAL) if was_direct => self.leave_direct(file, error),
            _ => Err(self.failed("write the file")(error).with("offset", offset.to_string())),
        }
    }

    /// Writes all of `bytes` at `offset`.
    pub fn write_at(&self, file: &File, mut bytes: &[u8], mut offset: u64) -> Result<()> {
        while !bytes.is_empty() {
            let was_direct = self.is_direct();
            match file.write_at(bytes, offset) {
                Ok(0) => self.recover(file, io::ErrorKind::WriteZero.into(), false, offset)?,
                Ok(written) => {
                    bytes = bytes.get(written..).unwrap_or_default();
                    offset += written as u64;
                }
                Err(error) => self.recover(file, error, was_direct, offset)?,
            }
        }
        Ok(())
    }

    /// Has the system begin to move buffered bytes to the disk, so that little is left for the sync,
    /// the job's own or the caller's.
    pub fn begin_write_back(&self, file: &File, offset: u64, nbytes: usize) {
        if nbytes >= LEAST_WRITE_BACK_BYTES && !self.is_direct() {
            // Only a head start: its failure shows again, and is reported, when the file is synced.
            // SAFETY: refers to no memory.
            unsafe {
                libc::sync_file_range(
                    file.as_raw_fd(),
                    offset as libc::off64_t,
                    nbytes as libc::off64_t,
                    libc::SYNC_FILE_RANGE_WRITE,
                )
            };
        }
    }

    /// Counts a block as written; true for the last.
    pub fn block_done(&self) -> bool {
        self.blocks_left.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Cuts the padding off, makes the file durable and closes it, or gives it to the group that does. All blocks
    /// have been written, and whoever wrote them has let go of the file: it is closed here, where an error of that
    /// is still one of the job.
    pub fn finish(&self) -> Result<()> {
        let file = self.open()?;
        if self.manner.direct && !self.file_bytes.is_multiple_of(PAGE_BYTES as u64) {
            file.set_len(self.file_bytes).map_err(self.failed("set the size of the file"))?;
        }
        if matches!(self.manner.durability, Durability::Now) {
            file.sync_all().map_err(self.failed("make the file durable"))?;
        }
        self.lock().file = None;
        let file = Arc::into_inner(file).ok_or_else(|| {
            Error::new(Kind::Internal, "a file is finished while it is written; please report this")
                .with("path", self.path.display().to_string())
        })?;
        match &self.manner.durability {
            Durability::Together(group) => group.add(&self.path, file),
            Durability::Now | Durability::Whenever => close(file).map_err(self.failed("close the file")),
        }
    }

    /// Removes the file if this output created it.
    pub fn remove(&self) {
        let mut state = self.lock();
        state.file = None;
        if std::mem::take(&mut state.created) {
            // The failure that led here is the one to report; what cannot be removed is a leftover of an
            // attempt that was never committed.
            drop(fs::remove_file(&self.path));
        }
    }
}
