//! What every storage does, whatever it is: the same cases in files of this system, in object stores (in memory, and on
//! a real server where that is installed), and in a storage in memory that fails where a test says.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use proptest::prelude::*;
use waystation_format::checksum::crc64;
use waystation_format::table::TableKind;
use waystation_io::job::Handle;
use waystation_io::local::Local;
use waystation_io::read::plan::{Plan, ReadFile};
use waystation_io::read::{self, Options};
use waystation_io::storage::Storage;
use waystation_io::sync_group::Durability;
use waystation_io::table_pages::table_counts;
use waystation_io::write::{self, CopiedFile, Extent, FileInput, Sources};
use waystation_io::{Error, Kind, Result};

use waystation_store::{Condition, ObjectStorage};

use crate::memory_storage::MemoryStorage;
use crate::read_support::{BLOCK, Memory, bytes_of, checksums_of, finish_in, run_in};
use crate::store_support::{Bucket, Gateway, names_beneath};
use crate::write_support::{AUTOMATIC, noise, plain};

/// A storage, and how a test sees it from outside.
trait Place {
    fn storage(&self) -> Arc<dyn Storage>;
    fn directory(&self) -> PathBuf;
    fn put(&self, path: &Path, content: &[u8]);
    fn get(&self, path: &Path) -> Option<Vec<u8>>;
    /// Whatever is there, also what was begun and never finished.
    fn names(&self) -> Vec<PathBuf>;
}

struct OnDisk(tempfile::TempDir);

impl Place for OnDisk {
    fn storage(&self) -> Arc<dyn Storage> {
        Local::by_path()
    }

    fn directory(&self) -> PathBuf {
        self.0.path().to_owned()
    }

    fn put(&self, path: &Path, content: &[u8]) {
        fs::write(path, content).unwrap();
    }

    fn get(&self, path: &Path) -> Option<Vec<u8>> {
        fs::read(path).ok()
    }

    fn names(&self) -> Vec<PathBuf> {
        let mut names = crate::write_support::entries(self.0.path());
        names.sort();
        names
    }
}

impl Place for Arc<MemoryStorage> {
    fn storage(&self) -> Arc<dyn Storage> {
        Self::clone(self)
    }

    fn directory(&self) -> PathBuf {
        PathBuf::from("memory:/bucket")
    }

    fn put(&self, path: &Path, content: &[u8]) {
        MemoryStorage::put(self, path, content);
    }

    fn get(&self, path: &Path) -> Option<Vec<u8>> {
        MemoryStorage::get(self, path)
    }

    fn names(&self) -> Vec<PathBuf> {
        MemoryStorage::names(self)
    }
}

impl Place for ObjectStorage {
    fn storage(&self) -> Arc<dyn Storage> {
        Arc::new(self.clone())
    }

    fn directory(&self) -> PathBuf {
        PathBuf::from("memory://bucket/run")
    }

    fn put(&self, path: &Path, content: &[u8]) {
        ObjectStorage::put(self, path, content, &Condition::Any).unwrap();
    }

    fn get(&self, path: &Path) -> Option<Vec<u8>> {
        ObjectStorage::get(self, path, u64::MAX).ok().map(|(content, _)| content)
    }

    fn names(&self) -> Vec<PathBuf> {
        names_beneath(self, &Place::directory(self))
    }
}

impl Place for Bucket {
    fn storage(&self) -> Arc<dyn Storage> {
        Place::storage(&self.storage)
    }

    fn directory(&self) -> PathBuf {
        self.path("run")
    }

    fn put(&self, path: &Path, content: &[u8]) {
        Place::put(&self.storage, path, content);
    }

    fn get(&self, path: &Path) -> Option<Vec<u8>> {
        Place::get(&self.storage, path)
    }

    fn names(&self) -> Vec<PathBuf> {
        let mut names = names_beneath(&self.storage, &self.directory());
        names.extend(self.uploads());
        names
    }
}

