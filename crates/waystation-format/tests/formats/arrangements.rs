//! The arrangements of the chunks of an array beside grid and boxes: runs, and partial boxes.

use crate::table_support::{Chunks, partition};
use proptest::prelude::*;
use waystation_format::Kind;
use waystation_format::table::{ArrayKind, PAGE_BYTES, RUN_WORDS, TableKind, decode};

type Boxes = Vec<(Vec<u64>, Vec<u64>)>;

fn partial(shape: &[u64], boxes: &[(Vec<u64>, Vec<u64>)]) -> Chunks {
    let mut table = Chunks::default();
    table.boxes_of(ArrayKind::PartialBoxes, shape, boxes);
    table
}

#[track_caller]
fn round_trips(table: &Chunks) {
    let file = table.encode().unwrap();
    assert_eq!(decode(TableKind::Chunks, &file).unwrap(), table.sections());
}

#[track_caller]
fn refused(table: &Chunks, reason: &str) {
    let error = table.encode().unwrap_err();
    assert_eq!(error.kind(), Kind::InvalidInput);
    assert!(error.message().contains(reason), "{error}");
}

#[test]
fn partial_boxes_may_leave_holes() {
    round_trips(&partial(&[4, 4], &[]));
    round_trips(&partial(&[4, 4], &[(vec![1, 1], vec![2, 3])]));
    round_trips(&partial(&[4, 4], &[(vec![0, 0], vec![4, 4])]));
    round_trips(&partial(&[], &[]));
    round_trips(&partial(&[], &[(vec![], vec![])]));
    round_trips(&partial(&[3, 0], &[]));
    let mut number = vec![0; 4];
    let file = partial(&[4, 4], &[]).encode().unwrap();
    number.copy_from_slice(&file[PAGE_BYTES..PAGE_BYTES + 4]);
    assert_eq!(number, [3, 0, 0, 0]);
}

#[test]
fn rules_of_partial_boxes() {
    let two = |first: (u64, u64), second: (u64, u64)| {
        partial(&[9], &[(vec![first.0], vec![first.1]), (vec![second.0], vec![second.1])])
    };
    round_trips(&two((1, 3), (4, 2)));
    refused(&two((1, 4), (4, 2)), "overlap");
    refused(&two((4, 2), (1, 3)), "not sorted");
    refused(&two((1, 3), (8, 2)), "outside of its array");
    refused(&two((1, 0), (8, 1)), "is empty");
    refused(&partial(&[], &[(vec![], vec![]), (vec![], vec![])]), "not sorted");
    refused(&partial(&[0], &[(vec![0], vec![1])]), "outside of its array");
    let mut wrong_group = two((1, 3), (4, 2));
    wrong_group.dims[2] += 1;
    refused(&wrong_group, "not the smallest");
    let mut too_long = two((1, 3), (4, 2));
    too_long.chunks[0].length += 1;
    refused(&too_long, "cannot have 7 bytes");
    let mut whole = two((1, 3), (4, 2));
    whole.arrays[0].kind = ArrayKind::Boxes;
    refused(&whole, "leave a part of it out");
}

fn in_runs(shape: &[u64], chunk_shape: &[u64], runs: &[[u64; RUN_WORDS]]) -> Chunks {
    let mut table = Chunks::default();
    table.grid(&[2], &[1]); // so that nothing begins at 0
    table.runs(shape, chunk_shape, runs);
    table
}

#[test]
fn chunks_in_runs() {
    round_trips(&in_runs(&[100_000], &[1], &[[0, 0, 1, 4096, 0]]));
    round_trips(&in_runs(&[10, 7], &[3, 2], &[[0, 5, 0, 0, 100], [7, 9, 2, 64, 0], [15, 3, 0, 0, 0]]));
    round_trips(&in_runs(&[], &[], &[[0, 1, 0, 4096, 0]]));
    round_trips(&in_runs(&[1 << 59], &[1], &[[0, 3, 0, 1, 4]]));
    let many: Vec<[u64; RUN_WORDS]> = (0..1000).map(|run| [2 * run, run, 1, run % 7, 0]).collect();
    round_trips(&in_runs(&[2000], &[1], &many));
    // Three pages and the one of the header say where 100,000 chunks are.
    let file = in_runs(&[100_000], &[1], &[[0, 0, 1, 4096, 0]]).encode().unwrap();
    assert_eq!(file.len(), 4 * PAGE_BYTES);
    assert_eq!(file[PAGE_BYTES + 48], 2);
}

