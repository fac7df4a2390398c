//! Table files: fixed-width entries in sections of checksummed pages.
//!
//! `container` knows pages and sections and nothing of what entries mean; `entries` names their
//! fields; `rules` holds what must be true of a table, and of the three tables together; `cover`
//! proves that boxes partition an array. Encoding checks the same rules as decoding.

mod container;
mod cover;
mod entries;
mod page;
mod rules;

pub use container::{Layout, Section, TableKind, decode, encode};
pub use entries::{ArrayEntry, ArrayKind, ChunkEntry, Entry, FileEntry, pack, unpack};
pub use page::{PAGE_BYTES, PAYLOAD_BYTES};
pub use rules::{block_count, validate_together};

/// Boxes of an irregular array under one bounding box.
pub const GROUP_BOXES: u64 = 64;

/// The version that this crate writes, and the newest that it reads.
pub const VERSION: u32 = 1;