fn places() -> Vec<Box<dyn Place>> {
    let mut places: Vec<Box<dyn Place>> = vec![
        Box::new(OnDisk(tempfile::tempdir().unwrap())),
        Box::new(Arc::new(MemoryStorage::default())),
        Box::new(ObjectStorage::in_memory("bucket")),
    ];
    if let Some(gateway) = Gateway::shared() {
        places.push(Box::new(gateway.bucket()));
    }
    places
}

fn outcome<T: Send + 'static>(job: &Handle<T>) -> Result<T> {
    job.join();
    job.shared().take_outcome().unwrap()
}

// ---- reads -------------------------------------------------------------------------------------

/// A file of `nbytes` that is read whole.
struct WholeFile {
    content: Vec<u8>,
    file: ReadFile,
    memory: Memory,
}

impl WholeFile {
    fn new(place: &dyn Place, nbytes: usize) -> Self {
        let content = bytes_of(nbytes, 5);
        let path = place.directory().join("file");
        place.put(&path, &content);
        let file = ReadFile {
            path,
            file_bytes: nbytes as u64,
            checksums: Some(checksums_of(&content)),
            version: None,
        };
        Self { content, file, memory: Memory::new(nbytes) }
    }

    fn words(&self) -> [i64; 5] {
        [0, 0, self.content.len() as i64, 0, self.memory.address() as i64]
    }

    fn read(&self, place: &dyn Place, options: &Options) -> Result<()> {
        finish_in(place.storage(), vec![self.file.clone()], &self.words(), options).0.map(drop)
    }

    fn start(&self, place: &dyn Place) -> Handle<read::Statistics> {
        let plan = Plan::new(vec![self.file.clone()], &self.words()).unwrap();
        // SAFETY: tests join the job before they drop this.
        unsafe { read::start(place.storage(), plan, Options::default()) }.unwrap()
    }
}

