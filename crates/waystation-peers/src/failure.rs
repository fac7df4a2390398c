//! An error of one side, as it tells it to the other: what kind it is, and what people can read of it.
//!
//! Invariants: what comes out is short and printable, whatever the other side has sent.

use waystation_format::{Error, Kind};

/// The longest text of a failure.
const TEXT_LIMIT_BYTES: usize = 1024;

/// What the other side is told of an error: its kind, and what people can read of it.
pub fn encode_failure(error: &Error) -> Vec<u8> {
    let number = Kind::ALL.iter().position(|&kind| kind == error.kind()).unwrap_or(Kind::ALL.len() - 1);
    let text = error.to_string();
    let end = (0..=TEXT_LIMIT_BYTES.min(text.len())).rev().find(|&end| text.is_char_boundary(end));
    let mut bytes = vec![number as u8];
    bytes.extend_from_slice(&text.as_bytes()[..end.unwrap_or(0)]);
    bytes
}

/// The error that the other side has told.
pub fn decode_failure(bytes: &[u8]) -> Error {
    let told = || {
        let (&number, text) = bytes.split_first()?;
        let kind = Kind::ALL.get(usize::from(number))?;
        let text = std::str::from_utf8(text).ok().filter(|text| text.len() <= TEXT_LIMIT_BYTES)?;
        let text: String = text.chars().map(|char| if char.is_control() { ' ' } else { char }).collect();
        Some(Error::new(*kind, text))
    };
    told().unwrap_or_else(|| Error::new(Kind::Corrupt, "the other side fails, and does not say why"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn whatever_is_told_is_short_and_printable(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            let text = decode_failure(&bytes).to_string();
            prop_assert!(text.len() <= TEXT_LIMIT_BYTES && !text.chars().any(char::is_control));
        }
    }

    #[test]
    fn an_error_keeps_its_kind_and_is_cut_where_it_is_too_long() {
        for kind in Kind::ALL {
            let told = decode_failure(&encode_failure(&Error::new(kind, "why").with("slot", "3")));
            assert_eq!((told.kind(), told.message()), (kind, "why (slot: 3)"));
        }
        let told = decode_failure(&encode_failure(&Error::new(Kind::Corrupt, "ß".repeat(1000))));
        assert_eq!(told.message(), "ß".repeat(TEXT_LIMIT_BYTES / 2));
        let told = decode_failure(&encode_failure(&Error::new(Kind::Corrupt, "two\nlines\u{1b}[31m")));
        assert_eq!(told.message(), "two lines [31m");
    }
}
