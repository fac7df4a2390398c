//! How far something has come that is done in pieces, by several threads, in any order.
//!
//! Invariant: every piece before the prefix is done. Pure; whoever shares one puts a lock around it, which
//! costs nothing beside a piece of work.

use std::collections::BTreeSet;

/// The pieces that are done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prefix {
    next: u64,
    later: BTreeSet<u64>,
}

impl Prefix {
    /// So many pieces are done, from the first.
    pub fn of(pieces: u64) -> Self {
        Self { next: pieces, later: BTreeSet::new() }
    }

    /// The pieces before this one are all done.
    pub fn pieces(&self) -> u64 {
        self.next
    }

    /// Whether a piece is done.
    pub fn contains(&self, piece: u64) -> bool {
        piece < self.next || self.later.contains(&piece)
    }

    /// Says that a piece is done; returns how many are from the first on.
    pub fn complete(&mut self, piece: u64) -> u64 {
        if piece >= self.next {
            self.later.insert(piece);
        }
        while self.later.remove(&self.next) {
            self.next += 1;
        }
        self.next
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_is_the_first_piece_that_is_not_done(pieces in proptest::collection::vec(0u64..40, 0..80)) {
            let mut prefix = Prefix::default();
            for (index, &piece) in pieces.iter().enumerate() {
                let done = &pieces[..=index];
                let expected = (0..).find(|piece| !done.contains(piece)).unwrap();
                prop_assert_eq!(prefix.complete(piece), expected);
                prop_assert_eq!(prefix.pieces(), expected);
                prop_assert!((0..40).all(|piece| prefix.contains(piece) == done.contains(&piece)));
            }
        }
    }
}
