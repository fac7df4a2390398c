//! The header of a safetensors file: a strict reader and a writer. And readers of the index of several, and
//! of the checksums that may stand beside them.
//!
//! A file is `u64 N`, `N` bytes of JSON, then the tensors one after another. The reader accepts no
//! file that the reference implementation refuses, and refuses what that one lets through although
//! two readers could understand it differently: repeated names, unknown fields, a `NUL` in a name.
//! What it returns has been checked against the length of the file, so that callers may address any
//! tensor without checking again. Tensor data itself is not looked at.

mod dtype;
mod header;
mod index;
mod json;
mod sums;
mod writer;

pub use dtype::Dtype;
pub use header::{Header, Tensor, header_end, parse};
pub use index::{IndexEntry, parse_index};
pub use sums::{FileSums, parse_sums};
pub use writer::{Planned, build};

/// Longest JSON text of a header, as in the reference implementation.
pub const HEADER_LIMIT_BYTES: u64 = 100_000_000;

/// Most tensors (and, separately, metadata keys) in one file.
pub const ENTRY_LIMIT: usize = 1 << 20;

/// Most dimensions of one array: the 64 that NumPy can hold, and the byte axis that the native
/// layout appends where safetensors has no dtype.
pub const DIMENSION_LIMIT: usize = 65;

/// Most bytes of the name of one tensor, so that errors can hold it.
pub const NAME_LIMIT_BYTES: usize = 1 << 16;

/// Bytes of the length in front of the JSON text.
const LENGTH_BYTES: u64 = 8;

/// The key that holds text for people instead of a tensor.
const METADATA_KEY: &str = "__metadata__";

/// Bytes of an array, or why there is no such number.
pub(crate) fn array_bytes(shape: &[u64], item_bits: u64) -> Result<u64, &'static str> {
    let items = shape.iter().try_fold(1u64, |product, &extent| product.checked_mul(extent));
    let bits = items.and_then(|items| items.checked_mul(item_bits));
    match bits {
        None => Err("its size overflows 64 bits"),
        Some(bits) if bits % 8 != 0 => Err("its size is not a whole number of bytes"),
        Some(bits) => Ok(bits / 8),
    }
}
