//! Write jobs that must fail: with an error of the right kind, and without leaving anything behind.

use std::fs;

use proptest::prelude::*;
use waystation_format::checksum::BLOCK_BYTES;
use waystation_io::write::{FileInput, Options, Statistics};
use waystation_io::{Error, Kind, Result};

use crate::write_support::{AUTOMATIC, entries, noise, plain, run};

fn error_of(outcome: Result<Statistics>) -> Error {
    outcome.map(|_| ()).unwrap_err()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, max_shrink_iters: 200, ..ProptestConfig::default() })]

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
        assert_eq!(error_of(run(Vec::new(), options.clone())).kind(), Kind::InvalidInput, "{options:?}");
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
