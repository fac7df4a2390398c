//! What cannot be seen from outside: that a wrong choice of mode only costs time, and that a file which shrinks
//! while it is read is Corrupt.

use std::fs::{self, OpenOptions};
use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use proptest::prelude::*;
use waystation_format::checksum::crc64;
use waystation_format::{Error, Kind};

use super::choice::{count_workers, depth_of_ring};
use super::files::Files;
use super::flight::Flight;
use super::portion::Reader;
use super::source::{DIRECT_MOST_PARTS, Opening, Source, Wanted};
use super::*;
use crate::aligned::AlignedBlock;
use crate::local::Local;
use crate::read::device::{CopyToDevice, Delivery, Devices, HostRows};
use crate::read::layout::{Layout, Rules};
use crate::read::plan::{FilePlan, Plan, ReadFile};
use crate::read::spans::{portions, spans_of};
use crate::read::tests::{BLOCK, DIRECT, plan};
use crate::read::{Options, start};
use crate::refusals::{in_a_thread, refuse};
use crate::write::DeviceCopies;

/// A file of two blocks, opened by a mode, and where it is to go.
struct Opened {
    plan: Plan,
    source: Arc<Source>,
    memory: AlignedBlock,
    content: Vec<u8>,
    file: tempfile::NamedTempFile,
}

fn opened(mode: Mode, destination_offset: usize) -> Opened {
    let content: Vec<u8> = (0..2 * BLOCK_BYTES).map(|index| (index * 7 / 5) as u8).collect();
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), &content).unwrap();
    file.as_file().sync_all().unwrap();
    let memory = AlignedBlock::map(2 * BLOCK_BYTES + destination_offset).unwrap();
    let address = memory.address().as_ptr() as usize + destination_offset;
    let checksums = content.chunks(BLOCK_BYTES).map(crc64).collect();
    let plan = plan(file.path().to_owned(), 2 * BLOCK, Some(checksums), &[(0, 2 * BLOCK, address)]);
    let spans = spans_of(&plan.files[0]);
    let wanted = Wanted {
        plan: &plan.files[0],
        spans: &spans,
        mode: Some(mode),
        cold_mode: mode,
        opening: &Opening::default(),
    };
    let source = Arc::new(Source::open(&wanted).unwrap());
    Opened { plan, source, memory, content, file }
}

#[test]
fn a_file_that_shrinks_meanwhile_is_corrupt() {
    for mode in Mode::ALL {
        let opened = opened(mode, 0);
        let file = &opened.plan.files[0];
        opened.file.as_file().set_len(BLOCK + 100).unwrap();
        // SAFETY: the memory outlives the read.
        let outcome = unsafe {
            Reader::new(1, 2 * BLOCK_BYTES, Delivery::default()).unwrap().read(
                file,
                &opened.source,
                None,
                0..2 * BLOCK,
            )
        };
        let error = outcome.unwrap_err();
        assert_eq!(error.kind(), Kind::Corrupt, "{error}");
        assert!(error.message().contains("truncated: 262244 bytes"), "{error}");
        let Some(mut flight) = Flight::new(1, 2 * BLOCK_BYTES, Delivery::default()).unwrap() else {
            continue;
        };
        // SAFETY: as above; landing waits.
        unsafe { flight.send(file, &opened.source, 0..2 * BLOCK) }.unwrap();
        assert_eq!(flight.land().unwrap_err().kind(), Kind::Corrupt);
    }
}

#[test]
fn an_error_of_the_system_is_told_with_path_and_offset() {
    let opened = opened(Mode::Buffered, 0);
    in_a_thread(|| {
        let mut reader = Reader::new(1, BLOCK_BYTES, Delivery::default()).unwrap();
        refuse(&[libc::SYS_preadv], libc::EIO);
        // SAFETY: the memory outlives the read.
        let outcome = unsafe { reader.read(&opened.plan.files[0], &opened.source, None, BLOCK..2 * BLOCK) };
        let error = outcome.unwrap_err();
        assert_eq!(error.context("path"), opened.file.path().to_str());
        assert_eq!(error.context("offset"), Some(BLOCK.to_string().as_str()));
    });
}

