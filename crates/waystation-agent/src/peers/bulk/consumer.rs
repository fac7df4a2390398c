//! Receiving a version past the store: verified blocks go to whoever wants them, as they come.
//!
//! Invariants: a block is given once, and only if it is what its checksum says; the version counts as fetched
//! only if all blocks were given and amount to the digest that the sender has signed.

use std::sync::{Mutex, MutexGuard, PoisonError};

use waystation_format::checksum::{BLOCK_BYTES, crc64};
use waystation_format::slot::{Sums, decode_contents, digest};
use waystation_format::{Error, Kind, Result};

use super::message::Offer;
use super::receive::Sink;
use crate::writer::Receipt;

/// What was fetched, beside the data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fetched {
    /// The table of contents.
    pub contents: Vec<u8>,
    /// What vouches for all of it.
    pub sums: Sums,
}

/// Gives blocks to a function.
pub struct Consumer<F>(Mutex<Given<F>>);

struct Given<F> {
    consume: F,
    offer: Option<Offer>,
    /// The checksum of each block that was given.
    sums: Vec<Option<u64>>,
    contents: Vec<u8>,
    buffer: Vec<u8>,
}

impl<F> Consumer<F> {
    pub fn new(consume: F) -> Self {
        let (sums, contents, buffer) = (Vec::new(), Vec::new(), Vec::new());
        Self(Mutex::new(Given { consume, offer: None, sums, contents, buffer }))
    }

    /// Makes ready for what is offered; whoever offers it again must offer the same.
    pub fn expect(&self, offer: &Offer) -> Result<()> {
        let mut given = self.lock();
        if given.offer.as_ref().is_some_and(|known| known != offer) {
            let message = "the version has another size than before the connection was lost";
            return Err(Error::new(Kind::Conflict, message));
        }
        given.offer = Some(offer.clone());
        Ok(())
    }

    /// How many blocks were given, from the first.
    pub fn blocks_in_place(&self) -> u64 {
        self.lock().sums.iter().take_while(|sum| sum.is_some()).count() as u64
    }

    /// What was fetched beside the blocks, once it is finished.
    pub fn fetched(&self, sums: Sums) -> Fetched {
        Fetched { contents: std::mem::take(&mut self.lock().contents), sums }
    }

    fn lock(&self) -> MutexGuard<'_, Given<F>> {
        // A consumer that panicked has ended its transfer, which is what the lock is shared in.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<F: FnMut(u64, &[u8]) -> Result<()> + Send> Sink for Consumer<F> {
    fn block(&self, index: u64, sum: u64, read: &mut dyn FnMut(&mut [u8]) -> Result<()>) -> Result<Receipt> {
        let mut guard = self.lock();
        let Given { consume, offer, sums, buffer, .. } = &mut *guard;
        let place = index as usize;
        if sums.get(place).is_some_and(Option::is_some) {
            return Ok(Receipt::Known);
        }
        let begin = index * BLOCK_BYTES as u64;
        let data_bytes = offer.as_ref().map_or(0, |offer| offer.data_bytes);
        let nbytes = data_bytes.saturating_sub(begin).min(BLOCK_BYTES as u64) as usize;
        buffer.resize(BLOCK_BYTES, 0);
        let bytes = &mut buffer[..nbytes];
        read(bytes)?;
        if crc64(bytes) != sum {
            return Ok(Receipt::Damaged);
        }
        consume(begin, bytes)?;
        if sums.len() <= place {
            sums.resize(place + 1, None);
        }
        sums[place] = Some(sum);
        Ok(Receipt::Placed)
    }

    fn contents(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let mut given = self.lock();
        given.contents.truncate(if offset == 0 { 0 } else { usize::MAX });
        if offset != given.contents.len() as u64 {
            return Err(Error::new(Kind::Corrupt, "pieces of the table of contents are out of order"));
        }
        given.contents.extend_from_slice(bytes);
        Ok(())
    }

    fn finish(&self, sums: Sums) -> Result<Sums> {
        let given = self.lock();
        let data_bytes = given.offer.as_ref().map_or(0, |offer| offer.data_bytes);
        let count = data_bytes.div_ceil(BLOCK_BYTES as u64) as usize;
        let blocks: Vec<u64> = given.sums.iter().map_while(|&sum| sum).collect();
        decode_contents(&given.contents, data_bytes)?;
        let contents = crc64(&given.contents);
        let found = Sums { contents, digest: digest(contents, blocks.iter().copied()) };
        if blocks.len() == count && found == sums {
            return Ok(sums);
        }
        Err(Error::new(Kind::Corrupt, "what has come is not what the sender says to have sent"))
    }
}
