//! Device blocks, with host memory in the place of a device's; and faults in the middle of a job, which
//! the copy from the "device" sets off at a known block.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};

use waystation_io::local::Local;
use waystation_io::mode::Mode;
use waystation_io::write::{self, DeviceCopies, DeviceCopy, DeviceRows, FileInput, Options, Statistics};
use waystation_io::{Error, Kind, Result};

const AUTOMATIC: Options = Options::AUTOMATIC;

static PREPARED: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());
static IN_FLIGHT: AtomicUsize = AtomicUsize::new(0);
static MOST_IN_FLIGHT: AtomicUsize = AtomicUsize::new(0);
static WAITED: AtomicUsize = AtomicUsize::new(0);
/// Runs before the wait with this number.
type Hook = (usize, Box<dyn FnOnce() -> Result<()> + Send>);
static HOOK: Mutex<Option<Hook>> = Mutex::new(None);

/// Copies when waited for, so that a worker that does not wait writes wrong bytes.
struct HostDevice;

struct Copies(Vec<DeviceRows>);

impl DeviceCopy for HostDevice {
    fn prepare_staging(&self, address: usize, nbytes: usize) -> Result<()> {
        PREPARED.lock().unwrap().push((address, address + nbytes));
        Ok(())
    }

    fn release_staging(&self, address: usize, nbytes: usize) {
        let mut prepared = PREPARED.lock().unwrap();
        let index = prepared.iter().position(|range| *range == (address, address + nbytes));
        assert!(index.is_some(), "released what was not prepared");
        prepared.remove(index.unwrap());
    }

    unsafe fn start(&self, copies: &[DeviceRows]) -> Result<Box<dyn DeviceCopies>> {
        let prepared = PREPARED.lock().unwrap();
        for rows in copies {
            assert_eq!(rows.device, 3);
            let end = rows.destination + (rows.rows - 1) * rows.destination_step as usize + rows.row_bytes;
            assert!(prepared.iter().any(|range| range.0 <= rows.destination && end <= range.1));
        }
        MOST_IN_FLIGHT.fetch_max(IN_FLIGHT.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        Ok(Box::new(Copies(copies.to_vec())))
    }
}

impl DeviceCopies for Copies {
    fn wait(&mut self) -> Result<()> {
        IN_FLIGHT.fetch_sub(1, Ordering::SeqCst);
        let number = WAITED.fetch_add(1, Ordering::SeqCst);
        let hook = HOOK.lock().unwrap().take_if(|hook| hook.0 == number);
        hook.map_or(Ok(()), |hook| hook.1())?;
        for rows in &self.0 {
            for row in 0..rows.rows {
                let source =
                    (rows.source as usize).wrapping_add_signed(row as isize * rows.source_step as isize);
                let destination = rows.destination + row * rows.destination_step as usize;
                // SAFETY: sources are vectors of the tests, destinations staging memory.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        source as *const u8,
                        destination as *mut u8,
                        rows.row_bytes,
                    );
                }
            }
        }
        Ok(())
    }
}

/// One test at a time: the device and its counters belong to the process.
fn device() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    static REGISTER: Once = Once::new();
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    REGISTER.call_once(|| write::register_device_copy(Arc::new(HostDevice)).unwrap());
    for counter in [&IN_FLIGHT, &MOST_IN_FLIGHT, &WAITED] {
        counter.store(0, Ordering::SeqCst);
    }
    *HOOK.lock().unwrap() = None;
    turn
}

fn run(files: Vec<FileInput>, options: Options) -> Result<Statistics> {
    // SAFETY: tests keep their sources until the job has been joined here.
    let job = unsafe { write::start(Local::by_path(), files, options) }?;
    job.join();
    assert_eq!(IN_FLIGHT.load(Ordering::SeqCst), 0, "copies were not waited for");
    assert!(PREPARED.lock().unwrap().is_empty(), "staging memory was not released");
    job.shared().take_outcome().unwrap()
}

fn noise(nbytes: usize) -> Vec<u8> {
    (0..nbytes).map(|index| ((index * 2_654_435_761) >> 13) as u8).collect()
}

/// `source` as rows of `row_bytes`, of which the device holds the first half and the host the second.
fn halves(path: PathBuf, source: &[u8], row_bytes: usize, parts: &mut Vec<Vec<u8>>) -> FileInput {
    let (rows, half) = (source.len() / row_bytes, row_bytes / 2);
    let mut words = vec![0, 1, 2, rows as i64, row_bytes as i64, 2];
    for (device, offset) in [(3, 0), (-1, half)] {
        let part: Vec<u8> =
            source.chunks(row_bytes).flat_map(|row| row[offset..][..half].iter().copied()).collect();
        words.extend([
            device,
            part.as_ptr() as i64,
            0,
            offset as i64,
            rows as i64,
            half as i64,
            half as i64,
            1,
        ]);
        parts.push(part);
    }
    FileInput { path, header: Vec::new(), file_bytes: source.len() as u64, words }
}

