//! Copies between a box in memory (any strides) and the linear bytes of a C-order array.
//!
//! [`BoxCopy`] is one box. *Linear* positions are bytes from the array's first element in C order, as a
//! file stores them. Invariants: everything is checked for overflow when a box is made, so that copying
//! cannot fail; a copy touches exactly the bytes of the box that lie in the asked linear range; memory is
//! only touched by `gather` and `scatter`.

use std::ops::Range;

use waystation_format::plan::Part;
use waystation_format::{Error, Kind, Result};

use crate::first_touch;

/// The longest stretch of memory that is touched before some pieces of it are filled.
const PREPARED_BYTES: usize = 4 << 20;

/// One axis of a box after merging: `extent` steps of `linear_step` bytes in the array and
/// `memory_step` bytes in memory. `span` is the linear length of one step's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Axis {
    extent: u64,
    linear_step: u64,
    memory_step: i64,
    span: u64,
}

/// `count` pieces of `piece_bytes` contiguous bytes, at constant steps on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Linear position of the first piece.
    pub linear: u64,
    /// Memory address of the first piece.
    pub address: usize,
    /// Contiguous bytes of each piece.
    pub piece_bytes: usize,
    /// Number of pieces.
    pub count: usize,
    /// Linear bytes from one piece to the next.
    pub linear_step: u64,
    /// Memory bytes from one piece to the next.
    pub memory_step: i64,
}

/// A box of a C-order array and where it lies in memory.
///
/// Built once (axes that are contiguous on both sides are merged), then used for any number of linear
/// ranges: [`BoxCopy::gather`] is what a writer needs, [`BoxCopy::scatter`] what a reader needs.
#[derive(Clone, Debug)]
pub struct BoxCopy {
    address: usize,
    first: u64,
    end: u64,
    piece_bytes: u64,
    axes: Vec<Axis>,
}

impl BoxCopy {
    /// A box of `box_shape` at `box_offset` in an array of `array_shape`, whose first element is at
    /// `address` and whose elements are `strides_bytes` apart in memory (negative and zero allowed).
    ///
    /// InvalidInput if lengths differ, the box leaves the array, or any product overflows.
    pub fn new(
        array_shape: &[u64],
        item_bytes: u64,
        box_offset: &[u64],
        box_shape: &[u64],
        address: usize,
        strides_bytes: &[i64],
    ) -> Result<Self> {
        let ndim = array_shape.len();
        if [box_offset.len(), box_shape.len(), strides_bytes.len()] != [ndim; 3] {
            return Err(invalid("a box has another number of axes than its array"));
        }
        let linear_strides = linear_strides(array_shape, item_bytes)?;
        for axis in 0..ndim {
            let end = box_offset[axis].checked_add(box_shape[axis]);
            if end.is_none_or(|end| end > array_shape[axis]) {
                return Err(invalid("a box reaches beyond its array").with("axis", axis.to_string()));
            }
        }
        if item_bytes == 0 || box_shape.contains(&0) {
            return Ok(Self { address, first: 0, end: 0, piece_bytes: 0, axes: Vec::new() });
        }
        check_memory(address, item_bytes, box_shape, strides_bytes)?;
        // Cannot overflow: the sums are positions within the array, whose size was checked.
        let first = box_offset.iter().zip(&linear_strides).map(|(offset, stride)| offset * stride).sum();
        let last: u64 =
            box_shape.iter().zip(&linear_strides).map(|(extent, stride)| (extent - 1) * stride).sum();
        let (piece_bytes, axes) = merge_axes(item_bytes, box_shape, &linear_strides, strides_bytes);
        Ok(Self { address, first, end: first + last + item_bytes, piece_bytes, axes })
    }

    /// The box of a record of a plan, which goes to memory. A negative address becomes one in the upper half, which no
    /// process has: refused here.
    pub fn of(part: &Part<'_>) -> Result<Self> {
        let Part { item_bytes, chunk_shape, offset, shape, destination, strides } = part;
        Self::new(chunk_shape, *item_bytes, offset, shape, *destination, strides)
    }

