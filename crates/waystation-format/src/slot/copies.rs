//! A record in two copies, written in turns, so that one of them is whole at any instant.
//!
//! The copy of sequence number `n` is page `n mod 2`. Whoever replaces a record writes the page of the older
//! copy: killed in the middle, it leaves that page torn and the other one as it was. So the record is the
//! whole copy of the greatest sequence, and a torn or damaged page is told apart from one that never was:
//! both copies exist from the beginning.

use super::VERSION;
use super::fields::Fields;
use crate::page::PAGE_BYTES;
use crate::{Error, Kind, Result};

/// How many copies there are of a record, each in a page of its own.
pub const COPIES: u64 = 2;

/// What is kept in two copies.
pub trait Record: Sized {
    /// What it is, for messages.
    const NAME: &'static str;

    /// Reads the page of that number, which must be the one for the record's sequence.
    fn decode(page: &[u8], number: u64) -> Result<Self>;

    /// The page, and its number.
    fn encode(&self) -> Result<(u64, Vec<u8>)>;

    /// How many records there were before.
    fn sequence(&self) -> u64;
}

/// The record that holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Newest<R> {
    /// The record.
    pub record: R,
    /// Whether the other copy is torn or damaged, so that this record may not be the last one written.
    pub other_is_damaged: bool,
}

/// The record of these pages, the first of a file.
///
/// Unsupported if a newer release wrote either copy, else Corrupt if none is whole.
pub fn newest<R: Record>(pages: &[u8]) -> Result<Newest<R>> {
    let copy = |number: u64| {
        let begin = number as usize * PAGE_BYTES;
        let page = pages.get(begin..begin + PAGE_BYTES).unwrap_or_default();
        R::decode(page, number)
    };
    match (copy(0), copy(1)) {
        (Ok(first), Ok(second)) => {
            let record = if first.sequence() > second.sequence() { first } else { second };
            Ok(Newest { record, other_is_damaged: false })
        }
        (Err(error), _) | (_, Err(error)) if error.kind() == Kind::Unsupported => Err(error),
        (Ok(record), Err(_)) | (Err(_), Ok(record)) => Ok(Newest { record, other_is_damaged: true }),
        (Err(first), Err(second)) => {
            let message = format!("both copies of {} are damaged", R::NAME);
            Err(Error::new(Kind::Corrupt, message)
                .with("first", first.message())
                .with("second", second.message()))
        }
    }
}

/// What comes after the magic and the version, if these are right.
pub(super) fn body_of<'a>(payload: &'a [u8], magic: &[u8; 8], name: &str) -> Result<Fields<'a>> {
    let mut fields = Fields(payload);
    let version = fields.array().filter(|found| found == magic).and_then(|_| fields.word());
    match version {
        Some(version) if version > VERSION => Err(Error::new(
            Kind::Unsupported,
            format!("{name} has format version {version}; this release reads up to {VERSION}: update it"),
        )),
        Some(_) => Ok(fields),
        None => Err(Error::new(Kind::Corrupt, format!("this is not {name}"))),
    }
}
