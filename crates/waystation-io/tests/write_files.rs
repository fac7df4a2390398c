//! Whole write jobs on real files: bytes and checksums against a naive reference, faults, cancellation.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use waystation_format::checksum::{BLOCK_BYTES, crc64};
use waystation_io::mode::Mode;
use waystation_io::ring::Ring;
use waystation_io::write::{self, FileInput, Options, Statistics};
use waystation_io::{Error, Kind, Result};

const AUTOMATIC: Options = Options { sync: true, mode: None, block_bytes: None, depth: None, threads: None };

/// A directory on a disk's file system, and one in memory.
fn directories() -> Vec<tempfile::TempDir> {
    let memory = Path::new("/dev/shm");
    let mut directories = vec![tempfile::tempdir().unwrap()];
    directories.extend(memory.exists().then(|| tempfile::tempdir_in(memory).unwrap()));
    directories
}

/// Modes that this system offers, and the automatic choice.
fn modes() -> Vec<Option<Mode>> {
    let has_ring = Ring::new(1).is_ok();
    let offered = Mode::ALL.into_iter().filter(|&mode| has_ring || mode != Mode::DirectRing);
    offered.map(Some).chain([None]).collect()
}

fn run(files: Vec<FileInput>, options: Options) -> Result<Statistics> {
    // SAFETY: tests keep their sources until the job has been joined here.
    let job = unsafe { write::start(files, options) }?;
    job.join();
    job.shared().take_outcome().unwrap()
}

/// An array cut along one axis into blocks, each with its own memory layout.
#[derive(Clone, Debug)]
struct ArrayCase {
    shape: Vec<usize>,
    item_bytes: usize,
    axis: usize,
    cuts: Vec<usize>,
    reversed: bool,
}

#[derive(Clone, Debug)]
struct FileCase {
    header_bytes: usize,
    arrays: Vec<ArrayCase>,
}

fn array_case() -> impl Strategy<Value = ArrayCase> {
    let shape = prop_oneof![
        6 => prop::collection::vec(0usize..40, 0..4),
        2 => prop::collection::vec(60usize..110, 3..4),
        1 => prop::collection::vec(1_000_000usize..4_000_000, 1..2),
    ];
    let item = prop::sample::select(vec![1usize, 2, 4, 8]);
    let cuts = prop::collection::vec(any::<prop::sample::Index>(), 0..4);
    (shape, item, any::<prop::sample::Index>(), cuts, any::<bool>()).prop_map(
        |(shape, item_bytes, axis, cuts, reversed)| {
            let axis = if shape.is_empty() { 0 } else { axis.index(shape.len()) };
            let extent = shape.get(axis).copied().unwrap_or(0);
            let mut bounds = vec![0, extent];
            bounds.extend(cuts.iter().filter(|_| extent > 0).map(|cut| cut.index(extent)));
            bounds.sort_unstable();
            bounds.dedup();
            ArrayCase { shape, item_bytes, axis, cuts: bounds, reversed }
        },
    )
}

fn plan_case() -> impl Strategy<Value = Vec<FileCase>> {
    let header = prop::sample::select(vec![0usize, 8, 4096, 8192, 300_000]);
    let file = (header, prop::collection::vec(array_case(), 0..6))
        .prop_map(|(header_bytes, arrays)| FileCase { header_bytes, arrays });
    prop::collection::vec(file, 0..4)
}

fn noise(nbytes: usize, seed: usize) -> Vec<u8> {
    (0..nbytes.div_ceil(8))
        .flat_map(|index| {
            (index ^ seed << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29).to_le_bytes()
        })
        .take(nbytes)
        .collect()
}

