//! Small files, directories and renames on real file systems.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use proptest::prelude::*;
use waystation_io::Kind;
use waystation_io::files::{read_small_files, rename_exchange, rename_new, sync_paths, write_small_files};
use waystation_io::sync_group::{Durability, SyncGroup};

fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn limited(paths: &[PathBuf], limit_bytes: u64) -> Vec<(&PathBuf, u64)> {
    paths.iter().map(|path| (path, limit_bytes)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn what_is_written_is_read_back(bodies in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..5000), 0..40),
                                    when in 0usize..3) {
        let directory = tempfile::tempdir().unwrap();
        let paths: Vec<PathBuf> = (0..bodies.len()).map(|index| directory.path().join(format!("{index}"))).collect();
        let files: Vec<(&PathBuf, &[u8])> = paths.iter().zip(bodies.iter().map(Vec::as_slice)).collect();
        let group = Arc::new(SyncGroup::open(directory.path()).unwrap());
        let durability = [Durability::Now, Durability::Together(Arc::clone(&group)), Durability::Whenever];
        write_small_files(&files, &durability[when]).unwrap();
        group.sync().unwrap();
        prop_assert_eq!(read_small_files(&limited(&paths, 5000), None).unwrap(), bodies);
    }
}

#[test]
fn an_existing_file_is_a_conflict_and_the_others_are_removed() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    fs::write(path("b"), "mine").unwrap();
    let files = [(path("a"), b"1".as_slice()), (path("b"), b"2"), (path("c"), b"3")];
    let error = write_small_files(&files, &Durability::Now).unwrap_err();
    assert_eq!(error.kind(), Kind::Conflict);
    assert_eq!(error.context("path"), path("b").to_str());
    assert_eq!(names(directory.path()), ["b"]);
    assert_eq!(fs::read(path("b")).unwrap(), b"mine");
}

#[test]
fn a_missing_directory_is_not_found() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("absent/file");
    assert_eq!(
        write_small_files(&[(&path, b"".as_slice())], &Durability::Now).unwrap_err().kind(),
        Kind::NotFound
    );
    let error = read_small_files(&[(&path, 10)], None).unwrap_err();
    assert_eq!((error.kind(), error.context("path")), (Kind::NotFound, path.to_str()));
    assert_eq!(sync_paths(&[&path]).unwrap_err().kind(), Kind::NotFound);
}

#[test]
fn too_large_files_and_things_that_are_no_files_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    fs::write(&path, [0; 11]).unwrap();
    assert_eq!(read_small_files(&[(&path, 11)], None).unwrap(), [[0; 11]]);
    assert_eq!(read_small_files(&[(&path, 10)], None).unwrap_err().kind(), Kind::Corrupt);
    let error = read_small_files(&[(directory.path(), 10)], None).unwrap_err();
    assert_eq!(error.kind(), Kind::InvalidInput);
    // Of a sparse file of terabytes nothing is read, and no memory is taken for it.
    fs::File::options().write(true).open(&path).unwrap().set_len(4 << 40).unwrap();
    let error = read_small_files(&[(&path, 64 << 30)], None).unwrap_err();
    assert_eq!((error.kind(), error.context("path")), (Kind::Corrupt, path.to_str()));

    let pipe = directory.path().join("pipe");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR).unwrap();
    assert_eq!(read_small_files(&[(&pipe, 10)], None).unwrap_err().kind(), Kind::Corrupt);
}

#[test]
fn the_error_of_the_first_bad_path_is_reported() {
    let directory = tempfile::tempdir().unwrap();
    let paths: Vec<PathBuf> = (0..100).map(|index| directory.path().join(format!("{index}"))).collect();
    let error = read_small_files(&limited(&paths, 10), None).unwrap_err();
    assert_eq!(error.context("path"), paths[0].to_str());
}

#[test]
fn files_and_directories_are_synced() {
    let directory = tempfile::tempdir().unwrap();
    let inner = directory.path().join("inner");
    fs::create_dir(&inner).unwrap();
    sync_paths(&[directory.path(), &inner]).unwrap();
    fs::write(inner.join("file"), "").unwrap();
    sync_paths(&[inner.join("file"), inner.clone()]).unwrap();
    assert_eq!(sync_paths(&[inner.join("none")]).unwrap_err().kind(), Kind::NotFound);
}

#[test]
fn a_new_name_never_replaces() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    fs::create_dir(path("source")).unwrap();
    fs::create_dir(path("taken")).unwrap();
    let error = rename_new(&path("source"), &path("taken")).unwrap_err();
    assert_eq!((error.kind(), error.context("path")), (Kind::Conflict, path("taken").to_str()));
    symlink("nowhere", path("dangling")).unwrap();
    assert_eq!(rename_new(&path("source"), &path("dangling")).unwrap_err().kind(), Kind::Conflict);
    rename_new(&path("source"), &path("target")).unwrap();
    assert_eq!(names(directory.path()), ["dangling", "taken", "target"]);

    let error = rename_new(&path("absent"), &path("other")).unwrap_err();
    assert_eq!((error.kind(), error.context("path")), (Kind::NotFound, path("absent").to_str()));
    let error = rename_new(&path("target"), &path("target/inside")).unwrap_err();
    assert_eq!(error.kind(), Kind::InvalidInput);
}

#[test]
fn an_exchange_swaps_two_names() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    fs::create_dir(path("first")).unwrap();
    fs::write(path("first/a"), "").unwrap();
    fs::create_dir(path("second")).unwrap();
    rename_exchange(&path("first"), &path("second")).unwrap();
    assert_eq!(names(&path("second")), ["a"]);
    assert_eq!(names(&path("first")), [""; 0]);
    assert_eq!(rename_exchange(&path("first"), &path("absent")).unwrap_err().kind(), Kind::NotFound);
    assert_eq!(rename_exchange(&path("first"), &path("first/a")).unwrap_err().kind(), Kind::InvalidInput);
}

#[test]
fn renames_between_file_systems_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let Ok(memory) = tempfile::tempdir_in("/dev/shm") else { return };
    let device = |path: &Path| rustix::fs::stat(path).unwrap().st_dev;
    if device(directory.path()) == device(memory.path()) {
        return;
    }
    fs::create_dir(directory.path().join("a")).unwrap();
    let error = rename_new(&directory.path().join("a"), &memory.path().join("a")).unwrap_err();
    assert_eq!(error.kind(), Kind::InvalidInput);
}

#[test]
fn a_read_only_directory_says_so() {
    if rustix::process::geteuid().is_root() {
        return; // root may write anywhere
    }
    let directory = tempfile::tempdir().unwrap();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o500)).unwrap();
    let path = directory.path().join("file");
    let error = write_small_files(&[(&path, b"".as_slice())], &Durability::Now).unwrap_err();
    assert_eq!((error.kind(), error.context("errno")), (Kind::InvalidInput, Some("13")));
}
