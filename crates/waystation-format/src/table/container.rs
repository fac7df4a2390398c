//! The container of a table file: a header page, then the sections, each on pages of its own.
//!
//! Invariants: where an entry lies follows from the header page alone; a section's pages follow the
//! section before at once, so the file has exactly the pages that its header implies; everything
//! that is not an entry is zero.

use std::ops::Range;

use super::{VERSION, rules};
use crate::page::{self, PAGE_BYTES, PAYLOAD_BYTES};
use crate::{Error, Kind, Result};

/// Which table a file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TableKind {
    /// The data files.
    Files,
    /// The arrays, their chunks and the extents of both.
    Chunks,
    /// The checksums of the blocks of the data files.
    Checksums,
}

impl TableKind {
    /// Every kind of table.
    pub const ALL: [TableKind; 3] = [TableKind::Files, TableKind::Chunks, TableKind::Checksums];

    /// The name, as Python knows it: the file is `<name>.bin`.
    pub fn name(self) -> &'static str {
        match self {
            TableKind::Files => "files",
            TableKind::Chunks => "chunks",
            TableKind::Checksums => "checksums",
        }
    }

    /// The table called `name`.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    fn magic(self) -> &'static [u8; 8] {
        match self {
            TableKind::Files => b"WSTFILES",
            TableKind::Chunks => b"WSTCHNKS",
            TableKind::Checksums => b"WSTCKSUM",
        }
    }

    /// Bytes of one entry, for each section.
    pub fn entry_bytes(self) -> &'static [usize] {
        match self {
            TableKind::Files => &[64],
            TableKind::Chunks => &[48, 24, 8],
            TableKind::Checksums => &[8],
        }
    }
}

/// Where the entries of one section lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Section {
    /// Bytes of one entry.
    pub entry_bytes: usize,
    /// Number of entries.
    pub entry_count: u64,
    /// Number of the first page.
    pub first_page: u64,
}

impl Section {
    fn entries_per_page(&self) -> u64 {
        (PAYLOAD_BYTES / self.entry_bytes) as u64
    }

    fn page_count(&self) -> u64 {
        self.entry_count.div_ceil(self.entries_per_page())
    }

    /// The number of the page that holds entry `index`.
    pub fn page_of(&self, index: u64) -> u64 {
        self.first_page + index / self.entries_per_page()
    }

    /// The bytes of the file that must be read for the entries in `range`.
    pub fn bytes_of(&self, range: Range<u64>) -> Result<Range<u64>> {
        if range.start > range.end || range.end > self.entry_count {
            let message = format!("entries {range:?} of a section of {} entries", self.entry_count);
            return Err(Error::new(Kind::InvalidInput, message));
        }
        if range.is_empty() {
            return Ok(0..0);
        }
        let page_bytes = PAGE_BYTES as u64;
        Ok(self.page_of(range.start) * page_bytes..(self.page_of(range.end - 1) + 1) * page_bytes)
    }

    /// The entries in `range`, from the bytes of the file that [`Section::bytes_of`] asks for.
    pub fn read(&self, range: Range<u64>, pages: &[u8]) -> Result<Vec<u8>> {
        let bytes = self.bytes_of(range.clone())?;
        if bytes.end - bytes.start != pages.len() as u64 {
            let message = format!("bytes {bytes:?} of the table are needed, got {} bytes", pages.len());
            return Err(Error::new(Kind::InvalidInput, message));
        }
        let width = self.entry_bytes;
        let mut entries = Vec::with_capacity((range.end - range.start) as usize * width);
        for (page, number) in pages.chunks(PAGE_BYTES).zip(bytes.start / PAGE_BYTES as u64..) {
            let first = (number - self.first_page) * self.entries_per_page();
            let held = self.entries_per_page().min(self.entry_count - first);
            let content = page::open(page, number, held as usize * width)?;
            let from = range.start.saturating_sub(first) as usize;
            let to = (range.end - first).min(held) as usize;
            entries.extend_from_slice(&content[from * width..to * width]);
        }
        Ok(entries)
    }
}

/// What the header page says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The sections, in order.
    pub sections: Vec<Section>,
}

impl Layout {
    /// The layout of sections with these numbers of entries.
    fn new(kind: TableKind, entry_counts: impl IntoIterator<Item = u64>) -> Option<Self> {
        let mut next_page = 1u64;
        let mut sections = Vec::with_capacity(kind.entry_bytes().len());
        for (&entry_bytes, entry_count) in kind.entry_bytes().iter().zip(entry_counts) {
            let section = Section { entry_bytes, entry_count, first_page: next_page };
            next_page = next_page.checked_add(section.page_count())?;
            sections.push(section);
        }
        next_page.checked_mul(PAGE_BYTES as u64)?;
        Some(Self { sections })
    }

