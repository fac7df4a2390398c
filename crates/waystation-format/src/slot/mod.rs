//! Slots: files in memory, each of which holds one version of one shard for the memory tier.
//!
//! `header` is who the slot's tenant is and how far it has come, kept in two copies (`copies`); `contents`
//! is the table of what its data are; `store` is what all slots of a host have in common. Invariants: where
//! everything lies follows from two lengths in the header ([`Regions`]); nothing is allocated for what a
//! header claims; encoding checks the same rules as decoding, and one value has one encoding.
//! `docs/format-slots.md` specifies every byte.

mod contents;
mod copies;
mod fields;
mod header;
mod store;

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

pub use contents::{Entry, ItemBox, decode_contents, encode_contents, place};
pub use copies::{COPIES, Newest, Record, newest};
pub use header::{Header, Key, State, Sums, Tenant, Version, Writer};
pub use store::StoreRecord;

use crate::checksum::{BLOCK_BYTES, Crc64};
use crate::page::PAGE_BYTES;
use crate::{Error, Kind, Result};

/// The version that this crate writes, and the newest that it reads.
pub const VERSION: u32 = 1;

/// Where a writer says how many blocks of data are in place, each with its checksum: one `u64`.
pub const PROGRESS_OFFSET: u64 = COPIES * PAGE_BYTES as u64;

/// Where the table of contents begins.
pub const CONTENTS_OFFSET: u64 = PROGRESS_OFFSET + PAGE_BYTES as u64;

/// Sixteen bytes that name a store, a run, a topology or a boot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Id(pub [u8; 16]);

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl FromStr for Id {
    type Err = Error;

    /// Reads 32 hex digits.
    fn from_str(text: &str) -> Result<Self> {
        let is_hex = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let number = is_hex.then(|| u128::from_str_radix(text, 16).ok()).flatten();
        number.map(|number| Self(number.to_be_bytes())).ok_or_else(|| {
            Error::new(Kind::InvalidInput, format!("'{text}' is not an id: those are 32 hex digits"))
        })
    }
}

/// Where the parts of a slot's file lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Regions {
    /// The table of contents.
    pub contents: Range<u64>,
    /// The checksums of the blocks of data, 8 bytes each.
    pub checksums: Range<u64>,
    /// The data. They begin with a block of the file, so the checksums are those of blocks of the file.
    pub data: Range<u64>,
}

impl Regions {
    /// The regions of a tenant, unless their end cannot be expressed.
    pub fn new(contents_bytes: u64, data_bytes: u64) -> Option<Self> {
        let contents = CONTENTS_OFFSET..CONTENTS_OFFSET.checked_add(contents_bytes)?;
        let checksums_start = contents.end.checked_next_multiple_of(PAGE_BYTES as u64)?;
        let block_bytes = BLOCK_BYTES as u64;
        let checksums_end = checksums_start.checked_add(8 * data_bytes.div_ceil(block_bytes))?;
        let data_start = checksums_end.checked_next_multiple_of(block_bytes)?;
        Some(Self {
            contents,
            checksums: checksums_start..checksums_end,
            data: data_start..data_start.checked_add(data_bytes)?,
        })
    }

    /// How many blocks the data have.
    pub fn block_count(&self) -> u64 {
        (self.checksums.end - self.checksums.start) / 8
    }
}

/// The digest of a shard: over the checksum of its table of contents, then those of its blocks, in order.
/// Replicas are equal if their digests are.
pub fn digest(contents_sum: u64, block_sums: impl IntoIterator<Item = u64>) -> u64 {
    let mut crc = Crc64::new();
    crc.update(&contents_sum.to_le_bytes());
    block_sums.into_iter().for_each(|sum| crc.update(&sum.to_le_bytes()));
    crc.finish()
}
