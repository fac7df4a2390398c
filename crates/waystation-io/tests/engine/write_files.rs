//! Whole write jobs on real files: bytes and checksums against a naive reference, progress, cancellation.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use proptest::prelude::*;
use waystation_format::checksum::{BLOCK_BYTES, crc64};
use waystation_io::Kind;
use waystation_io::local::Local;
use waystation_io::mode::Mode;
use waystation_io::ring::Ring;
use waystation_io::sync_group::{Durability, SyncGroup};
use waystation_io::throttle::{self, Limits, Throttle};
use waystation_io::write::{self, FileInput, Options, Statistics};

use crate::cases;
use crate::write_support::{AUTOMATIC, entries, noise, plain, run};

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

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(12, 1000), max_shrink_iters: 200, ..ProptestConfig::default() })]

    #[test]
    fn files_equal_a_naive_reference(
        cases in plan_case(),
        block in 0usize..4,
        depth in 1usize..6,
        threads in 1usize..4,
        when in 0usize..3,
        staging in prop::option::of(0usize..6),
        first in prop::collection::vec((0u64..3_000_000, 0u64..2_000_000), 0..3),
    ) {
        for directory in directories() {
            for mode in modes() {
                let (inputs, expected, _memory) = build(&cases, directory.path());
                let group = Arc::new(SyncGroup::open(directory.path()).unwrap());
                let durability =
                    [Durability::Now, Durability::Together(Arc::clone(&group)), Durability::Whenever];
                let options = Options {
                    durability: durability[when].clone(),
                    mode,
                    block_bytes: (block > 0).then_some(block * BLOCK_BYTES),
                    depth: Some(depth),
                    threads: Some(threads),
                    staging_bytes: staging.map(|blocks| blocks * BLOCK_BYTES),
                    first: first.iter().map(|&(begin, length)| begin..begin + length).collect(),
                    throttle: None,
                };
                let statistics = run(inputs.clone(), options).unwrap();
                group.sync().unwrap();
                check_written(&inputs, &expected, &statistics);
                for input in &inputs {
                    fs::remove_file(&input.path).unwrap();
                }
            }
        }
    }
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
        let job = unsafe {
            write::start(Local::by_path(), inputs.clone(), Options { mode, threads: Some(3), ..AUTOMATIC })
        }
        .unwrap();
        let mut position = 0;
        for source in &mut sources {
            position += source.len() as u64;
            assert!(job.shared().wait_front(position, None));
            source.fill(0xee);
        }
        job.join();
        check_written(&inputs, &expected, &job.shared().take_outcome().unwrap().unwrap());
        let (done, total) = job.shared().progress();
        assert_eq!(done, total);
    }
}

#[test]
fn what_goes_first_may_change_before_the_rest_is_copied() {
    for mode in modes() {
        let directory = tempfile::tempdir().unwrap();
        let throttle = directory.path().join("throttle");
        throttle::create(&throttle, Limits { bytes_per_s: Some(16 << 20), requests_per_s: None }).unwrap();
        let mut sources: Vec<Vec<u8>> = (0..4).map(|seed| noise((2 << 20) + seed, seed)).collect();
        let inputs: Vec<FileInput> = sources
            .iter()
            .enumerate()
            .map(|(index, source)| plain(directory.path().join(index.to_string()), 4096, source))
            .collect();
        let expected: Vec<Vec<u8>> =
            sources.iter().map(|source| [&[b' '; 4096][..], source].concat()).collect();
        let start = |index: usize| sources[..index].iter().map(Vec::len).sum::<usize>() as u64;
        let starts: Vec<u64> = (0..4).map(start).collect();
        let options = Options {
            mode,
            threads: Some(2),
            staging_bytes: Some(1 << 20),
            // The last array, and the second half of the second one.
            first: vec![starts[3]..u64::MAX, starts[1] + (1 << 20)..starts[2]],
            throttle: Some(Arc::new(Throttle::open(&throttle).unwrap())),
            ..AUTOMATIC
        };
        // SAFETY: `sources` outlive the job, and are changed only where it has passed.
        let job = unsafe { write::start(Local::by_path(), inputs.clone(), options) }.unwrap();
        assert!(job.shared().wait_front(starts[2], None));
        sources[1][1 << 20..].fill(0xee);
        assert!(job.shared().wait_front(starts[3] + sources[3].len() as u64, None));
        let (done, total) = job.shared().progress();
        assert!(done < total, "the rest went before");
        sources[3].fill(0xee);
        job.join();
        check_written(&inputs, &expected, &job.shared().take_outcome().unwrap().unwrap());
        let usage = Throttle::open(&throttle).unwrap().usage();
        assert!(usage.bytes >= total);
        assert!(usage.requests >= 4 * 8);
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
        let job =
            unsafe { write::start(Local::by_path(), files, Options { mode, threads: Some(2), ..AUTOMATIC }) }
                .unwrap();
        let stop_at = job.shared().progress().1 * round as u64 / 20;
        job.shared().wait_front(stop_at, None);
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
