//! What hosts say to each other in frames. Each message has one form: what is left over is Corrupt.

use waystation_format::{Error, Kind, Result};
use waystation_peers::{Kinds, MESSAGE_BYTES};

use crate::key::Key;

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameKind {
    /// The producer says where its memory is; the first that it says.
    Home = 1,
    /// The consumer wants blocks.
    Ask = 2,
    /// Bytes of a block, with their checksums.
    Block = 3,
    /// Where a block lies in the memory of the producer, which the consumer can read.
    Place = 4,
    /// A block will not come.
    Failed = 5,
    /// The consumer has blocks.
    Got = 6,
    /// The consumer does not want blocks any more.
    Cancel = 7,
}

impl Kinds for FrameKind {
    const ALL: &'static [Self] = &[
        FrameKind::Home,
        FrameKind::Ask,
        FrameKind::Block,
        FrameKind::Place,
        FrameKind::Failed,
        FrameKind::Got,
        FrameKind::Cancel,
    ];

    fn code(self) -> u8 {
        self as u8
    }
}

/// A frame: `transfer` is the number of the request that it answers, zero if it answers none.
pub type Frame = waystation_peers::Frame<FrameKind>;

const ASK_BYTES: usize = 6 * 8;
/// The most requests that one message has.
pub const MOST_ASKS: usize = MESSAGE_BYTES / ASK_BYTES;
/// The most numbers of requests that one message has.
pub const MOST_NUMBERS: usize = MESSAGE_BYTES / 8;

/// A block is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask {
    /// The number of the request, which the answer has.
    pub number: u64,
    /// Which block.
    pub key: Key,
    /// How long it is to be.
    pub nbytes: u64,
    /// Whether the consumer can read the producer's memory.
    pub can_read: bool,
}

/// Where the memory of a process is: which kernel, and which process of which of its namespaces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Home {
    /// The id of the boot, in two halves.
    pub boot: [u64; 2],
    /// The namespace of process ids.
    pub namespace: u64,
    /// The process.
    pub process: u64,
    /// The address of a word, and what it is: who reads it has found the process.
    pub mark: [u64; 2],
}

/// Where a block lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The address of its first byte.
    pub address: u64,
    /// The address of a word, and what it is as long as the block lies there.
    pub mark: [u64; 2],
}

/// The bytes of requests.
pub fn encode_asks(asks: &[Ask]) -> Vec<u8> {
    let words = asks.iter().flat_map(|ask| {
        let Key { run, epoch, transfer } = ask.key;
        [ask.number, run, epoch, transfer, ask.nbytes, u64::from(ask.can_read)]
    });
    encode_words(words)
}

/// Reads them.
pub fn decode_asks(bytes: &[u8]) -> Result<Vec<Ask>> {
    let words = decode_words(bytes)?;
    let (asks, rest) = words.as_chunks();
    if !rest.is_empty() {
        return Err(malformed());
    }
    let ask = |&[number, run, epoch, transfer, nbytes, can_read]: &[u64; 6]| {
        let can_read = match can_read {
            0 => false,
            1 => true,
            _ => return Err(malformed()),
        };
        Ok(Ask { number, key: Key { run, epoch, transfer }, nbytes, can_read })
    };
    asks.iter().map(ask).collect()
}

impl Home {
    /// Its bytes.
    pub fn encode(&self) -> Vec<u8> {
        let Home { boot: [high, low], namespace, process, mark: [address, value] } = *self;
        encode_words([high, low, namespace, process, address, value])
    }

    /// Reads it.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let [high, low, namespace, process, address, value] = decode_exactly(bytes)?;
        Ok(Self { boot: [high, low], namespace, process, mark: [address, value] })
    }
}

impl Place {
    /// Its bytes.
    pub fn encode(&self) -> Vec<u8> {
        encode_words([self.address, self.mark[0], self.mark[1]])
    }

    /// Reads it.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let [address, mark_address, mark] = decode_exactly(bytes)?;
        Ok(Self { address, mark: [mark_address, mark] })
    }
}

/// The bytes of numbers or checksums.
pub fn encode_words(words: impl IntoIterator<Item = u64>) -> Vec<u8> {
    words.into_iter().flat_map(u64::to_le_bytes).collect()
}

/// Reads them.
pub fn decode_words(bytes: &[u8]) -> Result<Vec<u64>> {
    let (words, rest) = bytes.as_chunks();
    if rest.is_empty() {
        Ok(words.iter().map(|word| u64::from_le_bytes(*word)).collect())
    } else {
        Err(malformed())
    }
}

fn decode_exactly<const N: usize>(bytes: &[u8]) -> Result<[u64; N]> {
    decode_words(bytes)?.try_into().map_err(|_| malformed())
}

fn malformed() -> Error {
    Error::new(Kind::Corrupt, "a message of another host is not well formed")
}

/// A frame that has no place where it comes.
pub fn unexpected(kind: FrameKind) -> Error {
    Error::new(Kind::Corrupt, "another host sent a frame that has no place there")
        .with("frame", format!("{kind:?}"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    prop_compose! {
        fn ask()(words in any::<[u64; 5]>(), can_read in any::<bool>()) -> Ask {
            let [number, run, epoch, transfer, nbytes] = words;
            Ask { number, key: Key { run, epoch, transfer }, nbytes, can_read }
        }
    }

    proptest! {
        #[test]
        fn messages_are_what_was_said(
            asks in proptest::collection::vec(ask(), 0..20), words in any::<[u64; 6]>(), numbers in any::<Vec<u64>>()
        ) {
            prop_assert_eq!(decode_asks(&encode_asks(&asks)).unwrap(), asks);
            prop_assert_eq!(decode_words(&encode_words(numbers.clone())).unwrap(), numbers);
            let [high, low, namespace, process, address, value] = words;
            let home = Home { boot: [high, low], namespace, process, mark: [address, value] };
            prop_assert_eq!(Home::decode(&home.encode()).unwrap(), home);
            let place = Place { address: high, mark: [low, namespace] };
            prop_assert_eq!(Place::decode(&place.encode()).unwrap(), place);
        }

        #[test]
        fn whatever_is_accepted_has_one_form(bytes in proptest::collection::vec(any::<u8>(), 0..120)) {
            if let Ok(asks) = decode_asks(&bytes) {
                prop_assert_eq!(encode_asks(&asks), &bytes[..]);
            }
            if let Ok(home) = Home::decode(&bytes) {
                prop_assert_eq!(home.encode(), &bytes[..]);
            }
            if let Ok(place) = Place::decode(&bytes) {
                prop_assert_eq!(place.encode(), &bytes[..]);
            }
            if let Ok(words) = decode_words(&bytes) {
                prop_assert_eq!(encode_words(words), &bytes[..]);
            }
        }
    }
}
