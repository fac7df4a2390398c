//! A small owner of one io_uring: reads and writes at file offsets, many in flight, one thread.
//!
//! Invariants: every operation that the kernel has taken is either handed out as a completion or waited for
//! when the ring is dropped, so the kernel never touches memory after its owner had the chance to free it.
//! Memory of a transfer that has begun can be neither freed nor lent again, and nothing ends a transfer to a
//! file early. So dropping has no time limit; its end is as certain as that of a read(2) or write(2) of the
//! same bytes. It does not depend on io_uring_enter, which a sandbox may refuse at any moment: the kernel
//! writes completions to shared memory whenever the thread leaves a system call, whichever that was, and
//! operations that it has not taken by then it never sees.
//! Short transfers and errors are reported as they are; what to do about them is the caller's affair.
//! Creating a ring runs one operation through it, because containers refuse io_uring in several ways.
//! A thread that had a ring keeps one open until it ends. Linux sends a thread's idle helpers home with the
//! last of its rings, and some kernels (6.18.44 among them) forget a transfer that the next ring hands to a
//! helper on its way out: nobody ever answers it, whatever signal or further call may come.

use std::cell::Cell;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::RawFd;
use std::time::Duration;

use io_uring::{IoUring, Probe, opcode, squeue, types};

/// Operations in flight of any ring.
const MOST_DEPTH: usize = 4096;
/// Milliseconds for which the kernel may be short of memory before that counts as a refusal.
const MOST_REFUSALS: usize = 5000;
/// IORING_ENTER_GETEVENTS: waits for completions.
const ENTER_GETEVENTS: u32 = 1;

/// The result of one operation.
#[derive(Debug)]
pub struct Completion {
    /// What the caller gave when pushing the operation.
    pub token: u64,
    /// Bytes transferred, perhaps fewer than asked for.
    pub result: io::Result<usize>,
}

thread_local! {
    /// The ring that this thread dropped last, with nothing in flight.
    static KEPT: Cell<Option<IoUring>> = const { Cell::new(None) };
}

/// One io_uring with up to `depth` operations in flight.
pub struct Ring {
    uring: ManuallyDrop<IoUring>,
    depth: usize,
    in_flight: usize,
}

