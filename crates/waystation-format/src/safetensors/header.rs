//! The strict reader.
//!
//! Invariants of what it returns: tensors are in the order of their data, the first begins where the
//! header ends, each begins where the one before ends, the last ends with the file; every span has
//! exactly the bytes of its shape and dtype; names are unique, without `NUL`.

use std::borrow::Cow;
use std::collections::HashSet;

use super::json::{Scanner, shown};
use super::{
    DIMENSION_LIMIT, Dtype, ENTRY_LIMIT, HEADER_LIMIT_BYTES, LENGTH_BYTES, METADATA_KEY, NAME_LIMIT_BYTES,
    array_bytes,
};
use crate::{Error, Kind, Result};

/// What a header says of one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Its name, any text without `NUL`.
    pub name: String,
    /// Its element type.
    pub dtype: Dtype,
    /// Its extents, slowest first.
    pub shape: Vec<u64>,
    /// Offset in the file of its first byte.
    pub begin: u64,
    /// Offset in the file after its last byte.
    pub end: u64,
}

/// A header that has been checked whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Text for people, in the order of the header; absent if there is no such key.
    pub metadata: Option<Vec<(String, String)>>,
    /// The tensors in the order of their data.
    pub tensors: Vec<Tensor>,
    /// Offset in the file of the first tensor.
    pub data_start: u64,
}

/// Offset at which the data of a file of `file_bytes` begins, from its first 8 bytes.
pub fn header_end(data: &[u8], file_bytes: u64) -> Result<u64> {
    if file_bytes < LENGTH_BYTES {
        return Err(corrupt(format!("a file of {file_bytes} bytes is too short for a safetensors header")));
    }
    let Some(length) = data.first_chunk().copied().map(u64::from_le_bytes) else {
        return Err(Error::new(Kind::InvalidInput, "the first 8 bytes of the file are needed"));
    };
    if length > HEADER_LIMIT_BYTES {
        return Err(corrupt(format!(
            "the header claims {length} bytes, more than the {HEADER_LIMIT_BYTES} that safetensors allows"
        )));
    }
    let end = LENGTH_BYTES + length;
    if end > file_bytes {
        return Err(corrupt(format!(
            "the header claims {length} bytes, but the file has only {file_bytes}: it was cut off"
        )));
    }
    Ok(end)
}

/// Parses and checks the header of a file of `file_bytes` whose first bytes are `data`.
pub fn parse(data: &[u8], file_bytes: u64) -> Result<Header> {
    let data_start = header_end(data, file_bytes)?;
    let Some(json) = data.get(LENGTH_BYTES as usize..data_start as usize) else {
        return Err(Error::new(Kind::InvalidInput, format!("the first {data_start} bytes are needed")));
    };
    let text = std::str::from_utf8(json).map_err(|error| {
        let offset = LENGTH_BYTES + error.valid_up_to() as u64;
        corrupt("the header is not valid UTF-8").with("offset", offset.to_string())
    })?;
    let mut header = read_entries(text)?;
    header.tensors.sort_by_key(|tensor| (tensor.begin, tensor.end));
    place(&mut header, data_start, file_bytes)?;
    Ok(header)
}

fn corrupt(message: impl Into<Cow<'static, str>>) -> Error {
    Error::new(Kind::Corrupt, message)
}

/// `"":{"dtype":"U8","shape":[],"data_offsets":[0,1]},`
const SHORTEST_ENTRY_BYTES: usize = 50;

/// Reads the JSON; offsets are still relative to the data and unchecked.
fn read_entries(text: &str) -> Result<Header> {
    let mut scanner = Scanner::of_header(text);
    // A guess that cannot be too small for a valid header, and is bounded for any other.
    let expected = (text.len() / SHORTEST_ENTRY_BYTES).min(ENTRY_LIMIT);
    let mut header = Header { metadata: None, tensors: Vec::with_capacity(expected), data_start: 0 };
    let mut seen = HashSet::with_capacity(expected);
    scanner.expect(b'{', "a JSON object")?;
    while let Some(key) = scanner.next_key(seen.is_empty())? {
        if key == METADATA_KEY {
            header.metadata = Some(read_metadata(&mut scanner)?);
        } else {
            if key.len() > NAME_LIMIT_BYTES {
                let message = format!("the name of a tensor has more than {NAME_LIMIT_BYTES} bytes");
                return Err(scanner.fault(message));
            }
            let tensor = read_tensor(&mut scanner, &key).map_err(|error| error.with("tensor", &*key))?;
            header.tensors.push(tensor);
        }
        if seen.len() == ENTRY_LIMIT {
            // No damage: other implementations read such a file.
            let message = format!(
                "the header has more than {ENTRY_LIMIT} entries, the most that are read of one file; divide the \
                 model among several files"
            );
            return Err(Error::new(Kind::Unsupported, message));
        }
        scanner.remember(&mut seen, key, ENTRY_LIMIT)?;
    }
    scanner.end()?;
    Ok(header)
}

