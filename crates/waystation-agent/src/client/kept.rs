//! Mappings of slots that were filled, kept for the next version: mapping memory anew takes as long as filling it.
//!
//! Invariant: of one shard no more are kept than it has versions, so that a process does not keep slots from
//! others which it will not be given again itself.

use std::path::Path;

use crate::writer::SlotWriter;

/// Writers that are done with a version, the one that waits longest first.
#[derive(Debug, Default)]
pub(super) struct Kept(Vec<SlotWriter>);

impl Kept {
    /// Takes out the writer of a slot.
    pub fn take(&mut self, path: &Path) -> Option<SlotWriter> {
        let place = self.0.iter().position(|writer| writer.grant().path == path)?;
        Some(self.0.remove(place))
    }

    /// Keeps a writer, and lets the oldest of its shard go if that makes too many.
    pub fn put(&mut self, writer: SlotWriter, versions_per_shard: usize) {
        let shard_of = |writer: &SlotWriter| writer.grant().tenant.key.shard.clone();
        let shard = shard_of(&writer);
        self.0.push(writer);
        let of_shard = |(place, writer): (usize, &SlotWriter)| (shard_of(writer) == shard).then_some(place);
        let places: Vec<usize> = self.0.iter().enumerate().filter_map(of_shard).collect();
        if places.len() > versions_per_shard {
            self.0.remove(places[0]);
        }
    }

    /// Lets all go; false if there were none.
    pub fn clear(&mut self) -> bool {
        let there_were = !self.0.is_empty();
        self.0.clear();
        there_were
    }
}