impl Ring {
    /// Creates a ring and proves that it works; an error means that io_uring is not to be had here.
    pub fn new(depth: usize) -> io::Result<Self> {
        let depth = depth.clamp(1, MOST_DEPTH);
        let uring = IoUring::new(depth as u32)?;
        let mut probe = Probe::new();
        uring.submitter().register_probe(&mut probe)?;
        if !probe.is_supported(opcode::Read::CODE) || !probe.is_supported(opcode::Write::CODE) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let mut ring = Self { uring: ManuallyDrop::new(uring), depth, in_flight: 0 };
        // SAFETY: a no-op refers to no memory.
        unsafe { ring.push(opcode::Nop::new().build(), 0)? };
        ring.wait(1)?;
        match ring.next_completion() {
            Some(Completion { result: Ok(_), .. }) => Ok(ring),
            Some(Completion { result: Err(error), .. }) => Err(error),
            None => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// How many operations may be in flight: what was asked for, within the ring's bounds.
    pub fn depth(&self) -> usize {
        self.depth
    }

    /// How many operations can be pushed before a completion must be taken.
    pub fn room(&self) -> usize {
        self.depth - self.in_flight
    }

    /// Operations that were pushed and whose completion was not handed out yet.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Queues a read of `bytes` bytes at `offset` of the file into `address`.
    ///
    /// # Safety
    /// Until the completion is handed out or the ring is dropped, the memory must stay valid, nobody else
    /// may touch it, and `file` must stay open.
    pub unsafe fn push_read(
        &mut self,
        file: RawFd,
        address: *mut u8,
        bytes: usize,
        offset: u64,
        token: u64,
    ) -> io::Result<()> {
        let entry = opcode::Read::new(types::Fd(file), address, length(bytes)?).offset(offset).build();
        // SAFETY: the caller keeps memory and file alive.
        unsafe { self.push(entry, token) }
    }

    /// Queues a write of `bytes` bytes from `address` to `offset` of the file.
    ///
    /// # Safety
    /// Until the completion is handed out or the ring is dropped, the memory must stay valid and
    /// unchanged, and `file` must stay open.
    pub unsafe fn push_write(
        &mut self,
        file: RawFd,
        address: *const u8,
        bytes: usize,
        offset: u64,
        token: u64,
    ) -> io::Result<()> {
        let entry = opcode::Write::new(types::Fd(file), address, length(bytes)?).offset(offset).build();
        // SAFETY: the caller keeps memory and file alive.
        unsafe { self.push(entry, token) }
    }

    /// # Safety
    /// As for the public pushes.
    unsafe fn push(&mut self, entry: squeue::Entry, token: u64) -> io::Result<()> {
        if self.in_flight >= self.depth {
            // A fuller ring could overflow its completion queue.
            return Err(io::Error::other("more operations than the depth of the ring"));
        }
        if self.uring.submission().is_full() {
            self.submit()?;
        }
        // SAFETY: the caller keeps what the entry refers to alive.
        unsafe { self.uring.submission().push(&entry.user_data(token)) }.map_err(io::Error::other)?;
        self.in_flight += 1;
        Ok(())
    }

    /// Starts everything that was pushed, without waiting.
    pub fn submit(&mut self) -> io::Result<()> {
        self.enter(0)
    }

    /// Starts everything that was pushed and waits until at least `at_least` completions are there
    /// (fewer when fewer operations are in flight).
    pub fn wait(&mut self, at_least: usize) -> io::Result<()> {
        let wanted = at_least.min(self.in_flight);
        loop {
            let ready = self.uring.completion().len();
            let pending = !self.uring.submission().is_empty();
            if ready >= wanted && !pending {
                return Ok(());
            }
            self.enter(wanted)?;
        }
    }

    fn enter(&mut self, wanted: usize) -> io::Result<()> {
        let mut refusals = 0;
        loop {
            match self.uring.submit_and_wait(wanted) {
                Ok(_) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The kernel is short of memory or the completion queue is backed up: completions help.
                Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY)) => {
                    if !self.uring.completion().is_empty() {
                        return Ok(());
                    }
                    if refusals == MOST_REFUSALS {
                        return Err(error);
                    }
                    refusals += 1;
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// The next completion that is already there.
    pub fn next_completion(&mut self) -> Option<Completion> {
        let entry = self.uring.completion().next()?;
        self.in_flight -= 1;
        let code = entry.result();
        let result = usize::try_from(code).map_err(|_| io::Error::from_raw_os_error(-code));
        Some(Completion { token: entry.user_data(), result })
    }
}

/// A length as the kernel takes it.
fn length(bytes: usize) -> io::Result<u32> {
    u32::try_from(bytes)
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "too long for one operation"))
}

impl Drop for Ring {
    fn drop(&mut self) {
        // The kernel looks at the queue only when it is entered to submit, which nobody does any more.
        let mut taken = self.in_flight - self.uring.submission().len();
        while taken > 0 {
            if self.uring.completion().next().is_some() {
                taken -= 1;
                continue;
            }
            // SAFETY: nothing is submitted, and there is no argument.
            let waited =
                unsafe { self.uring.submitter().enter::<libc::sigset_t>(0, 1, ENTER_GETEVENTS, None) };
            if waited.is_err() {
                // Refused by now, or interrupted: leaving any system call brings completions.
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        // SAFETY: the ring is being dropped, so nobody uses the field again.
        let uring = unsafe { ManuallyDrop::take(&mut self.uring) };
        // The one before it is closed once this one is kept. A thread that is ending keeps none.
        let _ = KEPT.try_with(|kept| drop(kept.replace(Some(uring))));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used)]
mod tests {
    use super::*;
    use crate::refusals::{in_a_thread, refuse};
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::FileExt;

    fn ring(depth: usize) -> Option<Ring> {
        Ring::new(depth).inspect_err(|error| eprintln!("skipped: io_uring refused: {error}")).ok()
    }

    #[test]
    fn writes_and_reads_back() {
        let Some(mut ring) = ring(4) else { return };
        let file = tempfile::tempfile().unwrap();
        let parts: Vec<Vec<u8>> = (0..4u8).map(|value| vec![value; 1000]).collect();
        for (index, part) in parts.iter().enumerate() {
            let offset = index as u64 * 1000;
            // SAFETY: `parts` and `file` outlive the wait below.
            unsafe { ring.push_write(file.as_raw_fd(), part.as_ptr(), 1000, offset, index as u64) }.unwrap();
        }
        ring.wait(4).unwrap();
        let mut tokens: Vec<u64> = std::iter::from_fn(|| ring.next_completion())
            .map(|completion| {
                assert_eq!(completion.result.unwrap(), 1000);
                completion.token
            })
            .collect();
        tokens.sort_unstable();
        assert_eq!(tokens, [0, 1, 2, 3]);
        let mut back = vec![0; 4000];
        // SAFETY: `back` outlives the wait below.
        unsafe { ring.push_read(file.as_raw_fd(), back.as_mut_ptr(), 4000, 0, 9) }.unwrap();
        ring.wait(1).unwrap();
        assert_eq!(ring.next_completion().unwrap().result.unwrap(), 4000);
        assert_eq!(back, parts.concat());
    }

    #[test]
    fn errors_and_short_reads_are_completions() {
        let Some(mut ring) = ring(2) else { return };
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(b"abc", 0).unwrap();
        let mut back = [0u8; 8];
        // SAFETY: `back` outlives the wait below.
        unsafe { ring.push_read(file.as_raw_fd(), back.as_mut_ptr(), 8, 0, 1) }.unwrap();
        ring.wait(1).unwrap();
        assert_eq!(ring.next_completion().unwrap().result.unwrap(), 3);
        // SAFETY: descriptor -1 is refused, the memory is never touched.
        unsafe { ring.push_read(-1, back.as_mut_ptr(), 8, 0, 2) }.unwrap();
        ring.wait(1).unwrap();
        let error = ring.next_completion().unwrap().result.unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EBADF));
    }

    #[test]
    fn a_thread_is_never_without_a_ring_after_its_first() {
        let is_ring = |descriptor: RawFd| {
            let target = std::fs::read_link(format!("/proc/self/fd/{descriptor}"));
            target.is_ok_and(|target| target.to_string_lossy().contains("io_uring"))
        };
        let thread = std::thread::spawn(move || {
            let mut kept = None;
            for _ in 0..3 {
                let next = ring(1)?;
                assert!(kept.is_none_or(is_ring));
                kept = Some(next.uring.as_raw_fd());
                drop(next);
            }
            kept.filter(|kept| is_ring(*kept))
        });
        let kept = thread.join().unwrap();
        assert!(kept.is_some() || ring(1).is_none());
    }

    #[test]
    fn depth_is_a_limit_and_drop_waits() {
        let Some(mut ring) = ring(2) else { return };
        let (reader, writer) = std::io::pipe().unwrap();
        let mut back = [0u8; 1];
        // SAFETY: the ring is dropped before `back`; its drop waits for the read.
        unsafe { ring.push_read(reader.as_raw_fd(), back.as_mut_ptr(), 1, 0, 1) }.unwrap();
        ring.submit().unwrap();
        assert!(ring.next_completion().is_none());
        let feeder = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            std::io::Write::write_all(&mut &writer, b"x").unwrap();
        });
        drop(ring);
        assert_eq!(&back, b"x");
        feeder.join().unwrap();
    }

