//! More files than a process may have open. A program of its own, because the limit is the process's.
#![allow(clippy::unwrap_used)]

#[path = "engine/read_support/mod.rs"]
mod read_support;

use std::fs;

use rustix::process::{Resource, Rlimit, setrlimit};
use waystation_io::local::Local;
use waystation_io::mode::Mode;
use waystation_io::read::plan::{Plan, ReadFile};
use waystation_io::read::{self, Options};

use read_support::{Memory, SPACES, bytes_of, checksums_of, directory_in};

#[test]
fn files_are_open_only_while_they_are_read() {
    let directory = directory_in(SPACES[0]).unwrap();
    let (count, nbytes) = (500, 5000);
    let contents: Vec<Vec<u8>> = (0..count).map(|index| bytes_of(nbytes, index)).collect();
    let files: Vec<ReadFile> = contents
        .iter()
        .enumerate()
        .map(|(index, content)| {
            let path = directory.path().join(format!("{index}"));
            fs::write(&path, content).unwrap();
            ReadFile {
                path,
                file_bytes: nbytes as u64,
                checksums: Some(checksums_of(content)),
                version: None,
            }
        })
        .collect();
    setrlimit(Resource::Nofile, Rlimit { current: Some(128), maximum: Some(128) }).unwrap();
    for mode in Mode::ALL {
        let memory = Memory::new(count as usize * nbytes);
        let words: Vec<i64> = (0..count as i64)
            .flat_map(|index| {
                let place = index * nbytes as i64;
                [index, 0, nbytes as i64, 0, memory.address() as i64 + place]
            })
            .collect();
        let plan = Plan::new(files.clone(), &words).unwrap();
        let options = Options { mode: Some(mode), threads: Some(3), ..Options::default() };
        // SAFETY: the memory outlives the join.
        let job = unsafe { read::start(Local::by_path(), plan, options) }.unwrap();
        job.join();
        job.shared().take_outcome().unwrap().unwrap();
        assert!(memory.bytes() == contents.concat());
    }
}
