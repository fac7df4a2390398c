//! What tests of write jobs share: a job from start to end, its inputs, and a look at what it left.

use std::fs;
use std::path::{Path, PathBuf};

use waystation_io::Result;
use waystation_io::local::Local;
use waystation_io::write::{self, FileInput, Options, Statistics};

pub const AUTOMATIC: Options = Options::AUTOMATIC;

/// Runs a whole write job.
pub fn run(files: Vec<FileInput>, options: Options) -> Result<Statistics> {
    // SAFETY: tests keep their sources until the job has been joined here.
    let job = unsafe { write::start(Local::by_path(), files, options) }?;
    job.join();
    job.shared().take_outcome().unwrap()
}

/// Bytes that repeat nowhere soon, another sequence for each `seed`.
pub fn noise(nbytes: usize, seed: usize) -> Vec<u8> {
    (0..nbytes.div_ceil(8))
        .flat_map(|index| {
            (index ^ seed << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29).to_le_bytes()
        })
        .take(nbytes)
        .collect()
}

/// What lies in a directory.
pub fn entries(directory: &Path) -> Vec<PathBuf> {
    fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect()
}

/// One array of `source` after a header of `header_bytes`.
pub fn plain(path: PathBuf, header_bytes: usize, source: &[u8]) -> FileInput {
    let (nbytes, address) = (source.len() as i64, source.as_ptr() as i64);
    let words = vec![header_bytes as i64, nbytes, 0, 1, -1, address];
    FileInput {
        path,
        header: vec![b' '; header_bytes],
        file_bytes: (header_bytes + source.len()) as u64,
        words,
    }
}
