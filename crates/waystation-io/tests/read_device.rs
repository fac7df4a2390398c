//! Reads to devices, with host memory in the place of a device's: a thread for every copy, which begins late
//! and may be made to fail. What a real device does beyond that is for `tests/gpu`.
#![allow(clippy::unwrap_used, clippy::panic)]

mod read_support;

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use read_support::{BLOCK, Memory, bytes_of, checksums_of};
use waystation_io::job::Handle;
use waystation_io::mode::Mode;
use waystation_io::read::device::{CopyToDevice, Devices, HostRows, Region};
use waystation_io::read::plan::{Plan, ReadFile};
use waystation_io::read::{self, Options, Statistics};
use waystation_io::write::DeviceCopies;
use waystation_io::{Error, Kind, Result};

const DEVICE: u32 = 3;
const STAGING_BYTES: usize = 16 * BLOCK;

/// What a copy with some number does instead of copying.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fault {
    AtStart,
    OnTheWay,
}

#[derive(Default)]
struct Log {
    prepared: Mutex<Vec<(usize, usize)>>,
    most_prepared_bytes: AtomicUsize,
    started: AtomicUsize,
    in_flight: AtomicUsize,
    most_in_flight: AtomicUsize,
    fault: Mutex<Option<(usize, Fault)>>,
}

struct HostDevice {
    log: Arc<Log>,
    late_by: Duration,
}

struct Copies {
    thread: Option<JoinHandle<Result<()>>>,
    log: Arc<Log>,
}

impl CopyToDevice for HostDevice {
    fn prepare_staging(&self, address: usize, nbytes: usize, device: u32) -> Result<()> {
        assert_eq!(device, DEVICE);
        let mut prepared = self.log.prepared.lock().unwrap();
        prepared.push((address, address + nbytes));
        let bytes = prepared.iter().map(|range| range.1 - range.0).sum();
        self.log.most_prepared_bytes.fetch_max(bytes, Ordering::SeqCst);
        Ok(())
    }

    fn release_staging(&self, address: usize, nbytes: usize) {
        let mut prepared = self.log.prepared.lock().unwrap();
        let index = prepared.iter().position(|range| *range == (address, address + nbytes));
        prepared.remove(index.unwrap());
    }

    fn stay_near(&self, device: u32) {
        assert_eq!(device, DEVICE);
    }

    unsafe fn start(&self, copies: &[HostRows]) -> Result<Box<dyn DeviceCopies>> {
        let number = self.log.started.fetch_add(1, Ordering::SeqCst);
        let fault = self.log.fault.lock().unwrap().filter(|fault| fault.0 == number).map(|fault| fault.1);
        if fault == Some(Fault::AtStart) {
            return Err(Error::new(Kind::Unavailable, "refused on purpose"));
        }
        let prepared = self.log.prepared.lock().unwrap().clone();
        for rows in copies {
            assert_eq!(rows.device, DEVICE);
            let end = rows.source + (rows.rows - 1) * rows.source_step as usize + rows.row_bytes;
            assert!(prepared.iter().any(|range| range.0 <= rows.source && end <= range.1));
        }
        let flying = self.log.in_flight.fetch_add(1, Ordering::SeqCst) + 1;
        self.log.most_in_flight.fetch_max(flying, Ordering::SeqCst);
        let (copies, late_by) = (copies.to_vec(), self.late_by);
        let thread = std::thread::spawn(move || {
            std::thread::sleep(late_by);
            if fault == Some(Fault::OnTheWay) {
                return Err(Error::new(Kind::Unavailable, "lost on purpose"));
            }
            copies.iter().for_each(copy_rows);
            Ok(())
        });
        Ok(Box::new(Copies { thread: Some(thread), log: Arc::clone(&self.log) }))
    }
}

fn copy_rows(rows: &HostRows) {
    for row in 0..rows.rows {
        let source = rows.source + row * rows.source_step as usize;
        let destination =
            rows.destination.wrapping_add_signed(row as i64 * rows.destination_step) as usize as *mut u8;
        // SAFETY: sources are staging memory, destinations memory of the tests, until the copy was waited for.
        unsafe { std::ptr::copy_nonoverlapping(source as *const u8, destination, rows.row_bytes) };
    }
}

impl DeviceCopies for Copies {
    fn wait(&mut self) -> Result<()> {
        let outcome = self.thread.take().unwrap().join().unwrap();
        self.log.in_flight.fetch_sub(1, Ordering::SeqCst);
        outcome
    }
}

/// A verified file, memory of the "device", and what it should hold after a load.
struct Case {
    _directory: tempfile::TempDir,
    path: PathBuf,
    content: Vec<u8>,
    memory: Memory,
    log: Arc<Log>,
    late_by: Duration,
    verified: bool,
}

