//! Entries of a table file, read without the rest of it.
//!
//! Invariants: nothing is remembered between calls, so every call reads the header page and checks the
//! length of the file; every page that is used matches its checksum and stands in its place. What holds
//! only between entries is not checked here: whoever reads some of them checks what it relies on.

use std::ops::Range;
use std::path::Path;

use waystation_format::table::{Layout, PAGE_BYTES, TableKind, check_fields};
use waystation_format::{Error, Kind, Result};

use crate::job::each_in_parallel;
use crate::storage::{Storage, StoredFile};

/// A table of which some pages are to be read.
struct Table {
    kind: TableKind,
    file: Box<dyn StoredFile>,
    layout: Layout,
}

/// The number of entries of each section of the table at `path`, which must have `file_bytes`.
pub fn table_counts(
    path: &Path,
    kind: TableKind,
    file_bytes: u64,
    storage: &dyn Storage,
) -> Result<Vec<u64>> {
    let table = Table::open(path, kind, file_bytes, storage)?;
    Ok(table.layout.sections.iter().map(|section| section.entry_count).collect())
}

/// The entries of ranges of sections of the table at `path`, which must have `file_bytes`.
pub fn read_table_entries(
    path: &Path,
    kind: TableKind,
    file_bytes: u64,
    ranges: &[(usize, Range<u64>)],
    storage: &dyn Storage,
) -> Result<Vec<Vec<u8>>> {
    let table = Table::open(path, kind, file_bytes, storage)?;
    each_in_parallel(ranges.len(), |index| {
        let (section, range) = &ranges[index];
        table.read(*section, range.clone()).map_err(|error| error.with("path", path.display().to_string()))
    })
}

impl Table {
    fn open(path: &Path, kind: TableKind, file_bytes: u64, storage: &dyn Storage) -> Result<Self> {
        let file = storage.open(path)?;
        let corrupt = |message: String| {
            Err(Error::new(Kind::Corrupt, message).with("path", path.display().to_string()))
        };
        if file.nbytes() != file_bytes {
            return corrupt(format!("the table should have {file_bytes} bytes, but has {}", file.nbytes()));
        }
        let mut header_page = [0; PAGE_BYTES];
        file.read_exact_at(&mut header_page, 0)?;
        let layout = Layout::parse(kind, &header_page)
            .map_err(|error| error.with("path", path.display().to_string()))?;
        if layout.file_bytes() != file_bytes {
            let expected = layout.file_bytes();
            return corrupt(format!("the table should have {expected} bytes, but has {file_bytes}"));
        }
        Ok(Self { kind, file, layout })
    }

    fn read(&self, section: usize, range: Range<u64>) -> Result<Vec<u8>> {
        let Some(entries) = self.layout.sections.get(section) else {
            let message = format!("a table of {} has no section {section}", self.kind.name());
            return Err(Error::new(Kind::InvalidInput, message));
        };
        let bytes = entries.bytes_of(range.clone())?;
        let mut pages = vec![0; (bytes.end - bytes.start) as usize];
        self.file.read_exact_at(&mut pages, bytes.start)?;
        let found = entries.read(range, &pages)?;
        check_fields(self.kind, section, &found)?;
        Ok(found)
    }
}
