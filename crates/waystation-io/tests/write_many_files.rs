//! More files than a process may have open. A program of its own, because the limit is the process's: tests
//! beside it would take from what is left, and be refused theirs.
#![allow(clippy::unwrap_used)]

#[path = "engine/write_support/mod.rs"]
mod write_support;

use std::fs;

use rustix::process::{Resource, Rlimit, setrlimit};
use waystation_format::checksum::crc64;

use write_support::{AUTOMATIC, entries, noise, plain, run};

#[test]
fn files_are_open_only_while_they_are_written() {
    const HEADER_BYTES: usize = 8;
    let directory = tempfile::tempdir().unwrap();
    let sources: Vec<Vec<u8>> = (0..3000).map(|index| noise(index % 50, index)).collect();
    let named = |(index, source): (usize, &Vec<u8>)| {
        plain(directory.path().join(index.to_string()), HEADER_BYTES, source)
    };
    let inputs: Vec<_> = sources.iter().enumerate().map(named).collect();
    setrlimit(Resource::Nofile, Rlimit { current: Some(512), maximum: Some(512) }).unwrap();
    let statistics = run(inputs.clone(), AUTOMATIC).unwrap();
    assert_eq!(entries(directory.path()).len(), sources.len());
    let mut bytes_written = 0;
    for ((input, source), checksums) in inputs.iter().zip(&sources).zip(&statistics.checksums) {
        let expected = [&[b' '; HEADER_BYTES], &source[..]].concat();
        assert_eq!(fs::read(&input.path).unwrap(), expected);
        assert_eq!(*checksums, [crc64(&expected)]);
        bytes_written += expected.len() as u64;
    }
    assert_eq!(statistics.bytes_written, bytes_written);
}