    /// The linear bytes from the first to just after the last byte of the box (with gaps between, unless
    /// [`BoxCopy::is_one_run`]).
    pub fn linear_range(&self) -> Range<u64> {
        self.first..self.end
    }

    /// Bytes of the box.
    pub fn nbytes(&self) -> u64 {
        self.piece_bytes * self.axes.iter().map(|axis| axis.extent).product::<u64>()
    }

    /// Whether the box is one run of bytes in the array and in memory.
    pub fn is_one_run(&self) -> bool {
        self.axes.is_empty()
    }

    /// Bytes of each of its runs: contiguous in the array and in memory.
    pub fn run_bytes(&self) -> u64 {
        self.piece_bytes
    }

    /// The address of the box's first element.
    pub fn address(&self) -> usize {
        self.address
    }

    /// The memory from the lowest to just after the highest byte of the box.
    pub fn memory_range(&self) -> Range<usize> {
        // Cannot overflow: `check_memory` has found both ends in the address space.
        let reach = |axis: &Axis| (axis.extent as i64 - 1).wrapping_mul(axis.memory_step) as isize;
        let below: isize = self.axes.iter().map(|axis| reach(axis).min(0)).sum();
        let above: isize = self.axes.iter().map(|axis| reach(axis).max(0)).sum();
        let end = self.address.wrapping_add_signed(above).wrapping_add(self.piece_bytes as usize);
        self.address.wrapping_add_signed(below)..end
    }

    /// The first maximal stretch of linear bytes that all belong to the box and end after `position`, cut
    /// to begin no earlier than `position`.
    pub fn next_stretch(&self, position: u64) -> Option<Range<u64>> {
        if position >= self.end {
            return None;
        }
        // Axes that are contiguous in the array, though not in memory, belong to one stretch.
        let mut stretch_bytes = self.piece_bytes;
        let mut outer = self.axes.len();
        while outer > 0 && self.axes[outer - 1].linear_step == stretch_bytes {
            outer -= 1;
            stretch_bytes *= self.axes[outer].extent;
        }
        let mut start = self.first;
        let mut later = None;
        for axis in &self.axes[..outer] {
            let index = first_index(axis, start, position);
            if index >= axis.extent {
                return later.map(|start| start..start + stretch_bytes);
            }
            start += index * axis.linear_step;
            if index + 1 < axis.extent {
                later = Some(start + axis.linear_step);
            }
        }
        if position >= start + stretch_bytes {
            return later.map(|start| start..start + stretch_bytes);
        }
        Some(start.max(position)..start + stretch_bytes)
    }

    /// Copies from the box's memory those of its bytes that lie in the linear range beginning at `start`
    /// and as long as `linear`, each to its place in `linear`. Other bytes of `linear` stay as they are.
    ///
    /// # Safety
    /// The box's memory must be readable host memory that does not overlap `linear`.
    pub unsafe fn gather(&self, start: u64, linear: &mut [u8]) {
        let base = linear.as_mut_ptr();
        self.for_each_run(start..start + linear.len() as u64, |run| {
            let target = base.wrapping_add((run.linear - start) as usize);
            let steps = (run.memory_step as isize, run.linear_step as isize);
            // SAFETY: the run lies in the asked range on the linear side; the caller vouches for memory.
            unsafe { copy_pieces(run.address as *const u8, target, run.piece_bytes, run.count, steps) }
        });
    }

    /// Copies to the box's memory those of its bytes that lie in the linear range beginning at `start`,
    /// whose bytes are `linear`.
    ///
    /// # Safety
    /// The box's memory must be writable host memory that does not overlap `linear` and that no other
    /// thread uses for the bytes in question.
    pub unsafe fn scatter(&self, start: u64, linear: &[u8]) {
        let base = linear.as_ptr();
        self.for_each_run(start..start + linear.len() as u64, |run| {
            let source = base.wrapping_add((run.linear - start) as usize);
            let steps = (run.linear_step as isize, run.memory_step as isize);
            let reach = (run.count as i64 - 1) * run.memory_step;
            let span = reach.unsigned_abs() as usize + run.piece_bytes;
            // Of memory that other threads fill between its pieces a run prepares little.
            if span <= PREPARED_BYTES {
                first_touch::prepare(run.address.wrapping_add_signed(reach.min(0) as isize), span);
            }
            // SAFETY: the run lies in the given bytes on the linear side; the caller vouches for memory.
            unsafe { copy_pieces(source, run.address as *mut u8, run.piece_bytes, run.count, steps) }
        });
    }

