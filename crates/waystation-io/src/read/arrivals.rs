//! Which records of a plan are in place: how many of the first, without a gap.
//!
//! Invariants: a record counts once every byte of it has reached its destination, which for one on a device
//! means that the copies have been waited for, or were found to be over; the front only moves forward.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use super::Statistics;
use super::plan::Plan;
use crate::job::Shared;

/// What a unit has of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// The number of the record.
    pub record: usize,
    /// Its bytes in the unit.
    pub nbytes: u64,
}

/// What is still to come of each record of a job.
pub struct Arrivals<'a> {
    left_bytes: Vec<AtomicU64>,
    front: Mutex<usize>,
    shared: &'a Shared<Statistics>,
}

impl<'a> Arrivals<'a> {
    /// Nothing has arrived but records of nothing.
    pub fn new(plan: &Plan, shared: &'a Shared<Statistics>) -> Self {
        let mut left_bytes: Vec<AtomicU64> = (0..plan.records).map(|_| AtomicU64::new(0)).collect();
        for piece in plan.files.iter().flat_map(|file| file.pieces()) {
            left_bytes[piece.record()] = AtomicU64::new(piece.copy().nbytes());
        }
        let arrivals = Self { left_bytes, front: Mutex::new(0), shared };
        arrivals.advance();
        arrivals
    }

    /// Counts bytes that are in place.
    pub fn count(&self, shares: &[Share]) {
        let mut is_whole = false;
        for share in shares {
            let left = self.left_bytes[share.record].fetch_sub(share.nbytes, Ordering::AcqRel);
            debug_assert!(left >= share.nbytes, "bytes of a record came twice");
            is_whole |= left == share.nbytes;
        }
        if is_whole {
            self.advance();
        }
    }

    /// Moves the front to the first record of which something is missing.
    fn advance(&self) {
        let mut front = self.front.lock().unwrap_or_else(PoisonError::into_inner);
        let is_there = |left: &AtomicU64| left.load(Ordering::Acquire) == 0;
        while self.left_bytes.get(*front).is_some_and(is_there) {
            *front += 1;
        }
        self.shared.set_front(*front as u64);
    }
}
