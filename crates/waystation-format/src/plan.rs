//! Plans: what Python asks of the engine, as records of int64 words, one after another.
//!
//! `waystation/_plans.py` makes them, and `tests/vectors/plans.json` holds both ends to the same fields.
//! Invariants: a plan makes nobody allocate more than a small multiple of its length; sizes, offsets and
//! ordinals are not negative. Whether they fit each other is for those to check who do what the records say.

use crate::{Error, Kind, Result};

/// More axes than any array library has.
const MOST_AXES: u64 = 64;

/// One kind of record.
pub trait Record<'a>: Sized {
    /// The next record of a plan.
    fn take(words: &mut Words<'a>) -> Result<Self>;
}

/// Makes something of every record of a plan and its number. An error says which `record` it is about.
pub fn each<'a, R: Record<'a>, T>(
    words: &'a [i64],
    mut make: impl FnMut(usize, R) -> Result<T>,
) -> Result<Vec<T>> {
    let mut left = Words(words);
    let mut made = Vec::new();
    while !left.0.is_empty() {
        let number = made.len();
        let one = R::take(&mut left).and_then(|record| make(number, record));
        made.push(one.map_err(|error| error.with("record", number.to_string()))?);
    }
    Ok(made)
}

/// Reads a box of a stored chunk.
#[derive(Debug, PartialEq, Eq)]
pub struct Read<'a> {
    /// The number of the file.
    pub file: u64,
    /// Where the chunk begins in it.
    pub chunk_offset: u64,
    /// The box, and where it goes.
    pub part: Part<'a>,
}

/// Decodes a chunk in memory, of which a box is wanted.
#[derive(Debug, PartialEq, Eq)]
pub struct Decode<'a> {
    /// Where the encoded chunk is.
    pub source: usize,
    /// Its bytes.
    pub nbytes: usize,
    /// Whether it is a zstd frame, and not the bytes themselves.
    pub is_compressed: bool,
    /// Whether its last four bytes are the CRC-32C of the others.
    pub has_checksum: bool,
    /// The box, and where it goes.
    pub part: Part<'a>,
}

/// A box of a chunk, and where in memory it goes. Without axes, the chunk is one item.
#[derive(Debug, PartialEq, Eq)]
pub struct Part<'a> {
    /// Bytes of an element.
    pub item_bytes: u64,
    /// Of the whole chunk.
    pub chunk_shape: Vec<u64>,
    /// Where in the chunk the box begins.
    pub offset: Vec<u64>,
    /// How large it is.
    pub shape: Vec<u64>,
    /// The address of its first element, as a bit pattern.
    pub destination: usize,
    /// Bytes from one element there to the next.
    pub strides: &'a [i64],
}

/// Writes an array that is gathered from blocks of memory. Without axes, it is one item.
#[derive(Debug, PartialEq, Eq)]
pub struct Segment<'a> {
    /// Where it begins in its file.
    pub file_offset: u64,
    /// Bytes of an element.
    pub item_bytes: u64,
    /// Of the array.
    pub shape: Vec<u64>,
    /// What it is made of.
    pub blocks: Vec<Block<'a>>,
}

/// A block of memory.
#[derive(Debug, PartialEq, Eq)]
pub struct Block<'a> {
    /// The device whose memory it is; `None` for host memory.
    pub device: Option<u32>,
    /// The address of its first element, as a bit pattern.
    pub source: usize,
    /// Where in the array it begins.
    pub offset: Vec<u64>,
    /// How large it is.
    pub shape: Vec<u64>,
    /// Bytes from one element to the next.
    pub strides: &'a [i64],
}

/// Copies contiguous host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostCopy {
    /// Address of the first byte to write.
    pub destination: usize,
    /// Address of the first byte to read.
    pub source: usize,
    /// Their number.
    pub nbytes: usize,
}

/// Copies one array, or a part of one, from a device: rows at a constant step, one after another on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArrayCopy {
    /// Ordinal of the device.
    pub device: u32,
    /// Where the first row goes in host memory, as a bit pattern.
    pub destination: usize,
    /// Where it begins on the device, as a bit pattern.
    pub source: u64,
    /// Contiguous bytes of each row.
    pub row_bytes: usize,
    /// Number of rows.
    pub rows: usize,
    /// Bytes from one row to the next on the device; matters only if there are several.
    pub source_step: i64,
}

impl ArrayCopy {
    /// Bytes of all rows; those of a copy that was checked do not overflow.
    pub fn nbytes(&self) -> usize {
        self.row_bytes.saturating_mul(self.rows)
    }
}

/// Offers a block of memory to the other hosts of a runtime.
#[derive(Debug, PartialEq, Eq)]
pub struct Offer {
    /// What the block is known by.
    pub key: Key,
    /// Where it is.
    pub address: usize,
    /// Its bytes.
    pub nbytes: usize,
    /// What Python releases it by.
    pub number: u64,
}

/// Fetches a block from another host of a runtime.
#[derive(Debug, PartialEq, Eq)]
pub struct Fetch {
    /// What the block is known by.
    pub key: Key,
    /// Where it goes.
    pub address: usize,
    /// Its bytes.
    pub nbytes: usize,
}

/// What a block between hosts is known by.
#[derive(Debug, PartialEq, Eq)]
pub struct Key {
    /// The run of a program.
    pub run: u64,
    /// Of its island.
    pub epoch: u64,
    /// The transfer within the run.
    pub transfer: u64,
}

