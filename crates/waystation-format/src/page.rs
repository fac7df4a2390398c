//! Pages: the unit of checksums and of range reads of table files, and of the headers of slots.
//!
//! A page is a payload, then the checksum of the payload and the page's number, so that a page that
//! is damaged or stands in another page's place is noticed.

use crate::checksum::Crc64;
use crate::{Error, Kind, Result};

/// Bytes of one page.
pub const PAGE_BYTES: usize = 4096;

/// Bytes of one page before its checksum.
pub const PAYLOAD_BYTES: usize = PAGE_BYTES - 8;

fn checksum(payload: &[u8], number: u64) -> u64 {
    let mut crc = Crc64::new();
    crc.update(payload);
    crc.update(&number.to_le_bytes());
    crc.finish()
}

/// Appends the page `number` that holds `payload`, at most [`PAYLOAD_BYTES`], filled up with zeros.
pub fn push(pages: &mut Vec<u8>, number: u64, payload: &[u8]) {
    debug_assert!(payload.len() <= PAYLOAD_BYTES);
    let start = pages.len();
    pages.extend_from_slice(payload);
    pages.resize(start + PAYLOAD_BYTES, 0);
    let sum = checksum(&pages[start..], number);
    pages.extend_from_slice(&sum.to_le_bytes());
}

/// The payload of `page`, the page of that number, if it is intact and zero past `used` bytes.
pub fn open(page: &[u8], number: u64, used: usize) -> Result<&[u8]> {
    let fault =
        |message: &'static str| Err(Error::new(Kind::Corrupt, message).with("page", number.to_string()));
    let Some((payload, sum)) = page.split_last_chunk::<8>().filter(|_| page.len() == PAGE_BYTES) else {
        return fault("a page is incomplete");
    };
    if checksum(payload, number) != u64::from_le_bytes(*sum) {
        return fault("a page does not match its checksum");
    }
    let (content, rest) = payload.split_at(used.min(PAYLOAD_BYTES));
    if rest.iter().any(|&byte| byte != 0) {
        return fault("a page has bytes after its last entry");
    }
    Ok(content)
}
