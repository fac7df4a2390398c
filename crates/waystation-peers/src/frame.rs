//! Frames: what goes over a connection that has much to carry.
//!
//! A frame is a header of 64 bytes, a message, and bulk: bytes straight from where they lie. The header
//! is signed with the number of the frame, and holds the signature of the message, so lengths are verified
//! before anything is read that they speak of. Bulk is not signed: its checksums are in the message, and who
//! receives it verifies each block. Invariants: a header has one form; no message is longer than
//! [`MESSAGE_BYTES`], no bulk longer than [`BULK_BYTES`]. `docs/protocol-peers.md` specifies every byte.

use std::io::{IoSlice, Read, Write};

use waystation_format::{Error, Kind, Result};

use crate::keys::{Signer, TAG_BYTES};

/// Length of a header.
pub const HEADER_BYTES: usize = 64;
/// A message has at most so many bytes.
pub const MESSAGE_BYTES: usize = 64 * 1024;
/// What follows a message has at most so many.
pub const BULK_BYTES: usize = 64 << 20;

const VERSION: u8 = 1;
const SIGNED_BYTES: usize = HEADER_BYTES - TAG_BYTES;

/// What a frame can be, in one protocol. Each kind has a code of its own, which no other protocol needs to
/// know.
pub trait Kinds: Copy + PartialEq + std::fmt::Debug + 'static {
    /// All of them.
    const ALL: &'static [Self];

    /// How it is written.
    fn code(self) -> u8;
}

/// A frame without its bulk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame<K> {
    /// What it is.
    pub kind: K,
    /// What it belongs to.
    pub transfer: u64,
    /// Where its bulk belongs; zero if it has none.
    pub offset: u64,
    /// The message.
    pub message: Vec<u8>,
    /// How many bytes of bulk follow.
    pub bulk_bytes: usize,
}

/// Signs the frames of one direction.
pub struct Sealer {
    signer: Signer,
    number: u64,
}

/// Verifies the frames of one direction.
pub struct Opener {
    signer: Signer,
    number: u64,
}

/// A header that was verified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header<K> {
    kind: K,
    transfer: u64,
    offset: u64,
    message_bytes: usize,
    bulk_bytes: usize,
    message_tag: [u8; TAG_BYTES],
}

impl Sealer {
    /// Begins a direction.
    pub fn new(signer: Signer) -> Self {
        Self { signer, number: 0 }
    }

    /// The header and the message of a frame.
    pub fn seal<K: Kinds>(&mut self, frame: &Frame<K>) -> Vec<u8> {
        debug_assert!(frame.message.len() <= MESSAGE_BYTES && frame.bulk_bytes <= BULK_BYTES);
        let mut bytes = Vec::with_capacity(HEADER_BYTES + frame.message.len());
        bytes.extend([VERSION, frame.kind.code(), 0, 0]);
        bytes.extend((frame.message.len() as u32).to_le_bytes());
        bytes.extend((frame.bulk_bytes as u32).to_le_bytes());
        bytes.extend([0; 4]);
        bytes.extend(frame.transfer.to_le_bytes());
        bytes.extend(frame.offset.to_le_bytes());
        bytes.extend(self.signer.tag(&[b"message", &frame.message]));
        bytes.extend(self.signer.tag(&[b"header", &self.number.to_le_bytes(), &bytes]));
        bytes.extend_from_slice(&frame.message);
        self.number += 1;
        bytes
    }
}

impl Opener {
    /// Begins a direction.
    pub fn new(signer: Signer) -> Self {
        Self { signer, number: 0 }
    }

    /// Reads a header. Corrupt if it is not the next that the other side has sent.
    pub fn open<K: Kinds>(&mut self, bytes: &[u8; HEADER_BYTES]) -> Result<Header<K>> {
        let (signed, tag) = bytes.split_at(SIGNED_BYTES);
        if !self.signer.verify(&[b"header", &self.number.to_le_bytes(), signed], tag) {
            return Err(corrupt("a frame is not what the other side has sent"));
        }
        self.number += 1;
        let found = K::ALL.iter().copied().find(|kind| kind.code() == bytes[1]);
        let kind = found.filter(|_| bytes[0] == VERSION).ok_or_else(|| {
            Error::new(Kind::Unsupported, "a frame is of an unknown kind or version")
                .with("frame", format!("{} of version {}", bytes[1], bytes[0]))
        })?;
        let long = |at: usize| bytes[at..].first_chunk().copied().map_or(0, u64::from_le_bytes);
        let length = |at: usize| bytes[at..].first_chunk().copied().map_or(0, u32::from_le_bytes) as usize;
        let (message_bytes, bulk_bytes) = (length(4), length(8));
        if message_bytes > MESSAGE_BYTES || bulk_bytes > BULK_BYTES {
            return Err(corrupt("a frame is longer than any may be"));
        }
        if bytes[2..4] != [0; 2] || bytes[12..16] != [0; 4] {
            return Err(corrupt("bytes of a frame are set that mean nothing"));
        }
        let mut message_tag = [0; TAG_BYTES];
        message_tag.copy_from_slice(&bytes[32..48]);
        Ok(Header { kind, transfer: long(16), offset: long(24), message_bytes, bulk_bytes, message_tag })
    }