    /// Visits the parts of the box in a linear range, in linear order.
    pub fn for_each_run(&self, range: Range<u64>, mut visit: impl FnMut(Run)) {
        if range.start < self.end && self.first < range.end {
            self.descend(0, self.first, self.address, &range, &mut visit);
        }
    }

    fn descend(
        &self,
        level: usize,
        linear: u64,
        address: usize,
        range: &Range<u64>,
        visit: &mut impl FnMut(Run),
    ) {
        let Some(axis) = self.axes.get(level) else {
            return visit_piece(linear, address, self.piece_bytes, range, visit);
        };
        let begin = first_index(axis, linear, range.start);
        let end = range.end.saturating_sub(linear).div_ceil(axis.linear_step).min(axis.extent);
        let at = |index: u64| {
            let memory = address.wrapping_add_signed((index as i64).wrapping_mul(axis.memory_step) as isize);
            (linear + index * axis.linear_step, memory)
        };
        if level + 1 < self.axes.len() {
            for index in begin..end {
                let (linear, address) = at(index);
                self.descend(level + 1, linear, address, range, visit);
            }
            return;
        }
        if begin >= end {
            return;
        }
        // Only the first and the last piece can be cut by the range; those between are one run.
        let is_whole = |index: u64| at(index).0 >= range.start && at(index).0 + axis.span <= range.end;
        let whole_begin = if is_whole(begin) { begin } else { begin + 1 };
        let whole_end = if is_whole(end - 1) { end } else { end - 1 };
        if whole_begin > begin {
            let (linear, address) = at(begin);
            visit_piece(linear, address, self.piece_bytes, range, visit);
        }
        if whole_begin < whole_end {
            let (linear, address) = at(whole_begin);
            visit(Run {
                linear,
                address,
                piece_bytes: self.piece_bytes as usize,
                count: (whole_end - whole_begin) as usize,
                linear_step: axis.linear_step,
                memory_step: axis.memory_step,
            });
        }
        if whole_end < end && whole_end >= whole_begin {
            let (linear, address) = at(whole_end);
            visit_piece(linear, address, self.piece_bytes, range, visit);
        }
    }
}

/// Bytes of an array, or InvalidInput where that number is beyond what a file can hold.
pub fn array_bytes(shape: &[u64], item_bytes: u64) -> Result<u64> {
    if shape.contains(&0) {
        return Ok(0);
    }
    shape
        .iter()
        .try_fold(item_bytes, |bytes, &extent| bytes.checked_mul(extent))
        .filter(|&bytes| i64::try_from(bytes).is_ok())
        .ok_or_else(|| invalid("the size of an array overflows"))
}

fn linear_strides(shape: &[u64], item_bytes: u64) -> Result<Vec<u64>> {
    array_bytes(shape, item_bytes)?;
    let mut strides = vec![0; shape.len()];
    let mut stride = item_bytes;
    for axis in (0..shape.len()).rev() {
        strides[axis] = stride;
        stride = stride.saturating_mul(shape[axis]);
    }
    Ok(strides)
}

/// The memory of the box, from its lowest to its highest address, must lie in the address space.
fn check_memory(address: usize, item_bytes: u64, shape: &[u64], strides: &[i64]) -> Result<()> {
    let (mut lowest, mut highest) = (address as i128, address as i128 + i128::from(item_bytes));
    for (&extent, &stride) in shape.iter().zip(strides) {
        let reach = i128::from(extent - 1) * i128::from(stride);
        lowest += reach.min(0);
        highest += reach.max(0);
    }
    if lowest <= 0 || highest > isize::MAX as i128 {
        return Err(invalid("the memory of a block lies outside the address space"));
    }
    Ok(())
}

