//! Table files: fixed-width entries in sections of checksummed pages.
//!
//! `container` knows pages and sections and nothing of what entries mean; `entries` names their
//! fields; `rules` holds what must be true of a table, and of the three tables together,
//! `arrangements` what must be true of the chunks of an array; `cover` proves that boxes partition an
//! array, `disjoint` that they do not overlap. Encoding checks the same rules as decoding.

mod arrangements;
mod container;
mod cover;
mod disjoint;
mod entries;
mod rules;

pub use crate::page::{PAGE_BYTES, PAYLOAD_BYTES};
pub use container::{Layout, Section, TableKind, decode, encode};
pub use entries::{ArrayEntry, ArrayKind, ChunkEntry, Entry, FileEntry, pack, unpack};
pub use rules::{block_count, check_fields, validate_together};

/// Boxes of an irregular array under one bounding box.
pub const GROUP_BOXES: u64 = 64;

/// Runs of the chunks of an array whose first chunk is stated once.
pub const GROUP_RUNS: u64 = 64;

/// Words of a run: its first chunk, the data file of that, the stride of files, its offset, the stride of
/// offsets.
pub const RUN_WORDS: usize = 5;

/// The version that this crate writes, and the newest that it reads.
pub const VERSION: u32 = 1;
