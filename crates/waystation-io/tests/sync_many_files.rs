//! More files that wait for their sync than a process may have open. A program of its own, because the limit is
//! the process's.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::sync::Arc;

use rustix::process::{Resource, Rlimit, setrlimit};
use waystation_io::local::files::write_small_files;
use waystation_io::local::sync_group::{Durability, SyncGroup};

#[test]
fn files_that_wait_for_their_sync_leave_descriptors_for_those_that_are_written_meanwhile() {
    let directory = tempfile::tempdir().unwrap();
    let files: Vec<_> = (0..2000)
        .map(|index| (directory.path().join(index.to_string()), index.to_string().into_bytes()))
        .collect();
    let open = fs::read_dir("/proc/self/fd").unwrap().count() as u64;
    setrlimit(Resource::Nofile, Rlimit { current: Some(open + 60), maximum: Some(open + 60) }).unwrap();
    let group = Arc::new(SyncGroup::open(directory.path()).unwrap());
    let borrowed: Vec<_> = files.iter().map(|(path, bytes)| (path, bytes.as_slice())).collect();
    write_small_files(&borrowed, &Durability::Together(Arc::clone(&group))).unwrap();
    group.sync().unwrap();
    for (path, bytes) in &files {
        assert_eq!(fs::read(path).unwrap(), *bytes);
    }
    let left = fs::read_dir("/proc/self/fd").unwrap().count() as u64;
    assert!(left <= open + 1, "{left} descriptors are open, where {open} were before");
}
