//! Much made durable at once, on real file systems.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use waystation_io::Kind;
use waystation_io::sync_group::SyncGroup;

/// Makes directories with two files each: the group gets the one open, the other by its path.
fn make(group: &SyncGroup, root: &Path, count: usize) -> Vec<PathBuf> {
    let directories: Vec<_> = (0..count).map(|index| root.join(index.to_string())).collect();
    for directory in &directories {
        fs::create_dir(directory).unwrap();
        let (own, other) = (directory.join("own"), directory.join("other"));
        fs::write(&other, [7; 1000]).unwrap();
        group.add(&own, File::create(&own).unwrap()).unwrap();
        group.add_paths([other, directory.clone()]);
    }
    directories
}

#[test]
fn few_and_many_files_and_directories_are_synced_and_closed() {
    let directory = tempfile::tempdir().unwrap();
    for root in [directory.path(), Path::new("/dev/shm")] {
        for count in [0, 1, 31, 32, 500] {
            let Ok(directory) = tempfile::tempdir_in(root) else { continue };
            let group = SyncGroup::open(directory.path()).unwrap();
            for _ in 0..2 {
                let made = make(&group, directory.path(), count);
                group.sync().unwrap();
                assert_eq!(open_below(directory.path()), [directory.path()], "of {count}");
                made.iter().for_each(|made| fs::remove_dir_all(made).unwrap());
            }
        }
    }
}

/// What this process has open in a directory, or of it.
fn open_below(directory: &Path) -> Vec<PathBuf> {
    fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| fs::read_link(entry.unwrap().path()).ok())
        .filter(|path| path.starts_with(directory))
        .collect()
}

#[test]
fn few_files_are_open_at_a_time() {
    let directory = tempfile::tempdir().unwrap();
    let group = SyncGroup::open(directory.path()).unwrap();
    for index in 0..300 {
        let path = directory.path().join(index.to_string());
        group.add(&path, File::create(&path).unwrap()).unwrap();
        assert!(open_below(directory.path()).len() <= 128);
    }
    assert!(open_below(directory.path()).len() > 1);
    group.close();
    assert!(open_below(directory.path()).is_empty(), "not even the directory");
}

#[test]
fn other_file_systems_are_synced_too() {
    let directory = tempfile::tempdir().unwrap();
    let Ok(memory) = tempfile::tempdir_in("/dev/shm") else { return };
    let group = SyncGroup::open(directory.path()).unwrap();
    make(&group, directory.path(), 50);
    make(&group, memory.path(), 50);
    group.sync().unwrap();
}

#[test]
fn what_is_gone_is_told_of() {
    let directory = tempfile::tempdir().unwrap();
    let group = SyncGroup::open(directory.path()).unwrap();
    for count in [1, 100] {
        let root = directory.path().join(format!("of {count}"));
        fs::create_dir(&root).unwrap();
        make(&group, &root, count);
        let gone = directory.path().join("gone");
        group.add_paths([gone.clone()]);
        let error = group.sync().unwrap_err();
        assert_eq!((error.kind(), error.context("path")), (Kind::NotFound, gone.to_str()));
    }
}

#[test]
fn a_group_needs_a_directory() {
    let directory = tempfile::tempdir().unwrap();
    let missing = directory.path().join("missing");
    assert_eq!(SyncGroup::open(&missing).err().unwrap().kind(), Kind::NotFound);
    fs::write(&missing, "").unwrap();
    assert_eq!(SyncGroup::open(&missing).err().unwrap().kind(), Kind::InvalidInput);
}