#[test]
fn a_refused_direct_transfer_is_repeated_through_the_page_cache() {
    for by_ring in [false, true] {
        let mut opened = opened(Mode::DirectRing, 1);
        let Some(source) = Arc::get_mut(&mut opened.source) else { return };
        if source.mode() == Mode::Buffered {
            return; // no direct transfers here at all
        }
        // An odd address is what no device accepts.
        source.believe(Rules { memory_alignment: 1, ..DIRECT });
        let file = &opened.plan.files[0];
        let delivered = if by_ring {
            let Some(mut flight) = Flight::new(2, 2 * BLOCK_BYTES, Delivery::default()).unwrap() else {
                return;
            };
            // SAFETY: the memory outlives the flight; landing waits.
            unsafe { flight.send(file, &opened.source, 0..2 * BLOCK) }.unwrap();
            flight.land().unwrap()
        } else {
            let mut reader = Reader::new(1, 2 * BLOCK_BYTES, Delivery::default()).unwrap();
            // SAFETY: the memory outlives the read.
            unsafe { reader.read(file, &opened.source, None, 0..2 * BLOCK) }.unwrap()
        };
        assert_eq!((delivered, opened.source.mode()), (2 * BLOCK, Mode::Buffered));
        // SAFETY: filled above, and nobody writes any more.
        let bytes = unsafe {
            std::slice::from_raw_parts(opened.memory.address().as_ptr().add(1), opened.content.len())
        };
        assert!(bytes == opened.content);
    }
}

/// Workers for a file of 64 MiB, of which everything is needed, in runs of `run_bytes`.
fn workers(path: PathBuf, run_bytes: u64, options: &Options) -> usize {
    const FILE_BYTES: u64 = 64 << 20;
    const RING_THREADS: usize = 1;
    let rows = FILE_BYTES / run_bytes;
    let (rows, run) = (rows as i64, run_bytes as i64);
    // Rows that are further apart in memory than in the file.
    let words = [0, 0, 1, 2, rows, run, 0, 0, rows, run, 0x10_0000, run + 64, 1];
    let plan =
        Plan::new(vec![ReadFile { path, file_bytes: FILE_BYTES, checksums: None, version: None }], &words)
            .unwrap();
    let spans: Vec<Vec<Range<u64>>> = plan.files.iter().map(spans_of).collect();
    let mode = options.mode.unwrap_or(Mode::DirectRing);
    let way = Way { mode, block_bytes: 1 << 20, depth: 16, threads: RING_THREADS };
    let files = Files::new(&plan, &spans, options.mode, way.mode, Opening::default());
    count_workers(&way, options, FILE_BYTES, &plan, &files).unwrap()
}

/// A device that nothing is copied to.
struct Untouched;

impl CopyToDevice for Untouched {
    fn prepare_staging(&self, _: usize, _: usize, _: u32) -> Result<()> {
        Ok(())
    }

    fn release_staging(&self, _: usize, _: usize) {}

    fn stay_near(&self, _: u32) {}

    unsafe fn start(&self, _: &[HostRows]) -> Result<Box<dyn DeviceCopies>> {
        Err(Error::new(Kind::Internal, "nothing is to be copied"))
    }
}

fn to_a_device(mode: Option<Mode>) -> Options {
    let devices = Devices::new(Arc::new(Untouched), Vec::new()).unwrap();
    Options { mode, devices: Some(devices), ..Options::default() }
}

#[test]
fn there_are_several_workers_on_any_number_of_cores() {
    for mode in Mode::ALL {
        let options = Options { mode: Some(mode), ..Options::default() };
        assert_eq!(workers(PathBuf::new(), 1 << 20, &options), 8);
        let prescribed = Options { threads: Some(3), ..options };
        assert_eq!(workers(PathBuf::new(), 1 << 20, &prescribed), 3);
    }
}