    /// Reads the first page of a table file of that kind and checks it.
    pub fn parse(kind: TableKind, header_page: &[u8]) -> Result<Self> {
        let widths = kind.entry_bytes();
        let payload = page::open(header_page, 0, PAYLOAD_BYTES)?;
        if &payload[..8] != kind.magic() {
            return Err(corrupt(format!("this is not a table of {}", kind.name())));
        }
        let version = u32_at(payload, 8);
        if version > VERSION {
            return Err(Error::new(
                Kind::Unsupported,
                format!(
                    "the table has format version {version}; this release reads up to {VERSION}: update it"
                ),
            ));
        }
        let counts = (0..widths.len()).map(|index| u64_at(payload, 16 + 24 * index + 8));
        let layout = Self::new(kind, counts).ok_or_else(|| corrupt("the table claims too many entries"))?;
        // Everything but the counts follows from the kind, so the page must equal the one we would write.
        if payload != layout.payload(kind) {
            return Err(corrupt("the header of the table contradicts itself").with("page", "0"));
        }
        Ok(layout)
    }

    /// Bytes of the whole file.
    pub fn file_bytes(&self) -> u64 {
        let end = self.sections.last().map_or(1, |last| last.first_page + last.page_count());
        end * PAGE_BYTES as u64
    }

    fn payload(&self, kind: TableKind) -> [u8; PAYLOAD_BYTES] {
        let mut payload = [0; PAYLOAD_BYTES];
        payload[..8].copy_from_slice(kind.magic());
        payload[8..12].copy_from_slice(&VERSION.to_le_bytes());
        payload[12..16].copy_from_slice(&(self.sections.len() as u32).to_le_bytes());
        for (section, field) in self.sections.iter().zip(payload[16..].chunks_exact_mut(24)) {
            field[..4].copy_from_slice(&(section.entry_bytes as u32).to_le_bytes());
            field[8..16].copy_from_slice(&section.entry_count.to_le_bytes());
            field[16..].copy_from_slice(&section.first_page.to_le_bytes());
        }
        payload
    }
}

/// The table file of `kind` with these entries, one slice per section.
pub fn encode(kind: TableKind, sections: &[&[u8]]) -> Result<Vec<u8>> {
    let layout = plan(kind, sections)?;
    rules::check(kind, sections).map_err(|error| error.with_kind(Kind::InvalidInput))?;
    let mut file = Vec::with_capacity(layout.file_bytes() as usize);
    page::push(&mut file, 0, &layout.payload(kind));
    for (section, entries) in layout.sections.iter().zip(sections) {
        let page_bytes = section.entries_per_page() as usize * section.entry_bytes;
        for (content, number) in entries.chunks(page_bytes).zip(section.first_page..) {
            page::push(&mut file, number, content);
        }
    }
    Ok(file)
}

/// The entries of each section of a whole table file, all rules of that table checked.
pub fn decode(kind: TableKind, file: &[u8]) -> Result<Vec<Vec<u8>>> {
    let Some(header_page) = file.get(..PAGE_BYTES) else {
        return Err(corrupt(format!("a table of {} bytes is cut off", file.len())));
    };
    let layout = Layout::parse(kind, header_page)?;
    if layout.file_bytes() != file.len() as u64 {
        let (expected, found) = (layout.file_bytes(), file.len());
        return Err(corrupt(format!("the table should have {expected} bytes, but has {found}")));
    }
    let read = |section: &Section| {
        let bytes = section.bytes_of(0..section.entry_count)?;
        section.read(0..section.entry_count, &file[bytes.start as usize..bytes.end as usize])
    };
    let sections = layout.sections.iter().map(read).collect::<Result<Vec<_>>>()?;
    rules::check(kind, &sections.iter().map(Vec::as_slice).collect::<Vec<_>>())?;
    Ok(sections)
}

fn plan(kind: TableKind, sections: &[&[u8]]) -> Result<Layout> {
    let widths = kind.entry_bytes();
    let whole = sections.iter().zip(widths).all(|(entries, width)| entries.len() % width == 0);
    if sections.len() != widths.len() || !whole {
        let message = format!("a table of {} has sections of entries of {widths:?} bytes", kind.name());
        return Err(Error::new(Kind::InvalidInput, message));
    }
    let counts = sections.iter().zip(widths).map(|(entries, width)| (entries.len() / width) as u64);
    Layout::new(kind, counts).ok_or_else(|| Error::new(Kind::InvalidInput, "the table has too many entries"))
}

fn corrupt(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(Kind::Corrupt, message)
}

fn u32_at(payload: &[u8], at: usize) -> u32 {
    payload[at..].first_chunk().copied().map_or(0, u32::from_le_bytes)
}

fn u64_at(payload: &[u8], at: usize) -> u64 {
    payload[at..].first_chunk().copied().map_or(0, u64::from_le_bytes)
}
