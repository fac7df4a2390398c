//! Durable writes of touched memory: the engine beside a raw loop of the disk's best way, in turns.
//!
//! `cargo run --release --example write_speed -- [DIRECTORY] [MIB] [ROUNDS] [MODE [THREADS [DEPTH [KIB]]]]`
//! prints each run in MiB/s (from creation to after fsync) and the ratio of the medians.
#![allow(clippy::unwrap_used)]

use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Instant;

use waystation_io::arena::{Arena, Slab};
use waystation_io::local::Local;
use waystation_io::mode::Mode;
use waystation_io::ring::Ring;
use waystation_io::sync_group::Durability;
use waystation_io::write::{self, FileInput, Options};

const MIB: usize = 1 << 20;
const HEADER_BYTES: usize = 4096;

/// io_uring, O_DIRECT, four blocks of 1 MiB in flight, straight from the source: no copy, no checksum.
fn write_raw(path: &Path, source: &Slab) {
    let file =
        OpenOptions::new().write(true).create_new(true).custom_flags(libc::O_DIRECT).open(path).unwrap();
    let mut ring = Ring::new(4).unwrap();
    for offset in (0..source.nbytes()).step_by(MIB) {
        if ring.in_flight() == 4 {
            ring.wait(1).unwrap();
        }
        while let Some(completion) = ring.next_completion() {
            assert_eq!(completion.result.unwrap(), MIB);
        }
        let address = source.address().as_ptr().wrapping_add(offset);
        // SAFETY: source and file outlive the ring.
        unsafe { ring.push_write(file.as_raw_fd(), address, MIB, offset as u64, 0) }.unwrap();
        ring.submit().unwrap();
    }
    drop(ring);
    file.sync_all().unwrap();
}

fn write_by_engine(path: &Path, source: &Slab, options: Options) -> write::Statistics {
    let nbytes = source.nbytes() as i64;
    let address = source.address().as_ptr() as i64;
    let words = vec![HEADER_BYTES as i64, 1, 1, nbytes, 1, -1, address, 0, nbytes, 1];
    let file_bytes = (HEADER_BYTES + source.nbytes()) as u64;
    let input = FileInput { path: path.to_owned(), header: vec![b' '; HEADER_BYTES], file_bytes, words };
    // SAFETY: `source` outlives the job, which is joined here.
    let job = unsafe { write::start(Local::by_path(), vec![input], options) }.unwrap();
    job.join();
    job.shared().take_outcome().unwrap().unwrap()
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |index: usize| arguments.get(index).map(|text| text.parse::<usize>().unwrap());
    let directory = Path::new(arguments.first().map_or(".", String::as_str));
    let nbytes = number(1).unwrap_or(2048) * MIB;
    let options = Options {
        durability: Durability::Now,
        mode: arguments.get(3).map(|text| text.parse().unwrap()),
        threads: number(4),
        depth: number(5),
        block_bytes: number(6).map(|kib| kib << 10),
        staging_bytes: None,
        first: Vec::new(),
        throttle: None,
    };
    let source = Arena::global().allocate(nbytes).unwrap();
    for offset in (0..nbytes).step_by(8) {
        let value = (offset as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17);
        // SAFETY: within the slab, which is page-aligned.
        unsafe { source.address().as_ptr().add(offset).cast::<u64>().write(value) };
    }
    let (mut raw, mut engine) = (Vec::new(), Vec::new());
    for round in 0..number(2).unwrap_or(5) {
        for kind in [round % 2, 1 - round % 2] {
            let path = directory.join("waystation-write-speed");
            let start = Instant::now();
            let statistics = if kind == 0 {
                write_raw(&path, &source);
                None
            } else {
                Some(write_by_engine(&path, &source, options.clone()))
            };
            let speed = (nbytes / MIB) as f64 / start.elapsed().as_secs_f64();
            std::fs::remove_file(&path).unwrap();
            match statistics {
                None => {
                    println!("raw     {speed:6.0} MiB/s");
                    raw.push(speed);
                }
                Some(of) => {
                    println!(
                        "engine  {speed:6.0} MiB/s  {} gather {:?} write {:?} sync {:?}",
                        of.mode.map_or("none", Mode::name),
                        of.gather_time,
                        of.write_time,
                        of.sync_time
                    );
                    engine.push(speed);
                }
            }
        }
    }
    let (raw, engine) = (median(&mut raw), median(&mut engine));
    println!("median raw {raw:.0}, engine {engine:.0} MiB/s, ratio {:.3}", engine / raw);
}