    /// The frame of a header and its message.
    fn join<K>(&self, header: Header<K>, message: Vec<u8>) -> Result<Frame<K>> {
        if !self.signer.verify(&[b"message", &message], &header.message_tag) {
            return Err(corrupt("the message of a frame is not what the other side has sent"));
        }
        let Header { kind, transfer, offset, bulk_bytes, .. } = header;
        Ok(Frame { kind, transfer, offset, message, bulk_bytes })
    }
}

/// The frames that come in.
pub struct FrameReader<R> {
    opener: Opener,
    /// Where bulk is read from, after its frame.
    pub source: R,
}

impl<R: Read> FrameReader<R> {
    /// The frames of a source.
    pub fn new(opener: Opener, source: R) -> Self {
        Self { opener, source }
    }

    /// The next frame, whose bulk is to be read from the source before the next.
    pub fn read<K: Kinds>(&mut self) -> Result<Frame<K>> {
        let mut bytes = [0; HEADER_BYTES];
        self.source.read_exact(&mut bytes).map_err(|error| lost(&error))?;
        let header = self.opener.open(&bytes)?;
        let mut message = vec![0; header.message_bytes];
        self.source.read_exact(&mut message).map_err(|error| lost(&error))?;
        self.opener.join(header, message)
    }
}

/// The frames that go out.
pub struct FrameWriter<W> {
    sealer: Sealer,
    /// Where bulk is written to, after its frame.
    pub target: W,
}

impl<W: Write> FrameWriter<W> {
    /// Frames to a target.
    pub fn new(sealer: Sealer, target: W) -> Self {
        Self { sealer, target }
    }

    /// Writes a frame, whose bulk is to be written to the target before the next.
    pub fn write<K: Kinds>(&mut self, frame: &Frame<K>) -> Result<()> {
        let bytes = self.sealer.seal(frame);
        self.target.write_all(&bytes).map_err(|error| lost(&error))
    }

    /// Writes a frame together with its bulk, in as few system calls as it takes.
    pub fn write_with<K: Kinds>(&mut self, frame: &Frame<K>, bulk: &[u8]) -> Result<()> {
        debug_assert!(frame.bulk_bytes == bulk.len());
        let bytes = self.sealer.seal(frame);
        let mut written = 0;
        while written < bytes.len() {
            let parts = [IoSlice::new(&bytes[written..]), IoSlice::new(bulk)];
            match self.target.write_vectored(&parts) {
                Ok(0) => return Err(lost(&std::io::ErrorKind::WriteZero.into())),
                Ok(count) => written += count,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(lost(&error)),
            }
        }
        self.target.write_all(&bulk[written - bytes.len()..]).map_err(|error| lost(&error))
    }
}

/// A connection that does not work any more.
pub fn lost(error: &std::io::Error) -> Error {
    use std::io::ErrorKind as Io;
    let why = match error.kind() {
        Io::UnexpectedEof => "the other side has closed it".to_owned(),
        Io::WouldBlock | Io::TimedOut => "the other side is silent".to_owned(),
        _ => error.to_string(),
    };
    Error::new(Kind::Unavailable, format!("the connection was lost: {why}"))
}

