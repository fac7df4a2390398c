//! A limit on bytes and requests a second that several processes keep together: a slow store, modelled.
//!
//! For benchmarks. A small file holds the limits, and for each of the two the time until which the store is
//! taken. Every job that names the file maps it; before each request it books its time with a
//! compare-and-swap and waits for the end of that. Invariants: processes and threads that share a file
//! together never get more than its limits allow, but for a burst of [`BURST`] after a pause; bookings are
//! served in the order in which they are made; a job without a throttle pays nothing for it. Small files of
//! metadata are not counted. A file is of use to one machine, until it is started anew.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use waystation_format::{Error, Kind, Result};

use crate::files::close;

/// What may be used at once after a pause.
pub const BURST: Duration = Duration::from_millis(10);
/// Nobody waits for so long: a time further ahead is from before the machine was started.
const LONGEST_QUEUE: Duration = Duration::from_secs(3600);
/// How often a waiting job looks whether it is to stop.
const SLICE: Duration = Duration::from_millis(20);
const MAGIC: u64 = u64::from_le_bytes(*b"wsthrot1");
const SECOND_NS: u128 = 1_000_000_000;

/// The file.
#[repr(C)]
struct Table {
    magic: AtomicU64,
    /// 0 is no limit, here and in the next.
    bytes_per_s: AtomicU64,
    requests_per_s: AtomicU64,
    bytes_until_ns: AtomicU64,
    requests_until_ns: AtomicU64,
    bytes: AtomicU64,
    requests: AtomicU64,
}

/// What a store gives in a second; `None` is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Bytes read and written.
    pub bytes_per_s: Option<u64>,
    /// Reads and writes.
    pub requests_per_s: Option<u64>,
}

/// What all processes together have asked of the store so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Bytes read and written.
    pub bytes: u64,
    /// Reads and writes.
    pub requests: u64,
}

/// One mapping of a throttle's file.
#[derive(Debug)]
pub struct Throttle {
    table: NonNull<Table>,
}

// SAFETY: the mapping belongs to the process, and all that is in it is atomic.
unsafe impl Send for Throttle {}
// SAFETY: as above.
unsafe impl Sync for Throttle {}

/// Makes the file of a throttle, which must not exist.
pub fn create(path: &Path, limits: Limits) -> Result<()> {
    if limits.bytes_per_s == Some(0) || limits.requests_per_s == Some(0) {
        return Err(Error::new(Kind::InvalidInput, "a throttle must let something through"));
    }
    let failed = |error| Error::from_io(error, "create the throttle", path);
    let words = [MAGIC, limits.bytes_per_s.unwrap_or(0), limits.requests_per_s.unwrap_or(0), 0, 0, 0, 0];
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let mut file = OpenOptions::new().write(true).create_new(true).open(path).map_err(failed)?;
    file.write_all(&bytes).and_then(|()| close(file)).map_err(failed)
}

impl Throttle {
    /// Maps the file of a throttle.
    pub fn open(path: &Path) -> Result<Self> {
        let failed = |error| Error::from_io(error, "open the throttle", path);
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(failed)?;
        let nbytes = file.metadata().map_err(failed)?.len();
        let foreign = || {
            Error::new(Kind::InvalidInput, "this is not the file of a throttle")
                .with("path", path.display().to_string())
        };
        // Beyond its end a mapping could not be read.
        if nbytes != size_of::<Table>() as u64 {
            return Err(foreign());
        }
        let throttle = Self::map(&file).map_err(|errno| failed(errno.into()))?;
        if throttle.table().magic.load(Ordering::Relaxed) != MAGIC {
            return Err(foreign());
        }
        Ok(throttle)
    }

    fn map(file: &File) -> rustix::io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address that the kernel chooses.
        let address = unsafe { mmap(null_mut(), size_of::<Table>(), access, MapFlags::SHARED, file, 0) }?;
        NonNull::new(address.cast()).map(|table| Self { table }).ok_or(rustix::io::Errno::NOMEM)
    }

    fn table(&self) -> &Table {
        // SAFETY: the mapping lives as long as `self`, is aligned to pages and as long as the table, of which
        // any bytes are valid; others change it by atomic operations only.
        unsafe { self.table.as_ref() }
    }

    /// Waits until the store has served a request of `nbytes`, or `should_stop` says that nobody wants it any
    /// more.
    pub fn take(&self, nbytes: u64, should_stop: impl Fn() -> bool) {
        let table = self.table();
        table.bytes.fetch_add(nbytes, Ordering::Relaxed);
        table.requests.fetch_add(1, Ordering::Relaxed);
        let now = now_ns();
        let end_of = |until: &AtomicU64, count: u64, per_s: &AtomicU64| match per_s.load(Ordering::Relaxed) {
            0 => now,
            per_s => book(until, duration_ns(count, per_s), now),
        };
        let bytes_end = end_of(&table.bytes_until_ns, nbytes, &table.bytes_per_s);
        let until = bytes_end.max(end_of(&table.requests_until_ns, 1, &table.requests_per_s));
        while !should_stop() {
            let left = until.saturating_sub(now_ns());
            if left == 0 {
                return;
            }
            std::thread::sleep(SLICE.min(Duration::from_nanos(left)));
        }
    }

    /// What all processes together have asked of the store so far.
    pub fn usage(&self) -> Usage {
        let table = self.table();
        Usage { bytes: table.bytes.load(Ordering::Relaxed), requests: table.requests.load(Ordering::Relaxed) }
    }
}

