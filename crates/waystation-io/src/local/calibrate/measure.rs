//! Times the ways to write and read on nameless files.
//!
//! Invariants: ways take turns, so that a disk whose speed drifts treats them alike, and those that fall
//! far behind take no further turn; writes go to fresh files and count until they are durable; reads are
//! of bytes that were dropped from the page cache, by the reader itself with verification, into memory
//! that nobody has touched, as the first load of a program does: finding it pages is part of the work.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use rustix::fs::Advice;
use waystation_format::checksum::{BLOCK_BYTES, crc64};
use waystation_format::{Error, Kind, Result};

use super::record::{Calibration, Trial, key_of};
use crate::aligned::AlignedBlock;
use crate::filesystem::{FileSystem, nameless_file, set_direct};
use crate::job::panicked;
use crate::local::Local;
use crate::mode::{Mode, Way};
use crate::probe::kernel_release;
use crate::read::plan::{Plan, ReadFile};
use crate::read::{self, Options};
use crate::ring::Ring;

/// Times that each way is tried, unless it falls behind.
const TURNS: usize = 3;
/// Speed in percent of the best below which a way takes no further turn: about what a disk's whims may make
/// of the fastest way, which has to stay in the race.
const HOPELESS_PERCENT: u64 = 60;
const MIB: usize = 1 << 20;

const fn way(mode: Mode, block_bytes: usize, depth: usize, threads: usize) -> Way {
    Way { mode, block_bytes, depth, threads }
}

/// In the order of preference: less staging memory and fewer threads first.
const WRITE_WAYS: [Way; 5] = [
    way(Mode::DirectRing, 8 * MIB, 2, 1),
    way(Mode::DirectRing, MIB, 8, 1),
    way(Mode::DirectRing, 16 * MIB, 2, 1),
    way(Mode::DirectThreads, 4 * MIB, 1, 2),
    way(Mode::Buffered, MIB, 1, 1),
];
/// In the order of preference: fewer threads first.
const READ_WAYS: [Way; 6] = [
    way(Mode::DirectRing, MIB, 16, 1),
    way(Mode::DirectRing, 2 * MIB, 8, 1),
    way(Mode::DirectRing, 4 * MIB, 8, 2),
    way(Mode::DirectRing, 2 * MIB, 64, 1),
    way(Mode::Buffered, MIB, 1, 2),
    way(Mode::Buffered, MIB, 1, 4),
];
/// How the file that is read back gets there: the way that every file system offers.
const PLAIN_WAY: Way = way(Mode::Buffered, MIB, 1, 1);

/// Measures all ways under `directory`.
pub fn measure(directory: &Path, filesystem: &FileSystem, probe_bytes: u64) -> Result<Calibration> {
    let bytes = (probe_bytes as usize).next_multiple_of(MIB);
    let failed = |error: io::Error| Error::from_io(error, "measure the file system", directory);
    // In memory there is nothing to go past.
    let suits = |way: &&Way| way.mode == Mode::Buffered || !filesystem.is_memory();
    let mut data = Memory::new(bytes)?;
    data.fill();
    let mut write: Vec<Trial> = WRITE_WAYS.iter().filter(suits).map(untried).collect();
    take_turns(&mut write, |way| {
        let (file, _) = nameless_file(directory)?;
        time(bytes, || write_durably(&file, data.bytes(), way))
    });
    if write.iter().all(|trial| trial.bytes_per_s.is_empty()) {
        let reason = write.pop().and_then(|trial| trial.refused).unwrap_or_default();
        return Err(Error::new(Kind::Unavailable, format!("no way of writing works: {reason}"))
            .with("path", directory.display().to_string()));
    }
    let (file, _) = nameless_file(directory).map_err(failed)?;
    write_durably(&file, data.bytes(), &PLAIN_WAY).map_err(failed)?;
    let checksums: Vec<u64> = data.bytes().chunks(BLOCK_BYTES).map(crc64).collect();
    drop(data);
    let mut read: Vec<Trial> = READ_WAYS.iter().filter(suits).map(untried).collect();
    take_turns(&mut read, |way| {
        rustix::fs::fadvise(&file, 0, None, Advice::DontNeed)?;
        let mut memory = Memory::new(bytes).map_err(io::Error::other)?;
        time(bytes, || read_back(&file, &checksums, &mut memory, way))
    });
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Ok(Calibration {
        key: key_of(filesystem),
        kernel: kernel_release(),
        probe_bytes,
        measured_unix_s: since_epoch.as_secs(),
        write,
        read,
        stored: None,
    })
}

fn untried(way: &Way) -> Trial {
    Trial { way: *way, bytes_per_s: Vec::new(), refused: None }
}

/// Tries all ways in turns. A way that failed or is far behind is not tried again.
fn take_turns(trials: &mut [Trial], mut attempt: impl FnMut(&Way) -> io::Result<u64>) {
    for _ in 0..TURNS {
        let best = trials.iter().filter_map(Trial::best_bytes_per_s).max().unwrap_or(0);
        let in_the_race = |trial: &&mut Trial| {
            let speed = trial.best_bytes_per_s().unwrap_or(best);
            trial.refused.is_none() && speed >= best / 100 * HOPELESS_PERCENT
        };
        for trial in trials.iter_mut().filter(in_the_race) {
            match attempt(&trial.way) {
                Ok(speed) => trial.bytes_per_s.push(speed),
                Err(error) => {
                    trial.refused = Some(error.to_string());
                    trial.bytes_per_s.clear();
                }
            }
        }
    }
}

