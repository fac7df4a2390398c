//! The end of a transfer that receives: it verifies each block as it lies in its place.
//!
//! Failures: the connection is lost (what is in place stays, and is not sent again); a block is damaged (it
//! is asked for again, [`ROUNDS`] times); the other side breaks the rules or fails (the transfer ends).
//! Invariants: nothing is read before its place and length are known to be right; only what a sink has
//! finished is told to be sealed.

use waystation_format::checksum::{BLOCK_BYTES, crc64};
use waystation_format::slot::Sums;
use waystation_format::{Error, Kind, Result};

use super::channel::{Channel, unexpected};
use super::frame::{Frame, FrameKind};
use super::message::{
    NAMED_BLOCKS, Offer, decode_exactly, decode_longs, decode_sums, encode_longs, encode_sums,
};
use crate::writer::Receipt;

const BLOCK: u64 = BLOCK_BYTES as u64;
/// How often damaged blocks are asked for.
pub const ROUNDS: u32 = 3;

/// Where the parts of a version go.
pub trait Sink: Sync {
    /// Puts one block in its place, verified; `read` gives its bytes.
    fn block(&self, index: u64, sum: u64, read: &mut dyn FnMut(&mut [u8]) -> Result<()>) -> Result<Receipt>;

    /// Takes a piece of the table of contents.
    fn contents(&self, offset: u64, bytes: &[u8]) -> Result<()>;

    /// All was sent: verifies that it is what the sums say, as a whole.
    fn finish(&self, sums: Sums) -> Result<Sums>;
}

/// Receives what goes over one channel; nothing if the channel is not the one on which the transfer ends.
pub fn receive(channel: &mut Channel, offer: &Offer, sink: &dyn Sink) -> Result<Option<Sums>> {
    let mut damaged = Vec::new();
    let mut rounds = 0;
    loop {
        let frame = channel.receive()?;
        match frame.kind {
            FrameKind::Blocks => receive_blocks(channel, &frame, offer, sink, &mut damaged)?,
            FrameKind::Contents => receive_contents(channel, &frame, offer, sink)?,
            FrameKind::Ask => {
                rounds += u32::from(!damaged.is_empty());
                if rounds > ROUNDS {
                    return Err(hopeless(&damaged));
                }
                damaged.truncate(NAMED_BLOCKS);
                channel.send(FrameKind::Damaged, encode_longs(&damaged))?;
                damaged.clear();
            }
            FrameKind::Finish => {
                let sums = decode_sums(&frame.message)?;
                let sealed = channel.while_showing_life(|| sink.finish(sums))?;
                channel.send(FrameKind::Sealed, encode_sums(sealed))?;
                return Ok(Some(sealed));
            }
            FrameKind::Leave => return Ok(None),
            kind => return Err(unexpected(kind)),
        }
    }
}

fn hopeless(damaged: &[u64]) -> Error {
    let message = format!("blocks have come damaged {} times; something on the way changes them", ROUNDS + 1);
    Error::new(Kind::Corrupt, message)
        .with("first_block", damaged.first().map_or_else(String::new, u64::to_string))
        .with("blocks", damaged.len().to_string())
}

fn receive_blocks(
    channel: &mut Channel,
    frame: &Frame,
    offer: &Offer,
    sink: &dyn Sink,
    damaged: &mut Vec<u64>,
) -> Result<()> {
    let sums = decode_longs(&frame.message)?;
    let lengths = lengths_of(frame, offer, sums.len()).ok_or_else(|| misplaced("blocks"))?;
    let first = frame.offset / BLOCK;
    for ((index, sum), nbytes) in (first..).zip(sums).zip(lengths) {
        match sink.block(index, sum, &mut |bytes| channel.read_bulk(bytes))? {
            Receipt::Placed => {}
            Receipt::Damaged => damaged.push(index),
            Receipt::Known => channel.read_bulk(&mut vec![0; nbytes])?,
        }
    }
    Ok(())
}