impl Drop for Throttle {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and nobody borrows from it any more.
        let unmapped = unsafe { munmap(self.table.as_ptr().cast(), size_of::<Table>()) };
        debug_assert!(unmapped.is_ok());
    }
}

/// How long a store that gives `per_s` a second is busy with `count`.
fn duration_ns(count: u64, per_s: u64) -> u64 {
    u64::try_from(u128::from(count) * SECOND_NS / u128::from(per_s)).unwrap_or(u64::MAX)
}

/// Books a time after those that are booked already; returns its end.
fn book(until: &AtomicU64, duration_ns: u64, now_ns: u64) -> u64 {
    let mut known = until.load(Ordering::Relaxed);
    loop {
        let is_of_this_boot = known <= now_ns.saturating_add(LONGEST_QUEUE.as_nanos() as u64);
        let free = if is_of_this_boot { known } else { now_ns };
        let begin = free.max(now_ns.saturating_sub(BURST.as_nanos() as u64));
        let end = begin.saturating_add(duration_ns);
        match until.compare_exchange_weak(known, end, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => return end,
            Err(other) => known = other,
        }
    }
}

/// The time since the machine was started, which all its processes share.
fn now_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is writable, and this clock exists on every Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec as u64 * SECOND_NS as u64 + now.tv_nsec as u64
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::time::Instant;

    const MIB: u64 = 1 << 20;
    const BURST_NS: u64 = BURST.as_nanos() as u64;

    #[test]
    fn bookings_follow_one_another() {
        let until = AtomicU64::new(0);
        assert_eq!(book(&until, 500, BURST_NS), 500);
        assert_eq!(book(&until, 500, BURST_NS), 1000);
        // A pause leaves no more than the burst.
        let later = 50 * BURST_NS;
        assert_eq!(book(&until, 500, later), later - BURST_NS + 500);
    }

    #[test]
    fn a_time_from_before_the_start_of_the_machine_is_forgotten() {
        let until = AtomicU64::new(u64::MAX);
        assert_eq!(book(&until, 7, 100), 107);
    }

    #[test]
    fn durations_do_not_overflow() {
        assert_eq!(duration_ns(u64::MAX, 1), u64::MAX);
        assert_eq!(duration_ns(3, 2), 1_500_000_000);
    }

    #[test]
    fn threads_with_mappings_of_their_own_share_a_limit() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("throttle");
        create(&path, Limits { bytes_per_s: Some(64 * MIB), requests_per_s: None }).unwrap();
        let start = Instant::now();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let throttle = Throttle::open(&path).unwrap();
                    (0..4).for_each(|_| throttle.take(MIB, || false));
                });
            }
        });
        // 16 MiB take a quarter of a second, less the burst; how much longer is the machine's affair.
        assert!(start.elapsed() >= Duration::from_millis(250) - BURST);
        let usage = Throttle::open(&path).unwrap().usage();
        assert_eq!(usage, Usage { bytes: 16 * MIB, requests: 16 });
    }

    #[test]
    fn requests_are_limited_whatever_their_size() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("throttle");
        create(&path, Limits { bytes_per_s: None, requests_per_s: Some(100) }).unwrap();
        let throttle = Throttle::open(&path).unwrap();
        let start = Instant::now();
        (0..11).for_each(|_| throttle.take(0, || false));
        assert!(start.elapsed() >= Duration::from_millis(110) - BURST);
    }

    #[test]
    fn nobody_waits_who_is_to_stop() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("throttle");
        create(&path, Limits { bytes_per_s: Some(1), requests_per_s: None }).unwrap();
        Throttle::open(&path).unwrap().take(1 << 40, || true); // ends at all
    }

    #[test]
    fn other_files_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        assert_eq!(Throttle::open(&path).unwrap_err().kind(), Kind::NotFound);
        for content in [&b""[..], &[7; size_of::<Table>()], &[0; 4096]] {
            std::fs::write(&path, content).unwrap();
            assert_eq!(Throttle::open(&path).unwrap_err().kind(), Kind::InvalidInput);
        }
        let limits = Limits { bytes_per_s: Some(1), requests_per_s: None };
        assert_eq!(create(&path, limits).unwrap_err().kind(), Kind::Conflict);
        let nothing = Limits { bytes_per_s: Some(0), requests_per_s: None };
        assert_eq!(create(&directory.path().join("new"), nothing).unwrap_err().kind(), Kind::InvalidInput);
    }
}
