//! The index of a model in several files: which of them holds which tensor.
//!
//! A JSON object with an object `weight_map` of texts; what else it says is stepped over. Invariants of
//! what is returned: no tensor is named twice; every file is a plain name, so beside the index. Nothing is
//! held of what is stepped over, so memory is bounded by the number of tensors.

use std::borrow::Cow;
use std::collections::HashSet;

use super::NAME_LIMIT_BYTES;
use super::json::{Scanner, shown};
use crate::{Error, Kind, Result};

/// Most tensors of one model.
const TENSOR_LIMIT: usize = 1 << 22;

/// Most members of the index beside the tensors; those that are known have two.
const MEMBER_LIMIT: usize = 1 << 10;

/// A tensor, and the file that holds it.
pub type IndexEntry<'a> = (Cow<'a, str>, Cow<'a, str>);

/// Parses and checks the text of an index, in its order.
pub fn parse_index(data: &[u8]) -> Result<Vec<IndexEntry<'_>>> {
    let text = std::str::from_utf8(data).map_err(|error| {
        let offset = error.valid_up_to().to_string();
        Error::new(Kind::Corrupt, "the index is not valid UTF-8").with("offset", offset)
    })?;
    let mut scanner = Scanner::of_index(text);
    let mut entries = None;
    let mut seen = HashSet::new();
    scanner.expect(b'{', "a JSON object")?;
    while let Some(key) = scanner.next_key(seen.is_empty())? {
        if key == "weight_map" {
            entries = Some(read_entries(&mut scanner)?);
        } else {
            scanner.skip_value()?;
        }
        scanner.remember(&mut seen, key, MEMBER_LIMIT)?;
    }
    scanner.end()?;
    match entries {
        None => Err(Error::new(Kind::Corrupt, "the index has no object 'weight_map'")),
        Some(entries) if entries.is_empty() => Err(Error::new(Kind::Corrupt, "the index names no tensor")),
        Some(entries) => Ok(entries),
    }
}

fn read_entries<'a>(scanner: &mut Scanner<'a>) -> Result<Vec<IndexEntry<'a>>> {
    let mut entries = Vec::new();
    let mut seen = HashSet::new();
    scanner.expect(b'{', "an object as 'weight_map'")?;
    while let Some(tensor) = scanner.next_key(seen.is_empty())? {
        if tensor.len() > NAME_LIMIT_BYTES {
            let message = format!("the name of a tensor has more than {NAME_LIMIT_BYTES} bytes");
            return Err(scanner.fault(message));
        }
        let file = read_file_name(scanner).map_err(|error| error.with("tensor", &*tensor))?;
        entries.push((tensor.clone(), file));
        scanner.remember(&mut seen, tensor, TENSOR_LIMIT)?;
    }
    Ok(entries)
}

fn read_file_name<'a>(scanner: &mut Scanner<'a>) -> Result<Cow<'a, str>> {
    let name = scanner.string()?;
    match problem(&name) {
        None => Ok(name),
        Some(problem) => Err(scanner.fault(format!("the index names {} as a file, {problem}", shown(&name)))),
    }
}

/// Why something is no name of a file beside the index; completes "… as a file, ".
fn problem(name: &str) -> Option<&'static str> {
    if name.is_empty() || name.contains('\0') || name == "." || name == ".." {
        Some("which is no name of a file")
    } else if name.contains(['/', '\\']) {
        Some("which leads elsewhere; only names of files beside the index are taken")
    } else if !name.ends_with(".safetensors") {
        Some("which is no safetensors file")
    } else {
        None
    }
}
