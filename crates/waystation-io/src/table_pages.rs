//! Entries of a table file, read without the rest of it.
//!
//! Invariants: nothing is remembered between calls, so every call reads the header page and checks the
//! length of the file; every page that is used matches its checksum and stands in its place. What holds
//! only between entries is not checked here: whoever reads some of them checks what it relies on.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::OFlags;
use waystation_format::table::{Layout, PAGE_BYTES, TableKind, check_fields};
use waystation_format::{Error, Kind, Result};

use crate::directory::{Directory, open_to_read};
use crate::files::in_parallel;

/// A table of which some pages are to be read.
struct Table<'a> {
    path: &'a Path,
    kind: TableKind,
    file: File,
    layout: Layout,
}

/// The number of entries of each section of the table at `path`, which must have `file_bytes`. With `root` it is
/// opened beneath that.
pub fn table_counts(
    path: &Path,
    kind: TableKind,
    file_bytes: u64,
    root: Option<&Directory>,
) -> Result<Vec<u64>> {
    let table = Table::open(path, kind, file_bytes, root)?;
    Ok(table.layout.sections.iter().map(|section| section.entry_count).collect())
}

/// The entries of ranges of sections of the table at `path`, which must have `file_bytes`.
pub fn read_table_entries(
    path: &Path,
    kind: TableKind,
    file_bytes: u64,
    ranges: &[(usize, Range<u64>)],
    root: Option<&Directory>,
) -> Result<Vec<Vec<u8>>> {
    let table = Table::open(path, kind, file_bytes, root)?;
    in_parallel(ranges.len(), |index| {
        let (section, range) = &ranges[index];
        table.read(*section, range.clone()).map_err(|error| error.with("path", path.display().to_string()))
    })
}

impl<'a> Table<'a> {
    fn open(path: &'a Path, kind: TableKind, file_bytes: u64, root: Option<&Directory>) -> Result<Self> {
        let file = open_to_read(root, path, OFlags::empty(), "open the table")?;
        let corrupt = |message: String| {
            Err(Error::new(Kind::Corrupt, message).with("path", path.display().to_string()))
        };
        let metadata = file.metadata().map_err(|error| Error::from_io(error, "examine the table", path))?;
        if !metadata.is_file() {
            return corrupt("a regular file was expected here".to_owned());
        }
        if metadata.len() != file_bytes {
            return corrupt(format!("the table should have {file_bytes} bytes, but has {}", metadata.len()));
        }
        let mut header_page = [0; PAGE_BYTES];
        file.read_exact_at(&mut header_page, 0)
            .map_err(|error| Error::from_io(error, "read the table", path))?;
        let layout = Layout::parse(kind, &header_page)
            .map_err(|error| error.with("path", path.display().to_string()))?;
        if layout.file_bytes() != file_bytes {
            let expected = layout.file_bytes();
            return corrupt(format!("the table should have {expected} bytes, but has {file_bytes}"));
        }
        Ok(Self { path, kind, file, layout })
    }

    fn read(&self, section: usize, range: Range<u64>) -> Result<Vec<u8>> {
        let Some(entries) = self.layout.sections.get(section) else {
            let message = format!("a table of {} has no section {section}", self.kind.name());
            return Err(Error::new(Kind::InvalidInput, message));
        };
        let bytes = entries.bytes_of(range.clone())?;
        let mut pages = vec![0; (bytes.end - bytes.start) as usize];
        self.file
            .read_exact_at(&mut pages, bytes.start)
            .map_err(|error| Error::from_io(error, "read the table", self.path))?;
        let found = entries.read(range, &pages)?;
        check_fields(self.kind, section, &found)?;
        Ok(found)
    }
}