fn read_metadata(scanner: &mut Scanner<'_>) -> Result<Vec<(String, String)>> {
    let mut metadata = Vec::new();
    let mut seen = HashSet::new();
    scanner.expect(b'{', "an object of strings as __metadata__")?;
    while let Some(key) = scanner.next_key(metadata.is_empty())? {
        let value = scanner.string()?;
        metadata.push((key.clone().into_owned(), value.into_owned()));
        scanner.remember(&mut seen, key, ENTRY_LIMIT)?;
    }
    Ok(metadata)
}

fn read_tensor(scanner: &mut Scanner<'_>, name: &str) -> Result<Tensor> {
    if name.contains('\0') {
        return Err(scanner.fault("the name of a tensor holds a NUL character"));
    }
    let (mut dtype, mut shape, mut offsets) = (None, None, None);
    let mut first = true;
    scanner.expect(b'{', "an object that describes a tensor")?;
    while let Some(field) = scanner.next_key(first)? {
        first = false;
        let repeated = match &*field {
            "dtype" => dtype.replace(read_dtype(scanner)?).is_some(),
            "shape" => shape.replace(scanner.integers(DIMENSION_LIMIT)?).is_some(),
            "data_offsets" => offsets.replace(read_offsets(scanner)?).is_some(),
            _ => {
                return Err(
                    scanner.fault(format!("unknown field {} in the entry of a tensor", shown(&field)))
                );
            }
        };
        if repeated {
            return Err(scanner.fault(format!("the entry of a tensor has the field {field:?} twice")));
        }
    }
    let (Some(dtype), Some(shape), Some((begin, end))) = (dtype, shape, offsets) else {
        return Err(scanner.fault("the entry of a tensor lacks dtype, shape or data_offsets"));
    };
    Ok(Tensor { name: name.to_owned(), dtype, shape, begin, end })
}

fn read_dtype(scanner: &mut Scanner<'_>) -> Result<Dtype> {
    let name = scanner.string()?;
    Dtype::from_name(&name).ok_or_else(|| scanner.fault(format!("unknown dtype {}", shown(&name))))
}

fn read_offsets(scanner: &mut Scanner<'_>) -> Result<(u64, u64)> {
    scanner.expect(b'[', "two integers as data_offsets")?;
    let begin = scanner.integer()?;
    scanner.expect(b',', "a second integer in data_offsets")?;
    let end = scanner.integer()?;
    scanner.expect(b']', "the end of data_offsets after two integers")?;
    Ok((begin, end))
}

/// Checks every span against its neighbours and its shape, and makes offsets absolute.
fn place(header: &mut Header, data_start: u64, file_bytes: u64) -> Result<()> {
    let mut expected = 0;
    for tensor in &mut header.tensors {
        check_span(tensor, expected)
            .map_err(|error| error.with("tensor", &tensor.name).with("offset", tensor.begin.to_string()))?;
        expected = tensor.end;
    }
    let data_bytes = file_bytes - data_start;
    if expected != data_bytes {
        return Err(corrupt(format!(
            "the tensors take {expected} bytes, but {data_bytes} follow the header: the file was cut off \
             or something was appended"
        )));
    }
    for tensor in &mut header.tensors {
        tensor.begin += data_start;
        tensor.end += data_start;
    }
    header.data_start = data_start;
    Ok(())
}

fn check_span(tensor: &Tensor, expected: u64) -> Result<()> {
    let (begin, end) = (tensor.begin, tensor.end);
    if begin != expected {
        let what = if begin < expected { "overlaps the tensor before it" } else { "leaves a hole before it" };
        return Err(corrupt(format!("the data of a tensor {what}: it begins at {begin}, not {expected}")));
    }
    if end < begin {
        return Err(corrupt(format!("the data of a tensor ends at {end}, before it begins at {begin}")));
    }
    let nbytes = array_bytes(&tensor.shape, tensor.dtype.bits())
        .map_err(|reason| corrupt(format!("the shape of a tensor is impossible: {reason}")))?;
    if nbytes != end - begin {
        let (shape, dtype) = (&tensor.shape, tensor.dtype.name());
        return Err(corrupt(format!(
            "shape {shape:?} of {dtype} takes {nbytes} bytes, but the entry spans {}",
            end - begin
        )));
    }
    Ok(())
}