fn corrupt(message: &'static str) -> Error {
    Error::new(Kind::Corrupt, message)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::keys::{Keys, Side, transcript};
    use crate::secret::Secret;

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum TestKind {
        Offer = 1,
        Blocks = 4,
        Wait = 11,
    }

    impl Kinds for TestKind {
        const ALL: &'static [Self] = &[TestKind::Offer, TestKind::Blocks, TestKind::Wait];

        fn code(self) -> u8 {
            self as u8
        }
    }

    type Frame = super::Frame<TestKind>;

    fn keys(side: Side) -> Keys {
        Keys::new(&Secret::new([3; 16]).unwrap(), &transcript(&[b"test"]), side).unwrap()
    }

    fn sealed(frames: &[Frame]) -> Vec<Vec<u8>> {
        let mut sealer = Sealer::new(keys(Side::Client).own);
        frames.iter().map(|frame| sealer.seal(frame)).collect()
    }

    fn reader(bytes: &[u8], side: Side) -> FrameReader<&[u8]> {
        FrameReader::new(Opener::new(keys(side).other), bytes)
    }

    fn frame(kind: TestKind, message: Vec<u8>) -> Frame {
        Frame { kind, transfer: 3, offset: 1 << 40, message, bulk_bytes: 12 }
    }

    fn frames() -> impl Strategy<Value = Vec<Frame>> {
        let kind = prop::sample::select(TestKind::ALL);
        let message = proptest::collection::vec(any::<u8>(), 0..300);
        let one = (kind, any::<u64>(), any::<u64>(), message, 0..=BULK_BYTES);
        let one = one.prop_map(|(kind, transfer, offset, message, bulk_bytes)| Frame {
            kind,
            transfer,
            offset,
            message,
            bulk_bytes,
        });
        proptest::collection::vec(one, 1..5)
    }

    proptest! {
        #[test]
        fn what_was_sealed_is_read(frames in frames()) {
            let bytes = sealed(&frames).concat();
            let mut reader = reader(&bytes, Side::Server);
            for frame in &frames {
                prop_assert_eq!(&reader.read::<TestKind>().unwrap(), frame);
            }
            prop_assert_eq!(reader.read::<TestKind>().unwrap_err().kind(), Kind::Unavailable);
        }

        #[test]
        fn a_changed_bit_is_noticed_in_its_frame(
            frames in frames(), at in any::<prop::sample::Index>(), bit in 0..8
        ) {
            let sealed = sealed(&frames);
            let mut bytes = sealed.concat();
            let at = at.index(bytes.len());
            bytes[at] ^= 1u8 << bit;
            let mut begin = 0;
            let whole = sealed.iter().take_while(|frame| { begin += frame.len(); begin <= at }).count();
            let mut reader = reader(&bytes, Side::Server);
            for frame in &frames[..whole] {
                prop_assert_eq!(&reader.read::<TestKind>().unwrap(), frame);
            }
            prop_assert_eq!(reader.read::<TestKind>().unwrap_err().kind(), Kind::Corrupt);
        }
    }

    #[test]
    fn frames_cannot_be_left_out_repeated_swapped_or_reflected() {
        let parts = sealed(&[frame(TestKind::Offer, vec![1]), frame(TestKind::Blocks, vec![2])]);
        let (first, second) = (&parts[0][..], &parts[1][..]);
        for hostile in [second.to_vec(), [first, first].concat(), [second, first].concat()] {
            let mut reader = reader(&hostile, Side::Server);
            let refused = reader.read::<TestKind>().and_then(|_| reader.read::<TestKind>());
            assert_eq!(refused.unwrap_err().kind(), Kind::Corrupt);
        }
        assert_eq!(reader(first, Side::Client).read::<TestKind>().unwrap_err().kind(), Kind::Corrupt);
        // The message of one frame under the header of another.
        let spliced = [&first[..HEADER_BYTES], &second[HEADER_BYTES..]].concat();
        assert_eq!(reader(&spliced, Side::Server).read::<TestKind>().unwrap_err().kind(), Kind::Corrupt);
    }

    #[test]
    fn nothing_is_waited_for_that_a_stranger_asks_for() {
        let mut forged = [0; HEADER_BYTES];
        forged[4..12].fill(0xff);
        // The source has no more than the header: had the message been read, the error were another.
        assert_eq!(reader(&forged, Side::Server).read::<TestKind>().unwrap_err().kind(), Kind::Corrupt);
    }

    #[test]
    fn even_who_knows_the_keys_is_bounded() {
        let signer = keys(Side::Client).own;
        let forge = |change: fn(&mut [u8])| {
            let mut bytes = sealed(&[frame(TestKind::Wait, Vec::new())]).concat();
            change(&mut bytes[..SIGNED_BYTES]);
            let tag = signer.tag(&[b"header", &[0; 8], &bytes[..SIGNED_BYTES]]);
            bytes[SIGNED_BYTES..].copy_from_slice(&tag);
            reader(&bytes, Side::Server).read::<TestKind>().unwrap_err().kind()
        };
        assert_eq!(forge(|bytes| bytes[6] = 2), Kind::Corrupt);
        assert_eq!(forge(|bytes| bytes[11] = 8), Kind::Corrupt);
        assert_eq!(forge(|bytes| bytes[2] = 1), Kind::Corrupt);
        assert_eq!(forge(|bytes| bytes[12] = 1), Kind::Corrupt);
        assert_eq!(forge(|bytes| bytes[1] = 77), Kind::Unsupported);
        assert_eq!(forge(|bytes| bytes[0] = 2), Kind::Unsupported);
    }
}
