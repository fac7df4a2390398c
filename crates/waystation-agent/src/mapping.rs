//! A slot's file as memory of the process that writes it.
//!
//! Invariants: a child that is forked does not have the mapping, and the descriptor is closed once the
//! mapping is there; so the lock taken before lasts exactly as long as this process can write the bytes.
//! Memory is touched through [`Mapping::populate`] first, so that a file that somebody has cut off is an
//! error and not a signal.
//!
//! Mapping small pages takes as long as filling them, huge ones no time. File systems in memory give huge pages
//! only where they were mounted so, which those of most hosts are not; but Linux makes them, from 6.1 on,
//! when it is asked (madvise(2), `MADV_COLLAPSE`), which [`Mapping::collapse`] does. For them to be mapped as
//! such, mappings begin at multiples of a huge page.

use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::ptr::{NonNull, null_mut};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use waystation_format::page::PAGE_BYTES;
use waystation_format::{Error, Kind, Result};
use waystation_io::aligned::HUGE_PAGE_BYTES;

/// As in `linux/mman.h`; libc does not name it.
const MADV_COLLAPSE: libc::c_int = 25;

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
        let place = place_for(nbytes).map_err(failed)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: it takes the place of pages that were mapped for it and that nobody knows of.
        let mapped = unsafe { mmap(place.cast(), nbytes, access, flags, file, 0) };
        let address = mapped.map_err(|errno| {
            // SAFETY: as above; what is left of them when they cannot be unmapped is but a range of addresses.
            let _ = unsafe { munmap(place.cast(), nbytes.next_multiple_of(PAGE_BYTES)) };
            failed(errno)
        })?;
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

    /// Has huge pages made of a range, as far as they can be had. What the file has no memory for yet is zeros
    /// then. The range begins at a multiple of a huge page; what is less than one at its end stays as it is.
    pub fn collapse(&self, range: Range<u64>) {
        let huge = HUGE_PAGE_BYTES as u64;
        let end = range.end.min(self.nbytes as u64) / huge * huge;
        for offset in (range.start..end).step_by(HUGE_PAGE_BYTES) {
            // SAFETY: the range lies in this mapping, and contents do not change by it.
            let done = unsafe { libc::madvise(self.at(offset).cast(), HUGE_PAGE_BYTES, MADV_COLLAPSE) };
            if done != 0 {
                return; // small pages do as well
            }
        }
    }
}

/// Addresses that begin at a multiple of a huge page, mapped to nothing yet.
fn place_for(nbytes: usize) -> rustix::io::Result<*mut u8> {
    let nbytes = nbytes.next_multiple_of(PAGE_BYTES);
    let whole = nbytes.checked_add(HUGE_PAGE_BYTES).ok_or(Errno::NOMEM)?;
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a fresh mapping at an address that the kernel chooses.
    let start: *mut u8 = unsafe { mmap_anonymous(null_mut(), whole, ProtFlags::empty(), flags) }?.cast();
    let before = start.align_offset(HUGE_PAGE_BYTES);
    let place = start.wrapping_add(before);
    for (address, around) in [(start, before), (place.wrapping_add(nbytes), whole - before - nbytes)] {
        if around > 0 {
            // SAFETY: a part of the mapping made above that nobody knows of.
            unsafe { munmap(address.cast(), around) }?;
        }
    }
    Ok(place)
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and whoever borrowed it is gone. It cannot fail for a range that is
        // mapped exactly so.
        let unmapped = unsafe { munmap(self.address.as_ptr().cast(), self.nbytes) };
        debug_assert!(unmapped.is_ok());
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn huge_pages_are_asked_for_where_they_could_be_and_change_no_byte() {
        let nbytes = 5 * HUGE_PAGE_BYTES as u64 / 2; // half of a huge page is left over
        let mut file = tempfile::tempfile_in("/dev/shm").unwrap();
        let bytes: Vec<u8> = (0..nbytes).map(|index| (index % 251) as u8).collect();
        file.write_all(&bytes).unwrap();
        let mapping = Mapping::new(&file, nbytes, Path::new("a slot")).unwrap();
        assert_eq!(mapping.at(0).align_offset(HUGE_PAGE_BYTES), 0);
        mapping.collapse(0..nbytes + 1);
        mapping.populate(0..nbytes).unwrap();
        // SAFETY: the range is the mapping, which only this test has.
        let found = unsafe { std::slice::from_raw_parts(mapping.at(0), nbytes as usize) };
        assert_eq!(found, bytes);
    }

    #[test]
    fn a_file_without_memory_has_zeros_once_it_has_huge_pages() {
        let nbytes = 2 * HUGE_PAGE_BYTES as u64;
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(nbytes).unwrap();
        let mapping = Mapping::new(&file, nbytes, Path::new("a slot")).unwrap();
        mapping.collapse(0..nbytes);
        mapping.populate(0..nbytes).unwrap();
        // SAFETY: the range is the mapping, which only this test has.
        let found = unsafe { std::slice::from_raw_parts(mapping.at(0), nbytes as usize) };
        assert!(found.iter().all(|&byte| byte == 0));
    }
}
