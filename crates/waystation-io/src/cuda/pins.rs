//! Host memory that devices may write to directly: pinned once, and pinned still when the arena hands it
//! out again.
//!
//! A range is *lent* while copies may go to it, and pinned when the first copy is about to. Invariants: a
//! range begins where an arena block does, so two never overlap; what is pinned is unpinned before it is
//! unmapped, on a thread of its own, because unpinning may wait for the device and the device for a thread
//! that waits here; the lock is never held during a call of the driver.
//!
//! Forks: a page that is shared with a child is copied when the parent writes it next, and a device would
//! go on writing to the page before. So lent ranges are withheld from children (nobody but the engine sees
//! them then), and what was not lent during a fork is pinned anew when it is lent next.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Once};

use cudarc::driver::sys;
use rustix::mm::{Advice, madvise};

use super::driver::{Device, lock};
use crate::aligned::{self, Mapping, PAGE_BYTES};

struct Pin {
    nbytes: usize,
    pinned_by: Option<Arc<Device>>,
    /// Refused while lent: not tried again for every copy.
    refused: bool,
    /// How many forks had begun when it was last lent; [`DURING_FORK`] if one was under way.
    forks: u64,
}

const DURING_FORK: u64 = u64::MAX;

static PINS: Mutex<BTreeMap<usize, Pin>> = Mutex::new(BTreeMap::new());
/// The process that the table belongs to.
static PROCESS: AtomicU32 = AtomicU32::new(0);
static FORKS_BEGUN: AtomicU64 = AtomicU64::new(0);
static FORKS_ENDED: AtomicU64 = AtomicU64::new(0);

/// Announces that copies may go to a range. The memory must be the arena's, from its block's beginning.
pub(super) fn lend(address: usize, nbytes: usize) {
    install();
    advise(address, nbytes, Advice::LinuxDontFork);
    let stale = {
        let mut pins = lock(&PINS);
        let forks = FORKS_BEGUN.load(Ordering::Acquire);
        match pins.get(&address) {
            Some(pin) if pin.nbytes >= nbytes && pin.forks == forks => None,
            _ => pins.insert(address, Pin { nbytes, pinned_by: None, refused: false, forks }),
        }
    };
    if let Some(Pin { pinned_by: Some(device), .. }) = stale {
        unregister(&device, address);
    }
}

/// Ends what [`lend`] began. The memory stays pinned if it was.
pub(super) fn give_back(address: usize, nbytes: usize) {
    {
        let mut pins = lock(&PINS);
        match pins.get_mut(&address) {
            Some(pin) if pin.pinned_by.is_some() => pin.forks = forks_so_far(),
            _ => drop(pins.remove(&address)),
        }
    }
    advise(address, nbytes, Advice::LinuxDoFork);
}

/// The part of a lent range that is not pinned and may still be: all or nothing.
pub(super) fn unpinned(address: usize) -> Option<Range<usize>> {
    let pins = lock(&PINS);
    let (&start, pin) = pins.range(..=address).next_back()?;
    let is_open = pin.pinned_by.is_none() && !pin.refused && address < start + pin.nbytes;
    is_open.then(|| start..start + pin.nbytes)
}

/// Pins the lent range around an address, unless that is done or was refused. Of one range only one thread
/// may be here at a time. The device's context must be current.
pub(super) fn pin(device: &Arc<Device>, address: usize) {
    let Some(range) = unpinned(address) else { return };
    // SAFETY: arena memory that is mapped, and stays so until it is unregistered.
    let status = unsafe {
        sys::cuMemHostRegister_v2(range.start as *mut c_void, range.len(), sys::CU_MEMHOSTREGISTER_PORTABLE)
    };
    if let Some(pin) = lock(&PINS).get_mut(&range.start) {
        match status {
            sys::CUresult::CUDA_SUCCESS => pin.pinned_by = Some(Arc::clone(device)),
            _ => pin.refused = true,
        }
    }
}

fn unregister(device: &Device, address: usize) {
    let current = device.make_current();
    // A context that is gone has taken its pins along, so there is nothing to do about a failure.
    // SAFETY: registered by `pin`, and taken out of the table by the caller.
    let _ = unsafe { sys::cuMemHostUnregister(address as *mut c_void) };
    drop(current);
}

fn install() {
    static INSTALL: Once = Once::new();
    INSTALL.call_once(|| {
        PROCESS.store(std::process::id(), Ordering::Release);
        // SAFETY: the handlers only add to atomics. Refused, for lack of memory, forks go unnoticed.
        unsafe { libc::pthread_atfork(Some(begin_fork), Some(end_fork), None) };
        aligned::before_unmapping(unmap);
    });
}

/// The forks that cannot share a range any more which was withheld from children until now.
fn forks_so_far() -> u64 {
    let ended = FORKS_ENDED.load(Ordering::Acquire);
    let begun = FORKS_BEGUN.load(Ordering::Acquire);
    if ended == begun { begun } else { DURING_FORK }
}

unsafe extern "C" fn begin_fork() {
    FORKS_BEGUN.fetch_add(1, Ordering::AcqRel);
}

unsafe extern "C" fn end_fork() {
    FORKS_ENDED.fetch_add(1, Ordering::AcqRel);
}

fn unmap(mapping: Mapping) {
    // In a child the table may be locked for ever, and its pins are the parent's.
    if PROCESS.load(Ordering::Acquire) != std::process::id() {
        return;
    }
    let pin = lock(&PINS).remove(&mapping.range().start);
    let Some(Pin { pinned_by: Some(device), .. }) = pin else { return };
    let shared = Arc::new(Mutex::new(Some(mapping)));
    let unpin = move |mapping: &Mutex<Option<Mapping>>| {
        if let Some(mapping) = lock(mapping).take() {
            unregister(&device, mapping.range().start);
        }
    };
    let (elsewhere, kept) = (unpin.clone(), Arc::clone(&shared));
    let spawned =
        std::thread::Builder::new().name("waystation-unpin".to_owned()).spawn(move || elsewhere(&kept));
    if spawned.is_err() {
        unpin(&shared);
    }
}

/// Faults a part of a range in for writing, so that pinning it takes no time for that.
pub(super) fn populate(part: Range<usize>) {
    // Only saves time: pinning faults in what this could not.
    advise(part.start, part.len(), Advice::LinuxPopulateWrite);
}

fn advise(address: usize, nbytes: usize, advice: Advice) {
    let whole = nbytes.next_multiple_of(PAGE_BYTES);
    // SAFETY: whole pages of arena memory; none of the advice used here changes what they hold.
    let _ = unsafe { madvise(address as *mut c_void, whole, advice) };
}
