//! The raw limit of a disk over io_uring: one file, plain memory, nothing else.
//!
//! `raw_limit write|read PATH BYTES BLOCK_BYTES WORKERS DEPTH direct|buffered [preallocate]` prints
//! `{"seconds": …}`. The benchmarks compare Waystation with it, so it uses nothing of Waystation's engine.
//! Each worker has a ring and an equal part of the file, and keeps DEPTH requests of BLOCK_BYTES in
//! flight. A write starts from memory that is ready and ends with the fsync of file and directory; a read
//! goes into memory that nothing has touched, and is checked after the clock has stopped: every page of
//! the file begins with its own number.

use std::error::Error;
use std::ffi::CString;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::time::Instant;

use io_uring::{IoUring, opcode, types};
use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

const PAGE_BYTES: usize = 4096;

#[derive(Clone, Copy, PartialEq)]
enum Direction {
    Write,
    Read,
}

struct Arguments {
    direction: Direction,
    path: PathBuf,
    nbytes: usize,
    block_bytes: usize,
    workers: usize,
    depth: usize,
    direct: bool,
    preallocate: bool,
}

impl Arguments {
    fn parse() -> Outcome<Self> {
        let words: Vec<String> = std::env::args().skip(1).collect();
        let [direction, path, nbytes, block_bytes, workers, depth, cache, rest @ ..] = words.as_slice()
        else {
            return Err("raw_limit write|read PATH BYTES BLOCK_BYTES WORKERS DEPTH direct|buffered \
                        [preallocate]"
                .into());
        };
        let direction = match direction.as_str() {
            "write" => Direction::Write,
            "read" => Direction::Read,
            other => return Err(format!("neither write nor read: '{other}'").into()),
        };
        let arguments = Self {
            direction,
            path: path.into(),
            nbytes: nbytes.parse()?,
            block_bytes: block_bytes.parse()?,
            workers: workers.parse()?,
            depth: depth.parse()?,
            direct: cache == "direct",
            preallocate: rest.iter().any(|word| word == "preallocate"),
        };
        let sizes = [arguments.nbytes, arguments.block_bytes];
        if sizes.iter().any(|size| *size == 0 || size % PAGE_BYTES != 0) {
            return Err(format!("sizes must be multiples of {PAGE_BYTES}: {sizes:?}").into());
        }
        if arguments.workers == 0 || arguments.depth == 0 {
            return Err("there must be a worker and a request in flight".into());
        }
        Ok(arguments)
    }
}

/// Anonymous memory, huge pages where the system grants them; unmapped when the process ends.
#[derive(Clone, Copy)]
struct Memory {
    start: NonNull<u8>,
    nbytes: usize,
}

// SAFETY: the memory lives as long as the process, and workers use disjoint parts of it.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(nbytes: usize) -> Outcome<Self> {
        // SAFETY: a new mapping, at an address of the kernel's choice, disturbs no other.
        let start = unsafe {
            let flags = ProtFlags::READ | ProtFlags::WRITE;
            let start = rustix::mm::mmap_anonymous(std::ptr::null_mut(), nbytes, flags, MapFlags::PRIVATE)?;
            // Advice only: without huge pages everything works, slower.
            let _ = rustix::mm::madvise(start, nbytes, Advice::LinuxHugepage);
            start
        };
        let start = NonNull::new(start.cast()).ok_or("the kernel mapped memory at address zero")?;
        Ok(Self { start, nbytes })
    }

    fn words(&self) -> &'static mut [u64] {
        // SAFETY: page-aligned, readable and writable for the life of the process; called by the main
        // thread alone, while no worker runs.
        unsafe { std::slice::from_raw_parts_mut(self.start.cast().as_ptr(), self.nbytes / 8) }
    }

    /// Numbers the pages and fills the rest with bytes that do not compress.
    fn fill(&self) {
        let mut random = 0x9e37_79b9_7f4a_7c15_u64;
        for (position, word) in self.words().iter_mut().enumerate() {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            *word =
                if position % (PAGE_BYTES / 8) == 0 { (position * 8 / PAGE_BYTES) as u64 } else { random };
        }
    }

    fn check(&self) -> Outcome<()> {
        for (page, words) in self.words().chunks(PAGE_BYTES / 8).enumerate() {
            if words[0] != page as u64 {
                return Err(format!("page {page} begins with {}", words[0]).into());
            }
        }
        Ok(())
    }
}

fn main() -> Outcome<()> {
    let arguments = Arguments::parse()?;
    let seconds = match arguments.direction {
        Direction::Write => write(&arguments)?,
        Direction::Read => read(&arguments)?,
    };
    println!("{{\"seconds\": {seconds:.6}}}");
    Ok(())
}

