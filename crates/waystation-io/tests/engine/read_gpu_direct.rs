//! Files read straight to a device, with host memory in the place of a device's, and reads that may give too
//! little, something else or nothing. What cuFile does beyond that is for `tests/gpu`.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;

use crate::device_support::{Case, copy_rows};
use crate::read_support::{BLOCK, Memory};
use waystation_io::aligned::AlignedBlock;
use waystation_io::mode::Mode;
use waystation_io::read::Statistics;
use waystation_io::read::device::HostRows;
use waystation_io::read::gpu_direct::{DeviceBlock, DirectFile, GpuDirect, ReadToDevice};
use waystation_io::write::DeviceCopies;
use waystation_io::{Error, Kind, Result};

const PAGE: usize = 4096;
const MODES: [Mode; 2] = [Mode::DirectRing, Mode::DirectThreads];

/// What a read with some number does, and for `Fails` those after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Fails,
    GivesAPage,
    GivesHalfAPage,
    GivesAnotherByte,
}

#[derive(Debug, Default)]
struct Log {
    files: AtomicUsize,
    blocks: AtomicUsize,
    reads: AtomicUsize,
    fault: Option<(usize, Fault)>,
    refuses_files: bool,
    refuses_blocks: bool,
}

#[derive(Debug)]
struct Reader(Arc<Log>);

#[derive(Debug)]
struct Open(File, Arc<Log>);

struct Block(AlignedBlock, Arc<Log>);

struct Copies(Option<JoinHandle<()>>);

fn refused() -> Error {
    Error::new(Kind::Unsupported, "refused on purpose")
}

impl ReadToDevice for Reader {
    fn open(&self, file: File) -> Result<Box<dyn DirectFile>> {
        if self.0.refuses_files {
            return Err(refused());
        }
        self.0.files.fetch_add(1, Ordering::SeqCst);
        Ok(Box::new(Open(file, Arc::clone(&self.0))))
    }

    fn allocate(&self, _device: u32, nbytes: usize) -> Result<Box<dyn DeviceBlock>> {
        if self.0.refuses_blocks {
            return Err(refused());
        }
        self.0.blocks.fetch_add(1, Ordering::SeqCst);
        Ok(Box::new(Block(AlignedBlock::map(nbytes)?, Arc::clone(&self.0))))
    }

    unsafe fn start(&self, copies: &[HostRows]) -> Result<Box<dyn DeviceCopies>> {
        let copies = copies.to_vec();
        Ok(Box::new(Copies(Some(std::thread::spawn(move || copies.iter().for_each(copy_rows))))))
    }
}

impl DirectFile for Open {
    unsafe fn read(
        &self,
        block: &dyn DeviceBlock,
        position: usize,
        nbytes: usize,
        offset: u64,
    ) -> Result<usize> {
        assert!(offset.is_multiple_of(PAGE as u64) && position.is_multiple_of(PAGE));
        assert!(nbytes.is_multiple_of(PAGE));
        let number = self.1.reads.fetch_add(1, Ordering::SeqCst);
        let fault = self
            .1
            .fault
            .filter(|&(first, fault)| number == first || (fault == Fault::Fails && number > first));
        let most = match fault.map(|fault| fault.1) {
            Some(Fault::Fails) => return Err(Error::new(Kind::Unavailable, "failed on purpose")),
            Some(Fault::GivesAPage) => PAGE,
            Some(Fault::GivesHalfAPage) => PAGE / 2,
            _ => nbytes,
        };
        let start = (block.address() as usize + position) as *mut u8;
        // SAFETY: the place lies in the block, which only this reader's thread uses there.
        let target = unsafe { std::slice::from_raw_parts_mut(start, most) };
        let filled = self.0.read_at(target, offset).unwrap();
        if fault.is_some_and(|fault| fault.1 == Fault::GivesAnotherByte) {
            target[filled / 2] ^= 1;
        }
        Ok(filled)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.1.files.fetch_sub(1, Ordering::SeqCst);
    }
}

impl DeviceBlock for Block {
    fn device(&self) -> u32 {
        crate::device_support::DEVICE
    }

    fn address(&self) -> u64 {
        self.0.address().as_ptr() as u64
    }

