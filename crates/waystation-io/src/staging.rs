//! Equal blocks of page-aligned memory that one worker fills and lets go again.
//!
//! Invariants: a slot is either free or lent; the memory comes from the arena and goes back to it, so
//! what was faulted in (and pinned) once serves the next job.

use std::ops::Range;
use std::sync::Arc;

use waystation_format::{Error, Kind, Result};

use crate::arena::{Arena, Slab};

/// One worker's blocks.
pub struct Staging {
    slab: Slab,
    slot_bytes: usize,
    free: Vec<usize>,
}

impl Staging {
    /// `slots` blocks of `slot_bytes` bytes.
    pub fn new(arena: &Arc<Arena>, slots: usize, slot_bytes: usize) -> Result<Self> {
        let too_large = || Error::new(Kind::InvalidInput, "the staging blocks are too large");
        let slab = arena.allocate(slots.checked_mul(slot_bytes).ok_or_else(too_large)?)?;
        Ok(Self { slab, slot_bytes, free: (0..slots).rev().collect() })
    }

    /// Lends a free slot.
    pub fn take(&mut self) -> Option<usize> {
        self.free.pop()
    }

    /// Takes back a slot that was lent.
    pub fn put_back(&mut self, slot: usize) {
        self.free.push(slot);
    }

    /// Where a slot begins.
    pub fn address(&self, slot: usize) -> *mut u8 {
        self.slab.address().as_ptr().wrapping_add(slot * self.slot_bytes)
    }

    /// All addresses of all slots.
    pub fn range(&self) -> Range<usize> {
        let start = self.slab.address().as_ptr() as usize;
        start..start + self.slab.nbytes()
    }

    /// The bytes of a slot.
    ///
    /// # Safety
    /// The slot must be lent to the caller, and nothing else may be reading or writing it (no transfer
    /// in flight).
    pub unsafe fn bytes(&mut self, slot: usize) -> &mut [u8] {
        assert!((slot + 1) * self.slot_bytes <= self.slab.nbytes());
        // SAFETY: within the slab, initialised by the system, and exclusive as the caller promises.
        unsafe { std::slice::from_raw_parts_mut(self.address(slot), self.slot_bytes) }
    }
}
