//! Strided copies against a copy of one element at a time.

use proptest::prelude::*;
use waystation_io::copy::BoxCopy;
use waystation_io::segment::{Segment, is_partition};

/// A random array, a box of it, and memory strides that let the box lie in `MEMORY` bytes.
#[derive(Clone, Debug)]
struct Case {
    shape: Vec<u64>,
    item_bytes: u64,
    offset: Vec<u64>,
    extent: Vec<u64>,
    strides: Vec<i64>,
    base: usize,
    memory_bytes: usize,
    range: (u64, u64),
}

/// How memory is laid out: which axis is outermost, which run backwards, how much padding per axis.
fn case(overlapping: bool) -> impl Strategy<Value = Case> {
    let axis =
        (1u64..6, any::<proptest::sample::Index>(), any::<proptest::sample::Index>(), any::<bool>(), 0i64..3);
    let axes = prop::collection::vec((axis, any::<u32>(), any::<bool>()), 0..5);
    (axes, prop::sample::select(vec![1u64, 2, 3, 4, 8, 16, 24]), any::<(u16, u16)>()).prop_map(
        move |(axes, item_bytes, cut)| {
            let ndim = axes.len();
            let mut case = Case {
                shape: axes.iter().map(|axis| axis.0.0).collect(),
                item_bytes,
                offset: vec![],
                extent: vec![],
                strides: vec![0; ndim],
                base: 0,
                memory_bytes: 0,
                range: (0, 0),
            };
            for ((size, low, high, _, _), _, _) in &axes {
                let offset = low.index(*size as usize) as u64;
                case.offset.push(offset);
                case.extent.push(1 + high.index((size - offset) as usize) as u64);
            }
            let mut order: Vec<usize> = (0..ndim).collect();
            if axes.first().is_some_and(|axis| axis.2) {
                order.sort_by_key(|&axis| axes[axis].1);
            }
            let mut step = item_bytes as i64;
            for &axis in order.iter().rev() {
                let ((_, _, _, backwards, padding), _, zero) = axes[axis];
                let extent = case.extent[axis] as i64;
                if overlapping && zero {
                    continue;
                }
                case.strides[axis] = if backwards { -step } else { step };
                if backwards {
                    case.base += ((extent - 1) * step) as usize;
                }
                step = step * extent + padding * item_bytes as i64;
            }
            case.memory_bytes = step as usize;
            let total = case.shape.iter().product::<u64>() * item_bytes;
            let (one, two) = (u64::from(cut.0) % (total + 1), u64::from(cut.1) % (total + 1));
            case.range = (one.min(two), one.max(two));
            case
        },
    )
}

/// Calls `visit(linear, memory)` for each byte of the box.
fn each_byte(case: &Case, mut visit: impl FnMut(u64, usize)) {
    let count: u64 = case.extent.iter().product();
    for element in 0..count {
        let (mut rest, mut linear, mut memory) = (element, 0, case.base as i64);
        let mut step = case.item_bytes;
        for axis in (0..case.shape.len()).rev() {
            let index = rest % case.extent[axis];
            rest /= case.extent[axis];
            linear += (case.offset[axis] + index) * step;
            memory += index as i64 * case.strides[axis];
            step *= case.shape[axis];
        }
        for byte in 0..case.item_bytes {
            visit(linear + byte, (memory + byte as i64) as usize);
        }
    }
}

fn build(case: &Case, memory: &[u8]) -> BoxCopy {
    let address = memory.as_ptr() as usize + case.base;
    BoxCopy::new(&case.shape, case.item_bytes, &case.offset, &case.extent, address, &case.strides).unwrap()
}

