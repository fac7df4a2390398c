//! A read plan: which boxes of which stored chunks go to which addresses.
//!
//! Invariants: a plan that exists is consistent. Every box lies in its chunk, every chunk in its file,
//! every destination in the address space, every file has as many checksums as blocks, and no later sum
//! or product of these numbers overflows. Pieces of a file are sorted by where they begin. A piece goes to
//! host memory unless a region of a device holds its destination. Nothing here opens a file.

use std::ops::Range;
use std::path::PathBuf;

use waystation_format::checksum::BLOCK_BYTES;
use waystation_format::plan::{Read, each};
use waystation_format::{Error, Kind, Result};

use super::device::Regions;
use crate::copy::{BoxCopy, array_bytes};

/// A file to read from.
#[derive(Clone, Debug)]
pub struct ReadFile {
    /// Where it is.
    pub path: PathBuf,
    /// How long it must be.
    pub file_bytes: u64,
    /// One checksum per block; without them nothing is verified.
    pub checksums: Option<Vec<u64>>,
    /// What its storage calls the version that must be read, where it has names for them.
    pub version: Option<String>,
}

/// One box of a stored chunk, and its destination.
#[derive(Clone, Debug)]
pub struct Piece {
    chunk_offset: u64,
    copy: BoxCopy,
    record: usize,
    device: Option<u32>,
}

impl Piece {
    /// File offsets from the first to just after the last needed byte.
    pub fn file_range(&self) -> Range<u64> {
        let linear = self.copy.linear_range();
        self.chunk_offset + linear.start..self.chunk_offset + linear.end
    }

    /// The copy, in positions relative to [`Piece::chunk_offset`].
    pub fn copy(&self) -> &BoxCopy {
        &self.copy
    }

    /// Where the chunk begins in the file.
    pub fn chunk_offset(&self) -> u64 {
        self.chunk_offset
    }

    /// The number of its record in the plan.
    pub fn record(&self) -> usize {
        self.record
    }

    /// The device that it goes to; `None` for host memory.
    pub fn device(&self) -> Option<u32> {
        self.device
    }

    /// The first stretch of needed file bytes that ends after `position`, from `position` on.
    pub fn next_stretch(&self, position: u64) -> Option<Range<u64>> {
        let stretch = self.copy.next_stretch(position.saturating_sub(self.chunk_offset))?;
        Some(self.chunk_offset + stretch.start..self.chunk_offset + stretch.end)
    }
}

/// A file and everything that is needed of it.
#[derive(Debug)]
pub struct FilePlan {
    /// The file.
    pub file: ReadFile,
    pieces: Vec<Piece>,
    /// The furthest end of any piece up to each: tells where a search may begin.
    reach: Vec<u64>,
}

impl FilePlan {
    fn new(file: ReadFile, mut pieces: Vec<Piece>) -> Self {
        pieces.sort_by_key(|piece| piece.file_range().start);
        let reach = pieces
            .iter()
            .scan(0, |furthest, piece| {
                *furthest = piece.file_range().end.max(*furthest);
                Some(*furthest)
            })
            .collect();
        Self { file, pieces, reach }
    }

    /// All pieces, in the order in which they begin.
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// The pieces that may need bytes of `range`.
    pub fn pieces_in(&self, range: &Range<u64>) -> impl Iterator<Item = &Piece> + Clone {
        let first = self.reach.partition_point(|&end| end <= range.start);
        let last = self.pieces.partition_point(|piece| piece.file_range().start < range.end);
        let start = range.start;
        self.pieces[first.min(last)..last].iter().filter(move |piece| piece.file_range().end > start)
    }

    /// Bytes that will be delivered.
    pub fn needed_bytes(&self) -> u64 {
        self.pieces.iter().fold(0, |sum: u64, piece| sum.saturating_add(piece.copy.nbytes()))
    }
}

/// A consistent plan.
#[derive(Debug)]
pub struct Plan {
    /// Every file of the call, also those of which nothing is needed.
    pub files: Vec<FilePlan>,
    /// How many records it was made of, those of nothing included.
    pub records: usize,
}

impl Plan {
    /// Decodes and checks the records of `words`, see [`Read`].
    pub fn new(files: Vec<ReadFile>, words: &[i64]) -> Result<Self> {
        files.iter().try_for_each(check_checksums)?;
        let mut pieces: Vec<Vec<Piece>> = files.iter().map(|_| Vec::new()).collect();
        let records = each(words, |number, record| {
            let (file, piece) = piece_of(number, record, &files)?;
            if piece.copy.nbytes() > 0 {
                pieces[file].push(piece);
            }
            Ok(())
        })?;
        let files = files.into_iter().zip(pieces).map(|(file, pieces)| FilePlan::new(file, pieces));
        Ok(Self { files: files.collect(), records: records.len() })
    }

    /// Sends the pieces whose destinations lie in regions of devices to these. InvalidInput if only a part
    /// of one does.
    pub fn place(&mut self, regions: &Regions) -> Result<()> {
        for file in &mut self.files {
            for piece in &mut file.pieces {
                piece.device = regions.device_of(&piece.copy.memory_range())?;
            }
        }
        Ok(())
    }

    /// Bytes that will be delivered.
    pub fn needed_bytes(&self) -> u64 {
        self.files.iter().fold(0, |sum: u64, file| sum.saturating_add(file.needed_bytes()))
    }
}

fn check_checksums(file: &ReadFile) -> Result<()> {
    let named = |message: String| {
        Error::new(Kind::InvalidInput, message).with("path", file.path.display().to_string())
    };
    if i64::try_from(file.file_bytes).is_err() {
        return Err(named(format!("no file can have {} bytes", file.file_bytes)));
    }
    let blocks = file.file_bytes.div_ceil(BLOCK_BYTES as u64);
    match &file.checksums {
        Some(checksums) if checksums.len() as u64 != blocks => {
            Err(named(format!("{} checksums were given for a file of {blocks} blocks", checksums.len())))
        }
        _ => Ok(()),
    }
}

/// The piece of a record, and the place of its file.
fn piece_of(number: usize, record: Read<'_>, files: &[ReadFile]) -> Result<(usize, Piece)> {
    let Read { file, chunk_offset, part } = record;
    let (index, file) = usize::try_from(file)
        .ok()
        .and_then(|index| Some((index, files.get(index)?)))
        .ok_or_else(|| invalid(format!("the plan names file {file} of {}", files.len())))?;
    let in_file = |error: Error| error.with("path", file.path.display().to_string());
    let chunk_bytes = array_bytes(&part.chunk_shape, part.item_bytes).map_err(in_file)?;
    if chunk_offset.checked_add(chunk_bytes).is_none_or(|end| end > file.file_bytes) {
        return Err(in_file(invalid(format!(
            "a chunk of {chunk_bytes} bytes at offset {chunk_offset} reaches beyond its file of {} bytes",
            file.file_bytes
        ))));
    }
    let copy = BoxCopy::of(&part).map_err(in_file)?;
    Ok((index, Piece { chunk_offset, copy, record: number, device: None }))
}

fn invalid(message: String) -> Error {
    Error::new(Kind::InvalidInput, message)
}