impl Case {
    fn new(nbytes: usize) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let (path, content) = (directory.path().join("file"), bytes_of(nbytes, 11));
        fs::write(&path, &content).unwrap();
        Self {
            _directory: directory,
            path,
            content,
            memory: Memory::new(2 * nbytes + 4096),
            log: Arc::default(),
            late_by: Duration::from_millis(2),
            verified: true,
        }
    }

    /// Starts a job; all memory but the first page is the device's.
    fn start(&self, words: &[i64], mode: Option<Mode>) -> Result<Handle<Statistics>> {
        let region =
            Region { device: DEVICE, address: self.memory.address() + 4096, nbytes: 2 * self.content.len() };
        let copier = HostDevice { log: Arc::clone(&self.log), late_by: self.late_by };
        let options = Options {
            mode,
            block_bytes: Some(BLOCK),
            threads: Some(2),
            devices: Some(Devices::new(Arc::new(copier), vec![region])?),
            staging_bytes: Some(STAGING_BYTES),
            ..Options::default()
        };
        let checksums = self.verified.then(|| checksums_of(&self.content));
        let file = ReadFile { path: self.path.clone(), file_bytes: self.content.len() as u64, checksums };
        let plan = Plan::new(vec![file], words)?;
        // SAFETY: the memory outlives the job, which every test joins.
        unsafe { read::start(plan, options) }
    }

    fn finish(&self, job: Handle<Statistics>) -> Result<Statistics> {
        job.join();
        assert_eq!(self.log.in_flight.load(Ordering::SeqCst), 0, "copies were not waited for");
        assert!(self.log.prepared.lock().unwrap().is_empty(), "staging memory was not released");
        assert!(self.log.most_prepared_bytes.load(Ordering::SeqCst) <= STAGING_BYTES);
        job.shared().take_outcome().unwrap()
    }

    fn run(&self, words: &[i64], mode: Option<Mode>) -> Result<Statistics> {
        self.finish(self.start(words, mode)?)
    }

    /// Where on the device something is.
    fn at(&self, offset: usize) -> i64 {
        (self.memory.address() + 4096 + offset) as i64
    }

    fn on_device(&self) -> &[u8] {
        &self.memory.bytes()[4096..]
    }
}

fn modes() -> [Option<Mode>; 4] {
    [None, Some(Mode::DirectRing), Some(Mode::DirectThreads), Some(Mode::Buffered)]
}

#[test]
fn everything_arrives_though_copies_are_late() {
    for mode in modes() {
        for verified in [true, false] {
            let case = Case { verified, ..Case::new(40 * BLOCK + 12_345) };
            // At an odd place in the file, and at another on the device.
            let (begin, nbytes) = (777, case.content.len() - 1000);
            let statistics = case.run(&[0, begin as i64, nbytes as i64, 0, case.at(256)], mode).unwrap();
            assert_eq!(statistics.bytes_needed, nbytes as u64);
            assert!(case.on_device()[256..][..nbytes] == case.content[begin..][..nbytes], "{mode:?}");
            assert!(case.on_device()[..256].iter().all(|&byte| byte == case.on_device()[0]));
            assert!(case.log.most_in_flight.load(Ordering::SeqCst) > 1, "copies took turns with reads");
        }
    }
}

#[test]
fn small_pieces_boxes_and_what_stays_on_the_host_are_read_together() {
    for mode in modes() {
        let case = Case::new(6 * BLOCK);
        let host = Memory::new(BLOCK);
        let mut words = vec![0, 3, BLOCK as i64 - 5, 0, host.address() as i64];
        // 500 pieces of 100 bytes, in reverse order and 256 bytes apart, between which nothing changes.
        for index in 0..500usize {
            words.extend([0, index as i64 * 100, 100, 0, case.at((499 - index) * 256)]);
        }
        // A box of 50 by 1000 bytes, whose rows are 4096 bytes apart in the file and 1024 on the device, and
        // one whose rows go backwards there.
        let (first, second) = (1 << 20, 1 << 21);
        let shape = [60, 4096, 5, 96, 50, 1000];
        words.extend([0, BLOCK as i64, 1, 2].into_iter().chain(shape).chain([case.at(first), 1024, 1]));
        words.extend([0, BLOCK as i64, 1, 2].into_iter().chain(shape).chain([case.at(second), -1024, 1]));
        let statistics = case.run(&words, mode).unwrap();
        assert_eq!(statistics.bytes_needed as usize, BLOCK - 5 + 50_000 + 2 * 50_000);
        assert!(host.bytes()[..BLOCK - 5] == case.content[3..][..BLOCK - 5]);
        let untouched = case.on_device()[case.content.len() * 2 - 1];
        for index in 0..500 {
            let place = &case.on_device()[(499 - index) * 256..][..256];
            assert_eq!(place[..100], case.content[index * 100..][..100]);
            assert!(place[100..].iter().all(|&byte| byte == untouched));
        }
        for row in 0..50 {
            let stored = &case.content[BLOCK + (5 + row) * 4096 + 96..][..1000];
            assert_eq!(&case.on_device()[first + row * 1024..][..1000], stored);
            assert_eq!(&case.on_device()[second - row * 1024..][..1000], stored);
        }
    }
}

