//! Damage, truncation, cancellation and wrong plans: each is a typed error that says where.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use proptest::prelude::*;
use waystation_io::local::Local;
use waystation_io::mode::Mode;
use waystation_io::read::plan::{Plan, ReadFile};
use waystation_io::read::{self, Options};
use waystation_io::{Kind, Result};

use crate::read_support::{BLOCK, Memory, SPACES, bytes_of, checksums_of, directory_in};

fn read_file(file: ReadFile, words: &[i64], mode: Option<Mode>) -> Result<read::Statistics> {
    let options = Options { mode, block_bytes: Some(BLOCK), ..Options::default() };
    // SAFETY: callers' destinations outlive the join.
    let job = unsafe { read::start(Local::by_path(), Plan::new(vec![file], words)?, options) }?;
    job.join();
    job.shared().take_outcome().unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// A flipped bit in a block that is touched is found and named; one elsewhere does not matter.
    #[test]
    fn a_flipped_bit_is_named(
        nbytes in 1..4 * BLOCK,
        from in any::<prop::sample::Index>(),
        length in any::<prop::sample::Index>(),
        flipped in any::<prop::sample::Index>(),
        bit in 0u8..8,
        mode in prop::option::of(prop::sample::select(Mode::ALL.to_vec())),
        space in 0..SPACES.len(),
    ) {
        let Some(directory) = directory_in(SPACES[space]) else { return Ok(()) };
        let path = directory.path().join("file");
        let mut content = bytes_of(nbytes, 11);
        let checksums = checksums_of(&content);
        let flipped = flipped.index(nbytes);
        content[flipped] ^= 1 << bit;
        fs::write(&path, &content).unwrap();
        let from = from.index(nbytes);
        let length = 1 + length.index(nbytes - from);
        let memory = Memory::new(length);
        let words = [0, from as i64, length as i64, 0, memory.address() as i64];
        let file = ReadFile { path: path.clone(), file_bytes: nbytes as u64, checksums: Some(checksums), version: None };
        let outcome = read_file(file, &words, mode);
        let block = flipped / BLOCK;
        if block < from / BLOCK || block > (from + length - 1) / BLOCK {
            prop_assert!(outcome.is_ok());
            prop_assert_eq!(memory.bytes(), &content[from..from + length]);
        } else {
            let error = outcome.unwrap_err();
            prop_assert_eq!(error.kind(), Kind::Corrupt);
            prop_assert_eq!(error.context("path"), path.to_str());
            let offset = (block * BLOCK).to_string();
            prop_assert_eq!(error.context("offset"), Some(offset.as_str()));
            let block_bytes = (nbytes - block * BLOCK).min(BLOCK).to_string();
            prop_assert_eq!(error.context("length"), Some(block_bytes.as_str()));
            prop_assert_ne!(error.context("expected"), error.context("actual"));
        }
    }

    #[test]
    fn a_truncated_file_is_corrupt(nbytes in 2..2 * BLOCK, cut in any::<prop::sample::Index>(), verified in any::<bool>()) {
        let directory = directory_in(SPACES[0]).unwrap();
        let path = directory.path().join("file");
        let content = bytes_of(nbytes, 5);
        fs::write(&path, &content[..cut.index(nbytes)]).unwrap();
        let memory = Memory::new(1);
        let checksums = verified.then(|| checksums_of(&content));
        let file = ReadFile { path: path.clone(), file_bytes: nbytes as u64, checksums, version: None };
        let error = read_file(file, &[0, 0, 1, 0, memory.address() as i64], None).unwrap_err();
        prop_assert_eq!((error.kind(), error.context("path")), (Kind::Corrupt, path.to_str()));
        prop_assert!(error.message().contains("truncated"));
    }
}

fn plain(path: PathBuf, file_bytes: u64) -> ReadFile {
    ReadFile { path, file_bytes, checksums: None, version: None }
}

#[test]
fn paths_that_are_no_files() {
    let directory = directory_in(SPACES[0]).unwrap();
    let memory = Memory::new(1);
    let words = [0, 0, 1, 0, memory.address() as i64];
    let absent = directory.path().join("absent");
    assert_eq!(read_file(plain(absent, 1), &words, None).unwrap_err().kind(), Kind::NotFound);
    let error = read_file(plain(directory.path().to_owned(), 1), &words, None).unwrap_err();
    assert_eq!(error.kind(), Kind::Corrupt);
    let pipe = directory.path().join("pipe");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR).unwrap();
    assert_eq!(read_file(plain(pipe, 1), &words, None).unwrap_err().kind(), Kind::Corrupt);
}

