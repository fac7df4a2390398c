//! Sealed JSON: a JSON value with the checksum of its exact bytes, itself a JSON file.
//!
//! The frame has no freedom: one body has one sealed form, and nothing may stand around it. What the
//! body says is the business of whoever parses it.

use crate::checksum::crc64;
use crate::{Error, Kind, Result};

const BEFORE_SUM: &[u8] = b"{\"crc64\":\"";
const SUM_DIGITS: usize = 16;
const BEFORE_BODY: &[u8] = b"\",\"record\":";
const AFTER_BODY: &[u8] = b"}\n";

/// Bytes that the frame adds to a body.
pub const FRAME_BYTES: usize = BEFORE_SUM.len() + SUM_DIGITS + BEFORE_BODY.len() + AFTER_BODY.len();

/// Frames `body`, which must be UTF-8 and not empty, with its checksum.
pub fn seal(body: &[u8]) -> Result<Vec<u8>> {
    if body.is_empty() || std::str::from_utf8(body).is_err() {
        return Err(Error::new(
            Kind::InvalidInput,
            "the body of a sealed record must be UTF-8 and not empty",
        ));
    }
    let sum = format!("{:016x}", crc64(body));
    Ok([BEFORE_SUM, sum.as_bytes(), BEFORE_BODY, body, AFTER_BODY].concat())
}

/// The body of a sealed record, verified.
pub fn open(data: &[u8]) -> Result<&[u8]> {
    let (sum, body) = split(data)?;
    if sum != format!("{:016x}", crc64(body)).as_bytes() {
        return Err(corrupt("the record does not match its checksum: it was damaged or changed"));
    }
    if body.is_empty() || std::str::from_utf8(body).is_err() {
        return Err(corrupt("the record is empty or not valid UTF-8"));
    }
    Ok(body)
}

/// The digits of the checksum and the body.
fn split(data: &[u8]) -> Result<(&[u8], &[u8])> {
    let not_sealed = || corrupt("this is not a sealed record: it does not begin as one");
    let rest = data.strip_prefix(BEFORE_SUM).ok_or_else(not_sealed)?;
    let (sum, rest) = rest.split_at_checked(SUM_DIGITS).ok_or_else(not_sealed)?;
    let rest = rest.strip_prefix(BEFORE_BODY).ok_or_else(not_sealed)?;
    let body = rest
        .strip_suffix(AFTER_BODY)
        .ok_or_else(|| corrupt("the record is cut off, or something was appended to it"))?;
    Ok((sum, body))
}

fn corrupt(message: &'static str) -> Error {
    Error::new(Kind::Corrupt, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_frame_is_the_specified_one() {
        let sealed = seal(b"123456789").unwrap();
        assert_eq!(sealed, b"{\"crc64\":\"ae8b14860a799888\",\"record\":123456789}\n");
        assert_eq!(open(&sealed).unwrap(), b"123456789");
        assert_eq!(sealed.len(), 9 + FRAME_BYTES);
    }

    #[test]
    fn any_changed_missing_or_added_byte_is_noticed() {
        let sealed = seal(br#"{"version":1,"items":["state"]}"#).unwrap();
        for index in 0..sealed.len() {
            let mut changed = sealed.clone();
            for bit in 0..8 {
                changed[index] = sealed[index] ^ (1 << bit);
                assert_eq!(open(&changed).unwrap_err().kind(), Kind::Corrupt, "byte {index}, bit {bit}");
            }
            assert_eq!(open(&sealed[..index]).unwrap_err().kind(), Kind::Corrupt, "cut at {index}");
        }
        for extra in [&b" "[..], b"\n", b"}\n", b"\0"] {
            assert!(open(&[&sealed, extra].concat()).is_err());
            assert!(open(&[extra, &sealed].concat()).is_err());
        }
    }

    #[test]
    fn a_body_must_be_text() {
        for body in [&b""[..], b"\xff", b"\"\xed\xa0\x80\""] {
            assert_eq!(seal(body).unwrap_err().kind(), Kind::InvalidInput);
        }
        let sum = format!("{:016x}", crc64(b"\xff"));
        let forged = [BEFORE_SUM, sum.as_bytes(), BEFORE_BODY, b"\xff", AFTER_BODY].concat();
        assert_eq!(open(&forged).unwrap_err().kind(), Kind::Corrupt);
    }
}