#[test]
fn each_of_several_rings_has_requests_in_flight_while_others_wait() {
    let way = Way { mode: Mode::DirectRing, block_bytes: 1 << 20, depth: 16, threads: 8 };
    assert_eq!(depth_of_ring(&way, &Options::default()), 4);
    assert_eq!(depth_of_ring(&way, &Options { depth: Some(16), ..Options::default() }), 2);
    assert_eq!(depth_of_ring(&way, &to_a_device(None)), 2);
    assert_eq!(depth_of_ring(&Way { threads: 1, ..way }, &Options::default()), 16);
    assert_eq!(depth_of_ring(&Way { block_bytes: 16 << 20, depth: 8, ..way }, &Options::default()), 1);
}

#[test]
fn a_ring_to_a_device_gets_few_workers_and_copying_every_core() {
    let cores = std::thread::available_parallelism().map_or(1, usize::from).min(16);
    let count = |run_bytes, mode| workers(PathBuf::new(), run_bytes, &to_a_device(Some(mode)));
    assert_eq!(count(1 << 20, Mode::DirectRing), 1);
    assert_eq!(count(64, Mode::DirectRing), cores);
    assert_eq!(count(1 << 20, Mode::Buffered), cores);
    assert_eq!(count(1 << 20, Mode::DirectThreads), cores);
}

#[test]
fn a_cached_file_goes_to_a_device_by_every_core_a_cold_one_as_the_way_says() {
    let cores = std::thread::available_parallelism().map_or(1, usize::from).min(16);
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), vec![7; 64 << 20]).unwrap();
    assert_eq!(workers(file.path().to_owned(), 1 << 20, &to_a_device(None)), cores);
    file.as_file().sync_all().unwrap();
    rustix::fs::fadvise(file.as_file(), 0, None, rustix::fs::Advice::DontNeed).unwrap();
    let mut byte = [0];
    let mut byte = [std::io::IoSliceMut::new(&mut byte)];
    let flags = rustix::io::ReadWriteFlags::NOWAIT;
    if rustix::io::preadv2(file.as_file(), &mut byte, 1 << 20, flags) == Err(rustix::io::Errno::AGAIN) {
        assert_eq!(workers(file.path().to_owned(), 1 << 20, &to_a_device(None)), 1);
    }
    let missing = file.path().with_extension("missing");
    let plan = plan(missing, 64 << 20, None, &[(0, 64 << 20, 0x10_0000)]);
    let spans: Vec<Vec<Range<u64>>> = plan.files.iter().map(spans_of).collect();
    let error =
        Files::new(&plan, &spans, None, Mode::DirectRing, Opening::default()).are_cached().unwrap_err();
    assert_eq!(error.kind(), Kind::NotFound);
}

/// A box of an array of bytes with two axes, as a resharded load has them, and how it is read. Everything is
/// small, so that many are tried: runs of a thousand bytes are read in place where it is usually 128 KiB.
#[derive(Clone, Debug)]
struct Geometry {
    rows: u64,
    row_bytes: u64,
    /// First row and column, and their number.
    window: [u64; 4],
    /// Where the array begins in the file.
    chunk_offset: u64,
    /// Bytes between rows in memory, and where the first lies from a page on.
    padding: u64,
    destination_offset: u64,
    unit_bytes: u64,
    offset_alignment: u64,
    memory_alignment: usize,
    least_bytes: u64,
    depth: usize,
    /// Units after which direct reads are refused, if they are.
    refused_after: Option<usize>,
}

const GEOMETRY_BYTES: u64 = 128 << 10;