/// The segment words of an array whose C-order bytes are `content`, and the memory of its blocks.
fn build_array(case: &ArrayCase, file_offset: usize, content: &[u8], memory: &mut Vec<Vec<u8>>) -> Vec<i64> {
    let ndim = case.shape.len();
    let mut words = vec![file_offset as i64, case.item_bytes as i64, ndim as i64];
    words.extend(case.shape.iter().map(|&extent| extent as i64));
    if ndim == 0 {
        memory.push(content.to_vec());
        words.extend([1, -1, memory.last().unwrap().as_ptr() as i64]);
        return words;
    }
    words.push(case.cuts.len() as i64 - 1);
    for pair in case.cuts.windows(2) {
        let mut extent = case.shape.clone();
        extent[case.axis] = pair[1] - pair[0];
        let count: usize = extent.iter().product();
        // Reversed blocks lie backwards in memory, in Fortran order.
        let order: Vec<usize> = if case.reversed { (0..ndim).collect() } else { (0..ndim).rev().collect() };
        let mut strides = vec![0i64; ndim];
        let mut step = case.item_bytes as i64;
        for &axis in &order {
            strides[axis] = if case.reversed { -step } else { step };
            step *= extent[axis] as i64;
        }
        let mut block = vec![0; count * case.item_bytes];
        let base = if case.reversed && count > 0 { (count - 1) * case.item_bytes } else { 0 };
        for element in 0..count {
            let (mut rest, mut at, mut linear, mut linear_step) = (element, base as i64, 0, case.item_bytes);
            for axis in (0..ndim).rev() {
                let index = rest % extent[axis];
                rest /= extent[axis];
                at += index as i64 * strides[axis];
                let global = index + if axis == case.axis { pair[0] } else { 0 };
                linear += global * linear_step;
                linear_step *= case.shape[axis];
            }
            let bytes = &content[linear..linear + case.item_bytes];
            block[at as usize..at as usize + case.item_bytes].copy_from_slice(bytes);
        }
        memory.push(block);
        words.extend([-1, memory.last().unwrap().as_ptr() as i64 + base as i64]);
        words.extend((0..ndim).map(|axis| if axis == case.axis { pair[0] as i64 } else { 0 }));
        words.extend(extent.iter().map(|&extent| extent as i64));
        words.extend(strides);
    }
    words
}

/// Inputs, the bytes that each file must have, and the memory that the inputs refer to.
fn build(cases: &[FileCase], directory: &Path) -> (Vec<FileInput>, Vec<Vec<u8>>, Vec<Vec<u8>>) {
    let (mut inputs, mut expected, mut memory) = (Vec::new(), Vec::new(), Vec::new());
    for (index, case) in cases.iter().enumerate() {
        let header = noise(case.header_bytes, index + 1000);
        let (mut bytes, mut words) = (header.clone(), Vec::new());
        for (seed, array) in case.arrays.iter().enumerate() {
            let content = noise(array.shape.iter().product::<usize>() * array.item_bytes, seed * 7 + index);
            words.extend(build_array(array, bytes.len(), &content, &mut memory));
            bytes.extend(content);
        }
        let path = directory.join(format!("file-{index}"));
        inputs.push(FileInput { path, header, file_bytes: bytes.len() as u64, words });
        expected.push(bytes);
    }
    (inputs, expected, memory)
}

fn check_written(inputs: &[FileInput], expected: &[Vec<u8>], statistics: &Statistics) {
    for ((input, bytes), checksums) in inputs.iter().zip(expected).zip(&statistics.checksums) {
        let found = fs::read(&input.path).unwrap();
        assert_eq!(found.len(), bytes.len());
        assert!(found == *bytes, "the bytes of {} differ", input.path.display());
        let wanted: Vec<u64> = bytes.chunks(BLOCK_BYTES).map(crc64).collect();
        assert_eq!(*checksums, wanted);
    }
    assert_eq!(statistics.bytes_written, expected.iter().map(|bytes| bytes.len() as u64).sum::<u64>());
}

fn entries(directory: &Path) -> Vec<PathBuf> {
    fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, max_shrink_iters: 200, ..ProptestConfig::default() })]

    #[test]
    fn files_equal_a_naive_reference(
        cases in plan_case(),
        block in 0usize..4,
        depth in 1usize..6,
        threads in 1usize..4,
        sync in any::<bool>(),
    ) {
        for directory in directories() {
            for mode in modes() {
                let (inputs, expected, _memory) = build(&cases, directory.path());
                let options = Options {
                    sync,
                    mode,
                    block_bytes: (block > 0).then_some(block * BLOCK_BYTES),
                    depth: Some(depth),
                    threads: Some(threads),
                };
                let statistics = run(inputs.clone(), options).unwrap();
                check_written(&inputs, &expected, &statistics);
                for input in &inputs {
                    fs::remove_file(&input.path).unwrap();
                }
            }
        }
    }

    #[test]
    fn hostile_words_are_refused_or_harmless(
        words in prop::collection::vec(prop_oneof![-2i64..9, any::<i64>()], 0..40),
        file_bytes in prop_oneof![0u64..100, any::<u64>()],
    ) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        // Without host blocks an accidentally valid plan reads no random addresses.
        let words = words.into_iter().map(|word| if word == -1 { -3 } else { word }).collect();
        let outcome = run(vec![FileInput { path, header: Vec::new(), file_bytes, words }], AUTOMATIC);
        prop_assert!(entries(directory.path()).is_empty() == outcome.is_err());
    }
}

