//! Proof that boxes partition an array: every element in exactly one box, in time linear in boxes.
//!
//! The indicator of a box is the product over the dimensions of (step at its begin − step at its
//! end). With a random number for every step, the boxes partition the array exactly when those
//! products add up to the array's own product: both sides are polynomials in the random numbers, and
//! polynomials of degree d that differ agree at a random point with probability at most d / 2^61.
//! So a partition is never refused, and anything else passes less than once in 2^54 tries, whatever
//! its author knew, for the numbers are drawn anew in every process.

use std::hash::{BuildHasher, RandomState};

/// The Mersenne prime 2^61 − 1; arithmetic is modulo it.
const PRIME: u64 = (1 << 61) - 1;

/// Adds up boxes until they can be compared with the array.
pub(super) struct Cover {
    random: RandomState,
    sum: u64,
}

impl Cover {
    pub(super) fn new() -> Self {
        Self { random: RandomState::new(), sum: 0 }
    }

    /// Counts the box at `offset` of `shape`, which lies inside the array.
    pub(super) fn add(&mut self, offset: &[u64], shape: &[u64]) {
        self.sum = (self.sum + self.product(offset, shape)) % PRIME;
    }

    /// Whether the boxes counted so far partition an array of `shape`.
    pub(super) fn is_exact(&self, shape: &[u64]) -> bool {
        self.sum == self.product(&vec![0; shape.len()], shape)
    }

    fn product(&self, offset: &[u64], shape: &[u64]) -> u64 {
        let sides = offset.iter().zip(shape).enumerate();
        sides.fold(1, |product, (dimension, (&begin, &extent))| {
            let side = self.step(dimension, begin) + PRIME - self.step(dimension, begin + extent);
            (u128::from(product) * u128::from(side % PRIME) % u128::from(PRIME)) as u64
        })
    }

    fn step(&self, dimension: usize, at: u64) -> u64 {
        self.random.hash_one((dimension, at)) % PRIME
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_exact(array: &[u64], boxes: &[(&[u64], &[u64])]) -> bool {
        let mut cover = Cover::new();
        boxes.iter().for_each(|(offset, shape)| cover.add(offset, shape));
        cover.is_exact(array)
    }

    #[test]
    fn partitions_are_exact() {
        assert!(is_exact(&[], &[(&[], &[])]));
        assert!(is_exact(&[7], &[(&[0], &[3]), (&[3], &[4])]));
        // A pinwheel: no straight cut separates its five boxes.
        let pinwheel: [(&[u64], &[u64]); 5] = [
            (&[0, 0], &[1, 2]),
            (&[0, 2], &[2, 1]),
            (&[1, 0], &[2, 1]),
            (&[1, 1], &[1, 1]),
            (&[2, 1], &[1, 2]),
        ];
        assert!(is_exact(&[3, 3], &pinwheel));
    }

    #[test]
    fn a_hole_that_an_overlap_makes_up_for_is_noticed() {
        assert!(!is_exact(&[6], &[(&[0], &[3]), (&[2], &[3])]));
        assert!(!is_exact(&[2, 2], &[(&[0, 0], &[1, 2]), (&[0, 1], &[1, 2])]));
        assert!(!is_exact(&[4], &[(&[0], &[2])]));
        assert!(!is_exact(&[4], &[]));
        assert!(!is_exact(&[], &[(&[], &[]), (&[], &[])]));
    }
}
