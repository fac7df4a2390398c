//! The end of a transfer that sends: chunks of blocks straight from the slot's file, on any number of
//! connections.
//!
//! A slot may still be written while it is sent: blocks go as they come to be in place. Failures: a
//! connection is lost, ended or the receiver fails (all connections of the transfer end; what was verified there
//! stays); the writer of the slot stands still ([`Order::stall`]).
//! Invariants: no chunk goes before the pacer's time for it; what is sent are blocks that are in place, with
//! the checksums that their writer has left; the transfer is done when the receiver says it has verified all.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use waystation_format::checksum::{BLOCK_BYTES, crc64};
use waystation_format::slot::{Sums, digest};
use waystation_format::{Error, Kind, Result};

use super::channel::{Channel, unexpected};
use super::frame::FrameKind;
use super::message::{decode_longs, decode_sums, encode_longs, encode_sums};
use super::pacing::{MOST_CHUNK_BYTES, Pacer};
use crate::peers::MESSAGE_BYTES;
use crate::store::Reading;

const BLOCK: u64 = BLOCK_BYTES as u64;
/// How often a sender looks whether it may go on.
const SLICE: Duration = Duration::from_millis(2);
/// Bytes of the table of contents in one frame.
const CONTENTS_PIECE_BYTES: usize = 4 << 20;

/// How a version is sent.
#[derive(Clone, Debug)]
pub struct Order {
    /// What goes at a time; see [`super::pacing::chunk_bytes`].
    pub chunk_bytes: u64,
    /// How fast.
    pub pacer: Arc<Pacer>,
    /// How long the writer of a slot that is still written may stand still.
    pub stall: Duration,
}

/// What the connections of a transfer share.
pub struct Work<'a> {
    reading: &'a Reading,
    order: &'a Order,
    blocks: u64,
    next: Mutex<u64>,
    has_failed: AtomicBool,
    failure: Mutex<Option<Error>>,
}

impl<'a> Work<'a> {
    /// All blocks of a slot from the first that the receiver does not have.
    pub fn new(reading: &'a Reading, order: &'a Order, first: u64) -> Result<Self> {
        let regions = reading.tenant().regions();
        let blocks = regions.map_or(0, |regions| regions.block_count());
        if first > blocks {
            return Err(Error::new(Kind::Corrupt, "the receiver has more blocks than there are"));
        }
        let (has_failed, failure) = (AtomicBool::new(false), Mutex::default());
        Ok(Self { reading, order, blocks, next: Mutex::new(first), has_failed, failure })
    }

