//! Open directories, beneath which the other functions open files.

use std::os::fd::{AsFd, AsRawFd, IntoRawFd};
use std::path::PathBuf;
use std::sync::Arc;

use pyo3::prelude::*;
use waystation_io::directory;
use waystation_io::local::Local;
use waystation_io::storage::Storage;

use crate::error::guarded;
use crate::store::ObjectStore;

/// Adds the names of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Directory>()
}

/// A directory that stays the same whatever happens to its name.
#[pyclass(frozen, module = "waystation._native")]
pub struct Directory(Option<Arc<directory::Directory>>);

impl Directory {
    fn inner(&self) -> PyResult<&Arc<directory::Directory>> {
        self.0.as_ref().ok_or_else(|| pyo3::exceptions::PyRuntimeError::new_err("the directory is closed"))
    }
}

impl Drop for Directory {
    /// Closes without the GIL, as Python does with files: other threads go on while the system closes.
    fn drop(&mut self) {
        let inner = self.0.take();
        // Where the interpreter is ending, no other thread waits for it.
        Python::try_attach(|py| py.detach(move || drop(inner)));
    }
}

/// The directory that a function was given, if it was given one.
pub fn opened(root: Option<PyRef<'_, Directory>>) -> Option<Arc<directory::Directory>> {
    root.and_then(|root| root.0.clone())
}

/// What a function of the engine takes as the root of its paths.
#[derive(FromPyObject)]
pub enum Root<'py> {
    Directory(PyRef<'py, Directory>),
    Store(PyRef<'py, ObjectStore>),
}

/// The storage of a root that a function was given, or else that of whole paths.
pub fn storage_of(root: Option<Root<'_>>) -> Arc<dyn Storage> {
    match root {
        Some(Root::Store(store)) => Arc::new(store.0.clone()),
        Some(Root::Directory(directory)) => Local::beneath(opened(Some(directory))),
        None => Local::by_path(),
    }
}

#[pymethods]
impl Directory {
    #[new]
    #[pyo3(signature = (path, /, *, follow_links_out=false))]
    fn new(py: Python<'_>, path: PathBuf, follow_links_out: bool) -> PyResult<Self> {
        py.detach(|| guarded(|| directory::Directory::open(&path, follow_links_out)))
            .map(|it| Self(Some(Arc::new(it))))
    }

    #[getter]
    fn path(&self) -> PyResult<&std::ffi::OsStr> {
        Ok(self.inner()?.path().as_os_str())
    }

    fn is_current(&self, py: Python<'_>) -> PyResult<bool> {
        let inner = self.inner()?;
        py.detach(|| guarded(|| inner.is_current()))
    }

    /// The caller closes it.
    #[pyo3(signature = (path, /, *, flags=0))]
    fn open(&self, py: Python<'_>, path: PathBuf, flags: u32) -> PyResult<i32> {
        let (inner, flags) = (self.inner()?, directory::flags(flags));
        let opened = py.detach(|| guarded(|| directory::open_to_read(Some(inner), &path, flags, "open")))?;
        Ok(opened.into_raw_fd())
    }

    fn fileno(&self) -> PyResult<i32> {
        Ok(self.inner()?.as_fd().as_raw_fd())
    }
}