fn geometry() -> impl Strategy<Value = Geometry> {
    let shape = (1u64..65, prop_oneof![1u64..20_000, (1u64..40).prop_map(|pages| pages * 512)]);
    let placed = prop_oneof![Just(0u64), (0u64..9).prop_map(|pages| pages * 512), 0u64..5000];
    let places = (placed.clone(), placed.clone(), placed);
    let alignments = prop::sample::select(vec![(512u64, 512usize), (512, 4096), (4096, 512), (4096, 4096)]);
    let reading = (1u64..9, alignments, 1u64..9, 1usize..5, prop::option::of(0usize..8));
    (shape, any::<[u64; 4]>(), places, reading).prop_map(
        |((rows, row_bytes), cuts, (chunk_offset, padding, destination_offset), reading)| {
            let (unit, (offset_alignment, memory_alignment), least, depth, refused_after) = reading;
            let rows = rows.min((GEOMETRY_BYTES - chunk_offset) / row_bytes).max(1);
            let cut = |from: u64, length: u64, extent: u64| {
                let begin = from % extent;
                (begin, 1 + length % (extent - begin))
            };
            // Half of all columns begin and end at pages, as those of real models do.
            let grain = if cuts[3] % 2 == 0 && row_bytes >= 512 { 512 } else { 1 };
            let (row, row_count) = cut(cuts[0], cuts[1], rows);
            let (column, column_count) = cut(cuts[2], cuts[3] / 2, row_bytes / grain);
            Geometry {
                rows,
                row_bytes,
                window: [row, column * grain, row_count, column_count * grain],
                chunk_offset,
                padding,
                destination_offset,
                unit_bytes: unit * 4096,
                offset_alignment,
                memory_alignment,
                least_bytes: least * 512,
                depth,
                refused_after,
            }
        },
    )
}

impl Geometry {
    fn words(&self, address: usize) -> Vec<i64> {
        let [row, column, row_count, column_count] = self.window;
        let shapes = [self.rows, self.row_bytes, row, column, row_count, column_count];
        let mut words = vec![0, self.chunk_offset as i64, 1, 2];
        words.extend(shapes.map(|word| word as i64));
        words.extend([address as i64, self.stride() as i64, 1]);
        words
    }

    fn stride(&self) -> u64 {
        self.window[3] + self.padding
    }

    fn rules(&self) -> Rules {
        let Self { offset_alignment, memory_alignment, least_bytes, .. } = *self;
        Rules { offset_alignment, memory_alignment, least_bytes, most_parts: DIRECT_MOST_PARTS }
    }

    fn units(&self, plan: &FilePlan) -> Vec<Range<u64>> {
        spans_of(plan).into_iter().flat_map(|span| portions(span, self.unit_bytes)).collect()
    }

    fn plan(&self, path: &Path, address: usize) -> Plan {
        let file =
            ReadFile { path: path.to_owned(), file_bytes: GEOMETRY_BYTES, checksums: None, version: None };
        Plan::new(vec![file], &self.words(address)).unwrap()
    }
}

/// How many geometries a test tries: `usual` in `make test`, and in `make test-long` a hundred times as many.
fn cases(usual: u32) -> ProptestConfig {
    let is_long = std::env::var_os("WAYSTATION_TEST_LONG").is_some();
    let cases = if is_long { 100 * usual } else { usual };
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(cases(20_000))]

    /// Parts cover a unit in file order, and are never more than there is room for.
    #[test]
    fn a_unit_has_no_more_parts_than_there_is_room_for(geometry in geometry(), room in 1usize..20) {
        let plan = geometry.plan(Path::new(""), 0x10_0000 + geometry.destination_offset as usize);
        let room = NonZeroUsize::new(room).unwrap();
        let mut layout = Layout::default();
        for rules in [geometry.rules(), Rules { most_parts: NonZeroUsize::MAX, ..geometry.rules() }] {
            for unit in geometry.units(&plan.files[0]) {
                layout.divide(&plan.files[0], unit.clone(), &rules, room, 0x1000 as *mut u8);
                prop_assert!(layout.parts().len() <= room.min(rules.most_parts).get());
                let mut position = unit.start;
                for part in layout.parts() {
                    prop_assert_eq!(part.begin, position);
                    prop_assert!(part.nbytes > 0);
                    position += part.nbytes as u64;
                }
                prop_assert_eq!(position, unit.end.next_multiple_of(rules.offset_alignment));
            }
        }
    }
}

