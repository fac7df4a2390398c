//! Cases for reads: files of known bytes, pieces of them, and a reference that copies item by item.
#![allow(dead_code)] // each test program uses its part

use std::fs;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use proptest::sample::Index;
use waystation_format::checksum::{BLOCK_BYTES, crc64};
use waystation_io::Result;
use waystation_io::aligned::AlignedBlock;
use waystation_io::local::Local;
use waystation_io::read::plan::{Plan, ReadFile};
use waystation_io::read::{self, Options, Statistics};
use waystation_io::storage::Storage;

pub const BLOCK: usize = BLOCK_BYTES;
/// File systems to read from: one on a disk (usually), one in memory.
pub const SPACES: [&str; 2] = ["", "/dev/shm"];
/// What memory holds where nothing is delivered.
const UNTOUCHED: u8 = 0xa5;

#[derive(Clone, Debug)]
pub struct FileSpec {
    pub nbytes: usize,
    pub verified: bool,
    pub seed: u64,
}

/// A wish for a piece; what does not fit its file is cut down.
#[derive(Clone, Debug)]
pub struct PieceSpec {
    pub file: usize,
    pub chunk_shape: Vec<u64>,
    pub item_bytes: u64,
    pub offset: Index,
    pub aligned: bool,
    pub place: Index,
    pub cuts: Vec<(u32, u32)>,
    pub whole: bool,
    pub page_aligned: bool,
    /// How the destination is strided.
    pub style: u64,
}

#[derive(Clone, Debug)]
pub struct Case {
    pub files: Vec<FileSpec>,
    pub pieces: Vec<PieceSpec>,
}

/// What a read did, and what it should have done.
pub struct Read {
    pub outcome: Result<Statistics>,
    pub memory: Vec<u8>,
    pub expected: Vec<u8>,
    pub needed_bytes: u64,
    pub files_needed: Vec<bool>,
    pub progress: (u64, u64),
}

/// A directory to read from; `None` where there is no such file system.
pub fn directory_in(space: &str) -> Option<tempfile::TempDir> {
    if space.is_empty() { tempfile::tempdir().ok() } else { tempfile::tempdir_in(space).ok() }
}

pub fn bytes_of(nbytes: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 24) as u8
    };
    (0..nbytes).map(|_| next()).collect()
}

pub fn checksums_of(bytes: &[u8]) -> Vec<u64> {
    bytes.chunks(BLOCK).map(crc64).collect()
}

/// A box of a chunk with its destination, in numbers that fit.
struct Fitted {
    file: usize,
    chunk_offset: u64,
    item_bytes: u64,
    chunk_shape: Vec<u64>,
    box_offset: Vec<u64>,
    box_shape: Vec<u64>,
    destination: u64, // from the beginning of memory
    strides: Vec<i64>,
}

/// Runs a case in `directory`; `spoil` may damage the files before they are read.
pub fn run(case: &Case, options: &Options, directory: &Path, spoil: impl FnOnce(&Path)) -> Read {
    let put = |path: &Path, bytes: &[u8]| fs::write(path, bytes).unwrap();
    run_in(Local::by_path(), &put, case, options, directory, spoil)
}

/// Runs a case in a storage, where `put` puts files.
pub fn run_in(
    storage: Arc<dyn Storage>,
    put: &dyn Fn(&Path, &[u8]),
    case: &Case,
    options: &Options,
    directory: &Path,
    spoil: impl FnOnce(&Path),
) -> Read {
    let contents: Vec<Vec<u8>> = case.files.iter().map(|file| bytes_of(file.nbytes, file.seed)).collect();
    let files: Vec<ReadFile> = case
        .files
        .iter()
        .zip(&contents)
        .enumerate()
        .map(|(index, (file, bytes))| {
            let path = directory.join(format!("{index}"));
            put(&path, bytes);
            let checksums = file.verified.then(|| checksums_of(bytes));
            ReadFile { path, file_bytes: bytes.len() as u64, checksums, version: None }
        })
        .collect();
    let mut memory_bytes = 64;
    let fitted: Vec<Fitted> = case
        .pieces
        .iter()
        .filter(|_| !files.is_empty())
        .map(|piece| fit(piece, &contents, &mut memory_bytes))
        .collect();
    let memory = Memory::new(memory_bytes as usize + 4096);
    let mut expected = memory.bytes().to_vec();
    let mut files_needed = vec![false; files.len()];
    let mut needed_bytes = 0;
    for piece in &fitted {
        let delivered = deliver(piece, &contents[piece.file], &mut expected);
        files_needed[piece.file] |= delivered > 0;
        needed_bytes += delivered;
    }
    let words: Vec<i64> = fitted.iter().flat_map(|piece| words_of(piece, memory.address())).collect();
    spoil(directory);
    let (outcome, progress) = finish_in(storage, files, &words, options);
    Read { outcome, memory: memory.bytes().to_vec(), expected, needed_bytes, files_needed, progress }
}

