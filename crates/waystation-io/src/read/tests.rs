//! What cannot be seen from outside: which bytes are read, and that they are read in place.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::path::PathBuf;

use waystation_format::checksum::BLOCK_BYTES;

use super::layout::{Layout, Rules};
use super::plan::{Plan, ReadFile};
use super::spans::{portions, spans_of, stripes_of};
use super::*;
use crate::local::read::DIRECT_MOST_PARTS;

pub const BLOCK: u64 = BLOCK_BYTES as u64;
pub const DIRECT: Rules = Rules {
    offset_alignment: 512,
    memory_alignment: 512,
    least_bytes: 128 << 10,
    most_parts: DIRECT_MOST_PARTS,
};

/// Contiguous pieces `(offset, length, address)` of one file.
pub fn plan(
    path: PathBuf,
    file_bytes: u64,
    verified: Option<Vec<u64>>,
    pieces: &[(u64, u64, usize)],
) -> Plan {
    let words: Vec<i64> = pieces
        .iter()
        .flat_map(|&(offset, length, address)| [0, offset as i64, length as i64, 0, address as i64])
        .collect();
    Plan::new(vec![ReadFile { path, file_bytes, checksums: verified, version: None }], &words).unwrap()
}

fn imagined(file_bytes: u64, verified: bool, pieces: &[(u64, u64, usize)]) -> Plan {
    let checksums = verified.then(|| vec![0; file_bytes.div_ceil(BLOCK) as usize]);
    plan(PathBuf::new(), file_bytes, checksums, pieces)
}

fn parts(plan: &Plan, unit: Range<u64>, rules: &Rules) -> Vec<(u64, usize, usize)> {
    let mut layout = Layout::default();
    layout.divide(&plan.files[0], unit, rules, NonZeroUsize::MAX, 0x1000 as *mut u8);
    layout.parts().iter().map(|part| (part.begin, part.nbytes, part.address as usize)).collect()
}

#[test]
fn aligned_runs_are_read_in_place() {
    let plan = imagined(4 * BLOCK, true, &[(4096, 3 * BLOCK, 0x10_0000)]);
    // The first page is somebody else's; scratch takes it.
    assert_eq!(
        parts(&plan, 0..BLOCK, &DIRECT),
        [(0, 4096, 0x1000), (4096, BLOCK as usize - 4096, 0x10_0000)]
    );
    let inner = [(BLOCK, BLOCK as usize, 0x10_0000 + BLOCK as usize - 4096)];
    assert_eq!(parts(&plan, BLOCK..2 * BLOCK, &DIRECT), inner);
}

#[test]
fn runs_that_cannot_be_aligned_go_through_scratch() {
    let misplaced = imagined(BLOCK, true, &[(0, BLOCK, 0x10_0100)]);
    assert_eq!(parts(&misplaced, 0..BLOCK, &DIRECT), [(0, BLOCK as usize, 0x1000)]);
    // The end of the file is asked for as far as the alignment wants.
    let odd = imagined(BLOCK - 5, true, &[(0, BLOCK - 5, 0x10_0000)]);
    let body = BLOCK as usize - 512;
    assert_eq!(parts(&odd, 0..BLOCK - 5, &DIRECT), [(0, body, 0x10_0000), (BLOCK - 512, 512, 0x1000 + body)]);
}

#[test]
fn bytes_that_two_pieces_need_go_through_scratch() {
    let plan = imagined(BLOCK, true, &[(0, BLOCK, 0x10_0000), (BLOCK - 7, 7, 0x90_0000)]);
    assert_eq!(parts(&plan, 0..BLOCK, &DIRECT), [(0, BLOCK as usize, 0x1000)]);
}

#[test]
fn spans_cover_what_is_needed_and_little_more() {
    let pieces = [(5000, 10, 0x1000), (5000 + (40 << 10), 10, 0x2000), (9 * BLOCK, 1, 0x3000)];
    let unverified = spans_of(&imagined(9 * BLOCK + 1, false, &pieces).files[0]);
    assert_eq!(unverified, [4096..49152, 9 * BLOCK..9 * BLOCK + 1]);
    let verified = spans_of(&imagined(9 * BLOCK + 1, true, &pieces).files[0]);
    assert_eq!(verified, [0..BLOCK, 9 * BLOCK..9 * BLOCK + 1]);
}

#[test]
fn a_strided_box_leaves_out_blocks_that_it_does_not_touch() {
    // Rows of three blocks, of which one item is needed each.
    let row = 3 * BLOCK as i64;
    let words = [0, 0, 1, 2, 4, row, 0, 5, 4, 1, 0x1000, 1, 1];
    let file = ReadFile {
        path: PathBuf::new(),
        file_bytes: 12 * BLOCK,
        checksums: Some(vec![0; 12]),
        version: None,
    };
    let plan = Plan::new(vec![file], &words).unwrap();
    let expected: Vec<Range<u64>> = (0..4).map(|row| row * 3 * BLOCK..(row * 3 + 1) * BLOCK).collect();
    assert_eq!(spans_of(&plan.files[0]), expected);
}

#[test]
fn stripes_are_the_spans_again() {
    let spans = [0..10 * BLOCK, 20 * BLOCK..20 * BLOCK + 7, 30 * BLOCK..31 * BLOCK];
    let stripes = stripes_of(0, &spans, 4 * BLOCK);
    assert!(stripes.iter().all(|stripe| span_bytes(&stripe.spans) <= 4 * BLOCK));
    let mut position = None;
    let mut rejoined: Vec<Range<u64>> = Vec::new();
    for span in stripes.into_iter().flat_map(|stripe| stripe.spans) {
        match rejoined.last_mut() {
            Some(last) if position == Some(span.start) => last.end = span.end,
            _ => rejoined.push(span.clone()),
        }
        position = Some(span.end);
    }
    assert_eq!(rejoined, spans);
    assert_eq!(portions(0..10, 4).collect::<Vec<_>>(), [0..4, 4..8, 8..10]);
    assert_eq!(portions(3..3, 4).count(), 0);
}

#[test]
fn processes_that_read_the_same_begin_with_other_parts() {
    let plan = imagined(16 * STRIPE_LEAST_BYTES, false, &[(0, 16 * STRIPE_LEAST_BYTES, 0x10_0000)]);
    let spans: Vec<Vec<Range<u64>>> = plan.files.iter().map(spans_of).collect();
    let begins_of = |among| {
        let options = Options { among, ..Options::default() };
        let shared = Shared::new(0);
        let batch = Batch { plan: &plan, options: &options, delivery: Delivery::default(), shared: &shared };
        batch.stripes(&spans, 4).all().iter().map(|stripe| stripe.spans[0].start).collect::<Vec<u64>>()
    };
    let all = begins_of(None);
    assert_eq!(all.len(), 16);
    for index in 0..4 {
        let mut own = begins_of(Some((index, 4)));
        assert_eq!(own[0], all[4 * index]);
        own.sort_unstable();
        assert_eq!(own, all);
    }
}