#[test]
fn bytes_that_are_damaged_never_reach_the_device() {
    for mode in modes() {
        let case = Case::new(8 * BLOCK);
        let mut damaged = case.content.clone();
        damaged[5 * BLOCK + 9] ^= 1;
        fs::write(&case.path, damaged).unwrap();
        let untouched = case.on_device()[5 * BLOCK];
        let error = case.run(&[0, 0, case.content.len() as i64, 0, case.at(0)], mode).unwrap_err();
        assert_eq!(error.kind(), Kind::Corrupt);
        assert!(case.on_device()[5 * BLOCK..6 * BLOCK].iter().all(|&byte| byte == untouched));
    }
}

#[test]
fn a_copy_that_fails_fails_the_job_once_all_have_been_waited_for() {
    for mode in modes() {
        for (number, fault) in
            [(0, Fault::AtStart), (7, Fault::AtStart), (0, Fault::OnTheWay), (9, Fault::OnTheWay)]
        {
            let case = Case::new(24 * BLOCK);
            *case.log.fault.lock().unwrap() = Some((number, fault));
            let error = case.run(&[0, 0, case.content.len() as i64, 0, case.at(0)], mode).unwrap_err();
            assert_eq!(error.kind(), Kind::Unavailable);
            assert!(error.message().contains("on purpose"), "{error}");
        }
    }
}

#[test]
fn the_last_copy_counts_too() {
    let case = Case::new(4 * BLOCK);
    *case.log.fault.lock().unwrap() = Some((3, Fault::OnTheWay));
    let error = case.run(&[0, 0, case.content.len() as i64, 0, case.at(0)], None).unwrap_err();
    assert!(error.message().contains("lost"), "{error}");
}

#[test]
fn a_cancelled_job_leaves_no_copy_under_way() {
    for mode in modes() {
        let case = Case { late_by: Duration::from_millis(20), ..Case::new(64 * BLOCK) };
        let job = case.start(&[0, 0, case.content.len() as i64, 0, case.at(0)], mode).unwrap();
        while case.log.started.load(Ordering::SeqCst) < 3 {
            std::thread::yield_now();
        }
        job.shared().cancel();
        assert_eq!(case.finish(job).unwrap_err().kind(), Kind::Cancelled);
        assert!(case.log.started.load(Ordering::SeqCst) < 64, "it went on to the end");
    }
}

#[test]
fn progress_counts_what_has_reached_the_device() {
    let case = Case { late_by: Duration::from_millis(50), ..Case::new(BLOCK) };
    let job = case.start(&[0, 0, BLOCK as i64, 0, case.at(0)], None).unwrap();
    while case.log.started.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
    if case.log.in_flight.load(Ordering::SeqCst) == 1 && !job.shared().is_finished() {
        let (done, _) = job.shared().progress();
        assert!(done == 0 || case.on_device()[..BLOCK] == case.content[..]);
    }
    case.finish(job).unwrap();
}

#[test]
fn a_destination_at_the_edge_of_device_memory_is_refused() {
    let case = Case::new(BLOCK);
    for (address, nbytes) in [(case.at(0) - 100, 200), (case.at(2 * BLOCK) - 100, 200)] {
        let error = case.start(&[0, 0, nbytes, 0, address], None).err().unwrap();
        assert_eq!(error.kind(), Kind::InvalidInput);
    }
}

#[test]
fn regions_do_not_overlap() {
    let copier = || Arc::new(HostDevice { log: Arc::default(), late_by: Duration::ZERO });
    let region = |address, nbytes| Region { device: DEVICE, address, nbytes };
    assert!(Devices::new(copier(), vec![region(4096, 100), region(8192, 1), region(4196, 1)]).is_ok());
    for regions in [vec![region(4096, 101), region(4196, 1)], vec![region(usize::MAX, 2)]] {
        assert_eq!(Devices::new(copier(), regions).unwrap_err().kind(), Kind::InvalidInput);
    }
}