    fn fetch(&self, bytes: &mut [u8]) -> Result<()> {
        // SAFETY: the block is longer, and nothing is under way in it.
        unsafe { std::ptr::copy_nonoverlapping(self.0.address().as_ptr(), bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.1.blocks.fetch_sub(1, Ordering::SeqCst);
    }
}

impl DeviceCopies for Copies {
    fn wait(&mut self) -> Result<()> {
        self.0.take().unwrap().join().unwrap();
        Ok(())
    }
}

/// Reads all of a file but its first bytes to odd places, some of it in rows; every byte is compared.
fn run(log: Log, mode: Mode, announce: bool) -> Statistics {
    let log = Arc::new(log);
    let mut case = Case { verified: false, announce, ..Case::new(80 * BLOCK + 12_345) };
    case.gpu_direct = GpuDirect::By(Arc::new(Reader(Arc::clone(&log))));
    let (begin, split) = (777, 70 * BLOCK + 11);
    let mut words = vec![0, begin as i64, (split - begin) as i64, 0, case.at(256)];
    let (width, rows) = (3001, 400);
    words.extend([0, split as i64, 1, 2, rows, width, 3, 5, 300, 2000, case.at(100 * BLOCK), 2048, 1]);
    let statistics = case.run(&words, Some(mode)).unwrap();
    assert!(case.on_device()[256..][..split - begin] == case.content[begin..split]);
    for row in 0..300 {
        let stored = &case.content[split + (3 + row) * width as usize + 5..][..2000];
        assert_eq!(&case.on_device()[100 * BLOCK + row * 2048..][..2000], stored);
    }
    assert_eq!(log.files.load(Ordering::SeqCst), 0, "a file was not let go of");
    assert_eq!(log.blocks.load(Ordering::SeqCst), 0, "a block was not let go of");
    statistics
}

#[test]
fn everything_arrives_without_the_host() {
    for mode in MODES {
        for announce in [false, true] {
            let statistics = run(Log::default(), mode, announce);
            assert_eq!(statistics.gpu_direct_bytes, statistics.bytes_read);
            assert_eq!(statistics.gpu_direct_reason, None);
        }
    }
}

#[test]
fn a_short_read_is_continued_from_the_next_page() {
    for mode in MODES {
        let statistics = run(Log { fault: Some((2, Fault::GivesAPage)), ..Log::default() }, mode, false);
        assert_eq!(statistics.gpu_direct_bytes, statistics.bytes_read);
    }
}

#[test]
fn what_fails_on_the_way_is_read_through_the_host() {
    for mode in MODES {
        for fault in [Fault::Fails, Fault::GivesHalfAPage] {
            let statistics = run(Log { fault: Some((3, fault)), ..Log::default() }, mode, true);
            assert!(statistics.gpu_direct_bytes > 0 && statistics.gpu_direct_bytes < statistics.bytes_read);
            assert!(statistics.gpu_direct_reason.is_some());
        }
    }
}

#[test]
fn what_cannot_be_trusted_or_had_is_not_used() {
    let cases = [
        (
            Log { fault: Some((0, Fault::GivesAnotherByte)), ..Log::default() },
            "differ from those of a plain read",
        ),
        (
            Log { fault: Some((0, Fault::GivesHalfAPage)), ..Log::default() },
            "differ from those of a plain read",
        ),
        (Log { fault: Some((0, Fault::Fails)), ..Log::default() }, "failed on purpose"),
        (Log { refuses_files: true, ..Log::default() }, "refused on purpose"),
        (Log { refuses_blocks: true, ..Log::default() }, "refused on purpose"),
    ];
    for (log, reason) in cases {
        let statistics = run(log, Mode::DirectThreads, false);
        assert_eq!(statistics.gpu_direct_bytes, 0);
        assert!(statistics.gpu_direct_reason.unwrap().contains(reason));
    }
}

#[test]
fn what_the_host_needs_or_verifies_never_comes_so() {
    let reader = || GpuDirect::By(Arc::new(Reader(Arc::default())));
    let verified = Case { gpu_direct: reader(), ..Case::new(8 * BLOCK) };
    let words = [0, 0, verified.content.len() as i64, 0, verified.at(0)];
    let statistics = verified.run(&words, Some(Mode::DirectThreads)).unwrap();
    assert_eq!(statistics.gpu_direct_bytes, 0);
    assert!(statistics.gpu_direct_reason.unwrap().contains("checksums"));

    let mixed = Case { gpu_direct: reader(), verified: false, ..Case::new(8 * BLOCK) };
    let host = Memory::new(BLOCK);
    let words = [0, 0, 7 * BLOCK as i64, 0, mixed.at(0), 0, 7 * BLOCK as i64, 100, 0, host.address() as i64];
    let statistics = mixed.run(&words, Some(Mode::DirectThreads)).unwrap();
    assert_eq!(statistics.gpu_direct_bytes, 0);
    assert!(statistics.gpu_direct_reason.unwrap().contains("memory of the host"));
    assert_eq!(host.bytes()[..100], mixed.content[7 * BLOCK..][..100]);
    assert!(mixed.on_device()[..7 * BLOCK] == mixed.content[..7 * BLOCK]);
}

#[test]
fn files_that_are_damaged_or_cut_off_are_errors_as_ever() {
    for mode in MODES {
        let mut case = Case { verified: false, ..Case::new(8 * BLOCK) };
        case.gpu_direct = GpuDirect::By(Arc::new(Reader(Arc::default())));
        File::options().write(true).open(&case.path).unwrap().set_len(5 * BLOCK as u64).unwrap();
        let words = [0, 0, case.content.len() as i64, 0, case.at(0)];
        assert_eq!(case.run(&words, Some(mode)).unwrap_err().kind(), Kind::Corrupt);
    }
}