fn noise(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|index| (index as u32).wrapping_mul(2_654_435_761).to_be_bytes()[0] | 1).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn gather_equals_one_element_at_a_time(case in case(true)) {
        let memory = noise(case.memory_bytes);
        let (start, end) = case.range;
        let mut found = vec![0; (end - start) as usize];
        // SAFETY: the strides were chosen so that the box lies in `memory`.
        unsafe { build(&case, &memory).gather(start, &mut found) };
        let mut expected = vec![0; found.len()];
        each_byte(&case, |linear, at| {
            if (start..end).contains(&linear) {
                expected[(linear - start) as usize] = memory[at];
            }
        });
        prop_assert_eq!(found, expected);
    }

    #[test]
    fn scatter_equals_one_element_at_a_time(case in case(false)) {
        let (start, end) = case.range;
        let linear = noise((end - start) as usize);
        let mut found = vec![0; case.memory_bytes];
        let copy = build(&case, &found);
        // SAFETY: the strides were chosen so that the box lies in `found`, whose address is unchanged.
        unsafe { copy.scatter(start, &linear) };
        std::hint::black_box(found.as_mut_ptr());
        let mut expected = vec![0; case.memory_bytes];
        each_byte(&case, |position, at| {
            if (start..end).contains(&position) {
                expected[at] = linear[(position - start) as usize];
            }
        });
        prop_assert_eq!(found, expected);
    }

    #[test]
    fn stretches_are_exactly_the_bytes_of_the_box(case in case(true)) {
        let copy = build(&case, &noise(case.memory_bytes));
        let total = (case.shape.iter().product::<u64>() * case.item_bytes) as usize;
        let mut expected = vec![false; total];
        each_byte(&case, |linear, _| expected[linear as usize] = true);
        let mut found = vec![false; total];
        let mut position = case.range.0;
        expected[..position as usize].fill(false);
        while let Some(stretch) = copy.next_stretch(position) {
            prop_assert!(stretch.start >= position && stretch.end > stretch.start);
            found[stretch.start as usize..stretch.end as usize].fill(true);
            position = stretch.end;
        }
        prop_assert_eq!(found, expected);
        let range = copy.linear_range();
        prop_assert_eq!(copy.nbytes(), case.extent.iter().product::<u64>() * case.item_bytes);
        prop_assert!(range.end <= total as u64);
    }

    #[test]
    fn a_grid_is_a_partition_until_a_box_moves(
        cuts in prop::collection::vec(prop::collection::btree_set(1u64..9, 0..4), 1..4),
        victim in any::<proptest::sample::Index>(),
    ) {
        let shape: Vec<u64> = vec![9; cuts.len()];
        let mut boxes = vec![(vec![], vec![])];
        for cut in &cuts {
            let bounds: Vec<u64> = [0].into_iter().chain(cut.iter().copied()).chain([9]).collect();
            boxes = boxes.into_iter().flat_map(|(offset, extent): (Vec<u64>, Vec<u64>)| {
                bounds.windows(2).map(|pair| {
                    let grown = |mut of: Vec<u64>, value| { of.push(value); of };
                    (grown(offset.clone(), pair[0]), grown(extent.clone(), pair[1] - pair[0]))
                }).collect::<Vec<_>>()
            }).collect();
        }
        let views = |boxes: &[(Vec<u64>, Vec<u64>)]| {
            let views: Vec<(&[u64], &[u64])> = boxes.iter().map(|(o, s)| (&o[..], &s[..])).collect();
            is_partition(&shape, &views)
        };
        prop_assert!(views(&boxes));
        let index = victim.index(boxes.len());
        let moved = boxes[index].clone();
        let mut broken = boxes.clone();
        broken.remove(index);
        prop_assert!(!views(&broken));
        broken.push(boxes[(index + 1) % boxes.len()].clone());
        prop_assert!(views(&broken) == (boxes.len() == 1) );
        broken.pop();
        broken.push(moved);
        prop_assert!(views(&broken));
    }
}

#[test]
fn segments_join_their_blocks() {
    let left = noise(8 * 3);
    let right = noise(8 * 5);
    let block = |memory: &[u8], offset, columns: u64| {
        let address = memory.as_ptr() as usize;
        BoxCopy::new(&[8, 8], 1, &[0, offset], &[8, columns], address, &[columns as i64, 1]).unwrap()
    };
    let segment = Segment::new(64, vec![block(&right, 3, 5), block(&left, 0, 3)]);
    let mut found = vec![0; 64];
    // SAFETY: both blocks lie in their vectors.
    unsafe { segment.gather(0, &mut found) };
    let expected: Vec<u8> =
        (0..8).flat_map(|row| [&left[row * 3..][..3], &right[row * 5..][..5]].concat()).collect();
    assert_eq!(found, expected);
}

#[test]
fn hostile_numbers_are_refused() {
    let new = |shape: &[u64], item, offset: &[u64], extent: &[u64], address, strides: &[i64]| {
        BoxCopy::new(shape, item, offset, extent, address, strides).map(|_| ())
    };
    assert!(new(&[u64::MAX, 2], 1, &[0, 0], &[1, 1], 4096, &[1, 1]).is_err());
    assert!(new(&[4], 1, &[1], &[4], 4096, &[1]).is_err());
    assert!(new(&[4], 1, &[u64::MAX], &[2], 4096, &[1]).is_err());
    assert!(new(&[4], 1, &[0], &[4], 4096, &[i64::MAX]).is_err());
    assert!(new(&[4], 1, &[0], &[4], 4096, &[i64::MIN]).is_err());
    assert!(new(&[4], 1, &[0], &[4], 2, &[-1]).is_err());
    assert!(new(&[4], 1, &[0], &[4], 0, &[1]).is_err());
    assert!(new(&[4], 1, &[0, 0], &[4], 4096, &[1]).is_err());
    assert!(new(&[u64::MAX, 0], 8, &[0, 0], &[5, 0], 0, &[1, 1]).is_ok());
}
