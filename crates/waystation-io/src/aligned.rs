//! Page-aligned memory straight from the system.
//!
//! Invariants: a block is zero when mapped, private to this process, aligned to a page (to a huge page
//! from [`HUGE_PAGE_BYTES`] on), and unmapped when dropped. A refused mapping is an error, never an
//! abort. Nothing here is MADV_DONTFORK: users see this memory, also in their forked children.

use std::ops::Range;
use std::ptr::{NonNull, null_mut};
use std::sync::OnceLock;

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use waystation_format::{Error, Kind, Result};

/// The alignment that every block has: no less than direct I/O wants of memory.
pub const PAGE_BYTES: usize = 4096;
/// From this size on blocks are aligned and advised for huge pages.
pub const HUGE_PAGE_BYTES: usize = 2 << 20;
/// Below this, starting a thread takes longer than faulting pages.
const FAULT_BYTES_PER_THREAD: usize = 16 << 20;

/// A private anonymous mapping.
pub struct AlignedBlock {
    address: NonNull<u8>,
    nbytes: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread, and the type hands out only its address.
unsafe impl Send for AlignedBlock {}
// SAFETY: as above; a shared reference gives no access to the bytes without `unsafe`.
unsafe impl Sync for AlignedBlock {}

impl AlignedBlock {
    /// Maps at least `nbytes` bytes (whole pages, at least one).
    pub fn map(nbytes: usize) -> Result<Self> {
        let refused =
            || Error::new(Kind::Unavailable, format!("could not allocate {nbytes} bytes of memory"));
        let rounded = nbytes.max(1).checked_next_multiple_of(PAGE_BYTES).ok_or_else(refused)?;
        let map = if rounded < HUGE_PAGE_BYTES { map_pages(rounded) } else { map_huge(rounded) };
        map.map_err(|errno| refused().with("errno", errno.raw_os_error().to_string()))
    }

    /// The first byte.
    pub fn address(&self) -> NonNull<u8> {
        self.address
    }

    /// Bytes mapped.
    pub fn nbytes(&self) -> usize {
        self.nbytes
    }

    /// Faults in the first `nbytes` bytes for writing, on up to `threads` threads. Contents stay. Only
    /// saves time later, so what cannot be faulted in now is left to the first touch.
    pub fn populate(&self, nbytes: usize, threads: usize) {
        let nbytes = nbytes.clamp(1, self.nbytes);
        let parts = threads.min(nbytes / FAULT_BYTES_PER_THREAD).max(1);
        let part_bytes = nbytes.div_ceil(parts).next_multiple_of(HUGE_PAGE_BYTES);
        std::thread::scope(|scope| {
            for begin in (part_bytes..nbytes).step_by(part_bytes) {
                let fault = move || self.populate_part(begin, part_bytes.min(nbytes - begin));
                if std::thread::Builder::new().spawn_scoped(scope, fault).is_err() {
                    fault();
                }
            }
            self.populate_part(0, part_bytes.min(nbytes));
        });
    }

    fn populate_part(&self, begin: usize, nbytes: usize) {
        let start = self.address.as_ptr().wrapping_add(begin);
        // SAFETY: the range lies in this mapping.
        unsafe { fault_in(start, nbytes) };
    }
}

/// Faults memory in for writing, whole pages of it, without a change of its contents. What the system refuses is
/// left to the first touch.
///
/// # Safety
/// The pages must be mapped, readable and writable.
pub(crate) unsafe fn fault_in(start: *mut u8, nbytes: usize) {
    let whole = nbytes.next_multiple_of(PAGE_BYTES);
    // SAFETY: as the caller promises; populating changes no contents.
    let done = unsafe { madvise(start.cast(), whole, Advice::LinuxPopulateWrite) };
    if done == Err(Errno::INVAL) {
        // Linux before 5.14. An atomic addition of nothing writes, whoever else uses the byte.
        for offset in (0..nbytes).step_by(PAGE_BYTES) {
            // SAFETY: as the caller promises.
            let byte = unsafe { std::sync::atomic::AtomicU8::from_ptr(start.add(offset)) };
            byte.fetch_add(0, std::sync::atomic::Ordering::Relaxed);
        }
    }
}

/// Has the kernel take huge pages for memory, or small ones, when it is touched for the first time. The kernel locks
/// the address space of the process meanwhile, so that all threads that touch memory wait: tell it of whole blocks.
///
/// # Safety
/// The pages must be mapped.
pub(crate) unsafe fn advise(start: *mut u8, nbytes: usize, is_huge: bool) {
    let advice = if is_huge { Advice::LinuxHugepage } else { Advice::LinuxNoHugepage };
    // SAFETY: as the caller promises; advice changes no contents. A system without huge pages takes none.
    let _ = unsafe { madvise(start.cast(), nbytes, advice) };
}

impl Drop for AlignedBlock {
    fn drop(&mut self) {
        let mapping = Mapping { address: self.address, nbytes: self.nbytes };
        match BEFORE_UNMAPPING.get() {
            Some(hook) => hook(mapping),
            None => drop(mapping),
        }
    }
}

static BEFORE_UNMAPPING: OnceLock<fn(Mapping)> = OnceLock::new();

/// Has every block of this process pass through `hook` before it is unmapped: for whoever told a device
/// about the memory. The first hook stays.
pub fn before_unmapping(hook: fn(Mapping)) {
    BEFORE_UNMAPPING.get_or_init(|| hook);
}

/// Memory that nobody uses any more; dropping it unmaps it.
pub struct Mapping {
    address: NonNull<u8>,
    nbytes: usize,
}

// SAFETY: as for a block: it belongs to the process, and only its address is handed out.
unsafe impl Send for Mapping {}

impl Mapping {
    /// The addresses that are to be unmapped.
    pub fn range(&self) -> Range<usize> {
        let start = self.address.as_ptr() as usize;
        start..start + self.nbytes
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and whoever borrowed it is gone. It cannot fail for a range that
        // is mapped exactly so.
        let unmapped = unsafe { munmap(self.address.as_ptr().cast(), self.nbytes) };
        debug_assert!(unmapped.is_ok());
    }
}

fn map_pages(nbytes: usize) -> rustix::io::Result<AlignedBlock> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping at an address that the kernel chooses.
    let address = unsafe { mmap_anonymous(null_mut(), nbytes, access, MapFlags::PRIVATE) }?;
    NonNull::new(address.cast()).map(|address| AlignedBlock { address, nbytes }).ok_or(Errno::NOMEM)
}

/// Maps more than asked for and gives back what lies around the aligned part.
fn map_huge(nbytes: usize) -> rustix::io::Result<AlignedBlock> {
    let whole = map_pages(nbytes.checked_add(HUGE_PAGE_BYTES).ok_or(Errno::NOMEM)?)?;
    let start = whole.address.as_ptr();
    let before = start.align_offset(HUGE_PAGE_BYTES);
    let after = whole.nbytes - before - nbytes;
    std::mem::forget(whole);
    let aligned = start.wrapping_add(before);
    for (address, bytes) in [(start, before), (aligned.wrapping_add(nbytes), after)] {
        if bytes > 0 {
            // SAFETY: a part of the mapping made above that nobody knows of.
            unsafe { munmap(address.cast(), bytes) }?;
        }
    }
    // SAFETY: the range is the mapping made above.
    unsafe { advise(aligned, nbytes, true) };
    NonNull::new(aligned).map(|address| AlignedBlock { address, nbytes }).ok_or(Errno::NOMEM)
}
