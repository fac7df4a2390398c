//! Frames: four bytes by which they are known, the length of the body as a `u32`, the body.
//!
//! Invariants: no more is allocated than has arrived, whatever a frame claims; a frame that is too long is
//! refused before any of it is read; an end between two frames is no error, an end within one is.

use std::io::{ErrorKind, Read, Write};
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;
use waystation_format::{Error, Kind, Result};

/// What every frame begins with.
pub const MAGIC: [u8; 4] = *b"WSTA";
/// What the body of a request may have.
pub const REQUEST_LIMIT_BYTES: u32 = 64 << 10;
/// What the body of a reply may have: a store may have many slots, whose shards may have long names.
pub const REPLY_LIMIT_BYTES: u32 = 64 << 20;

const HEAD_BYTES: usize = 8;

/// Writes a message as one frame. InvalidInput if that would be too long.
pub fn write(to: &mut impl Write, message: &impl Serialize, limit_bytes: u32) -> Result<()> {
    let mut frame = [MAGIC, [0; 4]].concat();
    serde_json::to_writer(&mut frame, message)
        .map_err(|error| Error::new(Kind::Internal, format!("a message cannot be expressed: {error}")))?;
    let body_bytes = u32::try_from(frame.len() - HEAD_BYTES).ok().filter(|&nbytes| nbytes <= limit_bytes);
    let body_bytes = body_bytes.ok_or_else(|| {
        Error::new(Kind::InvalidInput, "a message is longer than a frame may be")
            .with("nbytes", (frame.len() - HEAD_BYTES).to_string())
            .with("limit_bytes", limit_bytes.to_string())
    })?;
    frame[MAGIC.len()..HEAD_BYTES].copy_from_slice(&body_bytes.to_le_bytes());
    to.write_all(&frame).and_then(|()| to.flush()).map_err(failed("send a message"))
}

/// Reads the body of the next frame; `None` if there is none.
///
/// InvalidInput if it is no frame or too long, Unavailable if it does not arrive.
pub fn read(from: &mut impl Read, limit_bytes: u32) -> Result<Option<Vec<u8>>> {
    let mut head = [0; HEAD_BYTES];
    let mut filled = 0;
    while filled < HEAD_BYTES {
        match from.read(&mut head[filled..]) {
            Ok(0) if filled == 0 => return Ok(None),
            Ok(0) => return Err(cut_off()),
            Ok(nbytes) => filled += nbytes,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(failed("read a message")(error)),
        }
    }
    let [first, second, third, fourth, length @ ..] = head;
    if [first, second, third, fourth] != MAGIC {
        return Err(Error::new(Kind::InvalidInput, "what arrived is not a frame of this protocol"));
    }
    let body_bytes = u32::from_le_bytes(length);
    if body_bytes > limit_bytes {
        return Err(Error::new(Kind::InvalidInput, "a frame is longer than it may be")
            .with("nbytes", body_bytes.to_string())
            .with("limit_bytes", limit_bytes.to_string()));
    }
    let mut body = Vec::new();
    from.take(body_bytes.into()).read_to_end(&mut body).map_err(failed("read a message"))?;
    if body.len() as u64 == u64::from(body_bytes) { Ok(Some(body)) } else { Err(cut_off()) }
}

/// The message that a body is.
pub fn parse<M: DeserializeOwned>(body: &[u8]) -> Result<M> {
    serde_json::from_slice(body)
        .map_err(|error| Error::new(Kind::InvalidInput, format!("a message has no meaning: {error}")))
}

fn cut_off() -> Error {
    Error::new(Kind::Unavailable, "the connection ended within a message")
}

fn failed(action: &'static str) -> impl Fn(std::io::Error) -> Error {
    move |error| Error::from_io(error, action, Path::new("agent.sock")).with_kind(Kind::Unavailable)
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    /// Gives its bytes piece by piece, and counts how many were asked for.
    struct Pieces<'a> {
        bytes: &'a [u8],
        piece_bytes: usize,
    }

    impl Read for Pieces<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            let nbytes = self.piece_bytes.min(buffer.len()).min(self.bytes.len());
            let (given, rest) = self.bytes.split_at(nbytes);
            buffer[..nbytes].copy_from_slice(given);
            self.bytes = rest;
            Ok(nbytes)
        }
    }

    proptest! {
        #[test]
        fn frames_arrive_as_they_were_sent(messages in vec(".*", 0..4), piece_bytes in 1usize..20) {
            let mut sent = Vec::new();
            for message in &messages {
                write(&mut sent, message, REQUEST_LIMIT_BYTES).unwrap();
            }
            let mut pieces = Pieces { bytes: &sent, piece_bytes };
            for message in &messages {
                let body = read(&mut pieces, REQUEST_LIMIT_BYTES).unwrap().unwrap();
                prop_assert_eq!(&parse::<String>(&body).unwrap(), message);
            }
            prop_assert!(read(&mut pieces, REQUEST_LIMIT_BYTES).unwrap().is_none());
        }

        #[test]
        fn a_frame_that_is_cut_off_is_unavailable(message in ".*", share in 0.0f64..1.0) {
            let mut sent = Vec::new();
            write(&mut sent, &message, REQUEST_LIMIT_BYTES).unwrap();
            let kept = 1 + ((sent.len() - 1) as f64 * share) as usize;
            prop_assume!(kept < sent.len());
            let refused = read(&mut &sent[..kept], REQUEST_LIMIT_BYTES).unwrap_err();
            prop_assert_eq!(refused.kind(), Kind::Unavailable);
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in vec(any::<u8>(), 0..40)) {
            let outcome = read(&mut &bytes[..], REQUEST_LIMIT_BYTES);
            prop_assert_eq!(matches!(outcome, Ok(None)), bytes.is_empty());
        }
    }

    #[test]
    fn what_is_too_long_is_refused_on_both_sides() {
        let long = "x".repeat(REQUEST_LIMIT_BYTES as usize);
        let mut sent = Vec::new();
        assert_eq!(write(&mut sent, &long, REQUEST_LIMIT_BYTES).unwrap_err().kind(), Kind::InvalidInput);
        assert!(sent.is_empty());
        let claim = [&MAGIC[..], &u32::MAX.to_le_bytes()].concat();
        assert_eq!(read(&mut &claim[..], REPLY_LIMIT_BYTES).unwrap_err().kind(), Kind::InvalidInput);
        // Within the limit, but nothing comes: what was claimed is not allocated.
        let claim = [&MAGIC[..], &REPLY_LIMIT_BYTES.to_le_bytes(), b"{"].concat();
        assert_eq!(read(&mut &claim[..], REPLY_LIMIT_BYTES).unwrap_err().kind(), Kind::Unavailable);
    }
}
