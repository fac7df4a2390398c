//! A stream of bytes between two sides that have proven themselves: every piece of it is signed.
//!
//! What is written goes in *records*: length, bytes, tag. A tag signs the number of the record, so none can
//! be changed, left out, repeated, swapped or brought in from elsewhere. A record of no bytes is the end: a
//! connection that ends without it was cut. Invariants: bytes are given out only once their tag is verified;
//! a side holds at most one record of each direction; after a failure there are failures only. Nothing is
//! encrypted.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::keys::{Keys, TAG_BYTES};

/// A record has at most so many bytes.
pub(crate) const RECORD_BYTES: usize = 16 * 1024;
const LENGTH_BYTES: usize = 4;

/// A stream whose bytes are signed by one side and verified by the other.
#[derive(Debug)]
pub struct SignedStream<S> {
    stream: S,
    keys: Keys,
    incoming: Incoming,
    outgoing: Outgoing,
}

#[derive(Debug, Default)]
struct Incoming {
    /// The record that is being read or given out: its length, bytes and tag.
    record: Vec<u8>,
    /// How much of it was given out. Nothing before it is verified.
    given: Option<usize>,
    number: u64,
    has_ended: bool,
    has_failed: bool,
}

#[derive(Debug, Default)]
struct Outgoing {
    record: Vec<u8>,
    sent: usize,
    number: u64,
    has_ended: bool,
}

impl<S> SignedStream<S> {
    /// The stream of a connection for which a handshake has given keys.
    pub(crate) fn new(stream: S, keys: Keys) -> Self {
        Self { stream, keys, incoming: Incoming::default(), outgoing: Outgoing::default() }
    }

    /// What it was made of; nothing may have been read or written.
    pub(crate) fn into_parts(self) -> (S, Keys) {
        debug_assert!(self.incoming.number == 0 && self.outgoing.number == 0);
        (self.stream, self.keys)
    }
}

impl Incoming {
    /// How many bytes of the current record must be there for the next step; Err if it is no record.
    fn needed(&self) -> io::Result<usize> {
        let Some(&length) = self.record.first_chunk() else { return Ok(LENGTH_BYTES) };
        let length = u32::from_le_bytes(length) as usize;
        if length > RECORD_BYTES {
            return Err(refused("a record is longer than any may be"));
        }
        Ok(LENGTH_BYTES + length + TAG_BYTES)
    }

    /// Looks at a record that is there as a whole.
    fn verify(&mut self, keys: &Keys) -> io::Result<()> {
        let signed = self.record.len() - TAG_BYTES;
        let (content, tag) = self.record.split_at(signed);
        if !keys.other.verify(&[&self.number.to_le_bytes(), content], tag) {
            return Err(refused("a record is not what the other side has sent"));
        }
        self.number += 1;
        self.record.truncate(signed);
        self.has_ended = signed == LENGTH_BYTES;
        self.given = Some(LENGTH_BYTES);
        Ok(())
    }

    /// Gives out what is left of a verified record; false if there is nothing.
    fn give(&mut self, buffer: &mut ReadBuf<'_>) -> bool {
        let Some(given) = self.given else { return false };
        let left = &self.record[given..];
        let count = left.len().min(buffer.remaining());
        buffer.put_slice(&left[..count]);
        if count == left.len() && !self.has_ended {
            self.record.clear();
            self.given = None;
        } else {
            self.given = Some(given + count);
        }
        count > 0
    }
}

