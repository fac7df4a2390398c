//! The fields of the entries, and nothing about what must be true of them.

use std::borrow::Cow;

use crate::{Error, Kind, Result};

/// A fixed-width, little-endian entry of a table.
pub trait Entry: Sized {
    /// Bytes of one entry.
    const BYTES: usize;

    /// Appends the entry.
    fn write(&self, to: &mut Vec<u8>);

    /// Reads an entry from its `BYTES` bytes. A reserved field that is set, or a kind that this
    /// release does not know, is [`Kind::Unsupported`].
    fn read(bytes: &[u8]) -> Result<Self>;
}

/// The bytes of `entries`.
pub fn pack<T: Entry>(entries: &[T]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(entries.len() * T::BYTES);
    entries.iter().for_each(|entry| entry.write(&mut bytes));
    bytes
}

/// The entries in `bytes`, one by one; an error names the entry.
pub fn unpack<T: Entry>(bytes: &[u8]) -> impl Iterator<Item = Result<T>> + '_ {
    let read =
        |(index, bytes)| T::read(bytes).map_err(|error: Error| error.with("entry", format!("{index}")));
    bytes.chunks_exact(T::BYTES).enumerate().map(read)
}

/// One data file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileEntry {
    /// The process that wrote it.
    pub process: u32,
    /// Its number among the files of that process.
    pub sequence: u32,
    /// Where it is: 0 for the directory of the table, else the number of a place that the record lists.
    pub location: u32,
    /// Its length.
    pub file_bytes: u64,
    /// Bytes of its header: where its tensors begin.
    pub data_start: u64,
    /// Index of the checksum of its first block.
    pub first_block: u64,
}

impl FileEntry {
    /// The name of the file in the directory of its checkpointable.
    pub fn name(&self) -> String {
        format!("p{:05}-{:03}.safetensors", self.process, self.sequence)
    }
}

impl Entry for FileEntry {
    const BYTES: usize = 64;

    fn write(&self, to: &mut Vec<u8>) {
        words_of(to, &[self.process, self.sequence, self.location, 0]);
        longs_of(to, &[self.file_bytes, self.data_start, self.first_block, 0, 0, 0]);
    }

    fn read(bytes: &[u8]) -> Result<Self> {
        let mut fields = Fields(bytes);
        let (process, sequence, location) = (fields.word(), fields.word(), fields.word());
        refuse_reserved(fields.word() != 0, "flags of a data file")?;
        let (file_bytes, data_start, first_block) = (fields.long(), fields.long(), fields.long());
        refuse_reserved(fields.long() != 0, "a reserved field of a data file")?;
        refuse_reserved(fields.long() != 0 || fields.long() != 0, "a strong hash of a data file")?;
        Ok(Self { process, sequence, location, file_bytes, data_start, first_block })
    }
}

/// How the chunks of an array are arranged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArrayKind {
    /// A regular grid in row-major order.
    Grid,
    /// Any partition into boxes, sorted by offset.
    Boxes,
    /// A regular grid in row-major order whose chunks are found by arithmetic, in runs.
    Runs,
    /// Boxes that do not overlap, sorted by offset, which need not contain all of the array.
    PartialBoxes,
}

/// One array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArrayEntry {
    /// How its chunks are arranged.
    pub kind: ArrayKind,
    /// Number of its dimensions, as stored.
    pub ndim: u32,
    /// Width of one element, as stored.
    pub item_bits: u32,
    /// Index of its first chunk.
    pub first_chunk: u64,
    /// Number of its entries in the section `chunks`: that of its chunks, none if they are in runs.
    pub chunk_count: u64,
    /// Index of its first entry in the section `dims`.
    pub first_dim: u64,
    /// Number of its entries there.
    pub dim_count: u64,
}

impl Entry for ArrayEntry {
    const BYTES: usize = 48;

    fn write(&self, to: &mut Vec<u8>) {
        let kind = match self.kind {
            ArrayKind::Grid => 0,
            ArrayKind::Boxes => 1,
            ArrayKind::Runs => 2,
            ArrayKind::PartialBoxes => 3,
        };
        words_of(to, &[kind, self.ndim, self.item_bits, 0]);
        longs_of(to, &[self.first_chunk, self.chunk_count, self.first_dim, self.dim_count]);
    }

    fn read(bytes: &[u8]) -> Result<Self> {
        let mut fields = Fields(bytes);
        let kind = match fields.word() {
            0 => ArrayKind::Grid,
            1 => ArrayKind::Boxes,
            2 => ArrayKind::Runs,
            3 => ArrayKind::PartialBoxes,
            other => return Err(unsupported(format!("arrangement {other} of the chunks of an array"))),
        };
        let (ndim, item_bits) = (fields.word(), fields.word());
        refuse_reserved(fields.word() != 0, "a reserved field of an array")?;
        let (first_chunk, chunk_count) = (fields.long(), fields.long());
        let (first_dim, dim_count) = (fields.long(), fields.long());
        Ok(Self { kind, ndim, item_bits, first_chunk, chunk_count, first_dim, dim_count })
    }
}

/// One chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkEntry {
    /// Index of its data file.
    pub file: u32,
    /// Offset of its first byte in that file.
    pub offset: u64,
    /// Its length in bytes.
    pub length: u64,
}

impl Entry for ChunkEntry {
    const BYTES: usize = 24;

    fn write(&self, to: &mut Vec<u8>) {
        words_of(to, &[self.file, 0]);
        longs_of(to, &[self.offset, self.length]);
    }

    fn read(bytes: &[u8]) -> Result<Self> {
        let mut fields = Fields(bytes);
        let (file, codec) = (fields.word(), fields.word());
        refuse_reserved(codec != 0, "the codec of a chunk")?;
        Ok(Self { file, offset: fields.long(), length: fields.long() })
    }
}

impl Entry for u64 {
    const BYTES: usize = 8;

    fn write(&self, to: &mut Vec<u8>) {
        longs_of(to, &[*self]);
    }

    fn read(bytes: &[u8]) -> Result<Self> {
        Ok(Fields(bytes).long())
    }
}

/// Reads fields from the front; the bytes of an entry always suffice.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn word(&mut self) -> u32 {
        self.take().map_or(0, u32::from_le_bytes)
    }

    fn long(&mut self) -> u64 {
        self.take().map_or(0, u64::from_le_bytes)
    }

    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (field, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*field)
    }
}

fn words_of(to: &mut Vec<u8>, words: &[u32]) {
    words.iter().for_each(|word| to.extend_from_slice(&word.to_le_bytes()));
}

fn longs_of(to: &mut Vec<u8>, longs: &[u64]) {
    longs.iter().for_each(|long| to.extend_from_slice(&long.to_le_bytes()));
}

fn refuse_reserved(is_set: bool, what: &'static str) -> Result<()> {
    if is_set { Err(unsupported(what.to_owned())) } else { Ok(()) }
}

fn unsupported(what: String) -> Error {
    let message: Cow<'static, str> = format!("{what}: unknown to this release, a newer one wrote it").into();
    Error::new(Kind::Unsupported, message)
}
