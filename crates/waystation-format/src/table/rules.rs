//! What must be true of the entries of a table, and of the three tables together.
//!
//! Checked before a table is written and after it was read. A reader may then rely on: indices that
//! are in range, chunks as long as their boxes, boxes that partition their array (or, where a table says
//! that it holds a part only, do not overlap), data files whose blocks have checksums, and extents inside
//! the data of their file. How the chunks of one array are arranged is checked in `arrangements`.

use std::borrow::Cow;

use super::arrangements::{Coverage, check_boxes, check_grid, check_runs, volume};
use super::container::TableKind;
use super::entries::{ArrayEntry, ArrayKind, ChunkEntry, Entry, FileEntry, unpack};
use super::{GROUP_BOXES, PAGE_BYTES};
use crate::checksum::BLOCK_BYTES;
use crate::safetensors::{DIMENSION_LIMIT, Dtype};
use crate::{Error, Kind, Result};

/// Checks the entries of one table of `kind`, one slice of whole entries per section.
pub(super) fn check(kind: TableKind, sections: &[&[u8]]) -> Result<()> {
    match (kind, sections) {
        (TableKind::Files, [files]) => check_files(files),
        (TableKind::Chunks, [arrays, chunks, dims]) => check_arrays(arrays, chunks, dims),
        (TableKind::Checksums, [_]) => Ok(()),
        _ => Err(Error::new(Kind::Internal, "a table has the wrong number of sections")),
    }
}

/// Checks what entries of a section say by themselves: for a reader of some pages, who cannot check how
/// they relate to the others.
pub fn check_fields(kind: TableKind, section: usize, entries: &[u8]) -> Result<()> {
    match (kind, section) {
        (TableKind::Files, 0) => unpack::<FileEntry>(entries).try_for_each(|entry| entry.map(drop)),
        (TableKind::Chunks, 0) => unpack::<ArrayEntry>(entries).try_for_each(|entry| entry.map(drop)),
        (TableKind::Chunks, 1) => unpack::<ChunkEntry>(entries).try_for_each(|entry| entry.map(drop)),
        _ => Ok(()),
    }
}

/// Number of checksums of a data file.
pub fn block_count(file_bytes: u64) -> u64 {
    file_bytes.div_ceil(BLOCK_BYTES as u64)
}

/// Checks what no table shows alone: every block of a data file has its checksum, and every chunk
/// lies inside the data of its file. Takes the entries of `files.bin`, of the section `chunks` of
/// `chunks.bin` and of `checksums.bin`.
pub fn validate_together(files: &[u8], chunks: &[u8], checksums: &[u8]) -> Result<()> {
    check_files(files)?;
    let files = unpack::<FileEntry>(files).collect::<Result<Vec<_>>>()?;
    let blocks = files.last().map_or(0, |last| last.first_block + block_count(last.file_bytes));
    let stored = (checksums.len() / u64::BYTES) as u64;
    if stored != blocks {
        return Err(corrupt(format!("the data files have {blocks} blocks, but {stored} checksums")));
    }
    for (index, chunk) in unpack::<ChunkEntry>(chunks).enumerate() {
        let chunk = chunk?;
        check_extent(&files, &chunk).map_err(|error| error.with("chunk", index.to_string()))?;
    }
    Ok(())
}

fn check_extent(files: &[FileEntry], chunk: &ChunkEntry) -> Result<()> {
    let Some(file) = files.get(chunk.file as usize) else {
        return Err(corrupt(format!("a chunk is in data file {}, of {}", chunk.file, files.len())));
    };
    let end = chunk.offset.checked_add(chunk.length);
    if chunk.offset < file.data_start || end.is_none_or(|end| end > file.file_bytes) {
        return Err(corrupt("a chunk does not lie inside the data of its file").with("file", file.name()));
    }
    Ok(())
}

fn corrupt(message: impl Into<Cow<'static, str>>) -> Error {
    Error::new(Kind::Corrupt, message)
}

fn check_files(entries: &[u8]) -> Result<()> {
    let (mut before, mut next_block) = (None, 0u64);
    for (index, file) in unpack::<FileEntry>(entries).enumerate() {
        let file = file?;
        let fault = |message: &'static str| {
            Err(corrupt(message).with("file", file.name()).with("entry", index.to_string()))
        };
        let place = Some((file.process, file.sequence));
        if place <= before {
            return fault("the data files are not sorted by process and sequence");
        }
        if file.data_start == 0 || !file.data_start.is_multiple_of(PAGE_BYTES as u64) {
            return fault("the data of a file do not begin at a multiple of 4096");
        }
        if file.data_start > file.file_bytes {
            return fault("the header of a data file is longer than the file");
        }
        if file.first_block != next_block {
            return fault("the blocks of a data file do not follow those of the file before");
        }
        let Some(end) = next_block.checked_add(block_count(file.file_bytes)) else {
            return fault("the data files have too many blocks");
        };
        (before, next_block) = (place, end);
    }
    Ok(())
}