fn finish(files: Vec<ReadFile>, words: &[i64], options: &Options) -> (Result<Statistics>, (u64, u64)) {
    finish_in(Local::by_path(), files, words, options)
}

/// Reads from a storage; what came of it, and the progress in the end.
pub fn finish_in(
    storage: Arc<dyn Storage>,
    files: Vec<ReadFile>,
    words: &[i64],
    options: &Options,
) -> (Result<Statistics>, (u64, u64)) {
    let plan = match Plan::new(files, words) {
        Ok(plan) => plan,
        Err(error) => return (Err(error), (0, 0)),
    };
    // SAFETY: destinations lie in memory that outlives the join.
    let job = unsafe { read::start(storage, plan, options.clone()) }.unwrap();
    job.join();
    (job.shared().take_outcome().unwrap(), job.shared().progress())
}

fn fit(piece: &PieceSpec, contents: &[Vec<u8>], memory_bytes: &mut u64) -> Fitted {
    let room = contents[piece.file].len() as u64;
    let mut chunk_shape = piece.chunk_shape.clone();
    let mut item_bytes = piece.item_bytes;
    let size = |shape: &[u64], item: u64| shape.iter().product::<u64>() * item;
    while size(&chunk_shape, item_bytes) > room {
        match chunk_shape.iter_mut().max() {
            Some(largest) => *largest /= 2,
            None => item_bytes = room,
        }
    }
    let slack = room - size(&chunk_shape, item_bytes);
    let mut chunk_offset = piece.offset.index(slack as usize + 1) as u64;
    if piece.aligned {
        chunk_offset = chunk_offset / 4096 * 4096;
    }
    let (mut box_offset, mut box_shape) = (Vec::new(), Vec::new());
    for (axis, &extent) in chunk_shape.iter().enumerate() {
        let (from, length) = piece.cuts[axis];
        let offset = if piece.whole { 0 } else { u64::from(from) % (extent + 1) };
        box_offset.push(offset);
        box_shape.push(if piece.whole { extent } else { u64::from(length) % (extent - offset + 1) });
    }
    let (strides, first, span) = strides_of(&box_shape, item_bytes, piece.style);
    let alignment = if piece.page_aligned { 4096 } else { 1 };
    let start = (*memory_bytes + piece.place.index(100) as u64).next_multiple_of(alignment);
    *memory_bytes = start + span;
    let destination = start + first;
    Fitted {
        file: piece.file,
        chunk_offset,
        item_bytes,
        chunk_shape,
        box_offset,
        box_shape,
        destination,
        strides,
    }
}

/// Strides of a box in memory, the position of its first item, and the bytes that it spans: C order,
/// Fortran order, padded rows, reversed, or C order again.
fn strides_of(shape: &[u64], item_bytes: u64, style: u64) -> (Vec<i64>, u64, u64) {
    let mut strides = vec![0i64; shape.len()];
    let mut stride = item_bytes;
    let order: Vec<usize> =
        if style == 1 { (0..shape.len()).collect() } else { (0..shape.len()).rev().collect() };
    for axis in order {
        strides[axis] = stride as i64;
        stride = stride * shape[axis].max(1) + if style == 2 { 3 * item_bytes } else { 0 };
    }
    let last: u64 =
        shape.iter().zip(&strides).map(|(&extent, &step)| extent.saturating_sub(1) * step as u64).sum();
    if style == 3 {
        strides.iter_mut().for_each(|stride| *stride = -*stride);
        return (strides, last, last + item_bytes);
    }
    (strides, 0, last + item_bytes)
}

/// Copies a piece item by item; returns the bytes copied.
fn deliver(piece: &Fitted, content: &[u8], memory: &mut [u8]) -> u64 {
    let count: u64 = piece.box_shape.iter().product();
    let item = piece.item_bytes as usize;
    for number in 0..count {
        let (mut rest, mut from, mut to, mut stride) =
            (number, 0, piece.destination as i64, piece.item_bytes);
        for axis in (0..piece.box_shape.len()).rev() {
            let index = rest % piece.box_shape[axis];
            rest /= piece.box_shape[axis];
            from += (piece.box_offset[axis] + index) * stride;
            to += index as i64 * piece.strides[axis];
            stride *= piece.chunk_shape[axis];
        }
        let from = (piece.chunk_offset + from) as usize;
        memory[to as usize..][..item].copy_from_slice(&content[from..][..item]);
    }
    count * piece.item_bytes
}