fn on_device(path: PathBuf, source: &[u8]) -> FileInput {
    let words = vec![0, source.len() as i64, 0, 1, 3, source.as_ptr() as i64];
    FileInput { path, header: Vec::new(), file_bytes: source.len() as u64, words }
}

fn modes() -> [Option<Mode>; 3] {
    [None, Some(Mode::DirectThreads), Some(Mode::Buffered)]
}

#[test]
fn blocks_of_device_and_host_meet_in_the_file() {
    let _turn = device();
    let directory = tempfile::tempdir().unwrap();
    let source = noise(10 << 20);
    for mode in modes() {
        let (path, mut parts) = (directory.path().join("file"), Vec::new());
        let files = vec![halves(path.clone(), &source, 1 << 10, &mut parts)];
        run(files, Options { mode, ..AUTOMATIC }).unwrap();
        assert!(fs::read(&path).unwrap() == source);
        fs::remove_file(path).unwrap();
    }
    assert!(MOST_IN_FLIGHT.load(Ordering::SeqCst) > 1, "nothing was copied ahead");
}

#[test]
fn only_one_can_copy_from_devices() {
    let _turn = device();
    let error = write::register_device_copy(Arc::new(HostDevice)).unwrap_err();
    assert_eq!(error.kind(), Kind::Conflict);
}

#[test]
fn a_failing_copy_fails_the_job_and_leaves_nothing() {
    let _turn = device();
    let directory = tempfile::tempdir().unwrap();
    let source = noise(12 << 20);
    for mode in modes() {
        WAITED.store(0, Ordering::SeqCst);
        *HOOK.lock().unwrap() = Some((5, Box::new(|| Err(Error::new(Kind::Unavailable, "the bus is gone")))));
        let error =
            run(vec![on_device(directory.path().join("file"), &source)], Options { mode, ..AUTOMATIC });
        assert_eq!(error.unwrap_err().message(), "the bus is gone");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}

#[test]
fn a_panicking_copy_is_internal_and_leaves_nothing() {
    let _turn = device();
    let directory = tempfile::tempdir().unwrap();
    let source = noise(12 << 20);
    *HOOK.lock().unwrap() = Some((5, Box::new(|| panic!("on purpose"))));
    // SAFETY: `source` outlives the job.
    let job = unsafe {
        write::start(Local::by_path(), vec![on_device(directory.path().join("file"), &source)], AUTOMATIC)
    }
    .unwrap();
    job.join();
    assert_eq!(job.shared().take_outcome().unwrap().unwrap_err().kind(), Kind::Internal);
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    assert!(PREPARED.lock().unwrap().is_empty());
}

/// A small file system in memory, unmounted when dropped.
struct SmallMount(tempfile::TempDir);

impl SmallMount {
    fn new(mib: usize) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let mounted = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={mib}m"), "tmpfs"])
            .arg(directory.path())
            .status();
        mounted.is_ok_and(|status| status.success()).then_some(Self(directory))
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for SmallMount {
    fn drop(&mut self) {
        let unmounted = std::process::Command::new("umount").arg(self.path()).status();
        assert!(unmounted.is_ok_and(|status| status.success()));
    }
}

#[test]
fn space_that_runs_out_in_the_middle_is_unavailable_and_leaves_nothing() {
    let _turn = device();
    let Some(mount) = SmallMount::new(24) else {
        eprintln!("skipped: this user may not mount a small file system");
        return;
    };
    let source = noise(16 << 20);
    for mode in modes() {
        let ballast = mount.path().join("ballast");
        let greedy = ballast.clone();
        WAITED.store(0, Ordering::SeqCst);
        // The space was there at the start, but then something else takes what is left.
        let take_rest = move || {
            fs::write(&greedy, vec![1; 32 << 20]).unwrap_err();
            Ok(())
        };
        *HOOK.lock().unwrap() = Some((4, Box::new(take_rest)));
        let path = mount.path().join("file");
        let error = run(vec![on_device(path.clone(), &source)], Options { mode, ..AUTOMATIC }).unwrap_err();
        assert_eq!((error.kind(), error.context("errno")), (Kind::Unavailable, Some("28")), "{error}");
        assert_eq!(error.context("path"), path.to_str());
        fs::remove_file(ballast).unwrap();
        assert_eq!(fs::read_dir(mount.path()).unwrap().count(), 0);
    }
}

#[test]
fn too_small_a_file_system_is_refused_at_once() {
    let _turn = device();
    let Some(mount) = SmallMount::new(8) else {
        eprintln!("skipped: this user may not mount a small file system");
        return;
    };
    let source = noise(9 << 20);
    let error = run(vec![on_device(mount.path().join("file"), &source)], AUTOMATIC).unwrap_err();
    assert_eq!((error.kind(), error.context("errno")), (Kind::Unavailable, Some("28")));
    assert!(error.message().contains(&source.len().to_string()), "{error}");
    assert_eq!(WAITED.load(Ordering::SeqCst), 0);
}
