//! Arrays that several boxes make up: what a writer stores of an array whose parts lie apart in memory.
//!
//! [`is_partition`] is the check that the boxes fit together, [`Segment`] the array once they do: an
//! array's every linear byte (see [`crate::copy`]) then has exactly one box to come from.

use std::ops::Range;

use waystation_format::checksum::Crc64;

use crate::copy::BoxCopy;

/// An array of `nbytes` linear bytes that its blocks make up, as a file stores it.
#[derive(Clone, Debug)]
pub struct Segment {
    nbytes: u64,
    blocks: Vec<BoxCopy>,
}

impl Segment {
    /// An array made of `blocks`, which the caller has checked to partition it (see [`is_partition`]).
    pub fn new(nbytes: u64, mut blocks: Vec<BoxCopy>) -> Self {
        blocks.retain(|block| !block.linear_range().is_empty());
        blocks.sort_by_key(|block| block.linear_range().start);
        Self { nbytes, blocks }
    }

    /// Bytes of the array.
    pub fn nbytes(&self) -> u64 {
        self.nbytes
    }

    /// The address of its bytes, where they lie one after another in memory.
    pub fn contiguous(&self) -> Option<usize> {
        match &self.blocks[..] {
            [block] if block.is_one_run() && block.nbytes() == self.nbytes => Some(block.address()),
            _ => None,
        }
    }

    /// The non-empty blocks that may have bytes in a linear range.
    pub fn blocks_in(&self, range: Range<u64>) -> impl Iterator<Item = &BoxCopy> {
        let candidates = self.blocks.partition_point(|block| block.linear_range().start < range.end);
        self.blocks[..candidates].iter().filter(move |block| range.start < block.linear_range().end)
    }

    /// Fills `linear` with the array's linear bytes from `start` on.
    ///
    /// # Safety
    /// As for [`BoxCopy::gather`], of every block.
    pub unsafe fn gather(&self, start: u64, linear: &mut [u8]) {
        for block in self.blocks_in(start..start + linear.len() as u64) {
            // SAFETY: the caller vouches for every block.
            unsafe { block.gather(start, linear) };
        }
    }

    /// The same, and appends the bytes to `sum`: in one pass where they lie one after another in memory.
    ///
    /// # Safety
    /// As for [`Segment::gather`]; the range must lie in the array.
    pub unsafe fn gather_summed(&self, start: u64, linear: &mut [u8], sum: &mut Crc64) {
        if let Some(address) = self.contiguous() {
            let source = (address as *const u8).wrapping_add(start as usize);
            // SAFETY: the array's bytes are there, from the first to the last.
            return unsafe { sum.copy(source, linear) };
        }
        // SAFETY: as the caller promises.
        unsafe { self.gather(start, linear) };
        sum.update(linear);
    }
}

/// Whether boxes `(offset, shape)` cover every element of `array_shape` exactly once.
///
/// Boxes must lie in the array. Takes n log n steps for grids and close to that for most else.
pub fn is_partition(array_shape: &[u64], boxes: &[(&[u64], &[u64])]) -> bool {
    let volume = |shape: &[u64]| shape.iter().map(|&extent| u128::from(extent)).product::<u128>();
    let mut filled: Vec<_> = boxes.iter().filter(|(_, shape)| volume(shape) > 0).collect();
    if filled.iter().map(|(_, shape)| volume(shape)).sum::<u128>() != volume(array_shape) {
        return false;
    }
    let distinct = |axis: &usize| {
        let mut offsets: Vec<u64> = filled.iter().map(|(offset, _)| offset[*axis]).collect();
        offsets.sort_unstable();
        offsets.dedup();
        offsets.len()
    };
    let Some(axis) = (0..array_shape.len()).max_by_key(distinct) else {
        return true; // no axes: the volumes say that there is one box, of the one item
    };
    // Equal volume and no overlap is a partition. Only boxes that meet on the busiest axis can overlap.
    filled.sort_by_key(|(offset, _)| offset[axis]);
    let overlap = |one: &(&[u64], &[u64]), two: &(&[u64], &[u64])| {
        (0..array_shape.len())
            .all(|axis| one.0[axis] < two.0[axis] + two.1[axis] && two.0[axis] < one.0[axis] + one.1[axis])
    };
    filled.iter().enumerate().all(|(index, one)| {
        let end = one.0[axis] + one.1[axis];
        filled[index + 1..].iter().take_while(|two| two.0[axis] < end).all(|two| !overlap(one, two))
    })
}