fn assert_names(error: &Error, kind: Kind, path: &Path, offset: Option<usize>) {
    assert_eq!(error.kind(), kind, "{error}");
    assert_eq!(error.context("path"), path.to_str(), "{error}");
    assert_eq!(error.context("offset"), offset.map(|offset| offset.to_string()).as_deref(), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_byte_goes_where_the_plan_says(
        case in crate::read::case(),
        announce in any::<bool>(),
        among in prop::option::of((0usize..3, Just(3usize))),
    ) {
        for place in places() {
            let options = Options { announce, among, ..Options::default() };
            let put = |path: &Path, content: &[u8]| place.put(path, content);
            let read = run_in(place.storage(), &put, &case, &options, &place.directory(), |_| {});
            prop_assert_eq!(read.outcome.unwrap().bytes_needed, read.needed_bytes);
            prop_assert!(read.memory == read.expected, "memory differs from the reference");
            prop_assert_eq!(read.progress, (read.needed_bytes, read.needed_bytes));
        }
    }
}

#[test]
fn a_record_is_announced_once_all_of_it_is_there() {
    for place in places() {
        let whole = WholeFile::new(&*place, 9 * BLOCK + 5);
        let half = 4 * BLOCK as i64 + 77;
        let (all, address) = (whole.content.len() as i64, whole.memory.address() as i64);
        let words = [0, 0, half, 0, address, 0, half, all - half, 0, address + half];
        let plan = Plan::new(vec![whole.file.clone()], &words).unwrap();
        let options = Options { announce: true, ..Options::default() };
        // SAFETY: the memory outlives the job, which is joined.
        let job = unsafe { read::start(place.storage(), plan, options) }.unwrap();
        assert!(job.shared().wait_front(2, None));
        outcome(&job).unwrap();
        assert_eq!(job.shared().front(), 2);
        assert!(whole.memory.bytes() == whole.content);
    }
}

#[test]
fn damage_is_named_by_path_and_offset() {
    for place in places() {
        let whole = WholeFile::new(&*place, 5 * BLOCK);
        let mut damaged = whole.content.clone();
        damaged[3 * BLOCK + 9] ^= 1;
        place.put(&whole.file.path, &damaged);
        let error = whole.read(&*place, &Options::default()).unwrap_err();
        assert_names(&error, Kind::Corrupt, &whole.file.path, Some(3 * BLOCK));
    }
}

#[test]
fn the_length_of_a_file_is_what_the_plan_says() {
    for place in places() {
        let whole = WholeFile::new(&*place, 3 * BLOCK);
        let read = |content: &[u8], may_be_longer| {
            place.put(&whole.file.path, content);
            whole.read(&*place, &Options { may_be_longer, ..Options::default() })
        };
        let longer = [&whole.content[..], b"more"].concat();
        for (content, may_be_longer, said) in [
            (&whole.content[..2 * BLOCK], false, "the file is truncated"),
            (&whole.content[..2 * BLOCK], true, "the file is truncated"),
            (&longer[..], false, "bytes were appended to it"),
        ] {
            let error = read(content, may_be_longer).unwrap_err();
            assert_names(&error, Kind::Corrupt, &whole.file.path, None);
            assert!(error.message().contains(said), "{error}");
        }
        read(&longer, true).unwrap();
        assert!(whole.memory.bytes() == whole.content);
    }
}

#[test]
fn a_file_that_is_not_there_is_not_found() {
    for place in places() {
        let mut whole = WholeFile::new(&*place, BLOCK);
        whole.file.path = place.directory().join("missing");
        let error = whole.read(&*place, &Options::default()).unwrap_err();
        assert_eq!((error.kind(), error.context("path")), (Kind::NotFound, whole.file.path.to_str()));
        assert_eq!(place.storage().open(&whole.file.path).err().unwrap().kind(), Kind::NotFound);
    }
}

#[test]
fn small_parts_of_a_file_are_read_exactly() {
    for place in places() {
        let whole = WholeFile::new(&*place, 10_000);
        let file = place.storage().open(&whole.file.path).unwrap();
        assert_eq!(file.nbytes(), 10_000);
        let mut bytes = [0; 100];
        file.read_exact_at(&mut bytes, 9_900).unwrap();
        assert_eq!(bytes[..], whole.content[9_900..]);
        let error = file.read_exact_at(&mut bytes, 9_901).unwrap_err();
        assert_eq!(
            (error.context("path"), error.context("offset")),
            (whole.file.path.to_str(), Some("9901"))
        );
        let error = table_counts(&whole.file.path, TableKind::Checksums, 10_000, &*place.storage());
        assert_eq!(error.unwrap_err().kind(), Kind::Corrupt);
    }
}

#[test]
fn a_failure_in_the_middle_stops_the_job_and_is_named() {
    let store = Arc::new(MemoryStorage::default());
    let whole = WholeFile::new(&store, 40 * BLOCK);
    store.fail_read(&whole.file.path, 13 * BLOCK as u64);
    let error = whole.read(&store, &Options::default()).unwrap_err();
    assert_names(&error, Kind::Unavailable, &whole.file.path, Some(12 * BLOCK));
}

#[test]
fn a_cancelled_read_touches_memory_no_more() {
    let store = Arc::new(MemoryStorage::default());
    let whole = WholeFile::new(&store, 40 * BLOCK);
    store.close_gate();
    let job = whole.start(&store);
    store.await_waiting();
    job.shared().cancel();
    store.open_gate();
    assert_eq!(outcome(&job).unwrap_err().kind(), Kind::Cancelled);
    let touched = whole.memory.bytes().iter().zip(&whole.content).filter(|(found, bytes)| found == bytes);
    assert!(touched.count() < whole.content.len() / 2, "requests were begun after the job was cancelled");
    store.put(&whole.file.path, &vec![0; whole.content.len()]);
    assert!(whole.memory.bytes().iter().any(|byte| *byte != 0));
}

// ---- writes ------------------------------------------------------------------------------------

/// Three files, one of them empty, and the memory that they are written from.
fn inputs(place: &dyn Place, sources: &[Vec<u8>; 2]) -> (Vec<FileInput>, [(PathBuf, Vec<u8>); 3]) {
    let path = |name| place.directory().join(name);
    let files = vec![
        plain(path("first"), 4096, &sources[0]),
        plain(path("nothing"), 0, &[]),
        plain(path("second"), 0, &sources[1]),
    ];
    let first = [&vec![b' '; 4096][..], &sources[0]].concat();
    let contents =
        [(path("first"), first), (path("nothing"), Vec::new()), (path("second"), sources[1].clone())];
    (files, contents)
}

fn sources() -> [Vec<u8>; 2] {
    [noise(5 * BLOCK + 333, 1), noise(11 * BLOCK, 2)]
}

fn start_write(place: &dyn Place, files: Vec<FileInput>) -> Result<Handle<write::Statistics>> {
    // SAFETY: tests join the job before their sources are dropped.
    unsafe { write::start(place.storage(), files, AUTOMATIC) }
}

#[test]
fn what_is_written_is_there_with_its_checksums_and_can_be_read() {
    for place in places() {
        let sources = sources();
        let (files, contents) = inputs(&*place, &sources);
        let job = start_write(&*place, files).unwrap();
        let statistics = outcome(&job).unwrap();
        assert_eq!(place.names(), contents.each_ref().map(|(path, _)| path.clone()));
        for ((path, content), checksums) in contents.iter().zip(statistics.checksums) {
            assert!(place.get(path).as_ref() == Some(content));
            assert_eq!(checksums, checksums_of(content));
            let memory = Memory::new(content.len());
            let words = [0, 0, content.len() as i64, 0, memory.address() as i64];
            let file = ReadFile {
                path: path.clone(),
                file_bytes: content.len() as u64,
                checksums: Some(checksums),
                version: None,
            };
            finish_in(place.storage(), vec![file], &words, &Options::default()).0.unwrap();
            assert!(memory.bytes() == content);
        }
        let (done, total) = job.shared().progress();
        assert_eq!((done, done), (total, statistics.bytes_written));
    }
}

#[test]
fn a_name_that_is_taken_is_refused_before_anything_is_written() {
    for place in places() {
        let sources = sources();
        let (files, contents) = inputs(&*place, &sources);
        place.put(&contents[2].0, b"somebody else's");
        let error = start_write(&*place, files).and_then(|job| outcome(&job)).unwrap_err();
        assert_eq!((error.kind(), error.context("path")), (Kind::Conflict, contents[2].0.to_str()));
        assert_eq!(place.names(), [contents[2].0.clone()]);
        assert_eq!(place.get(&contents[2].0).unwrap(), b"somebody else's");
    }
}

#[test]
fn of_two_jobs_with_the_same_names_one_is_there_whole_or_none() {
    for (turn, place) in (0..20).flat_map(|turn| places().into_iter().map(move |place| (turn, place))) {
        let sources = [sources(), [noise(5 * BLOCK + 333, 3 + turn), noise(11 * BLOCK, 4 + turn)]];
        let cases = sources.each_ref().map(|sources| inputs(&*place, sources));
        let jobs = cases.each_ref().map(|(files, _)| start_write(&*place, files.clone()));
        let outcomes = jobs.map(|job| job.and_then(|job| outcome(&job)));
        for (outcome, (_, contents)) in outcomes.iter().zip(&cases) {
            match outcome {
                Ok(_) => {
                    assert!(contents.iter().all(|(path, content)| place.get(path).as_ref() == Some(content)))
                }
                Err(error) => assert_eq!(error.kind(), Kind::Conflict, "{error}"),
            }
        }
        let winners = outcomes.iter().filter(|outcome| outcome.is_ok()).count();
        assert_eq!(place.names().len(), 3 * winners);
    }
}

#[test]
fn a_cancelled_write_leaves_nothing() {
    for place in places() {
        let source = noise(64 << 20, 9);
        let files = vec![plain(place.directory().join("large"), 4096, &source)];
        let job = start_write(&*place, files).unwrap();
        assert!(job.shared().wait_front(1, None));
        job.shared().cancel();
        // Where it was faster, all of it is there.
        match outcome(&job) {
            Ok(_) => assert_eq!(place.names().len(), 1),
            Err(error) => {
                assert_eq!(error.kind(), Kind::Cancelled);
                assert!(place.names().is_empty());
            }
        }
    }
}

#[test]
fn a_failing_part_fails_the_job_and_leaves_nothing() {
    let store = Arc::new(MemoryStorage::default());
    let sources = sources();
    let (files, contents) = inputs(&store, &sources);
    store.fail_part(&contents[2].0, 4 * BLOCK as u64);
    let error = outcome(&start_write(&store, files).unwrap()).unwrap_err();
    assert_names(&error, Kind::Unavailable, &contents[2].0, Some(4 * BLOCK));
    assert!(store.names().is_empty());
}

#[test]
fn all_files_are_finished_or_none() {
    let store = Arc::new(MemoryStorage::default());
    let sources = sources();
    let (files, contents) = inputs(&store, &sources);
    store.fail_completion(&contents[2].0);
    let error = outcome(&start_write(&store, files).unwrap()).unwrap_err();
    assert_names(&error, Kind::Unavailable, &contents[2].0, None);
    assert!(store.names().is_empty());
}

#[test]
fn a_job_that_is_cancelled_while_a_part_is_under_way_leaves_nothing() {
    let store = Arc::new(MemoryStorage::default());
    let sources = sources();
    store.close_gate();
    let job = start_write(&store, inputs(&store, &sources).0).unwrap();
    store.await_waiting();
    job.shared().cancel();
    store.open_gate();
    assert_eq!(outcome(&job).unwrap_err().kind(), Kind::Cancelled);
    assert!(store.names().is_empty());
}

/// A storage whose files are durable once they are finished takes no part in the syncs of others.
#[test]
fn durability_may_be_left_to_whom_it_suits() {
    for place in places() {
        for durability in [Durability::Now, Durability::Whenever] {
            let source = noise(BLOCK, 1);
            let path = place.directory().join(format!("{durability:?}"));
            let options = write::Options { durability, ..AUTOMATIC };
            // SAFETY: the source outlives the job, which is joined here.
            let job =
                unsafe { write::start(place.storage(), vec![plain(path.clone(), 0, &source)], options) };
            outcome(&job.unwrap()).unwrap();
            assert!(place.get(&path) == Some(source));
        }
    }
}

// ---- copies ------------------------------------------------------------------------------------

/// A file that is to be copied, with the checksums that its content should have.
fn copied(from: &dyn Place, to: &dyn Place, name: &str, content: &[u8]) -> (ReadFile, CopiedFile) {
    let source = source(from, name, content);
    let file = CopiedFile {
        path: to.directory().join(format!("copy-of-{name}")),
        header: Vec::new(),
        extents: Vec::new(), // all of the source, as `start_copy` numbers it
        file_bytes: content.len() as u64,
        checksums: Some(checksums_of(content)),
        crc64: Some(crc64(content)),
    };
    (source, file)
}

fn source(from: &dyn Place, name: &str, content: &[u8]) -> ReadFile {
    let path = from.directory().join(name);
    ReadFile { path, file_bytes: content.len() as u64, checksums: None, version: None }
}

/// Copies whole files.
fn start_copy(
    from: &dyn Place,
    to: &dyn Place,
    pairs: Vec<(ReadFile, CopiedFile)>,
) -> Result<Handle<write::Statistics>> {
    let (sources, mut files): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
    for (number, file) in files.iter_mut().enumerate() {
        file.extents = Extent::all_after(0, &[[number as i64, 0, file.file_bytes as i64]]).unwrap();
    }
    start_assembly(from, to, sources, files)
}

fn start_assembly(
    from: &dyn Place,
    to: &dyn Place,
    sources: Vec<ReadFile>,
    files: Vec<CopiedFile>,
) -> Result<Handle<write::Statistics>> {
    let options = Options { threads: Some(1), ..Options::default() };
    let storage = from.storage();
    let sources = Sources { storage, sources, files, options, readers: 3, memory_bytes: None };
    write::start_copy(to.storage(), sources, AUTOMATIC)
}

/// Files that are empty, smaller than a block, and larger than a part of an upload.
fn put_files(from: &dyn Place) -> Vec<(&'static str, Vec<u8>)> {
    let files = vec![
        ("large", noise(37 * BLOCK + 77, 1)),
        ("nothing", Vec::new()),
        ("small", noise(333, 2)),
        ("whole", noise(6 * BLOCK, 3)),
    ];
    files.iter().for_each(|(name, content)| from.put(&from.directory().join(name), content));
    files
}

#[test]
fn files_are_copied_from_every_storage_to_every_other() {
    for from in places() {
        let contents = put_files(&*from);
        for to in places() {
            let files = contents.iter().map(|(name, content)| copied(&*from, &*to, name, content)).collect();
            let job = start_copy(&*from, &*to, files).unwrap();
            let statistics = outcome(&job).unwrap();
            for ((name, content), checksums) in contents.iter().zip(statistics.checksums) {
                let path = to.directory().join(format!("copy-of-{name}"));
                assert!(to.get(&path).as_ref() == Some(content), "{name}");
                assert_eq!(checksums, checksums_of(content));
            }
            let (done, total) = job.shared().progress();
            assert_eq!((done, done), (total, statistics.bytes_written));
        }
    }
}

#[test]
fn what_is_damaged_or_missing_is_not_copied() {
    for (from, to) in places().into_iter().zip(places()) {
        let contents = put_files(&*from);
        let files = || contents.iter().map(|(name, content)| copied(&*from, &*to, name, content));
        let large = from.directory().join("large");
        let fails = |files: Vec<(ReadFile, CopiedFile)>| {
            let error = outcome(&start_copy(&*from, &*to, files).unwrap()).unwrap_err();
            assert!(to.names().is_empty(), "{error} left {:?}", to.names());
            error
        };
        let mut damaged = contents[0].1.clone();
        damaged[35 * BLOCK + 9] ^= 1;
        from.put(&large, &damaged);
        assert_names(&fails(files().collect()), Kind::Corrupt, &large, Some(35 * BLOCK));
        let without_blocks = files().map(|(source, file)| (source, CopiedFile { checksums: None, ..file }));
        assert_names(&fails(without_blocks.collect()), Kind::Corrupt, &large, Some(0));
        from.put(&large, &damaged[..30 * BLOCK]);
        assert_names(&fails(files().collect()), Kind::Corrupt, &large, None);
        let mut missing: Vec<_> = files().collect();
        missing[2].0.path = from.directory().join("missing");
        from.put(&large, &contents[0].1);
        assert_names(&fails(missing), Kind::NotFound, &from.directory().join("missing"), None);
        let mut wrong: Vec<_> = files().collect();
        wrong[0].1.checksums = Some(vec![0; 3]);
        assert_eq!(start_copy(&*from, &*to, wrong).err().unwrap().kind(), Kind::InvalidInput);
    }
}

/// Extents of several sources, of any length and in any order, some of them within one block and some over many.
#[test]
fn files_are_put_together_from_parts_of_others() {
    for (from, to) in places().into_iter().zip(places()) {
        let contents = put_files(&*from);
        let sources: Vec<_> = contents
            .iter()
            .map(|(name, content)| ReadFile {
                checksums: Some(checksums_of(content)),
                ..source(&*from, name, content)
            })
            .collect();
        let large = contents[0].1.len() as i64;
        let rows =
            [[3, 5, 3 * BLOCK as i64], [0, large - 9, 9], [1, 0, 0], [2, 1, 331], [0, 0, large], [3, 0, 1]];
        for header in [noise(4096, 4), noise(3 * BLOCK + 1, 5), Vec::new()] {
            let parts = rows.iter().map(|&[source, offset, nbytes]| {
                &contents[source as usize].1[offset as usize..(offset + nbytes) as usize]
            });
            let expected = std::iter::once(&header[..]).chain(parts).collect::<Vec<_>>().concat();
            let path = to.directory().join(format!("of-{}", header.len()));
            let file = CopiedFile {
                path: path.clone(),
                extents: Extent::all_after(header.len(), &rows).unwrap(),
                header,
                file_bytes: expected.len() as u64,
                checksums: None,
                crc64: None,
            };
            let short = CopiedFile { file_bytes: file.file_bytes - 1, ..file.clone() };
            let error = start_assembly(&*from, &*to, sources.clone(), vec![short]).err().unwrap();
            assert_eq!(error.kind(), Kind::InvalidInput);
            let error =
                start_assembly(&*from, &*to, sources[..3].to_vec(), vec![file.clone()]).err().unwrap();
            assert_eq!(error.kind(), Kind::InvalidInput);
            let job = start_assembly(&*from, &*to, sources.clone(), vec![file]).unwrap();
            let statistics = outcome(&job).unwrap();
            assert!(to.get(&path).as_ref() == Some(&expected));
            assert_eq!(statistics.checksums, [checksums_of(&expected)]);
        }
        let mut damaged = contents[0].1.clone();
        damaged[35 * BLOCK + 9] ^= 1;
        from.put(&from.directory().join("large"), &damaged);
        let file = CopiedFile {
            path: to.directory().join("damaged"),
            header: noise(8, 6),
            extents: Extent::all_after(8, &[[0, 35 * BLOCK as i64 + 10, 3]]).unwrap(),
            file_bytes: 11,
            checksums: None,
            crc64: None,
        };
        let error = outcome(&start_assembly(&*from, &*to, sources, vec![file]).unwrap()).unwrap_err();
        assert_names(&error, Kind::Corrupt, &from.directory().join("large"), Some(35 * BLOCK));
        assert!(to.get(&to.directory().join("damaged")).is_none());
    }
    assert!(Extent::all_after(0, &[[0, -1, 3]]).is_err());
    assert!(Extent::all_after(8, &[[0, 0, i64::MAX]]).is_err());
}

#[test]
fn a_copy_that_is_cancelled_or_fails_leaves_nothing() {
    let (from, to) = (Arc::new(MemoryStorage::default()), Arc::new(MemoryStorage::default()));
    let contents = put_files(&from);
    let start = || {
        let files = contents.iter().map(|(name, content)| copied(&from, &to, name, content)).collect();
        start_copy(&from, &to, files).unwrap()
    };
    for waiting in [&from, &to] {
        waiting.close_gate();
        let job = start();
        waiting.await_waiting();
        job.shared().cancel();
        waiting.open_gate();
        assert_eq!(outcome(&job).unwrap_err().kind(), Kind::Cancelled);
        assert!(to.names().is_empty());
    }
    to.fail_completion(&to.directory().join("copy-of-whole"));
    assert_eq!(outcome(&start()).unwrap_err().kind(), Kind::Unavailable);
    assert!(to.names().is_empty());
    from.fail_read(&from.directory().join("large"), 13 * BLOCK as u64);
    assert_eq!(outcome(&start()).unwrap_err().kind(), Kind::Unavailable);
    assert!(to.names().is_empty());
}
