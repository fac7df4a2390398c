//! The bytes of a Waystation checkpoint: safetensors headers, tables and sealed records.
//!
//! Pure: nothing here opens a file or starts a thread, so everything here can be fuzzed.
//! `docs/format.md` specifies every byte; this crate is its implementation.

pub mod checksum;
pub mod error;
pub mod safetensors;
pub mod sealed;
pub mod table;

pub use error::{Error, Kind, Result};
