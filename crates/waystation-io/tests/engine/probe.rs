//! Probing real directories: what works is known to work, and nothing is left behind.

use std::fs;
use std::path::Path;

use waystation_io::Kind;
use waystation_io::filesystem::FileSystem;
use waystation_io::probe::{Answer, probe};

fn is_empty(directory: &Path) -> bool {
    fs::read_dir(directory).unwrap().next().is_none()
}

#[test]
fn a_writable_directory_answers_everything_and_stays_empty() {
    let directory = tempfile::tempdir().unwrap();
    let found = probe(directory.path()).unwrap();
    assert_eq!(found.writable, Answer::Yes);
    for answer in
        [&found.direct, &found.nowait, &found.nameless_files, &found.rename_new, &found.rename_exchange]
    {
        assert!(!matches!(answer, Answer::Untried(_)), "{found:?}");
    }
    assert!(found.cores > 0 && found.memory_limit_bytes > 0);
    assert!(found.memory_available_bytes <= found.memory_total_bytes);
    assert!(is_empty(directory.path()));
}

#[test]
fn memory_file_systems_are_recognised() {
    let Ok(directory) = tempfile::tempdir_in("/dev/shm") else { return };
    let found = probe(directory.path()).unwrap();
    assert_eq!(found.filesystem.kind, "tmpfs");
    assert!(found.filesystem.is_memory());
    assert_eq!(found.rename_new, Answer::Yes);
    assert!(is_empty(directory.path()));
}

#[test]
fn the_file_system_is_that_of_the_mount_table() {
    let found = FileSystem::of(Path::new("/proc/self")).unwrap();
    assert_eq!((found.kind.as_str(), found.mount_point.as_path()), ("proc", Path::new("/proc")));
}

#[test]
fn a_directory_that_refuses_files_is_still_described() {
    // Nobody can create files in /proc, root included; its files can be read, but not past a cache.
    let found = probe(Path::new("/proc")).unwrap();
    assert!(matches!(found.writable, Answer::No(_)), "{found:?}");
    assert!(matches!(found.rename_new, Answer::Untried(_)));
    assert!(!matches!(found.direct, Answer::Yes));
    let json = found.to_json();
    assert_eq!(json["writable"]["works"], false);
    assert_eq!(json["rename_exchange"]["works"], serde_json::Value::Null);
    assert!(json["rename_exchange"]["reason"].as_str().unwrap().contains("created"));
}

#[test]
fn bad_paths_are_typed_errors() {
    let directory = tempfile::tempdir().unwrap();
    let absent = directory.path().join("absent");
    assert_eq!(probe(&absent).unwrap_err().kind(), Kind::NotFound);
    fs::write(&absent, "").unwrap();
    assert_eq!(probe(&absent).unwrap_err().kind(), Kind::InvalidInput);
}
