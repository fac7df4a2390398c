//! The end of a connection that has the blocks: one thread reads what is asked for, another sends it.
//!
//! Failures: the connection ends (what was sent and not acknowledged stays offered, and can be asked for
//! again); the consumer breaks the rules (the connection ends). Invariants: a consumer has at most
//! [`MOST_OPEN`] requests open, so what it can make this side remember is bounded; a block stays offered
//! until the consumer says that it has it.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread;

use waystation_format::checksum::{BLOCK_BYTES, crc64};
use waystation_format::{Error, Kind, Result};
use waystation_peers::End;

use crate::connection::{Incoming, Outgoing};
use crate::held::{Held, Mark};
use crate::key::Key;
use crate::memory;
use crate::message::{Ask, FrameKind, Place, decode_asks, decode_words, encode_words, unexpected};
use crate::offers::Offers;
use crate::outbox::{Outbox, Reply};

/// The most requests that a consumer may have open.
pub const MOST_OPEN: usize = 1 << 18;
/// A frame has at most so much of a block: what is checksummed is sent while it is in the core's cache.
const PIECE_BYTES: usize = 4 * BLOCK_BYTES;

/// Serves a consumer until its connection ends; says why it has.
pub fn serve(
    offers: &Offers,
    outbox: &Arc<Outbox>,
    incoming: Incoming,
    outgoing: Outgoing,
    end: &End,
) -> Error {
    thread::scope(|scope| {
        scope.spawn(|| {
            // Whatever it is that fails here, the other thread sees that the connection has ended.
            drop(send_all(outbox, outgoing));
            end.now();
        });
        let outcome = Asked { offers, outbox, keys: HashMap::new() }.read_all(incoming);
        outbox.close();
        offers.forget(outbox);
        end.now();
        outcome
    })
}

/// What a consumer has asked for and not acknowledged.
struct Asked<'a> {
    offers: &'a Offers,
    outbox: &'a Arc<Outbox>,
    keys: HashMap<u64, Key>,
}

impl Asked<'_> {
    fn read_all(mut self, mut incoming: Incoming) -> Error {
        loop {
            if let Err(error) = self.read(&mut incoming) {
                return error;
            }
        }
    }

    fn read(&mut self, incoming: &mut Incoming) -> Result<()> {
        let frame = incoming.frame()?;
        if frame.bulk_bytes > 0 {
            return Err(unexpected(frame.kind));
        }
        match frame.kind {
            FrameKind::Ask => decode_asks(&frame.message)?.into_iter().try_for_each(|ask| self.ask(ask)),
            FrameKind::Got => {
                for number in decode_words(&frame.message)? {
                    // What is not known was given up before.
                    self.keys.remove(&number).inspect(|key| self.offers.take(key));
                }
                Ok(())
            }
            FrameKind::Cancel => {
                for number in decode_words(&frame.message)? {
                    self.outbox.cancel(number);
                    self.keys.remove(&number).inspect(|key| self.offers.give_up(self.outbox, number, key));
                }
                Ok(())
            }
            kind => Err(unexpected(kind)),
        }
    }

    fn ask(&mut self, ask: Ask) -> Result<()> {
        if self.keys.len() == MOST_OPEN {
            return Err(Error::new(Kind::Corrupt, "another host asks for more blocks than it may"));
        }
        self.keys.insert(ask.number, ask.key);
        self.offers.ask(self.outbox, ask);
        Ok(())
    }
}

fn send_all(outbox: &Outbox, mut outgoing: Outgoing) -> Result<()> {
    let mark = Mark::take();
    outgoing.send(FrameKind::Home, 0, memory::home(&mark).encode())?;
    while let Some((number, reply)) = outbox.take() {
        match reply {
            Reply::Block(held) if held.bytes().len() > PIECE_BYTES => {
                send_long(outbox, &mut outgoing, number, &held)?
            }
            reply => send_short(&mut outgoing, number, &reply)?,
        }
    }
    Ok(())
}

/// Sends what is one frame.
fn send_short(outgoing: &mut Outgoing, number: u64, reply: &Reply) -> Result<()> {
    match reply {
        Reply::Block(held) => send_piece(outgoing, number, 0, held.bytes()),
        Reply::Place(held) => {
            let place = Place { address: held.bytes().as_ptr().addr() as u64, mark: held.mark() };
            outgoing.send(FrameKind::Place, number, place.encode())
        }
        Reply::Failed(message) => outgoing.send(FrameKind::Failed, number, message.clone()),
    }
}

/// Sends a block piece by piece, and what is short between them.
fn send_long(outbox: &Outbox, outgoing: &mut Outgoing, number: u64, held: &Held) -> Result<()> {
    for (index, piece) in held.bytes().chunks(PIECE_BYTES).enumerate() {
        while let Some((short, reply)) = outbox.take_short() {
            send_short(outgoing, short, &reply)?;
        }
        if !outbox.is_wanted(number) {
            return Ok(());
        }
        send_piece(outgoing, number, index * PIECE_BYTES, piece)?;
    }
    Ok(())
}

fn send_piece(outgoing: &mut Outgoing, number: u64, offset: usize, piece: &[u8]) -> Result<()> {
    let sums = encode_words(piece.chunks(BLOCK_BYTES).map(crc64));
    outgoing.send_piece(number, offset as u64, sums, piece)
}
