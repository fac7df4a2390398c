//! The memory of another process of this machine, read by the kernel in one copy (`process_vm_readv(2)`).
//!
//! It is used where the kernel lets it be: the same boot, the same namespace of process ids, and the right to
//! trace the other process, which one user's processes have unless the system is set up otherwise
//! (`ptrace_scope` of Yama). Invariant: what was read counts only if the mark of the block is what it was
//! said to be, afterwards.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::held::Mark;
use crate::message::{Home, Place};

/// What is read at a time.
const PIECE_BYTES: usize = 64 << 20;

/// Where the memory of this process is, for others to find: whoever reads the mark has found it.
pub fn home(mark: &Mark) -> Home {
    // Where that is not known it is no machine's: nobody takes it for his own, and blocks go over TCP.
    let (boot, namespace) = scope().unwrap_or_default();
    Home { boot, namespace, process: std::process::id().into(), mark: mark.words() }
}

/// The memory of another process.
#[derive(Debug)]
pub struct OtherMemory {
    process: Pid,
    /// Readable once the process has ended, so that its id can be another's.
    life: OwnedFd,
}

impl OtherMemory {
    /// The memory of a process, if it is of this machine and can be read.
    pub fn open(home: &Home) -> Option<Self> {
        let is_here =
            scope().is_some_and(|(boot, namespace)| (boot, namespace) == (home.boot, home.namespace));
        let process = i32::try_from(home.process).ok().and_then(Pid::from_raw).filter(|_| is_here)?;
        let life = pidfd_open(process, PidfdFlags::empty()).ok()?;
        let opened = Self { process, life };
        opened.is_marked(home.mark).then_some(opened)
    }

    /// Reads a block. False if it was not there any more, or could not be read.
    ///
    /// # Safety
    ///
    /// The target is writable for so many bytes, and nobody else uses it.
    pub unsafe fn read(&self, place: &Place, target: *mut u8, nbytes: usize) -> bool {
        // SAFETY: the caller's promise.
        unsafe { self.copy(place.address, target, nbytes) && self.is_marked(place.mark) }
    }

    fn is_marked(&self, [address, value]: [u64; 2]) -> bool {
        let mut word = 0u64;
        // SAFETY: the word is this function's own.
        let is_read = unsafe { self.copy(address, (&raw mut word).cast(), size_of::<u64>()) };
        is_read && word == value && self.runs()
    }

    unsafe fn copy(&self, address: u64, target: *mut u8, nbytes: usize) -> bool {
        let Ok(address) = usize::try_from(address) else { return false };
        if address.checked_add(nbytes).is_none() {
            return false;
        }
        let mut done = 0;
        while done < nbytes {
            let length = (nbytes - done).min(PIECE_BYTES);
            // SAFETY: the caller has promised that the target is writable; whether the source can be read is
            // for the kernel to find out, which touches nothing of this process but the target.
            let count = unsafe {
                let local = libc::iovec { iov_base: target.add(done).cast(), iov_len: length };
                let remote = libc::iovec { iov_base: (address + done) as *mut libc::c_void, iov_len: length };
                libc::process_vm_readv(
                    self.process.as_raw_nonzero().get(),
                    &raw const local,
                    1,
                    &raw const remote,
                    1,
                    0,
                )
            };
            match usize::try_from(count) {
                Ok(count) if count > 0 => done += count,
                _ => return false,
            }
        }
        true
    }

    fn runs(&self) -> bool {
        let mut descriptors = [PollFd::new(&self.life, PollFlags::IN)];
        matches!(poll(&mut descriptors, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(0))
    }
}

/// The boot and the namespace in which process ids have their meaning here.
fn scope() -> Option<([u64; 2], u64)> {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    let boot = u128::from_str_radix(&digits, 16).ok()?;
    let namespace = fs::metadata("/proc/self/ns/pid").ok()?.ino();
    Some(([(boot >> 64) as u64, boot as u64], namespace))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::held::{Block, Held, Ledger};

    #[test]
    fn what_was_let_go_meanwhile_does_not_count() {
        let mark = Mark::take();
        let Some(memory) = OtherMemory::open(&home(&mark)) else { return }; // where the system refuses it
        let bytes: Vec<u8> = (0..100_000).map(|index| index as u8).collect();
        let block = Block { address: bytes.as_ptr().addr(), nbytes: bytes.len(), number: 1 };
        // SAFETY: the bytes live to the end of the test.
        let held = unsafe { Held::new(block, &Arc::new(Ledger::default())) };
        let place = Place { address: block.address as u64, mark: held.mark() };
        let mut target = vec![0; bytes.len()];
        // SAFETY: the target is that long.
        let mut read = |place: &Place| unsafe { memory.read(place, target.as_mut_ptr(), bytes.len()) };
        assert!(read(&place));
        assert!(!read(&Place { address: 8, ..place }));
        assert!(!read(&Place { address: u64::MAX, ..place }));
        drop(held);
        assert!(!read(&place));
        assert_eq!(target, bytes);
        assert!(OtherMemory::open(&Home { namespace: 1, ..home(&mark) }).is_none());
    }
}
