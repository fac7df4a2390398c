//! Open directories, beneath which the other functions open files.

use std::os::fd::{AsFd, AsRawFd, IntoRawFd};
use std::path::PathBuf;
use std::sync::Arc;

use pyo3::prelude::*;
use waystation_io::directory;

use crate::error::guarded;

/// Adds the names of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Directory>()
}

/// A directory that stays the same whatever happens to its name.
#[pyclass(frozen, module = "waystation._native")]
pub struct Directory(Arc<directory::Directory>);

/// The directory that a function was given, if it was given one.
pub fn opened(root: Option<PyRef<'_, Directory>>) -> Option<Arc<directory::Directory>> {
    root.map(|root| Arc::clone(&root.0))
}

#[pymethods]
impl Directory {
    #[new]
    #[pyo3(signature = (path, /, *, follow_links_out=false))]
    fn new(py: Python<'_>, path: PathBuf, follow_links_out: bool) -> PyResult<Self> {
        py.detach(|| guarded(|| directory::Directory::open(&path, follow_links_out)))
            .map(|it| Self(Arc::new(it)))
    }

    #[getter]
    fn path(&self) -> &std::ffi::OsStr {
        self.0.path().as_os_str()
    }

    fn is_current(&self, py: Python<'_>) -> PyResult<bool> {
        py.detach(|| guarded(|| self.0.is_current()))
    }

    /// The caller closes it.
    #[pyo3(signature = (path, /, *, flags=0))]
    fn open(&self, py: Python<'_>, path: PathBuf, flags: u32) -> PyResult<i32> {
        let flags = directory::flags(flags);
        let opened =
            py.detach(|| guarded(|| directory::open_to_read(Some(&self.0), &path, flags, "open")))?;
        Ok(opened.into_raw_fd())
    }

    fn fileno(&self) -> i32 {
        self.0.as_fd().as_raw_fd()
    }
}
