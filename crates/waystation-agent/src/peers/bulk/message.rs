//! The messages in frames. Each has one form: what is left over, or means nothing, is Corrupt.

use waystation_format::checksum::crc64;
use waystation_format::slot::{Id, Key, Sums, Version};
use waystation_format::{Error, Kind, Result};

use crate::peers::MESSAGE_BYTES;

/// The longest name of a shard.
const SHARD_LIMIT_BYTES: usize = 1024;
/// The most blocks that one message can name.
pub const NAMED_BLOCKS: usize = MESSAGE_BYTES / 8;

/// A version and how large it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// What it is.
    pub key: Key,
    /// Length of its table of contents.
    pub contents_bytes: u64,
    /// Length of its data.
    pub data_bytes: u64,
}

/// A version that somebody wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fetch {
    /// What it is.
    pub key: Key,
    /// The digest that it must have; whatever is there, if there is none.
    pub digest: Option<u64>,
}

/// The digest by which the frames of a transfer name the version.
pub fn transfer_of(key: &Key) -> u64 {
    let mut bytes = key.run.0.to_vec();
    put_key(&mut bytes, key);
    crc64(&bytes)
}

impl Offer {
    /// Its bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(self.contents_bytes.to_le_bytes());
        bytes.extend(self.data_bytes.to_le_bytes());
        put_key(&mut bytes, &self.key);
        bytes
    }

    /// Reads it, of a connection of that run.
    pub fn decode(bytes: &[u8], run: Id) -> Result<Self> {
        let mut fields = Fields(bytes);
        let (contents_bytes, data_bytes) = (fields.long()?, fields.long()?);
        Ok(Self { contents_bytes, data_bytes, key: fields.key(run)? })
    }
}

impl Fetch {
    /// Its bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(u64::from(self.digest.is_some()).to_le_bytes());
        bytes.extend(self.digest.unwrap_or(0).to_le_bytes());
        put_key(&mut bytes, &self.key);
        bytes
    }

    /// Reads it, of a connection of that run.
    pub fn decode(bytes: &[u8], run: Id) -> Result<Self> {
        let mut fields = Fields(bytes);
        let digest = match (fields.long()?, fields.long()?) {
            (0, 0) => None,
            (1, digest) => Some(digest),
            _ => return Err(malformed()),
        };
        Ok(Self { digest, key: fields.key(run)? })
    }
}

/// The bytes of some numbers.
pub fn encode_longs(longs: &[u64]) -> Vec<u8> {
    longs.iter().flat_map(|long| long.to_le_bytes()).collect()
}

/// Reads numbers to the end of a message.
pub fn decode_longs(bytes: &[u8]) -> Result<Vec<u64>> {
    let (longs, rest) = bytes.as_chunks();
    if !rest.is_empty() {
        return Err(malformed());
    }
    Ok(longs.iter().map(|&long| u64::from_le_bytes(long)).collect())
}

/// Reads so many numbers.
pub fn decode_exactly<const N: usize>(bytes: &[u8]) -> Result<[u64; N]> {
    decode_longs(bytes)?.try_into().map_err(|_| malformed())
}

/// The bytes of what vouches for a version.
pub fn encode_sums(sums: Sums) -> Vec<u8> {
    encode_longs(&[sums.contents, sums.digest])
}

/// Reads them.
pub fn decode_sums(bytes: &[u8]) -> Result<Sums> {
    decode_exactly(bytes).map(|[contents, digest]| Sums { contents, digest })
}

fn put_key(bytes: &mut Vec<u8>, key: &Key) {
    bytes.extend(key.version.epoch.to_le_bytes());
    bytes.extend(key.version.step.to_le_bytes());
    bytes.extend_from_slice(key.shard.as_bytes());
}

/// What is left of a message.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn long(&mut self) -> Result<u64> {
        let (long, rest) = self.0.split_first_chunk().ok_or_else(malformed)?;
        self.0 = rest;
        Ok(u64::from_le_bytes(*long))
    }

    /// A key, which is the end of a message.
    fn key(mut self, run: Id) -> Result<Key> {
        let version = Version { epoch: self.long()?, step: self.long()? };
        let shard = std::str::from_utf8(self.0).map_err(|_| malformed())?;
        if !(1..=SHARD_LIMIT_BYTES).contains(&shard.len()) {
            return Err(malformed());
        }
        Ok(Key { run, shard: shard.to_owned(), version })
    }
}

fn malformed() -> Error {
    Error::new(Kind::Corrupt, "a message of another agent is not well formed")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const RUN: Id = Id([4; 16]);

    fn key() -> impl Strategy<Value = Key> {
        ("[a-zß/]{1,40}", any::<u64>(), any::<u64>()).prop_map(|(shard, epoch, step)| Key {
            run: RUN,
            shard,
            version: Version { epoch, step },
        })
    }

    proptest! {
        #[test]
        fn messages_are_what_was_said(
            key in key(), sizes in any::<(u64, u64)>(), digest in any::<Option<u64>>(), longs in any::<Vec<u64>>()
        ) {
            let offer = Offer { key: key.clone(), contents_bytes: sizes.0, data_bytes: sizes.1 };
            prop_assert_eq!(&Offer::decode(&offer.encode(), RUN).unwrap(), &offer);
            let fetch = Fetch { key, digest };
            prop_assert_eq!(&Fetch::decode(&fetch.encode(), RUN).unwrap(), &fetch);
            prop_assert_eq!(decode_longs(&encode_longs(&longs)).unwrap(), longs);
        }

        #[test]
        fn whatever_is_accepted_has_one_form(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            if let Ok(offer) = Offer::decode(&bytes, RUN) {
                prop_assert_eq!(offer.encode(), &bytes[..]);
            }
            if let Ok(fetch) = Fetch::decode(&bytes, RUN) {
                prop_assert_eq!(fetch.encode(), &bytes[..]);
            }
            if let Ok(longs) = decode_longs(&bytes) {
                prop_assert_eq!(encode_longs(&longs), &bytes[..]);
            }
        }

        #[test]
        fn versions_have_names_of_their_own(one in key(), other in key()) {
            prop_assert_eq!(one == other, transfer_of(&one) == transfer_of(&other));
        }
    }
}