/// The lengths of the blocks of a frame, if they are blocks of the version and as long as the bulk.
fn lengths_of(frame: &Frame, offer: &Offer, count: usize) -> Option<impl Iterator<Item = usize> + use<>> {
    let end = frame.offset.checked_add(frame.bulk_bytes as u64)?;
    let is_whole = end == offer.data_bytes || end.is_multiple_of(BLOCK);
    let is_right = frame.offset.is_multiple_of(BLOCK)
        && is_whole
        && end <= offer.data_bytes
        && frame.bulk_bytes > 0
        && frame.bulk_bytes.div_ceil(BLOCK_BYTES) == count;
    let bulk_bytes = frame.bulk_bytes;
    let lengths = (0..count).map(move |index| (bulk_bytes - index * BLOCK_BYTES).min(BLOCK_BYTES));
    is_right.then_some(lengths)
}

fn receive_contents(channel: &mut Channel, frame: &Frame, offer: &Offer, sink: &dyn Sink) -> Result<()> {
    let [expected] = decode_exactly(&frame.message)?;
    let end = frame.offset.checked_add(frame.bulk_bytes as u64);
    if end.is_none_or(|end| end > offer.contents_bytes) {
        return Err(misplaced("a piece of the table of contents"));
    }
    let mut bytes = vec![0; frame.bulk_bytes];
    channel.read_bulk(&mut bytes)?;
    if crc64(&bytes) != expected {
        return Err(Error::new(Kind::Corrupt, "the table of contents has come damaged"));
    }
    sink.contents(frame.offset, &bytes)
}

fn misplaced(what: &str) -> Error {
    Error::new(Kind::Corrupt, format!("another agent sent {what} that the version does not have"))
}

#[cfg(test)]
mod tests {
    use waystation_format::slot::{Id, Key, Version};

    use super::*;

    const TAIL: u64 = 100;

    fn lengths(offset: u64, bulk_bytes: usize, count: usize) -> Option<Vec<usize>> {
        let key = Key { run: Id([0; 16]), shard: "a".to_owned(), version: Version::default() };
        let offer = Offer { key, contents_bytes: 8, data_bytes: 3 * BLOCK + TAIL };
        let frame = Frame { kind: FrameKind::Blocks, transfer: 0, offset, message: Vec::new(), bulk_bytes };
        lengths_of(&frame, &offer, count).map(Iterator::collect)
    }

    #[test]
    fn blocks_are_those_of_the_version() {
        let tail = TAIL as usize;
        assert_eq!(lengths(0, 2 * BLOCK_BYTES, 2), Some(vec![BLOCK_BYTES; 2]));
        assert_eq!(lengths(2 * BLOCK, BLOCK_BYTES + tail, 2), Some(vec![BLOCK_BYTES, tail]));
        assert_eq!(lengths(3 * BLOCK, tail, 1), Some(vec![tail]));
    }

    #[test]
    fn nothing_is_read_to_a_place_that_the_version_does_not_have() {
        let tail = TAIL as usize;
        let wrong = [
            (0, 2 * BLOCK_BYTES, 1),
            (0, 2 * BLOCK_BYTES, 3),
            (0, 0, 0),
            (0, BLOCK_BYTES - 1, 1),
            (1, BLOCK_BYTES, 1),
            (3 * BLOCK, tail + 1, 1),
            (3 * BLOCK, BLOCK_BYTES, 1),
            (4 * BLOCK, BLOCK_BYTES, 1),
            (u64::MAX - BLOCK + 1, BLOCK_BYTES, 1),
            (u64::MAX / BLOCK * BLOCK, 2 * BLOCK_BYTES, 2),
        ];
        for (offset, bulk_bytes, count) in wrong {
            assert_eq!(lengths(offset, bulk_bytes, count), None, "{offset} {bulk_bytes} {count}");
        }
    }
}
