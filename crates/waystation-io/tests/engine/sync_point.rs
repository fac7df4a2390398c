//! Much made durable at once, on real file systems.

use std::fs;
use std::path::{Path, PathBuf};

use waystation_io::Kind;
use waystation_io::sync_point::SyncPoint;

/// Directories with a file each, made after the point.
fn made(root: &Path, count: usize) -> Vec<PathBuf> {
    (0..count)
        .flat_map(|index| {
            let directory = root.join(index.to_string());
            fs::create_dir(&directory).unwrap();
            fs::write(directory.join("file"), [7; 1000]).unwrap();
            [directory.join("file"), directory]
        })
        .collect()
}

#[test]
fn few_and_many_files_and_directories_are_synced() {
    for count in [0, 1, 31, 32, 500] {
        let directory = tempfile::tempdir().unwrap();
        let point = SyncPoint::open(directory.path()).unwrap();
        let paths = made(directory.path(), count);
        point.sync(&paths).unwrap();
        assert_eq!(paths.iter().filter(|path| path.is_file()).count(), count);
    }
}

#[test]
fn other_file_systems_are_synced_too() {
    let directory = tempfile::tempdir().unwrap();
    let Ok(memory) = tempfile::tempdir_in("/dev/shm") else { return };
    let point = SyncPoint::open(directory.path()).unwrap();
    let mut paths = made(directory.path(), 50);
    paths.extend(made(memory.path(), 50));
    point.sync(&paths).unwrap();
}

#[test]
fn what_is_gone_is_told_of() {
    let directory = tempfile::tempdir().unwrap();
    let point = SyncPoint::open(directory.path()).unwrap();
    for count in [1, 100] {
        let root = directory.path().join(format!("of {count}"));
        fs::create_dir(&root).unwrap();
        let mut paths = made(&root, count);
        let gone = directory.path().join("gone");
        paths.insert(count, gone.clone());
        let error = point.sync(&paths).unwrap_err();
        assert_eq!((error.kind(), error.context("path")), (Kind::NotFound, gone.to_str()));
    }
}

#[test]
fn a_point_needs_a_directory() {
    let directory = tempfile::tempdir().unwrap();
    let missing = directory.path().join("missing");
    assert_eq!(SyncPoint::open(&missing).err().unwrap().kind(), Kind::NotFound);
    fs::write(&missing, "").unwrap();
    assert_eq!(SyncPoint::open(&missing).err().unwrap().kind(), Kind::InvalidInput);
}