#[test]
fn rules_of_runs() {
    let two = |runs: &[[u64; RUN_WORDS]]| in_runs(&[4, 4], &[1, 4], runs);
    let good = [[0, 0, 1, 4096, 0], [2, 7, 0, 0, 8]];
    round_trips(&two(&good));
    refused(&two(&[]), "do not follow each other");
    refused(&two(&good[1..]), "do not follow each other");
    refused(&two(&[good[1], good[0]]), "do not follow each other");
    refused(&two(&[good[0], [4, 7, 0, 0, 8]]), "do not follow each other");
    refused(&two(&[good[0], good[0]]), "do not follow each other");
    refused(&two(&[[0, u64::MAX, 1, 0, 0]]), "overflow 32 bits");
    refused(&two(&[[0, 0, 1 << 31, 0, 0]]), "overflow 32 bits");
    refused(&two(&[[0, 0, 0, u64::MAX - 7, 0]]), "overflows 64 bits");
    refused(&two(&[[0, 0, 0, 0, 1 << 63]]), "overflows 64 bits");
    round_trips(&two(&[[0, 0, 0, u64::MAX - 8, 0]]));
    round_trips(&two(&[[0, u64::from(u32::MAX), 0, 0, 0]]));
    refused(&in_runs(&[0, 4], &[1, 4], &[]), "has no elements");
    refused(&in_runs(&[4, 4], &[0, 4], &good), "an extent of 0");

    let changed = |change: fn(&mut Chunks)| {
        let mut table = two(&good);
        change(&mut table);
        table
    };
    let count = 2 + 2 * 2; // of the dims of the grid before, and of the two shapes
    assert_eq!(two(&good).dims[count..count + 2], [2, 0]);
    refused(&changed(|table| table.dims[6] = 3), "number of its runs");
    refused(&changed(|table| table.dims[6] = u64::MAX), "number of its runs");
    refused(&changed(|table| table.dims[7] = 1), "first chunks of groups");
    refused(&changed(|table| table.arrays[1].dim_count = 4), "number of extents");
    refused(&changed(|table| table.arrays[1].chunk_count = 1), "claims more");
    refused(
        &changed(|table| {
            table.arrays[1].chunk_count = 1;
            table.chunks.push(table.chunks[0]);
        }),
        "entries of chunks too",
    );
}

#[test]
fn clipped_chunks_of_narrow_elements_are_whole_bytes() {
    let of_four_bits = |extent: u64, chunk: u64| {
        let mut table = Chunks::default();
        table.runs(&[extent, 3], &[chunk, 1], &[[0, 0, 0, 0, 0]]);
        table.arrays[0].item_bits = 4;
        table
    };
    round_trips(&of_four_bits(8, 4));
    round_trips(&of_four_bits(6, 4));
    round_trips(&of_four_bits(2, 5));
    refused(&of_four_bits(7, 4), "not whole bytes");
    refused(&of_four_bits(6, 3), "not whole bytes");
    refused(&of_four_bits(1, 4), "not whole bytes");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) })]

    #[test]
    fn any_runs_round_trip_and_any_changed_word_is_refused_or_kept(
        grid in prop::collection::vec((1u64..50, 1u64..9), 0..4),
        cuts in prop::collection::vec((any::<u64>(), prop::array::uniform4(0u64..1000)), 0..200),
        (place, value) in (any::<usize>(), prop_oneof![0u64..200, any::<u64>()]),
    ) {
        let (shape, chunk_shape): (Vec<u64>, Vec<u64>) = grid.into_iter().unzip();
        let counts = shape.iter().zip(&chunk_shape).map(|(extent, chunk)| extent.div_ceil(*chunk));
        let chunk_count = counts.product::<u64>();
        let mut runs = vec![[0, 1, 2, 3, 4]];
        runs.extend(cuts.iter().map(|(at, [a, b, c, d])| [at % chunk_count, *a, *b, *c, *d]));
        runs.sort_unstable();
        runs.dedup_by_key(|run| run[0]);
        let mut table = in_runs(&shape, &chunk_shape, &runs);
        round_trips(&table);
        let first = table.arrays[1].first_dim as usize;
        let places = table.dims.len() - first;
        table.dims[first + place % places] = value;
        if table.encode().is_ok() {
            round_trips(&table);
        }
    }

    #[test]
    fn any_part_of_a_partition_round_trips_and_no_overlap_passes(
        shape in prop::collection::vec(1u64..60, 1..4),
        cuts in prop::collection::vec((any::<usize>(), any::<u64>()), 0..200),
        kept in prop::collection::vec(any::<bool>(), 200),
        (which, axis) in (any::<usize>(), any::<usize>()),
    ) {
        let all = partition(shape.clone(), &cuts);
        let boxes: Boxes =
            all.iter().zip(kept.iter().cycle()).filter(|(_, kept)| **kept).map(|(one, _)| one.clone()).collect();
        round_trips(&partial(&shape, &boxes));
        if boxes.is_empty() {
            return Ok(());
        }
        // A box that grows by one overlaps another, unless it grows into a hole.
        let mut grown = boxes.clone();
        let (which, axis) = (which % boxes.len(), axis % shape.len());
        grown[which].1[axis] += 1;
        let (offset, extents) = grown[which].clone();
        prop_assume!(offset[axis] + extents[axis] <= shape[axis]);
        let meets = |(other, size): &(Vec<u64>, Vec<u64>)| {
            (0..shape.len()).all(|axis| {
                offset[axis] < other[axis] + size[axis] && other[axis] < offset[axis] + extents[axis]
            })
        };
        let overlaps = grown.iter().filter(|one| meets(one)).count() > 1;
        prop_assert_eq!(partial(&shape, &grown).encode().is_err(), overlaps);
    }
}
