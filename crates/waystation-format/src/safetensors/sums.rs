//! The checksums of published files, which stand in a sealed file beside them.
//!
//! A JSON object: `version` 1, `block_bytes`, and an object `files` that has for each file `nbytes` and
//! `crc64`, the checksums of its blocks as little-endian 64-bit integers in base64. Invariants of what is
//! returned: no file is named twice, and each has as many checksums as its length has blocks. What else there
//! is is stepped over, and nothing held of it, so memory is bounded by the length of the text.

use std::borrow::Cow;
use std::collections::HashSet;

use super::json::{Scanner, shown};
use crate::checksum::BLOCK_BYTES;
use crate::{Error, Kind, Result};

const VERSION: u64 = 1;
const FILE_LIMIT: usize = 1 << 20;
const MEMBER_LIMIT: usize = 1 << 10;
/// Bytes of one checksum.
const SUM_BYTES: u64 = 8;

/// The checksums of one file.
#[derive(Debug, PartialEq, Eq)]
pub struct FileSums<'a> {
    /// Its name.
    pub name: Cow<'a, str>,
    /// Its length.
    pub nbytes: u64,
    /// The checksum of each of its blocks.
    pub blocks: Vec<u8>,
}

/// Parses and checks the text, without its seal. Unsupported if it is of another version.
pub fn parse_sums(data: &[u8]) -> Result<Vec<FileSums<'_>>> {
    let text = std::str::from_utf8(data).map_err(|error| {
        let offset = error.valid_up_to().to_string();
        Error::new(Kind::Corrupt, "the file of checksums is not valid UTF-8").with("offset", offset)
    })?;
    check_version(text)?;
    let mut files = None;
    for_each_member(&mut Scanner::of_sums(text), MEMBER_LIMIT, |scanner, key| {
        if key == "files" {
            files = Some(read_files(scanner)?);
            return Ok(());
        }
        scanner.skip_value()
    })?;
    files.ok_or_else(|| Error::new(Kind::Corrupt, "the file of checksums has no object 'files'"))
}

/// Looked at before all else: what a newer version means by the rest is not known.
fn check_version(text: &str) -> Result<()> {
    let mut scanner = Scanner::of_sums(text);
    let (mut version, mut block_bytes) = (None, None);
    for_each_member(&mut scanner, MEMBER_LIMIT, |scanner, key| {
        match &*key {
            "version" => version = Some(scanner.integer()?),
            "block_bytes" => block_bytes = Some(scanner.integer()?),
            _ => scanner.skip_value()?,
        }
        Ok(())
    })?;
    scanner.end()?;
    if version == Some(VERSION) && block_bytes == Some(BLOCK_BYTES as u64) {
        return Ok(());
    }
    let message = "the checksums are of a version that this one does not know; update waystation";
    Err(Error::new(Kind::Unsupported, message))
}

/// Calls something for each member of an object, which reads its value; no key comes twice.
fn for_each_member<'a>(
    scanner: &mut Scanner<'a>,
    limit: usize,
    mut read: impl FnMut(&mut Scanner<'a>, Cow<'a, str>) -> Result<()>,
) -> Result<()> {
    let mut seen = HashSet::new();
    scanner.expect(b'{', "a JSON object")?;
    while let Some(key) = scanner.next_key(seen.is_empty())? {
        scanner.remember(&mut seen, key.clone(), limit)?;
        read(scanner, key)?;
    }
    Ok(())
}

fn read_files<'a>(scanner: &mut Scanner<'a>) -> Result<Vec<FileSums<'a>>> {
    let mut files = Vec::new();
    for_each_member(scanner, FILE_LIMIT, |scanner, name| {
        files.push(read_file(scanner, name)?);
        Ok(())
    })?;
    Ok(files)
}

fn read_file<'a>(scanner: &mut Scanner<'a>, name: Cow<'a, str>) -> Result<FileSums<'a>> {
    let (mut nbytes, mut blocks) = (None, None);
    for_each_member(scanner, MEMBER_LIMIT, |scanner, key| {
        match &*key {
            "nbytes" => nbytes = Some(scanner.integer()?),
            "crc64" => {
                let text = scanner.string()?;
                let decoded = decode_base64(&text);
                blocks = Some(decoded.ok_or_else(|| scanner.fault("checksums are not in base64"))?);
            }
            _ => scanner.skip_value()?,
        }
        Ok(())
    })?;
    let (Some(nbytes), Some(blocks)) = (nbytes, blocks) else {
        return Err(scanner.fault(format!("the file {} lacks its length or its checksums", shown(&name))));
    };
    let count = nbytes.div_ceil(BLOCK_BYTES as u64);
    if count.checked_mul(SUM_BYTES) != Some(blocks.len() as u64) {
        let message = format!("the number of checksums of {} does not fit its length", shown(&name));
        return Err(scanner.fault(message));
    }
    Ok(FileSums { name, nbytes, blocks })
}

/// The bytes that a text stands for, if it is base64 with its padding, and nothing else.
fn decode_base64(text: &str) -> Option<Vec<u8>> {
    let (groups, rest) = text.as_bytes().as_chunks::<4>();
    if !rest.is_empty() {
        return None;
    }
    let mut bytes = Vec::with_capacity(groups.len() * 3);
    for (number, group) in groups.iter().enumerate() {
        let padding = match group {
            [_, _, b'=', b'='] => 2,
            [_, _, _, b'='] => 1,
            _ => 0,
        };
        if padding > 0 && number + 1 < groups.len() {
            return None;
        }
        let digits = group[..4 - padding].iter().map(|&letter| digit(letter));
        let value = digits
            .chain(std::iter::repeat_n(Some(0), padding))
            .try_fold(0u32, |value, digit| Some(value << 6 | u32::from(digit?)))?;
        let [_, decoded @ ..] = value.to_be_bytes();
        bytes.extend_from_slice(&decoded[..3 - padding]);
    }
    Some(bytes)
}

fn digit(letter: u8) -> Option<u8> {
    match letter {
        b'A'..=b'Z' => Some(letter - b'A'),
        b'a'..=b'z' => Some(letter - b'a' + 26),
        b'0'..=b'9' => Some(letter - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    }
}