fn check_arrays(arrays: &[u8], chunks: &[u8], dims: &[u8]) -> Result<()> {
    let mut rest = Rest { chunks, next_chunk: 0, dims, next_dim: 0 };
    for (index, array) in unpack::<ArrayEntry>(arrays).enumerate() {
        let array = array?;
        check_array(&array, &mut rest).map_err(|error| error.with("array", index.to_string()))?;
    }
    if rest.chunks.is_empty() && rest.dims.is_empty() {
        return Ok(());
    }
    Err(corrupt("the table has chunks or extents that belong to no array"))
}

fn check_array(array: &ArrayEntry, rest: &mut Rest<'_>) -> Result<()> {
    if array.ndim as usize > DIMENSION_LIMIT {
        let message = format!("an array has {} dimensions, of at most {DIMENSION_LIMIT}", array.ndim);
        return Err(corrupt(message));
    }
    let item_bits = u64::from(array.item_bits);
    if !Dtype::ALL.iter().any(|dtype| dtype.bits() == item_bits) {
        return Err(corrupt(format!("no element type has {item_bits} bits")));
    }
    if dim_count(array) != Some(array.dim_count) {
        return Err(corrupt("the number of extents of an array does not fit its dimensions and chunks"));
    }
    let (chunks, dims) = rest.take(array)?;
    let dims = unpack(dims).collect::<Result<Vec<u64>>>()?;
    let (shape, dims) = dims.split_at(array.ndim as usize);
    if volume(shape).is_none_or(|items| items.checked_mul(item_bits).is_none()) {
        return Err(corrupt(format!("the size of an array of shape {shape:?} overflows 64 bits")));
    }
    match array.kind {
        ArrayKind::Grid => check_grid(shape, dims, item_bits, chunks),
        ArrayKind::Boxes => check_boxes(shape, dims, item_bits, chunks, Coverage::Whole),
        ArrayKind::Runs => check_runs(shape, dims, item_bits, chunks),
        ArrayKind::PartialBoxes => check_boxes(shape, dims, item_bits, chunks, Coverage::Part),
    }
}

/// The entries that an array must have in the section `dims`.
fn dim_count(array: &ArrayEntry) -> Option<u64> {
    let ndim = u64::from(array.ndim);
    let shapes = match array.kind {
        ArrayKind::Grid => 2,
        // As many as it says: only the entries themselves tell how many runs there are.
        ArrayKind::Runs => return Some(array.dim_count.max(ndim.checked_mul(2)?.checked_add(1)?)),
        ArrayKind::Boxes | ArrayKind::PartialBoxes => {
            let boxes = array.chunk_count.checked_add(array.chunk_count.div_ceil(GROUP_BOXES))?;
            boxes.checked_mul(2)?.checked_add(1)?
        }
    };
    shapes.checked_mul(ndim)
}

/// The chunks and extents that no array has claimed yet.
struct Rest<'a> {
    chunks: &'a [u8],
    next_chunk: u64,
    dims: &'a [u8],
    next_dim: u64,
}

impl<'a> Rest<'a> {
    /// The chunks and extents of the next array: they follow those of the array before.
    fn take(&mut self, array: &ArrayEntry) -> Result<(&'a [u8], &'a [u8])> {
        if (array.first_chunk, array.first_dim) != (self.next_chunk, self.next_dim) {
            return Err(corrupt("the chunks or extents of an array do not follow those of the array before"));
        }
        let chunks = split(&mut self.chunks, array.chunk_count, ChunkEntry::BYTES);
        let dims = split(&mut self.dims, array.dim_count, u64::BYTES);
        let (Some(chunks), Some(dims)) = (chunks, dims) else {
            return Err(corrupt("an array claims more chunks or extents than the table has"));
        };
        self.next_chunk += array.chunk_count;
        self.next_dim += array.dim_count;
        Ok((chunks, dims))
    }
}

fn split<'a>(rest: &mut &'a [u8], count: u64, width: usize) -> Option<&'a [u8]> {
    let length = usize::try_from(count).ok()?.checked_mul(width)?;
    let (taken, left) = rest.split_at_checked(length)?;
    *rest = left;
    Some(taken)
}
