//! The table of contents of a slot: which box of which array lies where in its data.
//!
//! Invariants: entries are sorted by offset and do not overlap; no key (path and box) comes twice; every box
//! lies in its array, all bytes in the data. What the bytes mean is for those who wrote them: a table vouches
//! for places, not for dtypes.

use super::fields::Fields;
use crate::{Error, Kind, Result};

/// More axes than any array library has.
const MOST_AXES: usize = 64;
/// What data begin at a multiple of.
const ALIGNMENT_BYTES: u64 = 64;
/// Data that are at least so long begin at a page when [`place`] decides.
const PAGED_BYTES: u64 = 64 << 10;

/// A box of an array.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ItemBox {
    /// The shape of the whole array.
    pub array_shape: Vec<u64>,
    /// Where the box begins.
    pub offset: Vec<u64>,
    /// How far it reaches.
    pub shape: Vec<u64>,
}

/// One box of one array, and where its bytes are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The key path of the array in the state.
    pub path: String,
    /// The name of the type of its elements.
    pub dtype: String,
    /// Which part of it this is.
    pub item_box: ItemBox,
    /// Where its bytes begin in the data.
    pub offset: u64,
    /// How many they are.
    pub length: u64,
}

impl Entry {
    fn write(&self, to: &mut Vec<u8>) -> Result<()> {
        let narrow = |length: usize| u16::try_from(length).map_err(|_| corrupt("a key path is too long"));
        let path_bytes = narrow(self.path.len())?;
        let dtype_bytes = u8::try_from(self.dtype.len()).map_err(|_| corrupt("a dtype is too long"))?;
        let begin = to.len();
        let ItemBox { array_shape, offset, shape } = &self.item_box;
        to.extend_from_slice(&[0; 4]);
        to.extend_from_slice(&path_bytes.to_le_bytes());
        to.extend_from_slice(&[dtype_bytes, array_shape.len().min(usize::from(u8::MAX)) as u8]);
        for long in [&self.offset, &self.length].into_iter().chain(array_shape).chain(offset).chain(shape) {
            to.extend_from_slice(&long.to_le_bytes());
        }
        to.extend_from_slice(self.path.as_bytes());
        to.extend_from_slice(self.dtype.as_bytes());
        to.resize(to.len().next_multiple_of(8), 0);
        let entry_bytes = ((to.len() - begin) as u32).to_le_bytes();
        to[begin..begin + 4].copy_from_slice(&entry_bytes);
        Ok(())
    }

    fn read(fields: &mut Fields<'_>) -> Option<Self> {
        let entry_bytes = Fields(fields.0).word()?;
        let mut own = Fields(fields.bytes(entry_bytes as usize)?);
        own.word()?;
        let (path_bytes, dtype_bytes, ndim) = (own.half()?, own.byte()?, usize::from(own.byte()?));
        let (offset, length) = (own.long()?, own.long()?);
        let item_box =
            ItemBox { array_shape: own.longs(ndim)?, offset: own.longs(ndim)?, shape: own.longs(ndim)? };
        let path = own.text(usize::from(path_bytes))?.to_owned();
        let dtype = own.text(usize::from(dtype_bytes))?.to_owned();
        Some(Self { path, dtype, item_box, offset, length })
    }
}

/// The table of contents of these entries.
///
/// InvalidInput if they break a rule.
pub fn encode_contents(entries: &[Entry], data_bytes: u64) -> Result<Vec<u8>> {
    let refused = |error: Error| error.with_kind(Kind::InvalidInput);
    check(entries, data_bytes).map_err(refused)?;
    let mut contents = Vec::new();
    contents.extend_from_slice(&(entries.len() as u64).to_le_bytes());
    for entry in entries {
        entry.write(&mut contents).map_err(|error| refused(error).with("array", &*entry.path))?;
    }
    Ok(contents)
}

/// The entries of a table of contents, all rules checked.
pub fn decode_contents(contents: &[u8], data_bytes: u64) -> Result<Vec<Entry>> {
    let mut fields = Fields(contents);
    let count = fields.long().ok_or_else(|| corrupt("a table of contents is cut off"))?;
    let mut entries = Vec::new();
    while !fields.0.is_empty() {
        let before = fields.0;
        let entry = Entry::read(&mut fields);
        let entry = entry.ok_or_else(|| at(corrupt("an entry has no meaning"), entries.len()))?;
        let mut again = Vec::new();
        entry.write(&mut again)?;
        if again != before[..before.len() - fields.0.len()] {
            return Err(at(corrupt("an entry contradicts itself"), entries.len()));
        }
        entries.push(entry);
    }
    if entries.len() as u64 != count {
        let message = format!("a table of contents should have {count} entries, but has {}", entries.len());
        return Err(Error::new(Kind::Corrupt, message));
    }
    check(&entries, data_bytes)?;
    Ok(entries)
}

/// Where data of these lengths go, one after another, and how long that makes the data: large ones begin at
/// pages, so that they can be mapped and read past the cache. `None` if that cannot be expressed.
pub fn place(lengths: impl IntoIterator<Item = u64>) -> Option<(Vec<u64>, u64)> {
    let mut end = 0u64;
    let mut offsets = Vec::new();
    for length in lengths {
        let alignment = if length >= PAGED_BYTES { crate::page::PAGE_BYTES as u64 } else { ALIGNMENT_BYTES };
        let offset = end.checked_next_multiple_of(alignment)?;
        end = offset.checked_add(length)?;
        offsets.push(offset);
    }
    Some((offsets, end))
}

fn check(entries: &[Entry], data_bytes: u64) -> Result<()> {
    let mut position = 0u64;
    for (index, entry) in entries.iter().enumerate() {
        check_box(&entry.item_box).map_err(|error| at(error, index).with("array", &*entry.path))?;
        let end = entry.offset.checked_add(entry.length).filter(|&end| end <= data_bytes);
        let fault = match end {
            None => "an array reaches beyond the data of its slot",
            Some(_) if entry.offset < position => "arrays in a slot overlap, or are not in order",
            Some(_) if !entry.offset.is_multiple_of(ALIGNMENT_BYTES) => "an array in a slot is not aligned",
            Some(end) => {
                position = end;
                continue;
            }
        };
        return Err(at(corrupt(fault), index).with("array", &*entry.path));
    }
    let mut keys: Vec<_> = entries.iter().map(|entry| (&entry.path, &entry.item_box)).collect();
    keys.sort_unstable();
    match keys.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(corrupt("the same box of an array is in a slot twice").with("array", &**pair[0].0)),
        None => Ok(()),
    }
}

fn check_box(item_box: &ItemBox) -> Result<()> {
    let ItemBox { array_shape, offset, shape } = item_box;
    let ndim = array_shape.len();
    if ndim > MOST_AXES || offset.len() != ndim || shape.len() != ndim {
        return Err(corrupt("a box has too many axes, or another number of them than its array"));
    }
    let lies_inside =
        |axis: usize| offset[axis].checked_add(shape[axis]).is_some_and(|end| end <= array_shape[axis]);
    if (0..ndim).all(lies_inside) { Ok(()) } else { Err(corrupt("a box reaches beyond its array")) }
}

fn at(error: Error, index: usize) -> Error {
    error.with("entry", index.to_string())
}

fn corrupt(message: &'static str) -> Error {
    Error::new(Kind::Corrupt, message)
}
