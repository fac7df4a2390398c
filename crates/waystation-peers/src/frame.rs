//! Frames: what goes over a connection that has much to carry.
//!
//! A frame is a header of 32 bytes, a message, and bulk: bytes straight from where they lie. Whoever receives bulk verifies
//! each block of it by the checksums in the message. Invariants: a header has one form; no message is longer than
//! [`MESSAGE_BYTES`], no bulk longer than [`BULK_BYTES`]. `docs/protocol-peers.md` specifies every byte.

use std::io::{IoSlice, Read, Write};

use waystation_format::{Error, Kind, Result};

/// Length of a header.
pub const HEADER_BYTES: usize = 32;
/// A message has at most so many bytes.
pub const MESSAGE_BYTES: usize = 64 * 1024;
/// What follows a message has at most so many.
pub const BULK_BYTES: usize = 64 << 20;

const VERSION: u8 = 2;

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

impl<K: Kinds> Frame<K> {
    /// The header and the message.
    fn encode(&self) -> Vec<u8> {
        debug_assert!(self.message.len() <= MESSAGE_BYTES && self.bulk_bytes <= BULK_BYTES);
        let mut bytes = Vec::with_capacity(HEADER_BYTES + self.message.len());
        bytes.extend([VERSION, self.kind.code(), 0, 0]);
        bytes.extend((self.message.len() as u32).to_le_bytes());
        bytes.extend((self.bulk_bytes as u32).to_le_bytes());
        bytes.extend([0; 4]);
        bytes.extend(self.transfer.to_le_bytes());
        bytes.extend(self.offset.to_le_bytes());
        bytes.extend_from_slice(&self.message);
        bytes
    }

    /// Reads a header: a frame without its message, and how long that is.
    fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<(Self, usize)> {
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
        let frame = Self { kind, transfer: long(16), offset: long(24), message: Vec::new(), bulk_bytes };
        Ok((frame, message_bytes))
    }
}

/// The frames that come in.
pub struct FrameReader<R> {
    /// Where bulk is read from, after its frame.
    pub source: R,
}

impl<R: Read> FrameReader<R> {
    /// The frames of a source.
    pub fn new(source: R) -> Self {
        Self { source }
    }

    /// The next frame, whose bulk is to be read from the source before the next.
    pub fn read<K: Kinds>(&mut self) -> Result<Frame<K>> {
        let mut bytes = [0; HEADER_BYTES];
        self.source.read_exact(&mut bytes).map_err(|error| lost(&error))?;
        let (mut frame, message_bytes) = Frame::decode(&bytes)?;
        frame.message = vec![0; message_bytes];
        self.source.read_exact(&mut frame.message).map_err(|error| lost(&error))?;
        Ok(frame)
    }
}

/// The frames that go out.
pub struct FrameWriter<W> {
    /// Where bulk is written to, after its frame.
    pub target: W,
}

impl<W: Write> FrameWriter<W> {
    /// Frames to a target.
    pub fn new(target: W) -> Self {
        Self { target }
    }

    /// Writes a frame, whose bulk is to be written to the target before the next.
    pub fn write<K: Kinds>(&mut self, frame: &Frame<K>) -> Result<()> {
        let bytes = frame.encode();
        self.target.write_all(&bytes).map_err(|error| lost(&error))
    }

    /// Writes a frame together with its bulk, in as few system calls as it takes.
    pub fn write_with<K: Kinds>(&mut self, frame: &Frame<K>, bulk: &[u8]) -> Result<()> {
        debug_assert!(frame.bulk_bytes == bulk.len());
        let bytes = frame.encode();
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
        fn what_was_written_is_read(frames in frames()) {
            let mut writer = FrameWriter::new(Vec::new());
            frames.iter().for_each(|frame| writer.write(frame).unwrap());
            let mut reader = FrameReader::new(&writer.target[..]);
            for frame in &frames {
                prop_assert_eq!(&reader.read::<TestKind>().unwrap(), frame);
            }
            prop_assert_eq!(reader.read::<TestKind>().unwrap_err().kind(), Kind::Unavailable);
        }

        #[test]
        fn whatever_is_accepted_has_one_form(position in 0..HEADER_BYTES, value in any::<u8>()) {
            let frame = Frame { kind: TestKind::Blocks, transfer: 3, offset: 1 << 40, message: vec![7; 9], bulk_bytes: 12 };
            let mut bytes = frame.encode();
            bytes[position] = value;
            if let Ok(read) = FrameReader::new(&bytes[..]).read::<TestKind>() {
                prop_assert_eq!(&read.encode()[..], &bytes[..HEADER_BYTES + read.message.len()]);
            }
        }
    }

    #[test]
    fn what_a_header_says_is_bounded_before_anything_is_read() {
        let forge = |change: fn(&mut [u8])| {
            let frame =
                Frame { kind: TestKind::Wait, transfer: 3, offset: 0, message: Vec::new(), bulk_bytes: 0 };
            let mut bytes = frame.encode();
            change(&mut bytes);
            // The source has no more than the header: had a message been read, the error were another.
            FrameReader::new(&bytes[..]).read::<TestKind>().unwrap_err().kind()
        };
        assert_eq!(forge(|bytes| bytes[6] = 2), Kind::Corrupt);
        assert_eq!(forge(|bytes| bytes[11] = 8), Kind::Corrupt);
        assert_eq!(forge(|bytes| bytes[2] = 1), Kind::Corrupt);
        assert_eq!(forge(|bytes| bytes[12] = 1), Kind::Corrupt);
        assert_eq!(forge(|bytes| bytes[1] = 77), Kind::Unsupported);
        assert_eq!(forge(|bytes| bytes[0] = 1), Kind::Unsupported);
    }
}