fn write(arguments: &Arguments) -> Outcome<f64> {
    let memory = Memory::new(arguments.nbytes)?;
    memory.fill();
    let directory = arguments.path.parent().ok_or("the path has no directory")?;
    let start = Instant::now();
    let file = open(arguments, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL)?;
    if arguments.preallocate {
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, arguments.nbytes as u64)?;
    }
    transfer(arguments, &file, memory)?;
    rustix::fs::fsync(&file)?;
    File::open(if directory.as_os_str().is_empty() { Path::new(".") } else { directory })?.sync_all()?;
    Ok(start.elapsed().as_secs_f64())
}

fn read(arguments: &Arguments) -> Outcome<f64> {
    let start = Instant::now();
    let memory = Memory::new(arguments.nbytes)?;
    let file = open(arguments, OFlags::RDONLY)?;
    transfer(arguments, &file, memory)?;
    let seconds = start.elapsed().as_secs_f64();
    memory.check()?;
    Ok(seconds)
}

fn open(arguments: &Arguments, flags: OFlags) -> Outcome<OwnedFd> {
    let path = CString::new(arguments.path.as_os_str().as_bytes())?;
    let flags = if arguments.direct { flags | OFlags::DIRECT } else { flags };
    Ok(rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::from_raw_mode(0o644))?)
}

/// Moves the whole file, each worker its part; the first error of a worker is returned.
fn transfer(arguments: &Arguments, file: &OwnedFd, memory: Memory) -> Outcome<()> {
    let pages = arguments.nbytes / PAGE_BYTES;
    let part = pages.div_ceil(arguments.workers) * PAGE_BYTES;
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..arguments.nbytes)
            .step_by(part)
            .map(|begin| {
                let end = (begin + part).min(arguments.nbytes);
                scope.spawn(move || Worker::new(arguments, file, memory, begin, end)?.run())
            })
            .collect();
        for worker in workers {
            worker.join().map_err(|_| "a worker panicked")??;
        }
        Ok(())
    })
}

/// One ring and the part of the file that it moves.
struct Worker<'a> {
    arguments: &'a Arguments,
    file: &'a OwnedFd,
    memory: Memory,
    ring: IoUring,
    next: usize,
    end: usize,
    slots: Vec<(usize, usize)>, // (position, bytes left) of each request in flight
}

impl<'a> Worker<'a> {
    fn new(
        arguments: &'a Arguments,
        file: &'a OwnedFd,
        memory: Memory,
        begin: usize,
        end: usize,
    ) -> Outcome<Self> {
        let ring = IoUring::new(u32::try_from(arguments.depth.next_power_of_two())?)?;
        Ok(Self { arguments, file, memory, ring, next: begin, end, slots: Vec::new() })
    }

    fn run(mut self) -> Outcome<()> {
        let mut in_flight = 0;
        while self.slots.len() < self.arguments.depth && self.next < self.end {
            self.slots.push((0, 0));
            self.take_block(self.slots.len() - 1)?;
            in_flight += 1;
        }
        while in_flight > 0 {
            self.ring.submit_and_wait(1)?;
            let finished: Vec<(u64, i32)> =
                self.ring.completion().map(|entry| (entry.user_data(), entry.result())).collect();
            for (slot, result) in finished {
                if !self.advance(usize::try_from(slot)?, result)? {
                    in_flight -= 1;
                }
            }
        }
        Ok(())
    }

    /// Accounts for a finished request; false when its slot has nothing more to do.
    fn advance(&mut self, slot: usize, result: i32) -> Outcome<bool> {
        if result < 0 {
            return Err(std::io::Error::from_raw_os_error(-result).into());
        }
        if result == 0 {
            return Err(format!("the file ends at byte {}", self.slots[slot].0).into());
        }
        let moved = usize::try_from(result)?;
        let (position, left) = self.slots[slot];
        self.slots[slot] = (position + moved, left - moved);
        if left > moved {
            self.submit(slot)?;
        } else if self.next < self.end {
            self.take_block(slot)?;
        } else {
            return Ok(false);
        }
        Ok(true)
    }

    fn take_block(&mut self, slot: usize) -> Outcome<()> {
        let length = self.arguments.block_bytes.min(self.end - self.next);
        self.slots[slot] = (self.next, length);
        self.next += length;
        self.submit(slot)
    }

    fn submit(&mut self, slot: usize) -> Outcome<()> {
        let (position, left) = self.slots[slot];
        let file = types::Fd(self.file.as_raw_fd());
        let length = u32::try_from(left)?;
        // SAFETY: position < nbytes, since it lies in the worker's part of the memory.
        let address = unsafe { self.memory.start.as_ptr().add(position) };
        let entry = match self.arguments.direction {
            Direction::Write => opcode::Write::new(file, address, length).offset(position as u64).build(),
            Direction::Read => opcode::Read::new(file, address, length).offset(position as u64).build(),
        };
        // SAFETY: the memory lives as long as the process, and `position..position + left` belongs to
        // this request alone.
        unsafe { self.ring.submission().push(&entry.user_data(slot as u64)) }?;
        Ok(())
    }
}