/// One array of `source` after a header of `header_bytes`.
fn plain(path: PathBuf, header_bytes: usize, source: &[u8]) -> FileInput {
    let (nbytes, address) = (source.len() as i64, source.as_ptr() as i64);
    let words = vec![header_bytes as i64, nbytes, 0, 1, -1, address];
    FileInput {
        path,
        header: vec![b' '; header_bytes],
        file_bytes: (header_bytes + source.len()) as u64,
        words,
    }
}

fn error_of(outcome: Result<Statistics>) -> Error {
    outcome.map(|_| ()).unwrap_err()
}

#[test]
fn plans_with_holes_overlaps_or_wrong_ends_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let source = noise(64, 1);
    let address = source.as_ptr() as i64;
    let good = vec![8, 1, 1, 64, 2, -1, address, 0, 32, 1, -1, address, 32, 32, 1];
    let attempt = |words: Vec<i64>, file_bytes| {
        let path = directory.path().join("file");
        run(vec![FileInput { path, header: vec![0; 8], file_bytes, words }], AUTOMATIC)
    };
    type Change = (&'static str, fn(&mut Vec<i64>));
    let changes: [Change; 8] = [
        ("a hole before", |words| words[0] = 9),
        ("an overlap before", |words| words[0] = 7),
        ("blocks that overlap", |words| words[12] = 31),
        ("a block missing", |words| words[4] = 1),
        ("a block outside", |words| words[12] = 33),
        ("words missing", |words| words.truncate(words.len() - 1)),
        ("a device below -1", |words| words[5] = -2),
        ("a negative extent", |words| words[3] = -64),
    ];
    for (name, change) in changes {
        let mut words = good.clone();
        change(&mut words);
        let error = error_of(attempt(words, 72));
        assert_eq!(error.kind(), Kind::InvalidInput, "{name}: {error}");
        assert!(error.context("path").is_some(), "{name}: {error}");
    }
    for file_bytes in [71, 73, u64::MAX] {
        assert_eq!(error_of(attempt(good.clone(), file_bytes)).kind(), Kind::InvalidInput);
    }
    assert!(entries(directory.path()).is_empty());
    attempt(good, 72).unwrap();
}

#[test]
fn options_out_of_range_are_refused() {
    for options in [
        Options { block_bytes: Some(0), ..AUTOMATIC },
        Options { block_bytes: Some(BLOCK_BYTES + 4096), ..AUTOMATIC },
        Options { block_bytes: Some(1 << 40), ..AUTOMATIC },
        Options { depth: Some(0), ..AUTOMATIC },
        Options { threads: Some(10_000), ..AUTOMATIC },
    ] {
        assert_eq!(error_of(run(Vec::new(), options)).kind(), Kind::InvalidInput, "{options:?}");
    }
}

#[test]
fn an_existing_name_is_a_conflict_and_stays() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    fs::write(&path, "precious").unwrap();
    let source = noise(100, 1);
    let files = vec![plain(directory.path().join("new"), 8, &source), plain(path.clone(), 8, &source)];
    assert_eq!(error_of(run(files, AUTOMATIC)).kind(), Kind::Conflict);
    // One that only appears while the job runs is found by creation itself.
    let twice = directory.path().join("twice");
    let files = vec![plain(twice.clone(), 8, &source), plain(twice, 8, &source)];
    assert_eq!(error_of(run(files, AUTOMATIC)).kind(), Kind::Conflict);
    assert_eq!(entries(directory.path()), std::slice::from_ref(&path));
    assert_eq!(fs::read(path).unwrap(), b"precious");
}

#[test]
fn a_missing_directory_is_not_found() {
    let directory = tempfile::tempdir().unwrap();
    let source = noise(100, 1);
    let file = plain(directory.path().join("missing/file"), 8, &source);
    assert_eq!(error_of(run(vec![file], AUTOMATIC)).kind(), Kind::NotFound);
}