/// Drops axes of one step and merges those that are contiguous on both sides.
fn merge_axes(item_bytes: u64, shape: &[u64], linear: &[u64], memory: &[i64]) -> (u64, Vec<Axis>) {
    let mut piece_bytes = item_bytes;
    let mut axes: Vec<Axis> = Vec::new(); // innermost first
    for axis in (0..shape.len()).rev().filter(|&axis| shape[axis] != 1) {
        let (extent, linear_step, memory_step) = (shape[axis], linear[axis], memory[axis]);
        match axes.last_mut() {
            None if linear_step == piece_bytes && memory_step == piece_bytes as i64 => piece_bytes *= extent,
            Some(inner)
                if linear_step == inner.linear_step * inner.extent
                    && i128::from(memory_step)
                        == i128::from(inner.memory_step) * i128::from(inner.extent) =>
            {
                inner.extent *= extent;
            }
            _ => axes.push(Axis { extent, linear_step, memory_step, span: 0 }),
        }
    }
    let mut span = piece_bytes;
    for axis in &mut axes {
        axis.span = span;
        span += (axis.extent - 1) * axis.linear_step;
    }
    axes.reverse();
    (piece_bytes, axes)
}

/// The first step of an axis beginning at `linear` whose content ends after `position`.
fn first_index(axis: &Axis, linear: u64, position: u64) -> u64 {
    match position.checked_sub(linear + axis.span) {
        None => 0,
        Some(beyond) => beyond / axis.linear_step + 1,
    }
}

fn visit_piece(linear: u64, address: usize, bytes: u64, range: &Range<u64>, visit: &mut impl FnMut(Run)) {
    let begin = linear.max(range.start);
    let end = (linear + bytes).min(range.end);
    if begin < end {
        visit(Run {
            linear: begin,
            address: address + (begin - linear) as usize,
            piece_bytes: (end - begin) as usize,
            count: 1,
            linear_step: 0,
            memory_step: 0,
        });
    }
}

/// # Safety
/// All pieces must be readable at the source and writable at the target, without overlap.
unsafe fn copy_pieces(
    source: *const u8,
    target: *mut u8,
    piece_bytes: usize,
    count: usize,
    steps: (isize, isize),
) {
    // SAFETY (each arm): the caller vouches for all pieces; typed copies are unaligned ones.
    match piece_bytes {
        // SAFETY: see above.
        1 => unsafe { copy_items::<u8>(source, target, count, steps) },
        // SAFETY: see above.
        2 => unsafe { copy_items::<u16>(source, target, count, steps) },
        // SAFETY: see above.
        4 => unsafe { copy_items::<u32>(source, target, count, steps) },
        // SAFETY: see above.
        8 => unsafe { copy_items::<u64>(source, target, count, steps) },
        // SAFETY: see above.
        16 => unsafe { copy_items::<u128>(source, target, count, steps) },
        _ => {
            for index in 0..count as isize {
                let from = source.wrapping_offset(index * steps.0);
                let to = target.wrapping_offset(index * steps.1);
                // SAFETY: see above.
                unsafe { std::ptr::copy_nonoverlapping(from, to, piece_bytes) };
            }
        }
    }
}

/// # Safety
/// As for [`copy_pieces`], of pieces as large as `T`.
unsafe fn copy_items<T: Copy>(source: *const u8, target: *mut u8, count: usize, steps: (isize, isize)) {
    for index in 0..count as isize {
        let from = source.wrapping_offset(index * steps.0).cast::<T>();
        let to = target.wrapping_offset(index * steps.1).cast::<T>();
        // SAFETY: the caller vouches for the piece.
        unsafe { to.write_unaligned(from.read_unaligned()) };
    }
}

fn invalid(message: &'static str) -> Error {
    Error::new(Kind::InvalidInput, message)
}