impl<'a> Record<'a> for Read<'a> {
    fn take(words: &mut Words<'a>) -> Result<Self> {
        Ok(Self {
            file: words.unsigned("file")?,
            chunk_offset: words.unsigned("chunk_offset")?,
            part: Part::take(words)?,
        })
    }
}

impl<'a> Record<'a> for Decode<'a> {
    fn take(words: &mut Words<'a>) -> Result<Self> {
        Ok(Self {
            source: words.size("source")?,
            nbytes: words.size("nbytes")?,
            is_compressed: words.flag("is_compressed")?,
            has_checksum: words.flag("has_checksum")?,
            part: Part::take(words)?,
        })
    }
}

impl<'a> Record<'a> for Part<'a> {
    fn take(words: &mut Words<'a>) -> Result<Self> {
        let item_bytes = words.unsigned("item_bytes")?;
        let axes = words.axes()?;
        Ok(Self {
            item_bytes,
            chunk_shape: words.extents("chunk_shape", axes)?,
            offset: words.extents("offset", axes)?,
            shape: words.extents("shape", axes)?,
            destination: words.next("destination")? as usize,
            strides: words.list("strides", axes)?,
        })
    }
}

impl<'a> Record<'a> for Segment<'a> {
    fn take(words: &mut Words<'a>) -> Result<Self> {
        let file_offset = words.unsigned("file_offset")?;
        let item_bytes = words.unsigned("item_bytes")?;
        let axes = words.axes()?;
        let shape = words.extents("shape", axes)?;
        let count = words.unsigned("block_count")?;
        let block = |_| {
            Ok(Block {
                device: words.device()?,
                source: words.next("source")? as usize,
                offset: words.extents("offset", axes)?,
                shape: words.extents("shape", axes)?,
                strides: words.list("strides", axes)?,
            })
        };
        Ok(Self { file_offset, item_bytes, shape, blocks: (0..count).map(block).collect::<Result<_>>()? })
    }
}

impl Record<'_> for HostCopy {
    fn take(words: &mut Words<'_>) -> Result<Self> {
        Ok(Self {
            destination: words.size("destination")?,
            source: words.size("source")?,
            nbytes: words.size("nbytes")?,
        })
    }
}

impl Record<'_> for ArrayCopy {
    fn take(words: &mut Words<'_>) -> Result<Self> {
        Ok(Self {
            device: words
                .device()?
                .ok_or_else(|| invalid("the source of a copy is on no device".to_owned()))?,
            destination: words.next("destination")? as usize,
            source: words.next("source")? as u64,
            row_bytes: words.size("row_bytes")?,
            rows: words.size("rows")?,
            source_step: words.next("source_step")?,
        })
    }
}

impl Record<'_> for Offer {
    fn take(words: &mut Words<'_>) -> Result<Self> {
        Ok(Self {
            key: Key::take(words)?,
            address: words.size("address")?,
            nbytes: words.size("nbytes")?,
            number: words.unsigned("number")?,
        })
    }
}

impl Record<'_> for Fetch {
    fn take(words: &mut Words<'_>) -> Result<Self> {
        Ok(Self { key: Key::take(words)?, address: words.size("address")?, nbytes: words.size("nbytes")? })
    }
}

impl Record<'_> for Key {
    fn take(words: &mut Words<'_>) -> Result<Self> {
        Ok(Self {
            run: words.unsigned("run")?,
            epoch: words.unsigned("epoch")?,
            transfer: words.unsigned("transfer")?,
        })
    }
}

/// The words of a plan that are still to be taken.
pub struct Words<'a>(&'a [i64]);

impl<'a> Words<'a> {
    fn list(&mut self, field: &'static str, count: usize) -> Result<&'a [i64]> {
        let Some((list, left)) = self.0.split_at_checked(count) else {
            return Err(invalid(format!("the plan ends inside a record, at its {field}")));
        };
        self.0 = left;
        Ok(list)
    }

    fn next(&mut self, field: &'static str) -> Result<i64> {
        Ok(self.list(field, 1)?[0])
    }

    fn unsigned(&mut self, field: &'static str) -> Result<u64> {
        unsigned(self.next(field)?, field)
    }

    /// An address or a size in memory.
    fn size(&mut self, field: &'static str) -> Result<usize> {
        let word = self.next(field)?;
        usize::try_from(word).map_err(|_| invalid(format!("the plan has the {field} {word}")))
    }

    fn flag(&mut self, field: &'static str) -> Result<bool> {
        match self.next(field)? {
            0 => Ok(false),
            1 => Ok(true),
            word => Err(invalid(format!("the plan has the {field} {word}, which is neither 0 nor 1"))),
        }
    }

    fn device(&mut self) -> Result<Option<u32>> {
        match self.next("device")? {
            -1 => Ok(None),
            word => u32::try_from(word).map(Some).map_err(|_| {
                invalid(format!("the plan has the device {word}, which is neither -1 nor an ordinal"))
            }),
        }
    }

    fn axes(&mut self) -> Result<usize> {
        match self.unsigned("ndim")? {
            axes @ ..=MOST_AXES => Ok(axes as usize),
            axes => Err(invalid(format!("the plan has an array of {axes} axes"))),
        }
    }

    fn extents(&mut self, field: &'static str, axes: usize) -> Result<Vec<u64>> {
        self.list(field, axes)?.iter().map(|&word| unsigned(word, field)).collect()
    }
}

fn unsigned(word: i64, field: &str) -> Result<u64> {
    u64::try_from(word).map_err(|_| invalid(format!("the plan has the negative {field} {word}")))
}

fn invalid(message: String) -> Error {
    Error::new(Kind::InvalidInput, message)
}
