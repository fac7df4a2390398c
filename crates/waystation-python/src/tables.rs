//! Tables that are read page by page: the functions of the `# files` section of `_native.pyi` for them.

use std::ops::Range;
use std::path::PathBuf;

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use waystation_io::table_pages;

use crate::directory::{Root, storage_of};
use crate::error::guarded;
use crate::format::table_kind;

/// Adds the names of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(table_counts, module)?)?;
    module.add_function(wrap_pyfunction!(read_table_entries, module)?)?;
    Ok(())
}

#[pyfunction]
#[pyo3(signature = (path, kind, file_bytes, /, *, root=None))]
fn table_counts(
    py: Python<'_>,
    path: PathBuf,
    kind: &str,
    file_bytes: u64,
    root: Option<Root<'_>>,
) -> PyResult<Vec<u64>> {
    let (kind, storage) = (table_kind(kind)?, storage_of(root));
    py.detach(|| guarded(|| table_pages::table_counts(&path, kind, file_bytes, &*storage)))
}

#[pyfunction]
#[pyo3(signature = (path, kind, file_bytes, ranges, /, *, root=None))]
fn read_table_entries<'py>(
    py: Python<'py>,
    path: PathBuf,
    kind: &str,
    file_bytes: u64,
    ranges: Vec<(usize, u64, u64)>,
    root: Option<Root<'_>>,
) -> PyResult<Vec<Bound<'py, PyBytes>>> {
    let (kind, storage) = (table_kind(kind)?, storage_of(root));
    let ranges: Vec<(usize, Range<u64>)> =
        ranges.into_iter().map(|(section, begin, end)| (section, begin..end)).collect();
    let read = || guarded(|| table_pages::read_table_entries(&path, kind, file_bytes, &ranges, &*storage));
    let found = py.detach(read)?;
    Ok(found.iter().map(|entries| PyBytes::new(py, entries)).collect())
}
