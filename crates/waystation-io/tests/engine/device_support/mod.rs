//! Reads to devices, with host memory in the place of a device's: a thread for every copy, which begins late
//! and may be made to fail, or to wait. What a real device does beyond that is for `tests/gpu`.
#![allow(dead_code)] // each test program uses its part

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use waystation_io::job::Handle;
use waystation_io::local::Local;
use waystation_io::mode::Mode;
use waystation_io::read::device::{CopyToDevice, Devices, HostRows, Region};
use waystation_io::read::gpu_direct::GpuDirect;
use waystation_io::read::plan::{Plan, ReadFile};
use waystation_io::read::{self, Options, Statistics};
use waystation_io::write::DeviceCopies;
use waystation_io::{Error, Kind, Result};

use crate::read_support::{BLOCK, Memory, bytes_of, checksums_of};

pub const DEVICE: u32 = 3;
pub const STAGING_BYTES: usize = 16 * BLOCK;

/// What a copy with some number does instead of copying.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    AtStart,
    OnTheWay,
}

/// What became of copies, and what is to become of them.
#[derive(Default)]
pub struct Log {
    pub prepared: Mutex<Vec<(usize, usize)>>,
    pub most_prepared_bytes: AtomicUsize,
    pub started: AtomicUsize,
    pub in_flight: AtomicUsize,
    pub most_in_flight: AtomicUsize,
    pub fault: Mutex<Option<(usize, Fault)>>,
    /// Copies to this address of the device and beyond wait until it is `None`.
    pub held_from: Mutex<Option<u64>>,
    pub released: Condvar,
}

impl Log {
    /// Lets all copies go on.
    pub fn release(&self) {
        *self.held_from.lock().unwrap() = None;
        self.released.notify_all();
    }

    fn wait_for_release(&self, copies: &[HostRows]) {
        let furthest = copies.iter().map(|rows| rows.destination).max().unwrap();
        let held = self.held_from.lock().unwrap();
        drop(self.released.wait_while(held, |from| from.is_some_and(|from| furthest >= from)).unwrap());
    }
}

/// A device whose memory is the host's.
pub struct HostDevice {
    pub log: Arc<Log>,
    pub late_by: Duration,
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
        let (copies, late_by, log) = (copies.to_vec(), self.late_by, Arc::clone(&self.log));
        let thread = std::thread::spawn(move || {
            log.wait_for_release(&copies);
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

/// Copies rows at once.
pub fn copy_rows(rows: &HostRows) {
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

    fn are_over(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

/// A verified file, memory of the "device", and what it should hold after a load.
pub struct Case {
    pub directory: tempfile::TempDir,
    pub path: PathBuf,
    pub content: Vec<u8>,
    pub memory: Memory,
    pub log: Arc<Log>,
    pub late_by: Duration,
    pub verified: bool,
    pub announce: bool,
    pub gpu_direct: GpuDirect,
}

impl Case {
    pub fn new(nbytes: usize) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let (path, content) = (directory.path().join("file"), bytes_of(nbytes, 11));
        fs::write(&path, &content).unwrap();
        Self {
            directory,
            path,
            content,
            memory: Memory::new(2 * nbytes + 4096),
            log: Arc::default(),
            late_by: Duration::from_millis(2),
            verified: true,
            announce: false,
            gpu_direct: GpuDirect::Unwanted,
        }
    }

    /// Starts a job; all memory but the first page is the device's.
    pub fn start(&self, words: &[i64], mode: Option<Mode>) -> Result<Handle<Statistics>> {
        let region =
            Region { device: DEVICE, address: self.memory.address() + 4096, nbytes: 2 * self.content.len() };
        let copier = HostDevice { log: Arc::clone(&self.log), late_by: self.late_by };
        let options = Options {
            mode,
            block_bytes: Some(BLOCK),
            threads: Some(2),
            devices: Some(Devices::new(Arc::new(copier), vec![region])?),
            staging_bytes: Some(STAGING_BYTES),
            announce: self.announce,
            gpu_direct: self.gpu_direct.clone(),
            ..Options::default()
        };
        let checksums = self.verified.then(|| checksums_of(&self.content));
        let file = ReadFile {
            path: self.path.clone(),
            file_bytes: self.content.len() as u64,
            checksums,
            version: None,
        };
        let plan = Plan::new(vec![file], words)?;
        // SAFETY: the memory outlives the job, which every test joins.
        unsafe { read::start(Local::by_path(), plan, options) }
    }

    /// Waits for a job, after which nothing of it may be left.
    pub fn finish(&self, job: Handle<Statistics>) -> Result<Statistics> {
        job.join();
        assert_eq!(self.log.in_flight.load(Ordering::SeqCst), 0, "copies were not waited for");
        assert!(self.log.prepared.lock().unwrap().is_empty(), "staging memory was not released");
        assert!(self.log.most_prepared_bytes.load(Ordering::SeqCst) <= STAGING_BYTES);
        job.shared().take_outcome().unwrap()
    }

    /// A job from start to end.
    pub fn run(&self, words: &[i64], mode: Option<Mode>) -> Result<Statistics> {
        self.finish(self.start(words, mode)?)
    }

    /// Where on the device something is.
    pub fn at(&self, offset: usize) -> i64 {
        (self.memory.address() + 4096 + offset) as i64
    }

    /// What is on the device.
    pub fn on_device(&self) -> &[u8] {
        &self.memory.bytes()[4096..]
    }
}

/// Every way to read.
pub fn modes() -> [Option<Mode>; 4] {
    [None, Some(Mode::DirectRing), Some(Mode::DirectThreads), Some(Mode::Buffered)]
}
