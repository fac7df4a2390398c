//! How near the reader comes to the best raw loops, cold and warm, into equally fresh memory.
//!
//! Usage: `cargo run --release --example read_speed -- [directory] [MiB] [rounds]`. Every round runs each
//! way once, one after another, so that a disk or machine whose speed drifts treats them alike. The raw
//! loops read the file and do nothing else; the reader verifies every block.
#![allow(clippy::unwrap_used, clippy::expect_used)] // an example may end with a message

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Instant;

use waystation_format::checksum::{BLOCK_BYTES, crc64};
use waystation_io::aligned::AlignedBlock;
use waystation_io::local::Local;
use waystation_io::mode::Mode;
use waystation_io::read::plan::{Plan, ReadFile};
use waystation_io::read::{self, Options};
use waystation_io::ring::Ring;

const MIB: usize = 1 << 20;

struct Input {
    path: PathBuf,
    nbytes: usize,
    checksums: Vec<u64>,
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let directory = arguments.next().map_or_else(std::env::temp_dir, PathBuf::from);
    let nbytes = arguments.next().map_or(2048, |text| text.parse().expect("MiB")) * MIB;
    let rounds = arguments.next().map_or(5, |text| text.parse().expect("rounds"));
    let input = prepare(&directory.join("read_speed.bin"), nbytes);
    measure("cold", &input, rounds, true);
    measure("warm", &input, rounds, false);
    fs::remove_file(&input.path).unwrap();
}

fn prepare(path: &Path, nbytes: usize) -> Input {
    let mut state = 88_172_645_463_325_252_u64;
    let mut block = vec![0u8; MIB];
    let mut file = File::create(path).unwrap();
    let mut checksums = Vec::new();
    for _ in 0..nbytes / MIB {
        for word in block.chunks_exact_mut(8) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            word.copy_from_slice(&state.to_le_bytes());
        }
        checksums.extend(block.chunks(BLOCK_BYTES).map(crc64));
        file.write_all(&block).unwrap();
    }
    file.sync_all().unwrap();
    Input { path: path.to_owned(), nbytes, checksums }
}

type Attempt = (&'static str, bool, fn(&Input, &AlignedBlock));

fn measure(temperature: &str, input: &Input, rounds: usize, cold: bool) {
    let attempts: [Attempt; 8] = [
        ("raw ring depth 16, 1 MiB", true, raw_ring),
        ("raw buffered, 4 threads", true, |input, memory| raw_buffered(input, memory, 4)),
        ("raw buffered, 2 threads", true, |input, memory| raw_buffered(input, memory, 2)),
        ("reader, its own choice", false, |input, memory| read(input, memory, None, None)),
        ("reader, direct-ring", false, |input, memory| read(input, memory, Some(Mode::DirectRing), None)),
        ("reader, direct-threads x4", false, |input, memory| {
            read(input, memory, Some(Mode::DirectThreads), Some(4));
        }),
        ("reader, buffered x2", false, |input, memory| read(input, memory, Some(Mode::Buffered), Some(2))),
        ("reader, buffered x4", false, |input, memory| read(input, memory, Some(Mode::Buffered), Some(4))),
    ];
    let mut speeds = vec![Vec::new(); attempts.len()];
    for _ in 0..rounds {
        for (index, (_, _, attempt)) in attempts.iter().enumerate() {
            if cold {
                drop_cache(&input.path)
            } else {
                fill_cache(input)
            }
            let memory = AlignedBlock::map(input.nbytes).unwrap();
            let start = Instant::now();
            attempt(input, &memory);
            speeds[index].push(input.nbytes as f64 / MIB as f64 / start.elapsed().as_secs_f64());
        }
    }
    // On a busy machine the best run says more about a way than the median does.
    let of = |speeds: &[f64]| {
        let mut sorted = speeds.to_vec();
        sorted.sort_by(f64::total_cmp);
        (sorted[sorted.len() / 2], sorted[sorted.len() - 1])
    };
    let raw = attempts.iter().zip(&speeds).filter(|((_, raw, _), _)| *raw).map(|(_, speeds)| of(speeds));
    let limit = raw.fold((0.0, 0.0), |most: (f64, f64), one| (most.0.max(one.0), most.1.max(one.1)));
    for ((name, _, _), speeds) in attempts.iter().zip(&speeds) {
        let (median, best) = of(speeds);
        let ratios = (median / limit.0, best / limit.1);
        println!(
            "{temperature} {name:26} median {median:6.0} MiB/s ({:.2} of raw), best {best:6.0} ({:.2} of raw)",
            ratios.0, ratios.1
        );
    }
}

fn drop_cache(path: &Path) {
    let file = File::open(path).unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

fn fill_cache(input: &Input) {
    std::io::copy(&mut File::open(&input.path).unwrap(), &mut std::io::sink()).unwrap();
}

fn read(input: &Input, memory: &AlignedBlock, mode: Option<Mode>, threads: Option<usize>) {
    let file = ReadFile {
        path: input.path.clone(),
        file_bytes: input.nbytes as u64,
        checksums: Some(input.checksums.clone()),
        version: None,
    };
    let words = [0, 0, input.nbytes as i64, 0, memory.address().as_ptr() as i64];
    let plan = Plan::new(vec![file], &words).unwrap();
    // SAFETY: the memory outlives the job, which is joined here.
    let job = unsafe { read::start(Local::by_path(), plan, Options { mode, threads, ..Options::default() }) }
        .unwrap();
    job.join();
    job.shared().take_outcome().unwrap().unwrap();
}

fn raw_ring(input: &Input, memory: &AlignedBlock) {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(&input.path).unwrap();
    let mut ring = Ring::new(16).expect("io_uring");
    let mut next = 0;
    loop {
        while ring.in_flight() < 16 && next < input.nbytes {
            let target = memory.address().as_ptr().wrapping_add(next);
            // SAFETY: memory and file outlive the ring, and every offset lies in both.
            unsafe { ring.push_read(file.as_raw_fd(), target, MIB, next as u64, 0) }.unwrap();
            next += MIB;
        }
        if ring.in_flight() == 0 {
            return;
        }
        ring.wait(1).unwrap();
        while let Some(completion) = ring.next_completion() {
            assert_eq!(completion.result.unwrap(), MIB);
        }
    }
}

fn raw_buffered(input: &Input, memory: &AlignedBlock, threads: usize) {
    let share = input.nbytes / threads;
    std::thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || {
                let file = File::open(&input.path).unwrap();
                for offset in (thread * share..(thread + 1) * share).step_by(MIB) {
                    let target = memory.address().as_ptr().wrapping_add(offset);
                    // SAFETY: the range lies in the memory and is this thread's alone.
                    let bytes = unsafe { std::slice::from_raw_parts_mut(target, MIB) };
                    file.read_exact_at(bytes, offset as u64).unwrap();
                }
            });
        }
    });
}