#[test]
fn device_blocks_need_someone_to_copy_them() {
    let directory = tempfile::tempdir().unwrap();
    let words = vec![0, 64, 0, 1, 0, 0x1000];
    let file = FileInput { path: directory.path().join("file"), header: Vec::new(), file_bytes: 64, words };
    assert_eq!(error_of(run(vec![file], AUTOMATIC)).kind(), Kind::Unsupported);
    assert!(entries(directory.path()).is_empty());
}

#[test]
fn many_small_files_stay_within_the_limit_of_open_files() {
    let directory = tempfile::tempdir().unwrap();
    let sources: Vec<Vec<u8>> = (0..3000).map(|index| noise(index % 50, index)).collect();
    let inputs: Vec<FileInput> = sources
        .iter()
        .enumerate()
        .map(|(index, source)| plain(directory.path().join(index.to_string()), 8, source))
        .collect();
    // SAFETY: changes only the soft limit of this process.
    unsafe {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit), 0);
        limit.rlim_cur = 512.min(limit.rlim_max);
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit), 0);
    }
    let statistics = run(inputs.clone(), AUTOMATIC).unwrap();
    let expected: Vec<Vec<u8>> = sources.iter().map(|source| [&[b' '; 8][..], source].concat()).collect();
    check_written(&inputs, &expected, &statistics);
}

#[test]
fn the_gather_position_says_what_may_change() {
    for mode in modes() {
        let directory = tempfile::tempdir().unwrap();
        let mut sources: Vec<Vec<u8>> = (0..3).map(|seed| noise((9 << 20) + seed, seed)).collect();
        let inputs: Vec<FileInput> = sources
            .iter()
            .enumerate()
            .map(|(index, source)| plain(directory.path().join(index.to_string()), 4096, source))
            .collect();
        let expected: Vec<Vec<u8>> =
            sources.iter().map(|source| [&[b' '; 4096][..], source].concat()).collect();
        // SAFETY: `sources` outlive the job, and are changed only where it has passed.
        let job =
            unsafe { write::start(inputs.clone(), Options { mode, threads: Some(3), ..AUTOMATIC }) }.unwrap();
        let mut position = 0;
        for source in &mut sources {
            position += source.len() as u64;
            assert!(job.shared().wait_gathered(position, None));
            source.fill(0xee);
        }
        job.join();
        check_written(&inputs, &expected, &job.shared().take_outcome().unwrap().unwrap());
        let (done, total) = job.shared().progress();
        assert_eq!(done, total);
    }
}

#[test]
fn a_cancelled_job_leaves_nothing_or_everything() {
    let directory = tempfile::tempdir().unwrap();
    let source = noise(32 << 20, 3);
    for (round, mode) in modes().into_iter().cycle().take(24).enumerate() {
        let files =
            (0..3).map(|index| plain(directory.path().join(index.to_string()), 4096, &source)).collect();
        // SAFETY: `source` outlives the job.
        let job = unsafe { write::start(files, Options { mode, threads: Some(2), ..AUTOMATIC }) }.unwrap();
        let stop_at = job.shared().progress().1 * round as u64 / 20;
        job.shared().wait_gathered(stop_at, None);
        job.shared().cancel();
        job.join();
        match job.shared().take_outcome().unwrap() {
            Err(error) => {
                assert_eq!(error.kind(), Kind::Cancelled);
                assert!(entries(directory.path()).is_empty());
            }
            Ok(_) => {
                assert_eq!(entries(directory.path()).len(), 3);
                for path in entries(directory.path()) {
                    fs::remove_file(path).unwrap();
                }
            }
        }
    }
}

#[test]
fn too_little_space_is_known_before_anything_is_written() {
    let directory = tempfile::tempdir().unwrap();
    // A word of memory that claims, by zero strides, to be a huge array.
    let item = [7u8; 8];
    let extent = 1i64 << 50;
    let words = vec![0, 8, 1, extent, 1, -1, item.as_ptr() as i64, 0, extent, 0];
    let path = directory.path().join("file");
    let file = FileInput { path, header: Vec::new(), file_bytes: 8 << 50, words };
    let error = error_of(run(vec![file], AUTOMATIC));
    assert_eq!((error.kind(), error.context("errno")), (Kind::Unavailable, Some("28")));
    assert!(error.message().contains(&(8u64 << 50).to_string()), "{error}");
    assert!(entries(directory.path()).is_empty());
}
