//! What the tests of tables build them with.

#![allow(clippy::unwrap_used, dead_code)] // each test uses a part of it

use waystation_format::checksum::crc64;
use waystation_format::table::{
    ArrayEntry, ArrayKind, ChunkEntry, GROUP_BOXES, GROUP_RUNS, PAGE_BYTES, RUN_WORDS, TableKind, encode,
    pack,
};

/// The three sections of a table of chunks, built array by array.
#[derive(Clone, Default)]
pub struct Chunks {
    pub arrays: Vec<ArrayEntry>,
    pub chunks: Vec<ChunkEntry>,
    pub dims: Vec<u64>,
}

impl Chunks {
    pub fn push(&mut self, kind: ArrayKind, ndim: usize, lengths: &[u64], dims: &[u64]) {
        self.arrays.push(ArrayEntry {
            kind,
            ndim: ndim as u32,
            item_bits: 16,
            first_chunk: self.chunks.len() as u64,
            chunk_count: lengths.len() as u64,
            first_dim: self.dims.len() as u64,
            dim_count: dims.len() as u64,
        });
        for &length in lengths {
            let offset = self.chunks.last().map_or(4096, |last| last.offset + last.length);
            self.chunks.push(ChunkEntry { file: 0, offset, length });
        }
        self.dims.extend_from_slice(dims);
    }

    /// An array of 16-bit elements in a grid.
    pub fn grid(&mut self, shape: &[u64], chunk_shape: &[u64]) {
        let mut extents = vec![2u64];
        for (&whole, &chunk) in shape.iter().zip(chunk_shape) {
            let along: Vec<u64> =
                (0..whole.div_ceil(chunk.max(1))).map(|index| chunk.min(whole - index * chunk)).collect();
            extents =
                extents.iter().flat_map(|length| along.iter().map(move |extent| length * extent)).collect();
        }
        self.push(ArrayKind::Grid, shape.len(), &extents, &[shape, chunk_shape].concat());
    }

    /// An array of 16-bit elements in boxes `(offset, shape)`.
    pub fn boxes(&mut self, shape: &[u64], boxes: &[(Vec<u64>, Vec<u64>)]) {
        self.boxes_of(ArrayKind::Boxes, shape, boxes);
    }

    /// The same, of that kind.
    pub fn boxes_of(&mut self, kind: ArrayKind, shape: &[u64], boxes: &[(Vec<u64>, Vec<u64>)]) {
        let lengths: Vec<u64> = boxes.iter().map(|(_, shape)| 2 * shape.iter().product::<u64>()).collect();
        let mut dims = shape.to_vec();
        for group in boxes.chunks(GROUP_BOXES as usize) {
            let along = |at: fn(u64, u64) -> u64, pick: fn(u64, u64) -> u64, dimension: usize| {
                let ends = group.iter().map(|(offset, shape)| at(offset[dimension], shape[dimension]));
                ends.reduce(pick).unwrap()
            };
            let low: Vec<u64> =
                (0..shape.len()).map(|dimension| along(|at, _| at, u64::min, dimension)).collect();
            let high = (0..shape.len()).map(|dimension| along(|at, extent| at + extent, u64::max, dimension));
            let extents: Vec<u64> = high.zip(&low).map(|(high, low)| high - low).collect();
            dims.extend([low, extents].concat());
        }
        dims.extend(boxes.iter().flat_map(|(offset, shape)| [offset.clone(), shape.clone()].concat()));
        self.push(kind, shape.len(), &lengths, &dims);
    }

    /// An array of 16-bit elements in a grid whose chunks are in runs.
    pub fn runs(&mut self, shape: &[u64], chunk_shape: &[u64], runs: &[[u64; RUN_WORDS]]) {
        let firsts = runs.iter().step_by(GROUP_RUNS as usize).map(|run| run[0]);
        let mut dims = [shape, chunk_shape, &[runs.len() as u64]].concat();
        dims.extend(firsts);
        dims.extend(runs.iter().flatten());
        self.push(ArrayKind::Runs, shape.len(), &[], &dims);
    }

    pub fn sections(&self) -> [Vec<u8>; 3] {
        [pack(&self.arrays), pack(&self.chunks), pack(&self.dims)]
    }

    pub fn encode(&self) -> waystation_format::Result<Vec<u8>> {
        let [arrays, chunks, dims] = self.sections();
        encode(TableKind::Chunks, &[&arrays, &chunks, &dims])
    }
}

/// Makes the checksums of changed pages right again.
pub fn mend(file: &mut [u8]) {
    for (number, page) in file.chunks_exact_mut(PAGE_BYTES).enumerate() {
        let content = [&page[..PAGE_BYTES - 8], &(number as u64).to_le_bytes()].concat();
        page[PAGE_BYTES - 8..].copy_from_slice(&crc64(&content).to_le_bytes());
    }
}

/// Cuts a box into two, again and again, as `cuts` say.
pub fn partition(shape: Vec<u64>, cuts: &[(usize, u64)]) -> Vec<(Vec<u64>, Vec<u64>)> {
    let mut boxes = vec![(vec![0; shape.len()], shape)];
    for (index, (which, at)) in cuts.iter().enumerate() {
        let (offset, shape) = boxes[which % boxes.len()].clone();
        let dimension = index % shape.len();
        let at = at % shape[dimension];
        if at > 0 {
            let (mut low, mut high) = ((offset.clone(), shape.clone()), (offset, shape));
            low.1[dimension] = at;
            high.0[dimension] += at;
            high.1[dimension] -= at;
            let which = which % boxes.len();
            boxes[which] = low;
            boxes.push(high);
        }
    }
    boxes.sort();
    boxes
}