proptest! {
    #![proptest_config(cases(4000))]

    /// A ring reads any geometry, also where direct reads are refused on the way.
    #[test]
    fn a_ring_reads_every_geometry(geometry in geometry()) {
        let (_, path, content) = &*GEOMETRY_FILE;
        let nbytes = (geometry.destination_offset + geometry.stride() * geometry.window[2]) as usize;
        let memory = AlignedBlock::map(nbytes).unwrap();
        let first = memory.address().as_ptr() as usize + geometry.destination_offset as usize;
        let plan = geometry.plan(path, first);
        let plan = &plan.files[0];
        let mode = Some(Mode::DirectRing);
        let spans = spans_of(plan);
        let mut source =
            Source::open(&Wanted { plan, spans: &spans, mode, cold_mode: Mode::DirectRing, opening: &Opening::default() }).unwrap();
        source.believe(geometry.rules());
        let source = Arc::new(source);
        // Scratch is as long as a unit that is rounded up to the alignment.
        let unit_bytes = geometry.unit_bytes as usize;
        let Some(mut flight) = Flight::new(geometry.depth, unit_bytes, Delivery::default()).unwrap() else {
            return Ok(());
        };
        for (number, unit) in geometry.units(plan).into_iter().enumerate() {
            if geometry.refused_after == Some(number) {
                source.refuse();
            }
            // SAFETY: the memory outlives the flight; landing waits.
            unsafe { flight.send(plan, &source, unit) }.unwrap();
        }
        prop_assert_eq!(flight.land().unwrap(), geometry.window[2] * geometry.window[3]);
        prop_assert!(!flight.has_given_up());
        // SAFETY: filled above, and nobody writes any more.
        let bytes = unsafe { std::slice::from_raw_parts(memory.address().as_ptr(), nbytes) };
        let mut expected = vec![0; nbytes];
        let [row, column, row_count, column_count] = geometry.window;
        for index in 0..row_count {
            let from = (geometry.chunk_offset + (row + index) * geometry.row_bytes + column) as usize;
            let to = (geometry.destination_offset + index * geometry.stride()) as usize;
            let length = column_count as usize;
            expected[to..to + length].copy_from_slice(&content[from..from + length]);
        }
        prop_assert!(bytes == expected);
    }
}

/// A file that many geometries are read from, without a name to be left behind: in memory if direct reads are
/// known there, since they take no disk's time.
static GEOMETRY_FILE: LazyLock<(fs::File, PathBuf, Vec<u8>)> = LazyLock::new(|| {
    let content: Vec<u8> = (0..GEOMETRY_BYTES).map(|index| (index * 31 / 7 + index / 251) as u8).collect();
    let directories = [PathBuf::from("/dev/shm"), std::env::temp_dir()];
    let files = directories.iter().filter_map(|directory| tempfile::tempfile_in(directory).ok());
    let mut opened = files.map(|file| {
        let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        fs::write(&path, &content).unwrap();
        (file, path, content.clone())
    });
    opened
        .find(|(_, path, _)| OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path).is_ok())
        .unwrap()
});

