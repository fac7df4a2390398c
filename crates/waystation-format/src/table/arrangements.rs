//! What must be true of the chunks of one array, for each of the ways in which they are arranged.

use std::borrow::Cow;

use super::cover::Cover;
use super::disjoint::find_overlap;
use super::entries::{ChunkEntry, Entry, unpack};
use super::{GROUP_BOXES, GROUP_RUNS, RUN_WORDS};
use crate::{Error, Kind, Result};

/// How much of an array its boxes must contain.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Coverage {
    /// Every element, exactly once.
    Whole,
    /// Any elements, none of them twice.
    Part,
}

/// The product of the extents; 0 if one of them is, however large the others are.
pub(super) fn volume(shape: &[u64]) -> Option<u64> {
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

pub(super) fn check_grid(shape: &[u64], chunk_shape: &[u64], item_bits: u64, chunks: &[u8]) -> Result<()> {
    let count = (chunks.len() / ChunkEntry::BYTES) as u64;
    if volume(shape) == Some(0) {
        let fault = || corrupt("an array without elements has chunks");
        return if count == 0 { Ok(()) } else { Err(fault()) };
    }
    let grid = grid_of(shape, chunk_shape)?;
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

/// How many chunks there are along each dimension; their product fits, as that of the shape does.
fn grid_of(shape: &[u64], chunk_shape: &[u64]) -> Result<Vec<u64>> {
    if chunk_shape.contains(&0) {
        return Err(corrupt("the chunks of an array have an extent of 0"));
    }
    Ok(shape.iter().zip(chunk_shape).map(|(extent, chunk)| extent.div_ceil(*chunk)).collect())
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

/// `dims` are the shape of a chunk, the number of runs, the first chunk of each group of runs, the runs.
pub(super) fn check_runs(shape: &[u64], dims: &[u64], item_bits: u64, chunks: &[u8]) -> Result<()> {
    let (chunk_shape, rest) = dims.split_at(shape.len());
    if volume(shape) == Some(0) || !chunks.is_empty() {
        return Err(corrupt("an array whose chunks are in runs has no elements, or entries of chunks too"));
    }
    let chunk_count = volume(&grid_of(shape, chunk_shape)?).unwrap_or(0);
    if !are_whole_bytes(shape, chunk_shape, item_bits) {
        return Err(corrupt(format!("chunks of {item_bits} bits an element are not whole bytes")));
    }
    let sides = shape.iter().zip(chunk_shape).map(|(&whole, &chunk)| chunk.min(whole));
    let chunk_bytes = sides.product::<u64>() * item_bits / 8;
    let (firsts, runs) = split_runs(rest)?;
    let begins = || runs.chunks_exact(RUN_WORDS).map(|run| run[0]);
    let ends = begins().skip(1).chain([chunk_count]);
    if begins().next() != Some(0) || begins().zip(ends.clone()).any(|(begin, end)| begin >= end) {
        return Err(corrupt(
            "the runs of an array do not follow each other from its first chunk to its last",
        ));
    }
    if !begins().step_by(GROUP_RUNS as usize).eq(firsts.iter().copied()) {
        return Err(corrupt("the first chunks of groups of runs are not those of the runs"));
    }
    runs.chunks_exact(RUN_WORDS)
        .zip(ends)
        .try_for_each(|(run, end)| check_run(run, end - run[0] - 1, chunk_bytes))
}

/// The first chunks of the groups, and the runs, of `words` that begin with their number.
fn split_runs(words: &[u64]) -> Result<(&[u64], &[u64])> {
    let fault = || corrupt("the number of extents of an array does not fit the number of its runs");
    let (&run_count, words) = words.split_first().ok_or_else(fault)?;
    let group_count = run_count.div_ceil(GROUP_RUNS);
    let expected = run_count.checked_mul(RUN_WORDS as u64).and_then(|runs| runs.checked_add(group_count));
    if expected != Some(words.len() as u64) {
        return Err(fault());
    }
    Ok(words.split_at(group_count as usize))
}

/// Checks that files and bytes of a run have numbers; `steps` is the number of its chunks less one.
fn check_run(run: &[u64], steps: u64, chunk_bytes: u64) -> Result<()> {
    let last = |first: u64, stride: u64| stride.checked_mul(steps).and_then(|way| way.checked_add(first));
    if last(run[1], run[2]).is_none_or(|file| file > u64::from(u32::MAX)) {
        return Err(corrupt("the data files of a run overflow 32 bits"));
    }
    if last(run[3], run[4]).is_none_or(|offset| offset.checked_add(chunk_bytes).is_none()) {
        return Err(corrupt("the end of a chunk overflows 64 bits"));
    }
    Ok(())
}

/// Whether every chunk of a grid is, the clipped ones included: no product of their extents leaves a rest.
fn are_whole_bytes(shape: &[u64], chunk_shape: &[u64], item_bits: u64) -> bool {
    let mut rests = vec![item_bits % 8];
    for (&whole, &chunk) in shape.iter().zip(chunk_shape) {
        let extents = [if whole >= chunk { chunk } else { whole }, whole % chunk];
        let present = extents.into_iter().filter(|&extent| extent > 0).map(|extent| extent % 8);
        rests = present.flat_map(|extent| rests.iter().map(move |rest| rest * extent % 8)).collect();
        rests.sort_unstable();
        rests.dedup();
    }
    rests == [0]
}

/// `dims` are the bounding boxes of the groups, then the boxes.
pub(super) fn check_boxes(
    shape: &[u64],
    dims: &[u64],
    item_bits: u64,
    chunks: &[u8],
    coverage: Coverage,
) -> Result<()> {
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
    if coverage == Coverage::Whole && !cover.is_exact(shape) {
        return Err(corrupt("the boxes of an array overlap or leave a part of it out"));
    }
    if coverage == Coverage::Part && find_overlap(ndim, boxes).is_some() {
        return Err(corrupt("the boxes of an array overlap"));
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

fn corrupt(message: impl Into<Cow<'static, str>>) -> Error {
    Error::new(Kind::Corrupt, message)
}
