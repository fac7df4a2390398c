//! What has gone to other agents, or come from them, counted for those who watch; nothing is decided by it.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts of one direction.
#[derive(Debug, Default)]
pub struct Traffic {
    bytes: AtomicU64,
    damaged_blocks: AtomicU64,
    whole: AtomicU64,
    failed: AtomicU64,
    resumed: AtomicU64,
}

/// What was counted up to a moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrafficCounts {
    /// Bytes of tables of contents and of blocks, each time that they went.
    pub bytes: u64,
    /// Blocks that came with other bytes than were sent; they are sent again.
    pub damaged_blocks: u64,
    /// Versions of shards that went whole.
    pub whole: u64,
    /// Transfers that were given up.
    pub failed: u64,
    /// How often a transfer went on over another connection.
    pub resumed: u64,
}

impl Traffic {
    /// What was counted so far.
    pub fn counts(&self) -> TrafficCounts {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        TrafficCounts {
            bytes: of(&self.bytes),
            damaged_blocks: of(&self.damaged_blocks),
            whole: of(&self.whole),
            failed: of(&self.failed),
            resumed: of(&self.resumed),
        }
    }

    pub(super) fn note_bytes(&self, nbytes: u64) {
        self.bytes.fetch_add(nbytes, Ordering::Relaxed);
    }

    pub(super) fn note_damaged_block(&self) {
        self.damaged_blocks.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn note_whole(&self) {
        self.whole.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn note_failed(&self) {
        self.failed.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn note_resumed(&self) {
        self.resumed.fetch_add(1, Ordering::Relaxed);
    }
}