#[test]
fn wrong_plans_are_refused_before_anything_is_opened() {
    let memory = Memory::new(64);
    let address = memory.address() as i64;
    let max = i64::MAX;
    let cases: [(&str, Vec<i64>); 16] = [
        ("ends inside a record, at its chunk_offset", vec![0]),
        ("ends inside a record, at its chunk_shape", vec![0, 0, 1, 2, 3]),
        ("an array of 9223372036854775807 axes", vec![0, 0, 1, max]),
        ("ends inside a record, at its destination", vec![0, 0, 1, 1, 3, 0, 3]),
        ("names file 1 of 1", vec![1, 0, 1, 0, address]),
        ("negative file -1", vec![-1, 0, 1, 0, address]),
        ("negative chunk_offset", vec![0, -8, 1, 0, address]),
        ("negative item_bytes", vec![0, 0, -1, 0, address]),
        ("negative ndim", vec![0, 0, 1, -1, address]),
        ("negative shape", vec![0, 0, 1, 1, 4, 0, -1, address, 1]),
        ("beyond its file", vec![0, 90, 11, 0, address]),
        ("beyond its file", vec![0, max, 1, 0, address]),
        ("overflows", vec![0, 0, 8, 2, max, max, 0, 0, 1, 1, address, 1, 1]),
        ("beyond its array", vec![0, 0, 1, 1, 4, 2, 3, address, 1]),
        ("address space", vec![0, 0, 4, 0, 0]),
        ("address space", vec![0, 0, 1, 1, 4, 0, 4, address, max]),
    ];
    for (expected, words) in cases {
        let error = Plan::new(vec![plain(PathBuf::from("absent"), 100)], &words).unwrap_err();
        assert_eq!(error.kind(), Kind::InvalidInput, "{words:?}");
        assert!(error.message().contains(expected), "{words:?}: {error}");
        assert_eq!(error.context("record"), Some("0"));
    }
    let mut file = plain(PathBuf::from("absent"), BLOCK as u64 + 1);
    file.checksums = Some(vec![0]);
    let error = Plan::new(vec![file], &[]).unwrap_err();
    assert!(error.message().contains("1 checksums were given for a file of 2 blocks"), "{error}");
    assert_eq!(Plan::new(vec![plain(PathBuf::new(), u64::MAX)], &[]).unwrap_err().kind(), Kind::InvalidInput);
}

proptest! {
    /// Whatever the words are, the plan is refused or consistent; it never panics.
    #[test]
    fn any_words(words in prop::collection::vec(prop_oneof![0i64..5, any::<i64>(), Just(1 << 40)], 0..40)) {
        if let Ok(plan) = Plan::new(vec![plain(PathBuf::new(), 1 << 20)], &words) {
            for piece in plan.files[0].pieces() {
                prop_assert!(piece.file_range().end <= 1 << 20);
            }
        }
    }
}

#[test]
fn a_cancelled_read_touches_memory_no_more() {
    let directory = directory_in(SPACES[0]).unwrap();
    let path = directory.path().join("file");
    let nbytes = 64 << 20;
    let file = OpenOptions::new().write(true).create_new(true).open(&path).unwrap();
    file.write_all_at(&[1], nbytes - 1).unwrap();
    for mode in Mode::ALL {
        let memory = Memory::new(nbytes as usize);
        let words = [0, 0, nbytes as i64, 0, memory.address() as i64];
        let plan = Plan::new(vec![plain(path.clone(), nbytes)], &words).unwrap();
        // SAFETY: the memory outlives the job.
        let job = unsafe {
            read::start(Local::by_path(), plan, Options { mode: Some(mode), ..Options::default() })
        }
        .unwrap();
        while job.shared().progress().0 == 0 && !job.shared().is_finished() {
            std::hint::spin_loop();
        }
        job.shared().cancel();
        job.join();
        let outcome = job.shared().take_outcome().unwrap();
        assert!(outcome.is_ok() || outcome.is_err_and(|error| error.kind() == Kind::Cancelled));
        let before = memory.bytes().to_vec();
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert!(memory.bytes() == before, "{mode}");
    }
}

#[test]
fn one_bad_file_fails_the_job_and_dropping_a_handle_is_safe() {
    let directory = directory_in(SPACES[0]).unwrap();
    let content = bytes_of(4 * BLOCK, 1);
    let mut files = Vec::new();
    for index in 0..8 {
        let path = directory.path().join(format!("{index}"));
        fs::write(&path, &content).unwrap();
        let mut checksums = checksums_of(&content);
        if index == 5 {
            checksums[2] ^= 1;
        }
        files.push(ReadFile {
            path,
            file_bytes: content.len() as u64,
            checksums: Some(checksums),
            version: None,
        });
    }
    let memory = Memory::new(8 * content.len());
    let words: Vec<i64> = (0..8)
        .flat_map(|index| {
            [index, 0, content.len() as i64, 0, memory.address() as i64 + index * content.len() as i64]
        })
        .collect();
    for mode in Mode::ALL {
        let options = Options { mode: Some(mode), ..Options::default() };
        // SAFETY: the memory outlives the jobs, which are joined here or by their drop.
        let job = unsafe {
            read::start(Local::by_path(), Plan::new(files.clone(), &words).unwrap(), options.clone())
        }
        .unwrap();
        job.join();
        let error = job.shared().take_outcome().unwrap().unwrap_err();
        assert_eq!(error.context("path"), files[5].path.to_str());
        assert_eq!(error.context("offset"), Some((2 * BLOCK).to_string().as_str()));
        // SAFETY: as above.
        drop(
            unsafe { read::start(Local::by_path(), Plan::new(files.clone(), &words).unwrap(), options) }
                .unwrap(),
        );
    }
}