    /// Sends over several channels at once, and ends the transfer on the first.
    pub fn run(&self, channels: &mut [Channel]) -> Result<Sums> {
        let Some((first, others)) = channels.split_first_mut() else {
            return Err(Error::new(Kind::InvalidInput, "a transfer needs a connection"));
        };
        thread::scope(|scope| {
            let spawn = |channel| scope.spawn(move || self.noting(|| self.serve_other(channel)));
            let threads: Vec<_> = others.iter_mut().map(spawn).collect();
            self.noting(|| self.send_blocks(first));
            for thread in threads {
                if thread.join().is_err() {
                    self.noting(|| Err(waystation_io::job::panicked()));
                }
            }
        });
        let failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner).take();
        let sent = failure.map_or_else(|| self.finish(first), Err);
        sent.inspect(|_| self.order.pacer.traffic().note_whole())
            .inspect_err(|error| first.tell_failure(error))
    }

    /// Does something, and keeps the first error of all connections, which ends the others.
    fn noting(&self, work: impl FnOnce() -> Result<()>) {
        if let Err(error) = work() {
            self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            self.has_failed.store(true, Ordering::Release);
        }
    }

    fn serve_other(&self, channel: &mut Channel) -> Result<()> {
        self.send_blocks(channel)?;
        channel.send(FrameKind::Leave, Vec::new())
    }

    /// Sends chunks until there are none, and those again that came damaged.
    fn send_blocks(&self, channel: &mut Channel) -> Result<()> {
        while let Some(chunk) = self.take_chunk(channel)? {
            self.send_chunk(channel, chunk)?;
        }
        loop {
            channel.send(FrameKind::Ask, Vec::new())?;
            // The receiver says when it has asked often enough.
            let damaged = decode_longs(&channel.expect(FrameKind::Damaged)?)?;
            if damaged.is_empty() {
                return Ok(());
            }
            for block in damaged {
                if block >= self.blocks {
                    return Err(Error::new(Kind::Corrupt, "the receiver asks for a block that there is not"));
                }
                self.send_chunk(channel, block..block + 1)?;
            }
        }
    }

    /// The next blocks, once they are in place.
    fn take_chunk(&self, channel: &mut Channel) -> Result<Option<Range<u64>>> {
        let most = self.order.chunk_bytes.clamp(BLOCK, MOST_CHUNK_BYTES) / BLOCK;
        let most = most.min(MESSAGE_BYTES as u64 / 8);
        let (mut known, mut since) = (0, Instant::now());
        loop {
            let in_place = self.reading.blocks_in_place()?;
            {
                let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
                if *next == self.blocks {
                    return Ok(None);
                }
                let end = in_place.min(*next + most);
                // A short chunk only at the end, or where the writer is slow: it is waited for once.
                if end > *next && (end - *next == most || end == self.blocks || known == in_place) {
                    let chunk = *next..end;
                    *next = end;
                    return Ok(Some(chunk));
                }
            }
            if in_place > known {
                (known, since) = (in_place, Instant::now());
            } else if since.elapsed() > self.order.stall {
                return Err(Error::new(Kind::Unavailable, "the writer of the slot stands still")
                    .with("blocks_in_place", in_place.to_string())
                    .with("blocks", self.blocks.to_string()));
            }
            self.rest(channel, SLICE)?;
        }
    }

    fn send_chunk(&self, channel: &mut Channel, blocks: Range<u64>) -> Result<()> {
        let tenant = self.reading.tenant();
        let regions = tenant.regions().ok_or_else(overflow)?;
        let (begin, end) = (blocks.start * BLOCK, (blocks.end * BLOCK).min(tenant.data_bytes));
        self.wait_for_turn(channel, end - begin)?;
        let mut sums = vec![0; 8 * (blocks.end - blocks.start) as usize];
        self.reading.file().read_at(&mut sums, regions.checksums.start + 8 * blocks.start)?;
        let nbytes = (end - begin) as usize;
        if let Some(bytes_per_s) = self.order.pacer.bytes_per_s() {
            channel.pace(bytes_per_s);
        }
        channel.send_with_bulk(FrameKind::Blocks, begin, sums, nbytes)?;
        channel.send_file(self.reading.file().file(), regions.data.start + begin, nbytes)?;
        self.order.pacer.traffic().note_bytes(nbytes as u64);
        Ok(())
    }

    fn wait_for_turn(&self, channel: &mut Channel, nbytes: u64) -> Result<()> {
        let pacer = &self.order.pacer;
        let turn = pacer.book(nbytes, Instant::now());
        loop {
            let left = turn.saturating_duration_since(Instant::now());
            if left.is_zero() && !pacer.is_paused() {
                return self.check(channel);
            }
            self.rest(channel, if left.is_zero() { SLICE } else { left.min(10 * SLICE) })?;
        }
    }

    fn rest(&self, channel: &mut Channel, time: Duration) -> Result<()> {
        self.check(channel)?;
        thread::sleep(time);
        channel.show_life()
    }

    /// Whether to go on: another connection may have failed, the receiver may have said something.
    fn check(&self, channel: &mut Channel) -> Result<()> {
        if self.has_failed.load(Ordering::Acquire) {
            return Err(Error::new(Kind::Unavailable, "another connection of the transfer has failed"));
        }
        if channel.has_incoming() {
            // Signs of life aside, a receiver that was not asked has only a failure to tell.
            return Err(match channel.receive() {
                Ok(frame) => unexpected(frame.kind),
                Err(error) => error,
            });
        }
        Ok(())
    }

    /// Sends what makes the version whole, and waits for the receiver to say that it is.
    fn finish(&self, channel: &mut Channel) -> Result<Sums> {
        let tenant = self.reading.tenant();
        let regions = tenant.regions().ok_or_else(overflow)?;
        if self.blocks == 0 && self.reading.sums().is_none() {
            return Err(Error::new(Kind::Unavailable, "a slot without data is sent once it is sealed"));
        }
        let mut contents = vec![0; tenant.contents_bytes as usize];
        self.reading.file().read_at(&mut contents, regions.contents.start)?;
        for (index, piece) in contents.chunks(CONTENTS_PIECE_BYTES).enumerate() {
            let offset = (index * CONTENTS_PIECE_BYTES) as u64;
            self.wait_for_turn(channel, piece.len() as u64)?;
            let sum = encode_longs(&[crc64(piece)]);
            channel.send_with_bulk(FrameKind::Contents, offset, sum, piece.len())?;
            channel.send_bytes(piece)?;
            self.order.pacer.traffic().note_bytes(piece.len() as u64);
        }
        let contents = crc64(&contents);
        let sums = Sums { contents, digest: digest(contents, self.reading.block_sums(self.blocks)?) };
        channel.send(FrameKind::Finish, encode_sums(sums))?;
        let sealed = decode_sums(&channel.expect(FrameKind::Sealed)?)?;
        if sealed != sums {
            return Err(Error::new(Kind::Corrupt, "the receiver has sealed something else than was sent"));
        }
        Ok(sums)
    }
}

fn overflow() -> Error {
    Error::new(Kind::Corrupt, "the sizes of a shard overflow")
}
