//! The order in which the pieces of a job are handed out.
//!
//! Normally that of the files. Pieces that somebody waits for, because their memory is to change, go before
//! the rest. Invariants: every piece has one place; those of each of the two kinds are in the order of the
//! files.

use std::ops::Range;

/// Consecutive pieces, and how many are handed out before them.
struct Run {
    before: u64,
    pieces: Range<u64>,
}

pub(super) struct Order {
    runs: Vec<Run>,
    /// How many pieces go first; all, where none is preferred.
    first: u64,
}

impl Order {
    /// The order of `count` pieces, those of the ranges `first` before the rest. Ranges may overlap.
    pub fn new(first: &[Range<u64>], count: u64) -> Self {
        let first = merged(first);
        let mut order = Self { runs: Vec::new(), first: 0 };
        first.iter().for_each(|pieces| order.push(pieces.clone()));
        order.first = order.len();
        let mut next = 0;
        for pieces in &first {
            order.push(next..pieces.start);
            next = pieces.end;
        }
        order.push(next..count);
        if first.is_empty() {
            order.first = count;
        }
        order
    }

    fn push(&mut self, pieces: Range<u64>) {
        let before = self.len();
        if !pieces.is_empty() {
            self.runs.push(Run { before, pieces });
        }
    }

    fn len(&self) -> u64 {
        self.runs.last().map_or(0, |run| run.before + (run.pieces.end - run.pieces.start))
    }

    /// The piece that is handed out after `index` others.
    pub fn piece(&self, index: u64) -> Option<u64> {
        let run = &self.runs[self.runs.partition_point(|run| run.before <= index).checked_sub(1)?];
        Some(run.pieces.start + (index - run.before)).filter(|piece| *piece < run.pieces.end)
    }

    /// The same; of those that go first the last, where all of them were handed out before.
    pub fn first_piece(&self, index: u64) -> Option<u64> {
        self.piece(index.min(self.first.checked_sub(1)?))
    }
}

/// The same pieces in disjoint ranges, in order.
fn merged(ranges: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut sorted: Vec<Range<u64>> = ranges.iter().filter(|range| !range.is_empty()).cloned().collect();
    sorted.sort_unstable_by_key(|range| range.start);
    let mut merged: Vec<Range<u64>> = Vec::new();
    for range in sorted {
        match merged.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all(order: &Order) -> Vec<u64> {
        (0..).map_while(|index| order.piece(index)).collect()
    }

    #[test]
    fn without_preference_it_is_that_of_the_files() {
        let order = Order::new(&[], 4);
        assert_eq!(all(&order), [0, 1, 2, 3]);
        assert_eq!(order.first_piece(3), Some(3));
        assert_eq!(all(&Order::new(&[], 0)), [0u64; 0]);
    }

    proptest! {
        #[test]
        fn preferred_pieces_go_first_and_none_is_lost(
            count in 0u64..40,
            ranges in prop::collection::vec((0u64..40, 0u64..8), 1..6),
        ) {
            let ranges: Vec<_> =
                ranges.iter().map(|&(begin, length)| begin.min(count)..(begin + length).min(count)).collect();
            let order = Order::new(&ranges, count);
            let is_preferred = |piece: &u64| ranges.iter().any(|range| range.contains(piece));
            let (mut expected, rest): (Vec<u64>, Vec<u64>) = (0..count).partition(is_preferred);
            let first = if expected.is_empty() { count } else { expected.len() as u64 };
            expected.extend(rest);
            prop_assert_eq!(all(&order), expected.clone());
            for index in 0..count {
                let wanted = expected[index.min(first - 1) as usize];
                prop_assert_eq!(order.first_piece(index), Some(wanted));
            }
        }
    }
}
