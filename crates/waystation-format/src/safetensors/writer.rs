//! The writer: lays tensors out one after another and pads the header.
//!
//! Invariants: whatever it writes, the reader accepts and returns unchanged and in the same order;
//! the data begin at a multiple of the alignment asked for.

use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt::Write;

use super::{
    DIMENSION_LIMIT, Dtype, ENTRY_LIMIT, HEADER_LIMIT_BYTES, LENGTH_BYTES, METADATA_KEY, NAME_LIMIT_BYTES,
    array_bytes,
};
use crate::{Error, Kind, Result};

/// A tensor that is to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planned<'a> {
    /// Its name, any text without `NUL`, unique in the file.
    pub name: Cow<'a, str>,
    /// Its element type.
    pub dtype: Dtype,
    /// Its extents, slowest first.
    pub shape: Cow<'a, [u64]>,
}

/// Greatest alignment of the data that can be asked for.
const ALIGN_LIMIT_BYTES: u64 = 1 << 24;

/// The header of `tensors` laid out in the given order without holes, padded with spaces until the
/// data begin at a multiple of `align_bytes`, a power of two from 8.
pub fn build(
    tensors: &[Planned<'_>],
    metadata: Option<&[(String, String)]>,
    align_bytes: u64,
) -> Result<Vec<u8>> {
    if !align_bytes.is_power_of_two() || !(8..=ALIGN_LIMIT_BYTES).contains(&align_bytes) {
        return Err(invalid(format!(
            "align_bytes must be a power of two from 8 to {ALIGN_LIMIT_BYTES}, not {align_bytes}"
        )));
    }
    check_count(tensors.len() + usize::from(metadata.is_some()), "tensors")?;
    let mut json = String::with_capacity(128 * (tensors.len() + 1));
    json.push('{');
    if let Some(metadata) = metadata {
        push_metadata(&mut json, metadata)?;
    }
    push_tensors(&mut json, tensors)?;
    json.push('}');
    finish(json, align_bytes)
}

fn invalid(message: impl Into<Cow<'static, str>>) -> Error {
    Error::new(Kind::InvalidInput, message)
}

fn check_count(count: usize, what: &str) -> Result<()> {
    if count > ENTRY_LIMIT {
        return Err(invalid(format!("{count} {what} are too many for one file: at most {ENTRY_LIMIT}")));
    }
    Ok(())
}

fn push_metadata(json: &mut String, metadata: &[(String, String)]) -> Result<()> {
    check_count(metadata.len(), "metadata keys")?;
    let mut seen = HashSet::with_capacity(metadata.len());
    push_string(json, METADATA_KEY);
    json.push_str(":{");
    for (key, value) in metadata {
        if !seen.insert(key) {
            return Err(invalid(format!("the metadata have the key {key:?} twice")));
        }
        push_comma(json);
        push_string(json, key);
        json.push(':');
        push_string(json, value);
    }
    json.push('}');
    Ok(())
}

fn push_tensors(json: &mut String, tensors: &[Planned<'_>]) -> Result<()> {
    let mut seen = HashSet::with_capacity(tensors.len());
    let mut begin = 0u64;
    for tensor in tensors {
        check(tensor, seen.insert(&tensor.name)).map_err(|error| error.with("tensor", &*tensor.name))?;
        let end = end_of(tensor, begin).map_err(|error| error.with("tensor", &*tensor.name))?;
        push_comma(json);
        push_string(json, &tensor.name);
        json.push_str(":{\"dtype\":\"");
        json.push_str(tensor.dtype.name());
        json.push_str("\",\"shape\":");
        push_numbers(json, &tensor.shape);
        json.push_str(",\"data_offsets\":");
        push_numbers(json, &[begin, end]);
        json.push('}');
        begin = end;
    }
    Ok(())
}

fn check(tensor: &Planned<'_>, is_new: bool) -> Result<()> {
    if !is_new {
        return Err(invalid("two tensors have one name"));
    }
    if tensor.name == METADATA_KEY {
        return Err(invalid(format!("a tensor cannot be called {METADATA_KEY}: safetensors reserves it")));
    }
    if tensor.name.contains('\0') {
        return Err(invalid("the name of a tensor holds a NUL character"));
    }
    if tensor.name.len() > NAME_LIMIT_BYTES {
        return Err(invalid(format!("the name of a tensor has more than {NAME_LIMIT_BYTES} bytes")));
    }
    if tensor.shape.len() > DIMENSION_LIMIT {
        return Err(invalid(format!("a tensor has more than {DIMENSION_LIMIT} dimensions")));
    }
    Ok(())
}

fn end_of(tensor: &Planned<'_>, begin: u64) -> Result<u64> {
    let nbytes = array_bytes(&tensor.shape, tensor.dtype.bits());
    nbytes.and_then(|nbytes| begin.checked_add(nbytes).ok_or("its end overflows 64 bits")).map_err(|reason| {
        let (shape, dtype) = (&tensor.shape, tensor.dtype.name());
        invalid(format!("a tensor of {dtype} {shape:?} cannot be laid out: {reason}"))
    })
}

/// Puts a comma before every member of an object but the first.
fn push_comma(json: &mut String) {
    if !json.ends_with('{') {
        json.push(',');
    }
}

fn push_numbers(json: &mut String, numbers: &[u64]) {
    json.push('[');
    for (index, number) in numbers.iter().enumerate() {
        // Formatting into a String cannot fail.
        let _ = write!(json, "{}{number}", if index == 0 { "" } else { "," });
    }
    json.push(']');
}

fn push_string(json: &mut String, text: &str) {
    json.push('"');
    for character in text.chars() {
        match character {
            '"' => json.push_str("\\\""),
            '\\' => json.push_str("\\\\"),
            '\0'..='\u{1f}' => {
                let _ = write!(json, "\\u{:04x}", u32::from(character));
            }
            _ => json.push(character),
        }
    }
    json.push('"');
}

fn finish(json: String, align_bytes: u64) -> Result<Vec<u8>> {
    let end = (LENGTH_BYTES + json.len() as u64).next_multiple_of(align_bytes);
    let length = end - LENGTH_BYTES;
    if length > HEADER_LIMIT_BYTES {
        return Err(invalid(format!(
            "the header takes {length} bytes, more than the {HEADER_LIMIT_BYTES} that safetensors allows: \
             divide the tensors between files"
        )));
    }
    let mut header = Vec::with_capacity(end as usize);
    header.extend_from_slice(&length.to_le_bytes());
    header.extend_from_slice(json.as_bytes());
    header.resize(end as usize, b' ');
    Ok(header)
}