/// Bytes per second.
fn time(bytes: usize, transfer: impl FnOnce() -> io::Result<()>) -> io::Result<u64> {
    let start = Instant::now();
    transfer()?;
    Ok((bytes as f64 / start.elapsed().as_secs_f64().max(1e-9)) as u64)
}

/// Page-aligned memory.
struct Memory {
    block: AlignedBlock,
    nbytes: usize,
}

impl Memory {
    fn new(nbytes: usize) -> Result<Self> {
        Ok(Self { block: AlignedBlock::map(nbytes)?, nbytes })
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping has so many bytes, zero at first, and only `&mut self` writes to them.
        unsafe { std::slice::from_raw_parts(self.block.address().as_ptr(), self.nbytes) }
    }

    /// Bytes that no file system can compress or leave out.
    fn fill(&mut self) {
        // SAFETY: as above, and the borrow is exclusive.
        let bytes = unsafe { std::slice::from_raw_parts_mut(self.block.address().as_ptr(), self.nbytes) };
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        for word in bytes.chunks_exact_mut(8) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            word.copy_from_slice(&state.to_le_bytes());
        }
    }
}

fn write_durably(file: &File, data: &[u8], way: &Way) -> io::Result<()> {
    set_direct(file, way.mode.is_direct())?;
    if way.mode == Mode::DirectRing {
        write_by_ring(file, data, way)?;
    } else {
        write_by_threads(file, data, way)?;
    }
    file.sync_all()
}

fn write_by_ring(file: &File, data: &[u8], way: &Way) -> io::Result<()> {
    let mut ring = Ring::new(way.depth)?;
    let mut blocks = data.chunks(way.block_bytes).enumerate();
    loop {
        while ring.in_flight() < ring.depth().min(way.depth)
            && let Some((index, block)) = blocks.next()
        {
            let offset = (index * way.block_bytes) as u64;
            // SAFETY: data and file outlive the ring, whose drop waits; nobody changes the data.
            unsafe { ring.push_write(file.as_raw_fd(), block.as_ptr(), block.len(), offset, index as u64) }?;
        }
        if ring.in_flight() == 0 {
            return Ok(());
        }
        ring.wait(1)?;
        while let Some(completion) = ring.next_completion() {
            let begin = completion.token as usize * way.block_bytes;
            if completion.result? != way.block_bytes.min(data.len() - begin) {
                return Err(io::ErrorKind::WriteZero.into());
            }
        }
    }
}

fn write_by_threads(file: &File, data: &[u8], way: &Way) -> io::Result<()> {
    let share = data.len().div_ceil(way.threads).next_multiple_of(way.block_bytes);
    let write = |range: Range<usize>| {
        for begin in range.clone().step_by(way.block_bytes) {
            let end = (begin + way.block_bytes).min(range.end);
            file.write_all_at(&data[begin..end], begin as u64)?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let ranges = (0..data.len()).step_by(share).map(|begin| begin..(begin + share).min(data.len()));
        let threads: Vec<_> = ranges.map(|range| scope.spawn(move || write(range))).collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().unwrap_or_else(|_| Err(io::Error::other(panicked()))))
    })
}

/// Reads the file with the reader itself.
fn read_back(file: &File, checksums: &[u64], memory: &mut Memory, way: &Way) -> io::Result<()> {
    let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let file = ReadFile {
        path,
        file_bytes: memory.nbytes as u64,
        checksums: Some(checksums.to_vec()),
        version: None,
    };
    let words = [0, 0, memory.nbytes as i64, 0, memory.block.address().as_ptr() as i64];
    let plan = Plan::new(vec![file], &words).map_err(io::Error::other)?;
    let options = Options {
        mode: Some(way.mode),
        block_bytes: Some(way.block_bytes),
        depth: Some(way.depth),
        threads: Some(way.threads),
        ..Options::default()
    };
    // SAFETY: the memory is borrowed exclusively until the job's handle is joined and dropped below.
    let job = unsafe { read::start(Local::by_path(), plan, options) }.map_err(io::Error::other)?;
    job.join();
    let statistics =
        job.shared().take_outcome().unwrap_or_else(|| Err(panicked())).map_err(io::Error::other)?;
    if statistics.modes != [Some(way.mode)] {
        return Err(io::Error::other(format!("the system refuses {}", way.mode)));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tried(speeds: &[&[u64]]) -> Vec<Trial> {
        let ways = WRITE_WAYS.iter().zip(speeds);
        let mut trials: Vec<Trial> = ways.clone().map(|(way, _)| untried(way)).collect();
        let mut left: Vec<(Way, Vec<u64>)> =
            ways.map(|(way, speeds)| (*way, speeds.iter().rev().copied().collect())).collect();
        take_turns(&mut trials, |way| {
            let of_way = left.iter_mut().find(|(known, _)| known == way);
            of_way.and_then(|(_, speeds)| speeds.pop()).ok_or_else(|| io::Error::other("refused"))
        });
        trials
    }

    #[test]
    fn a_way_that_is_far_behind_takes_no_further_turn() {
        let trials = tried(&[&[100, 90, 95], &[59, 1000, 1000], &[61, 30, 99]]);
        let speeds: Vec<&[u64]> = trials.iter().map(|trial| trial.bytes_per_s.as_slice()).collect();
        assert_eq!(speeds, [&[100, 90, 95][..], &[59], &[61, 30, 99]]);
    }

    #[test]
    fn a_way_that_fails_once_has_no_speed() {
        let trials = tried(&[&[100, 100], &[50]]);
        assert_eq!(trials[0].bytes_per_s, [0; 0]);
        assert_eq!(trials[0].refused.as_deref(), Some("refused"));
        assert_eq!(trials[1].bytes_per_s, [50]);
    }
}
