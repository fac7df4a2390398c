//! The bytes of a Waystation checkpoint: safetensors headers, tables and sealed records; and those of the
//! slots of the memory tier. And the plans by which Python says what is to be done with such bytes.
//!
//! Pure: nothing here opens a file or starts a thread, so everything here can be fuzzed.
//! `docs/format.md` and `docs/format-slots.md` specify every byte; this crate is their implementation.

pub mod checksum;
pub mod error;
pub mod page;
pub mod plan;
pub mod safetensors;
pub mod sealed;
pub mod slot;
pub mod table;

pub use error::{Error, Kind, Result};
