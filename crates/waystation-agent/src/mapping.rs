//! A slot's file as memory of the process that writes it.
//!
//! Invariants: a child that is forked does not have the mapping, and the descriptor is closed once the
//! mapping is there; so the lock taken before lasts exactly as long as this process can write the bytes.
//! Memory is touched through [`Mapping::populate`] first, so that a file that somebody has cut off is an
//! error and not a signal.

use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::ptr::{NonNull, null_mut};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use waystation_format::page::PAGE_BYTES;
use waystation_format::{Error, Kind, Result};

/// A writable, shared mapping of a whole file.
#[derive(Debug)]
pub(crate) struct Mapping {
    address: NonNull<u8>,
    nbytes: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread, and the type hands out only its address.
unsafe impl Send for Mapping {}
// SAFETY: as above; a shared reference gives no access to the bytes without `unsafe`.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `nbytes` bytes of a file.
    pub fn new(file: &File, nbytes: u64, path: &Path) -> Result<Self> {
        let failed = |errno: Errno| Error::from_io(errno.into(), "map a slot", path);
        let nbytes = usize::try_from(nbytes).map_err(|_| failed(Errno::NOMEM))?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address that the kernel chooses.
        let address =
            unsafe { mmap(null_mut(), nbytes, access, MapFlags::SHARED, file, 0) }.map_err(failed)?;
        let address = NonNull::new(address.cast()).ok_or_else(|| failed(Errno::NOMEM))?;
        let mapping = Self { address, nbytes };
        // SAFETY: the range is the mapping made above.
        unsafe { madvise(address.as_ptr().cast(), nbytes, Advice::LinuxDontFork) }.map_err(failed)?;
        Ok(mapping)
    }

    /// The address of a byte, which must be within the mapping.
    pub fn at(&self, offset: u64) -> *mut u8 {
        debug_assert!(offset <= self.nbytes as u64);
        self.address.as_ptr().wrapping_add(offset as usize)
    }

    /// Makes a range accessible without faults.
    pub fn populate(&self, range: Range<u64>) -> Result<()> {
        let begin = range.start / PAGE_BYTES as u64 * PAGE_BYTES as u64;
        let end = range.end.min(self.nbytes as u64);
        if begin >= end {
            return Ok(());
        }
        // SAFETY: the range lies in this mapping, and populating changes no contents.
        match unsafe { madvise(self.at(begin).cast(), (end - begin) as usize, Advice::LinuxPopulateWrite) } {
            // Linux before 5.14 leaves it to the first touch.
            Ok(()) | Err(Errno::INVAL) => Ok(()),
            Err(errno) => {
                let message = format!("the memory of a slot cannot be used: {errno}; was its file cut off?");
                Err(Error::new(Kind::Unavailable, message).with("errno", errno.raw_os_error().to_string()))
            }
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and whoever borrowed it is gone. It cannot fail for a range that is
        // mapped exactly so.
        let unmapped = unsafe { munmap(self.address.as_ptr().cast(), self.nbytes) };
        debug_assert!(unmapped.is_ok());
    }
}