/// Once direct reads of a file are refused it is divided as the page cache likes it: 128 runs and the gaps
/// around them are 257 requests of a unit.
#[test]
fn a_refused_file_is_divided_into_no_more_requests_than_the_ring_takes() {
    const RUN_BYTES: usize = 16 << 10;
    const ROWS: usize = 2 * 128;
    let content: Vec<u8> = (0..2 * RUN_BYTES * ROWS).map(|index| (index * 13 / 9) as u8).collect();
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), &content).unwrap();
    let memory = AlignedBlock::map(RUN_BYTES * ROWS).unwrap();
    let (run, row) = (RUN_BYTES as i64, 2 * RUN_BYTES as i64);
    let address = memory.address().as_ptr() as i64;
    let words = [0, 0, 1, 2, ROWS as i64, row, 0, run / 2, ROWS as i64, run, address, run, 1];
    let file_bytes = content.len() as u64;
    let read = ReadFile { path: file.path().to_owned(), file_bytes, checksums: None, version: None };
    let plan = Plan::new(vec![read], &words).unwrap();
    let (plan, spans) = (&plan.files[0], spans_of(&plan.files[0]));
    let mode = Mode::DirectRing;
    let source = Source::open(&Wanted {
        plan,
        spans: &spans,
        mode: Some(mode),
        cold_mode: mode,
        opening: &Opening::default(),
    })
    .unwrap();
    source.refuse();
    let source = Arc::new(source);
    for depth in 1..40 {
        let unit_bytes = content.len() / 2;
        let Some(mut flight) = Flight::new(depth, unit_bytes, Delivery::default()).unwrap() else { return };
        for unit in portions(0..file_bytes, unit_bytes as u64) {
            // SAFETY: the memory outlives the flight; landing waits.
            unsafe { flight.send(plan, &source, unit) }.unwrap();
        }
        assert_eq!(flight.land().unwrap(), (RUN_BYTES * ROWS) as u64);
        assert!(!flight.has_given_up());
        // SAFETY: filled above, and nobody writes any more.
        let bytes = unsafe { std::slice::from_raw_parts_mut(memory.address().as_ptr(), RUN_BYTES * ROWS) };
        for (number, found) in bytes.chunks(RUN_BYTES).enumerate() {
            let begin = number * 2 * RUN_BYTES + RUN_BYTES / 2;
            assert!(found == &content[begin..begin + RUN_BYTES], "row {number} at depth {depth}");
        }
        bytes.fill(0);
    }
}

/// A sandbox that takes io_uring away while units are in flight costs time, and no byte.
#[test]
fn a_ring_that_is_taken_away_in_the_middle_of_a_file_is_done_without() {
    for sent_before in 0..2 {
        let opened = opened(Mode::DirectRing, 0);
        in_a_thread(|| {
            let file = &opened.plan.files[0];
            let Some(mut flight) = Flight::new(2, BLOCK_BYTES, Delivery::default()).unwrap() else { return };
            for (number, unit) in portions(0..2 * BLOCK, BLOCK).enumerate() {
                if number == sent_before {
                    refuse(&[libc::SYS_io_uring_enter], libc::EPERM);
                }
                // SAFETY: the memory outlives the flight; landing waits.
                unsafe { flight.send(file, &opened.source, unit) }.unwrap();
            }
            assert_eq!(flight.land().unwrap(), 2 * BLOCK);
            assert!(flight.has_given_up());
        });
        // SAFETY: filled above, and nobody writes any more.
        let bytes =
            unsafe { std::slice::from_raw_parts(opened.memory.address().as_ptr(), opened.content.len()) };
        assert!(bytes == opened.content);
    }
}

#[test]
fn a_job_without_a_ring_reads_by_threads() {
    let opened = opened(Mode::DirectRing, 0);
    let Opened { plan, memory, content, file: _file, .. } = opened;
    in_a_thread(|| {
        refuse(&[libc::SYS_io_uring_enter], libc::EPERM);
        let options = Options { mode: Some(Mode::DirectRing), ..Options::default() };
        // SAFETY: the memory outlives the job, which is joined here.
        let job = unsafe { start(Local::by_path(), plan, options) }.unwrap();
        job.join();
        let statistics = job.shared().take_outcome().unwrap().unwrap();
        assert_ne!(statistics.modes, [Some(Mode::DirectRing)]);
    });
    // SAFETY: filled above, and nobody writes any more.
    let bytes = unsafe { std::slice::from_raw_parts(memory.address().as_ptr(), content.len()) };
    assert!(bytes == content);
}
