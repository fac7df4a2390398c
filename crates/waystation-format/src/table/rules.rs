//! What must be true of the entries of a table, and of the three tables together.
//!
//! Checked before a table is written and after it was read. A reader may then rely on: indices that
//! are in range, chunks as long as their boxes, boxes that partition their array, data files whose
//! blocks have checksums, and extents inside the data of their file.

use std::borrow::Cow;

use super::container::TableKind;
use super::cover::Cover;
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
        ArrayKind::Boxes => check_boxes(shape, dims, item_bits, chunks),
    }
}

/// The entries that an array must have in the section `dims`.
fn dim_count(array: &ArrayEntry) -> Option<u64> {
    let ndim = u64::from(array.ndim);
    let shapes = match array.kind {
        ArrayKind::Grid => 2,
        ArrayKind::Boxes => {
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

/// The product of the extents; 0 if one of them is, however large the others are.
fn volume(shape: &[u64]) -> Option<u64> {
    if shape.contains(&0) {
        return Some(0);
    }
    shape.iter().try_fold(1u64, |product, &extent| product.checked_mul(extent))
}

/// Checks that a chunk is as long as its box; the box lies in an array whose size is known to fit.
fn check_length(chunk: Result<ChunkEntry>, shape: &[u64], item_bits: u64) -> Result<()> {
    let chunk = chunk?;
    let bits = shape.iter().product::<u64>() * item_bits;
    if !bits.is_multiple_of(8) || chunk.length != bits / 8 {
        return Err(corrupt(format!(
            "a chunk of shape {shape:?} and {item_bits} bits an element cannot have {} bytes",
            chunk.length
        )));
    }
    if chunk.offset.checked_add(chunk.length).is_none() {
        return Err(corrupt("the end of a chunk overflows 64 bits"));
    }
    Ok(())
}

fn check_grid(shape: &[u64], chunk_shape: &[u64], item_bits: u64, chunks: &[u8]) -> Result<()> {
    let count = (chunks.len() / ChunkEntry::BYTES) as u64;
    if volume(shape) == Some(0) {
        let fault = || corrupt("an array without elements has chunks");
        return if count == 0 { Ok(()) } else { Err(fault()) };
    }
    if chunk_shape.contains(&0) {
        return Err(corrupt("the chunks of an array have an extent of 0"));
    }
    let grid: Vec<u64> =
        shape.iter().zip(chunk_shape).map(|(extent, chunk)| extent.div_ceil(*chunk)).collect();
    if volume(&grid) != Some(count) {
        return Err(corrupt(format!("a grid of {grid:?} chunks has {count} entries")));
    }
    let mut position = vec![0u64; shape.len()];
    let mut clipped = vec![0u64; shape.len()];
    for chunk in unpack::<ChunkEntry>(chunks) {
        for (dimension, extent) in clipped.iter_mut().enumerate() {
            // The position is inside the grid, so the product is inside the array.
            let begin = position[dimension] * chunk_shape[dimension];
            *extent = chunk_shape[dimension].min(shape[dimension] - begin);
        }
        check_length(chunk, &clipped, item_bits)?;
        advance(&mut position, &grid);
    }
    Ok(())
}

/// The next position of a grid in row-major order.
fn advance(position: &mut [u64], grid: &[u64]) {
    for (at, extent) in position.iter_mut().zip(grid).rev() {
        *at += 1;
        if *at < *extent {
            return;
        }
        *at = 0;
    }
}

/// `dims` are the bounding boxes of the groups, then the boxes.
fn check_boxes(shape: &[u64], dims: &[u64], item_bits: u64, chunks: &[u8]) -> Result<()> {
    let (ndim, count) = (shape.len(), chunks.len() / ChunkEntry::BYTES);
    let (groups, boxes) = dims.split_at(2 * ndim * count.div_ceil(GROUP_BOXES as usize));
    let mut cover = Cover::new();
    let mut before: Option<&[u64]> = None;
    for (index, chunk) in unpack::<ChunkEntry>(chunks).enumerate() {
        let (offset, extents) = boxes[2 * ndim * index..2 * ndim * (index + 1)].split_at(ndim);
        check_inside(shape, offset, extents)?;
        if before.is_some_and(|before| before >= offset) {
            return Err(corrupt("the boxes of an array are not sorted by offset"));
        }
        check_length(chunk, extents, item_bits)?;
        cover.add(offset, extents);
        before = Some(offset);
    }
    if volume(shape) == Some(0) {
        return if count == 0 { Ok(()) } else { Err(corrupt("an array without elements has chunks")) };
    }
    if !cover.is_exact(shape) {
        return Err(corrupt("the boxes of an array overlap or leave a part of it out"));
    }
    check_groups(ndim, groups, boxes)
}

fn check_inside(shape: &[u64], offset: &[u64], extents: &[u64]) -> Result<()> {
    for ((&whole, &begin), &extent) in shape.iter().zip(offset).zip(extents) {
        if extent == 0 || begin.checked_add(extent).is_none_or(|end| end > whole) {
            return Err(corrupt(format!(
                "a box at {offset:?} of shape {extents:?} is empty or outside of its array of shape {shape:?}"
            )));
        }
    }
    Ok(())
}

fn check_groups(ndim: usize, groups: &[u64], boxes: &[u64]) -> Result<()> {
    if ndim == 0 {
        return Ok(());
    }
    let members = boxes.chunks(2 * ndim * GROUP_BOXES as usize);
    for (stated, members) in groups.chunks_exact(2 * ndim).zip(members) {
        if stated != bounding_box(ndim, members) {
            return Err(corrupt("the bounding box of a group of boxes is not the smallest one"));
        }
    }
    Ok(())
}

/// The smallest box around `boxes` (offset, then shape, one after another).
fn bounding_box(ndim: usize, boxes: &[u64]) -> Vec<u64> {
    let mut low = vec![u64::MAX; ndim];
    let mut high = vec![0; ndim];
    for one in boxes.chunks_exact(2 * ndim) {
        for dimension in 0..ndim {
            let (begin, extent) = (one[dimension], one[ndim + dimension]);
            low[dimension] = low[dimension].min(begin);
            high[dimension] = high[dimension].max(begin + extent);
        }
    }
    let extents = low.iter().zip(&high).map(|(low, high)| high - low).collect::<Vec<_>>();
    [low, extents].concat()
}