    /// Without the call that submits and waits there is no ring, and what was begun before ends all the same.
    #[test]
    fn a_refused_system_call_is_an_error_and_dropping_ends() {
        if ring(1).is_none() {
            return;
        }
        for call in [libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, libc::SYS_io_uring_register] {
            in_a_thread(|| {
                refuse(&[call], libc::EPERM);
                let error = Ring::new(4).map(drop).unwrap_err();
                assert_eq!(error.raw_os_error(), Some(libc::EPERM));
            });
        }
        in_a_thread(|| {
            let mut ring = Ring::new(4).unwrap();
            let file = tempfile::tempfile().unwrap();
            file.write_all_at(&[7; 4096], 0).unwrap();
            let mut back = [0u8; 8192];
            let (taken, queued) = back.split_at_mut(4096);
            // SAFETY: the ring is dropped before `back` and `file`; its drop waits.
            unsafe { ring.push_read(file.as_raw_fd(), taken.as_mut_ptr(), 4096, 0, 1) }.unwrap();
            ring.submit().unwrap();
            refuse(&[libc::SYS_io_uring_enter], libc::EPERM);
            // SAFETY: as above.
            unsafe { ring.push_read(file.as_raw_fd(), queued.as_mut_ptr(), 4096, 0, 2) }.unwrap();
            assert_eq!(ring.submit().unwrap_err().raw_os_error(), Some(libc::EPERM));
            drop(ring);
            assert_eq!((taken[0], taken[4095], queued[0]), (7, 7, 0));
        });
    }
}
