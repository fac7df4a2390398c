//! Entries of table files on disk: the same as of the whole table, and nothing of a damaged one.

use std::fs;
use std::path::{Path, PathBuf};

use waystation_format::Kind;
use waystation_format::checksum::crc64;
use waystation_format::table::{Entry, FileEntry, PAGE_BYTES, TableKind, encode, pack};
use waystation_io::local::Local;
use waystation_io::table_pages::{read_table_entries, table_counts};

fn checksums(directory: &Path) -> (PathBuf, u64) {
    let path = directory.join("checksums.bin");
    let table = encode(TableKind::Checksums, &[&pack(&(0u64..5000).collect::<Vec<_>>())]).unwrap();
    fs::write(&path, &table).unwrap();
    (path, table.len() as u64)
}

#[test]
fn ranges_are_those_of_the_whole_table() {
    let directory = tempfile::tempdir().unwrap();
    let (path, file_bytes) = checksums(directory.path());
    assert_eq!(table_counts(&path, TableKind::Checksums, file_bytes, &Local::default()).unwrap(), [5000]);
    let ranges: Vec<_> = [0..1, 510..512, 7..7, 0..5000, 4999..5000].map(|range| (0, range)).into();
    let found =
        read_table_entries(&path, TableKind::Checksums, file_bytes, &ranges, &Local::default()).unwrap();
    for ((_, range), entries) in ranges.iter().zip(found) {
        assert_eq!(entries, pack(&range.clone().collect::<Vec<u64>>()));
    }
    assert!(
        read_table_entries(&path, TableKind::Checksums, file_bytes, &[], &Local::default())
            .unwrap()
            .is_empty()
    );
}

#[test]
fn ranges_that_are_not_there() {
    let directory = tempfile::tempdir().unwrap();
    let (path, file_bytes) = checksums(directory.path());
    for range in [(0, 4999..5001), (1, 0..1)] {
        let error = read_table_entries(&path, TableKind::Checksums, file_bytes, &[range], &Local::default())
            .unwrap_err();
        assert_eq!(error.kind(), Kind::InvalidInput, "{error}");
        assert_eq!(error.context("path"), Some(&*path.display().to_string()));
    }
}

#[test]
fn damage_and_other_files_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let (path, file_bytes) = checksums(directory.path());
    let read = |kind, expected_bytes| {
        read_table_entries(&path, kind, expected_bytes, &[(0, 0..511)], &Local::default())
    };
    assert_eq!(read(TableKind::Checksums, file_bytes + 1).unwrap_err().kind(), Kind::Corrupt);
    assert_eq!(read(TableKind::Files, file_bytes).unwrap_err().kind(), Kind::Corrupt);

    let whole = fs::read(&path).unwrap();
    for (at, is_used) in [(9, true), (PAGE_BYTES + 77, true), (3 * PAGE_BYTES, false)] {
        let mut damaged = whole.clone();
        damaged[at] ^= 4;
        fs::write(&path, &damaged).unwrap();
        assert_eq!(read(TableKind::Checksums, file_bytes).is_err(), is_used, "byte {at}");
    }
    let longer = [&whole[..], &[0; PAGE_BYTES]].concat();
    fs::write(&path, &longer).unwrap();
    assert_eq!(read(TableKind::Checksums, longer.len() as u64).unwrap_err().kind(), Kind::Corrupt);
    fs::remove_file(&path).unwrap();
    assert_eq!(read(TableKind::Checksums, file_bytes).unwrap_err().kind(), Kind::NotFound);
    let here = directory.path();
    assert_eq!(
        table_counts(here, TableKind::Checksums, 0, &Local::default()).unwrap_err().kind(),
        Kind::Corrupt
    );
}

#[test]
fn a_reserved_field_in_use_is_unsupported() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("files.bin");
    let files = [FileEntry {
        process: 0,
        sequence: 0,
        location: 0,
        file_bytes: 4096,
        data_start: 4096,
        first_block: 0,
    }];
    let mut table = encode(TableKind::Files, &[&pack(&files)]).unwrap();
    table[PAGE_BYTES + 12] = 1; // flags
    let page = [&table[PAGE_BYTES..2 * PAGE_BYTES - 8], &1u64.to_le_bytes()].concat();
    table[2 * PAGE_BYTES - 8..].copy_from_slice(&crc64(&page).to_le_bytes());
    fs::write(&path, &table).unwrap();
    let error =
        read_table_entries(&path, TableKind::Files, table.len() as u64, &[(0, 0..1)], &Local::default())
            .unwrap_err();
    assert_eq!(error.kind(), Kind::Unsupported);
    assert_eq!(FileEntry::BYTES, 64);
}
