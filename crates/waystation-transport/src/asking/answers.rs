//! What comes over one connection to a host that blocks are wanted of.
//!
//! Failures: a block comes damaged, or the host says that it will not come (its fetch fails, with all
//! requests of it); the connection ends, or the host breaks the rules (so does this). Invariants: bytes go
//! only to where a request of that number wants them, in order, and no further; what was given up is read
//! past.

use std::sync::Arc;

use waystation_format::checksum::{BLOCK_BYTES, crc64};
use waystation_format::{Error, Kind, Result};
use waystation_peers::decode_failure;

use super::{Asking, Wanted, lock, send_asks, send_numbers};
use crate::connection::Incoming;
use crate::fetch::Fetch;
use crate::held::Lease;
use crate::memory::OtherMemory;
use crate::message::{Frame, FrameKind, MOST_NUMBERS, Place, decode_words, unexpected};

/// The answers of one connection.
pub struct Answers<'a> {
    asking: &'a Asking,
    incoming: Incoming,
    memory: Option<OtherMemory>,
    /// What is in place and not acknowledged yet.
    got: Vec<u64>,
    /// Where bytes go that nobody wants any more.
    scratch: Vec<u8>,
}

/// A block that bytes come for.
struct Coming {
    fetch: Arc<Fetch>,
    /// Held while its memory is written to.
    _lease: Arc<Lease>,
    target: usize,
    nbytes: usize,
    received: usize,
}

impl<'a> Answers<'a> {
    /// What comes in; the memory is that of the host, if this process can read it.
    pub fn new(asking: &'a Asking, incoming: Incoming, memory: Option<OtherMemory>) -> Self {
        Self { asking, incoming, memory, got: Vec::new(), scratch: Vec::new() }
    }

    /// Takes the next frame.
    pub fn take(&mut self) -> Result<()> {
        let frame = self.incoming.frame()?;
        match frame.kind {
            FrameKind::Block => self.take_block(&frame)?,
            kind if frame.bulk_bytes > 0 => return Err(unexpected(kind)),
            FrameKind::Place => self.take_place(frame.transfer, &Place::decode(&frame.message)?)?,
            FrameKind::Failed => self.fail(frame.transfer, decode_failure(&frame.message)),
            kind => return Err(unexpected(kind)),
        }
        if !self.got.is_empty() && (!self.incoming.has_more() || self.got.len() == MOST_NUMBERS) {
            if let Some(outgoing) = &mut *lock(&self.asking.outgoing) {
                send_numbers(outgoing, FrameKind::Got, &self.got)?;
            }
            self.got.clear();
        }
        Ok(())
    }

    /// Takes bytes of a block to their place, and verifies them there.
    fn take_block(&mut self, frame: &Frame) -> Result<()> {
        let sums = decode_words(&frame.message)?;
        if sums.len() != frame.bulk_bytes.div_ceil(BLOCK_BYTES) {
            return Err(Error::new(Kind::Corrupt, "another host sent a block without its checksums"));
        }
        let Some(coming) = self.coming(frame.transfer) else { return self.read_past(frame.bulk_bytes) };
        let missing = coming.nbytes - coming.received;
        let is_next = frame.offset == coming.received as u64 && frame.bulk_bytes <= missing;
        if !is_next || (frame.bulk_bytes == 0 && missing > 0) {
            return Err(Error::new(Kind::Corrupt, "another host sent bytes that were not asked for"));
        }
        let mut received = coming.received;
        let end = received + frame.bulk_bytes;
        for sum in sums {
            if coming.fetch.is_over() {
                return self.read_past(end - received);
            }
            let length = (end - received).min(BLOCK_BYTES);
            // SAFETY: the range is within the block, by the check above; only this thread writes to it.
            let piece = unsafe { coming.fetch.piece(coming.target, received, length) };
            self.incoming.bulk(piece)?;
            received += length;
            if crc64(piece) != sum {
                let message = "a block came damaged; something on the way changes bytes";
                self.fail(frame.transfer, Error::new(Kind::Corrupt, message));
            }
        }
        self.note(frame.transfer, end, &coming);
        Ok(())
    }

    /// Reads a block where it lies, or asks for its bytes if that cannot be.
    fn take_place(&mut self, number: u64, place: &Place) -> Result<()> {
        let Some(coming) = self.coming(number) else { return Ok(()) };
        let memory = self.memory.as_ref().ok_or_else(|| unexpected(FrameKind::Place))?;
        // SAFETY: the piece is the whole block; only this thread writes to it.
        let is_read = unsafe {
            let target = coming.fetch.piece(coming.target, 0, coming.nbytes);
            memory.read(place, target.as_mut_ptr(), target.len())
        };
        if is_read {
            self.note(number, coming.nbytes, &coming);
            return Ok(());
        }
        let mut outgoing = lock(&self.asking.outgoing);
        let mut state = self.asking.lock();
        let Some(wanted) = state.wanted.get_mut(&number) else { return Ok(()) };
        (wanted.can_read, wanted.is_asked) = (false, false);
        let asks = state.take_asks();
        drop(state);
        outgoing.as_mut().map_or(Ok(()), |outgoing| send_asks(outgoing, &asks))
    }

    /// The block of a request, if anybody still wants it.
    fn coming(&self, number: u64) -> Option<Coming> {
        let state = self.asking.lock();
        let Wanted { fetch, lease, target, received, .. } = state.wanted.get(&number)?;
        let nbytes = fetch.targets()[*target].nbytes;
        let (fetch, lease) = (Arc::clone(fetch), Arc::clone(lease));
        Some(Coming { fetch, _lease: lease, target: *target, nbytes, received: *received })
    }

    /// So much of a block is in place.
    fn note(&mut self, number: u64, received: usize, coming: &Coming) {
        let mut state = self.asking.lock();
        let Some(wanted) = state.wanted.get_mut(&number) else { return };
        wanted.received = received;
        if received == coming.nbytes {
            state.wanted.remove(&number);
            drop(state);
            self.got.push(number);
            coming.fetch.note_block();
        }
    }

    /// A request fails, and with it all others of its fetch.
    fn fail(&self, number: u64, error: Error) {
        let Some(coming) = self.coming(number) else { return };
        let key = coming.fetch.targets()[coming.target].key;
        let error = error.with("host", self.asking.peer.name.as_str()).with("block", key.to_string());
        coming.fetch.fail(error);
        self.asking.give_up(&coming.fetch);
    }

    fn read_past(&mut self, nbytes: usize) -> Result<()> {
        self.scratch.resize(BLOCK_BYTES, 0);
        let mut left = nbytes;
        while left > 0 {
            let length = left.min(BLOCK_BYTES);
            self.incoming.bulk(&mut self.scratch[..length])?;
            left -= length;
        }
        Ok(())
    }
}