fn words_of(piece: &Fitted, base: usize) -> Vec<i64> {
    let mut words = vec![
        piece.file as i64,
        piece.chunk_offset as i64,
        piece.item_bytes as i64,
        piece.chunk_shape.len() as i64,
    ];
    for list in [&piece.chunk_shape, &piece.box_offset, &piece.box_shape] {
        words.extend(list.iter().map(|&word| word as i64));
    }
    words.push(base as i64 + piece.destination as i64);
    words.extend(&piece.strides);
    words
}

/// Page-aligned memory of a known content.
pub struct Memory {
    block: AlignedBlock,
    nbytes: usize,
}

impl Memory {
    pub fn new(nbytes: usize) -> Self {
        let block = AlignedBlock::map(nbytes).unwrap();
        // SAFETY: a fresh mapping of at least so many bytes.
        unsafe { std::ptr::write_bytes(block.address().as_ptr(), UNTOUCHED, nbytes) };
        Self { block, nbytes }
    }

    pub fn address(&self) -> usize {
        self.block.address().as_ptr() as usize
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: filled when made; tests look only while no job runs.
        unsafe { std::slice::from_raw_parts(self.block.address().as_ptr(), self.nbytes) }
    }
}

/// Reads contiguous `(offset, length)` runs of one verified file, each to a place of its own.
pub fn read_runs(file_bytes: u64, runs: &[(u64, u64)], options: &Options) -> Read {
    let directory = directory_in(SPACES[0]).unwrap();
    let content = bytes_of(file_bytes as usize, 7);
    let path = directory.path().join("file");
    fs::write(&path, &content).unwrap();
    let total: u64 = runs.iter().map(|(_, length)| length.next_multiple_of(4096) + 4096).sum();
    let memory = Memory::new(total as usize);
    let mut expected = memory.bytes().to_vec();
    let (mut words, mut place) = (Vec::new(), 0);
    for &(offset, length) in runs {
        let (from, to) = (offset as usize, place as usize);
        expected[to..to + length as usize].copy_from_slice(&content[from..from + length as usize]);
        words.extend([0, offset as i64, length as i64, 0, memory.address() as i64 + place as i64]);
        place += length.next_multiple_of(4096) + 4096;
    }
    let file = ReadFile { path, file_bytes, checksums: Some(checksums_of(&content)), version: None };
    let (outcome, progress) = finish(vec![file], &words, options);
    assert!(outcome.is_ok(), "{outcome:?}");
    let needed_bytes = runs.iter().map(|(_, length)| length).sum();
    Read {
        outcome,
        memory: memory.bytes().to_vec(),
        expected,
        needed_bytes,
        files_needed: vec![true],
        progress,
    }
}

/// Reads 100 bytes at either end of a file of 2 MiB.
pub fn read_two_ends(directory: &Path, verified: bool) -> Statistics {
    let content = bytes_of(8 * BLOCK, 3);
    let path = directory.join("ends");
    fs::write(&path, &content).unwrap();
    let memory = Memory::new(200);
    let end = content.len() as i64 - 100;
    let words = [0, 0, 100, 0, memory.address() as i64, 0, end, 100, 0, memory.address() as i64 + 100];
    let checksums = verified.then(|| checksums_of(&content));
    let file = ReadFile { path, file_bytes: content.len() as u64, checksums, version: None };
    let (outcome, _) = finish(vec![file], &words, &Options::default());
    assert_eq!(memory.bytes()[..100], content[..100]);
    assert_eq!(memory.bytes()[100..], content[end as usize..]);
    outcome.unwrap()
}

/// Reads the columns `first..first + count`, in bytes, of a verified array of rows. Nothing of the file is in the
/// page cache where its file system allows that.
pub fn read_columns(rows: usize, row_bytes: usize, columns: Range<usize>, options: &Options) -> Read {
    let directory = directory_in(SPACES[0]).unwrap();
    let content = bytes_of(rows * row_bytes, 9);
    let path = directory.path().join("file");
    fs::write(&path, &content).unwrap();
    let file = fs::File::open(&path).unwrap();
    file.sync_all().unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    let width = columns.len();
    let memory = Memory::new(rows * width);
    let expected: Vec<u8> =
        content.chunks(row_bytes).flat_map(|row| &row[columns.clone()]).copied().collect();
    let numbers = [0, 0, 1, 2, rows, row_bytes, 0, columns.start, rows, width, memory.address(), width, 1];
    let words = numbers.map(|number| number as i64);
    let file = ReadFile {
        path,
        file_bytes: content.len() as u64,
        checksums: Some(checksums_of(&content)),
        version: None,
    };
    let (outcome, progress) = finish(vec![file], &words, options);
    let needed_bytes = (rows * width) as u64;
    Read {
        outcome,
        memory: memory.bytes().to_vec(),
        expected,
        needed_bytes,
        files_needed: vec![true],
        progress,
    }
}