impl<S: AsyncRead + Unpin> SignedStream<S> {
    /// Reads one record to its end and verifies it.
    fn poll_record(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            let have = self.incoming.record.len();
            let needed = self.incoming.needed()?;
            if have >= LENGTH_BYTES && have == needed {
                return Poll::Ready(self.incoming.verify(&self.keys));
            }
            let record = &mut self.incoming.record;
            record.resize(needed, 0);
            let mut buffer = ReadBuf::new(&mut record[have..]);
            let polled = Pin::new(&mut self.stream).poll_read(context, &mut buffer);
            let read = buffer.filled().len();
            self.incoming.record.truncate(have + read);
            ready!(polled)?;
            if read == 0 {
                return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()));
            }
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for SignedStream<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        while buffer.remaining() > 0 && !this.incoming.give(buffer) && !this.incoming.has_ended {
            if this.incoming.has_failed {
                return Poll::Ready(Err(refused("the connection has failed before")));
            }
            let polled = ready!(this.poll_record(context));
            this.incoming.has_failed = polled.is_err();
            polled?;
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> SignedStream<S> {
    /// Makes the next record of some bytes, when the one before is sent.
    fn push(&mut self, bytes: &[u8]) {
        let Outgoing { record, sent, number, .. } = &mut self.outgoing;
        record.clear();
        record.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
        record.extend_from_slice(bytes);
        let tag = self.keys.own.tag(&[&number.to_le_bytes(), record]);
        record.extend_from_slice(&tag);
        *sent = 0;
        *number += 1;
    }

    /// Sends all of the current record.
    fn poll_send(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Outgoing { record, sent, .. } = &mut self.outgoing;
        while *sent < record.len() {
            match ready!(Pin::new(&mut self.stream).poll_write(context, &record[*sent..]))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                count => *sent += count,
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for SignedStream<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        ready!(this.poll_send(context))?;
        if this.outgoing.has_ended {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let count = bytes.len().min(RECORD_BYTES);
        if count > 0 {
            this.push(&bytes[..count]); // an empty one would be the end
            // Whether it goes at once does not matter: the bytes are taken, and a flush sends them.
            if let Poll::Ready(Err(error)) = this.poll_send(context) {
                return Poll::Ready(Err(error));
            }
        }
        Poll::Ready(Ok(count))
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(this.poll_send(context))?;
        Pin::new(&mut this.stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(this.poll_send(context))?;
        if !this.outgoing.has_ended {
            this.push(&[]);
            this.outgoing.has_ended = true;
            ready!(this.poll_send(context))?;
        }
        Pin::new(&mut this.stream).poll_shutdown(context)
    }
}

fn refused(message: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};

    use super::*;
    use crate::keys::{Side, transcript};
    use crate::secret::Secret;

    fn keys(side: Side) -> Keys {
        Keys::new(&Secret::new([3; 16]).unwrap(), &transcript(&[b"test"]), side).unwrap()
    }

    /// What a client sends that writes each of the pieces, and then ends or is cut.
    async fn sent(pieces: &[Vec<u8>], ends: bool) -> Vec<u8> {
        let (near, mut far) = duplex(1 << 22);
        let mut client = SignedStream::new(near, keys(Side::Client));
        for piece in pieces {
            client.write_all(piece).await.unwrap();
            client.flush().await.unwrap();
        }
        if ends {
            client.shutdown().await.unwrap();
        }
        drop(client);
        let mut bytes = Vec::new();
        far.read_to_end(&mut bytes).await.unwrap();
        bytes
    }

    /// What a server reads of it: whole, or what was given out before the failure.
    async fn read(bytes: &[u8]) -> (Vec<u8>, io::Result<()>) {
        let (near, mut far): (DuplexStream, DuplexStream) = duplex(bytes.len().max(1));
        far.write_all(bytes).await.unwrap();
        drop(far);
        let mut server = SignedStream::new(near, keys(Side::Server));
        let mut all = Vec::new();
        let outcome = server.read_to_end(&mut all).await.map(drop);
        if outcome.is_err() {
            assert!(server.read_u8().await.is_err(), "after a failure there are failures only");
        }
        (all, outcome)
    }

    fn run<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
    }

    proptest! {
        #[test]
        fn what_was_written_is_read(
            pieces in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..40_000), 0..5)
        ) {
            let (all, outcome) = run(async { read(&sent(&pieces, true).await).await });
            prop_assert!(outcome.is_ok());
            prop_assert_eq!(all, pieces.concat());
        }

        #[test]
        fn no_byte_is_given_out_from_where_a_bit_was_changed(
            at in any::<prop::sample::Index>(), bit in 0..8
        ) {
            let pieces = [vec![1; 100], vec![2; 100]];
            run(async {
                let mut bytes = sent(&pieces, true).await;
                let at = at.index(bytes.len());
                bytes[at] ^= 1u8 << bit;
                let (all, outcome) = read(&bytes).await;
                assert!(outcome.is_err());
                let whole = (at / 120).min(2) * 100;
                assert_eq!(all, pieces.concat()[..whole]);
            });
        }
    }

    #[test]
    fn records_cannot_be_left_out_repeated_swapped_or_cut() {
        run(async {
            let pieces = [vec![1; 10], vec![2; 10]];
            let bytes = sent(&pieces, true).await;
            let (first, rest) = bytes.split_at(30);
            let (second, end) = rest.split_at(30);
            assert!(read(&[first, second, end].concat()).await.1.is_ok());
            let hostile: [(&[&[u8]], usize); 8] = [
                (&[second, end], 0),
                (&[first, end], 1),
                (&[first, first, second, end], 1),
                (&[second, first, end], 0),
                (&[first, second], 2),
                (&[first, &second[..29]], 1),
                (&[first, &second[..3]], 1),
                (&[], 0),
            ];
            for (parts, whole) in hostile {
                let (all, outcome) = read(&parts.concat()).await;
                assert!(outcome.is_err());
                assert_eq!(all, pieces.concat()[..whole * 10]);
            }
        });
    }

    #[test]
    fn what_a_side_has_sent_is_refused_when_it_comes_back() {
        run(async {
            let bytes = sent(&[vec![1; 10]], true).await;
            let (near, mut far) = duplex(100);
            far.write_all(&bytes).await.unwrap();
            let mut client = SignedStream::new(near, keys(Side::Client));
            assert_eq!(client.read_u8().await.unwrap_err().kind(), io::ErrorKind::InvalidData);
        });
    }

    #[test]
    fn a_length_beyond_the_limit_is_refused_at_once() {
        run(async {
            let (near, mut far) = duplex(100);
            far.write_all(&(RECORD_BYTES as u32 + 1).to_le_bytes()).await.unwrap();
            let mut server = SignedStream::new(near, keys(Side::Server));
            // The other side keeps the connection open: it is not waited for.
            assert_eq!(server.read_u8().await.unwrap_err().kind(), io::ErrorKind::InvalidData);
            assert!(server.incoming.record.capacity() < 100);
        });
    }
}
