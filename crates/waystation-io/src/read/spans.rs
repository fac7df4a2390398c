//! Which bytes of a file are read for a plan, and in what portions.
//!
//! A *span* is a range of file bytes that is read without a hole, a *stripe* a series of spans of one
//! file that one worker reads, a *unit* what it asks the system for at once. Invariants: spans of a file
//! are disjoint, ascending, and cover every needed byte; they begin at multiples of the granule and end
//! at one or at the end of the file.

use std::ops::Range;

use waystation_format::checksum::BLOCK_BYTES;

use super::plan::{FilePlan, Piece};

/// Least bytes that are read where there are no checksums: a page, and what direct transfers want.
pub const PAGE_GRANULE_BYTES: u64 = 4096;
/// Reading so many bytes that nobody needs takes no longer than asking twice.
const GAP_BYTES: u64 = 64 << 10;

/// What one worker reads before it takes more.
#[derive(Debug, PartialEq, Eq)]
pub struct Stripe {
    /// Index of the file in the plan.
    pub file: usize,
    /// What to read of it.
    pub spans: Vec<Range<u64>>,
}

/// The spans of a file.
pub fn spans_of(plan: &FilePlan) -> Vec<Range<u64>> {
    let verified = plan.file.checksums.is_some();
    // A gap that holds a whole block is left out: reading it would mean verifying it too.
    let (granule, gap) = if verified { (BLOCK_BYTES as u64, 0) } else { (PAGE_GRANULE_BYTES, GAP_BYTES) };
    let mut spans: Vec<Range<u64>> = Vec::new();
    for piece in plan.pieces() {
        add_spans(piece, plan.file.file_bytes, granule, gap, &mut spans);
    }
    spans.sort_unstable_by_key(|span| span.start);
    let mut merged: Vec<Range<u64>> = Vec::with_capacity(spans.len());
    for span in spans {
        push_merged(&mut merged, span, gap);
    }
    merged
}

fn add_spans(piece: &Piece, file_bytes: u64, granule: u64, gap: u64, spans: &mut Vec<Range<u64>>) {
    let mut position = 0;
    while let Some(stretch) = piece.next_stretch(position) {
        let end = stretch.end.next_multiple_of(granule).min(file_bytes);
        push_merged(spans, stretch.start / granule * granule..end, gap);
        // Stretches that end in a granule already taken need no visit.
        position = end;
    }
}

/// Appends a span, as part of the last one where that is near enough.
fn push_merged(spans: &mut Vec<Range<u64>>, span: Range<u64>, gap: u64) {
    match spans.last_mut() {
        Some(last) if span.start >= last.start && span.start <= last.end.saturating_add(gap) => {
            last.end = last.end.max(span.end);
        }
        _ => spans.push(span),
    }
}

/// Divides spans into stripes of about `stripe_bytes`, in file order.
pub fn stripes_of(file: usize, spans: &[Range<u64>], stripe_bytes: u64) -> Vec<Stripe> {
    let stripe_bytes = stripe_bytes.next_multiple_of(BLOCK_BYTES as u64);
    let mut stripes: Vec<Stripe> = Vec::new();
    let mut room = 0;
    for part in spans.iter().flat_map(|span| portions(span.clone(), stripe_bytes)) {
        let bytes = part.end - part.start;
        match stripes.last_mut() {
            Some(stripe) if bytes <= room => {
                stripe.spans.push(part);
                room -= bytes;
            }
            _ => {
                stripes.push(Stripe { file, spans: vec![part] });
                room = stripe_bytes.saturating_sub(bytes);
            }
        }
    }
    stripes
}

/// Cuts a span into portions of at most `portion_bytes`, a multiple of the granule.
pub fn portions(span: Range<u64>, portion_bytes: u64) -> impl Iterator<Item = Range<u64>> {
    let mut left = span;
    std::iter::from_fn(move || {
        let begin = left.start;
        left.start = left.end.min(begin.saturating_add(portion_bytes.max(1)));
        (begin < left.start).then_some(begin..left.start)
    })
}

/// Bytes of spans.
pub fn span_bytes(spans: &[Range<u64>]) -> u64 {
    spans.iter().map(|span| span.end - span.start).sum()
}
