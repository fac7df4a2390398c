//! Object stores: small objects, whole. The engine takes a store as the root of its paths.

use std::cell::RefCell;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use waystation_format::Result;
use waystation_store::{Condition, Found, ObjectStorage, Settings, Version, Waits, give_up_if};

use crate::error::guarded;
use crate::format::Bytes;

/// Adds the names of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    give_up_if(is_interrupted);
    module.add_class::<StoreWaits>()?;
    module.add_class::<ObjectStore>()
}

/// Length, time of change in nanoseconds (0 where that is not known), ETag, generation.
type VersionTuple = (u64, u64, Option<String>, Option<String>);

/// Everything beneath one bucket.
#[pyclass(frozen, module = "waystation._native")]
pub struct ObjectStore(pub ObjectStorage);

#[pymethods]
impl ObjectStore {
    #[new]
    #[pyo3(signature = (
        location, /, *, options, deadline_s, allow_unconditional, query=None, cache_directory=None, cache_bytes=0
    ))]
    fn new(
        location: &str,
        options: Vec<(String, String)>,
        deadline_s: f64,
        allow_unconditional: bool,
        query: Option<String>,
        cache_directory: Option<PathBuf>,
        cache_bytes: u64,
    ) -> PyResult<Self> {
        let deadline = Duration::try_from_secs_f64(deadline_s)
            .map_err(|error| pyo3::exceptions::PyValueError::new_err(error.to_string()))?;
        let cache = cache_directory.map(|directory| (directory, cache_bytes));
        let settings = Settings { options, deadline, allow_unconditional, query, cache };
        guarded(|| ObjectStorage::new(location, settings)).map(Self)
    }

    #[pyo3(signature = (path, /))]
    fn status(&self, py: Python<'_>, path: PathBuf) -> PyResult<Option<(bool, VersionTuple)>> {
        let found = waiting(py, || self.0.status(&path))?;
        Ok(found.map(|found| match found {
            Found::Object(version) => (false, to_tuple(version)),
            Found::Directory => (true, (0, 0, None, None)),
        }))
    }

    #[pyo3(signature = (wanted, /))]
    fn get<'py>(
        &self,
        py: Python<'py>,
        wanted: Vec<(PathBuf, u64)>,
    ) -> PyResult<Vec<(Bound<'py, PyBytes>, VersionTuple)>> {
        let found = waiting(py, || self.0.get_all(&wanted))?;
        let made = |(content, version): (Vec<u8>, Version)| (PyBytes::new(py, &content), to_tuple(version));
        Ok(found.into_iter().map(made).collect())
    }

    #[pyo3(signature = (path, nbytes, /))]
    fn get_beginning<'py>(
        &self,
        py: Python<'py>,
        path: PathBuf,
        nbytes: u64,
    ) -> PyResult<(Bound<'py, PyBytes>, VersionTuple)> {
        let (content, version) = waiting(py, || self.0.beginning(&path, nbytes))?;
        Ok((PyBytes::new(py, &content), to_tuple(version)))
    }

    #[pyo3(signature = (path, begin, end, version, /))]
    fn get_range<'py>(
        &self,
        py: Python<'py>,
        path: PathBuf,
        begin: u64,
        end: u64,
        version: VersionTuple,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let version = of_tuple(version);
        let found = waiting(py, || self.0.get_range(&path, begin..end, &version))?;
        Ok(PyBytes::new(py, &found))
    }

    #[pyo3(signature = (path, content, /, *, new=false, unchanged=None))]
    fn put(
        &self,
        py: Python<'_>,
        path: PathBuf,
        content: &[u8],
        new: bool,
        unchanged: Option<VersionTuple>,
    ) -> PyResult<VersionTuple> {
        let condition = match unchanged {
            Some(version) => Condition::Unchanged(of_tuple(version)),
            None if new => Condition::New,
            None => Condition::Any,
        };
        waiting(py, || self.0.put(&path, content, &condition)).map(to_tuple)
    }

    #[pyo3(signature = (contents, /))]
    fn put_all(&self, py: Python<'_>, contents: Vec<(PathBuf, Bound<'_, PyAny>)>) -> PyResult<()> {
        let held: Vec<(PathBuf, Bytes)> = contents
            .into_iter()
            .map(|(path, data)| Ok((path, Bytes::of(&data)?)))
            .collect::<PyResult<_>>()?;
        waiting(py, || {
            let contents: Vec<_> = held.iter().map(|(path, data)| (path.clone(), data.as_slice())).collect();
            self.0.put_all(&contents)
        })
    }

    #[pyo3(signature = (source, target, /))]
    fn copy(&self, py: Python<'_>, source: PathBuf, target: PathBuf) -> PyResult<()> {
        waiting(py, || self.0.copy(&source, &target))
    }

    #[pyo3(signature = (directory, /))]
    #[allow(clippy::type_complexity)] // the stub's
    fn list(
        &self,
        py: Python<'_>,
        directory: PathBuf,
    ) -> PyResult<(Vec<(String, VersionTuple)>, Vec<String>)> {
        let found = waiting(py, || self.0.list(&directory))?;
        let objects = found.objects.into_iter().map(|(name, version)| (name, to_tuple(version)));
        Ok((objects.collect(), found.directories))
    }

    #[pyo3(signature = (directory, /))]
    fn bytes_beneath(&self, py: Python<'_>, directory: PathBuf) -> PyResult<u64> {
        waiting(py, || self.0.bytes_beneath(&directory))
    }

    #[pyo3(signature = (path, /, *, unchanged=None))]
    fn remove(&self, py: Python<'_>, path: PathBuf, unchanged: Option<VersionTuple>) -> PyResult<()> {
        waiting(py, || match unchanged {
            Some(version) => self.0.remove_version(&path, &of_tuple(version)),
            None => self.0.remove(&path),
        })
    }

    #[pyo3(signature = (directory, /))]
    fn removes_versions(&self, py: Python<'_>, directory: PathBuf) -> PyResult<bool> {
        waiting(py, || self.0.removes_versions(&directory))
    }

    #[pyo3(signature = (directory, /))]
    fn remove_all(&self, py: Python<'_>, directory: PathBuf) -> PyResult<usize> {
        waiting(py, || self.0.remove_all(&directory))
    }
}

/// Waits of threads that work for the one that has made this.
#[pyclass(frozen, module = "waystation._native")]
pub struct StoreWaits(Waits);

#[pymethods]
impl StoreWaits {
    #[new]
    fn new() -> Self {
        Self(Waits::new())
    }

    fn join(&self) {
        self.0.join();
    }

    fn end(&self) {
        self.0.end();
    }
}

thread_local! {
    /// What a signal has raised while this thread waited for a store.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
}

/// Whether a signal that has come meanwhile raises an error; asked in the main thread.
fn is_interrupted() -> bool {
    let raised = Python::try_attach(|py| py.check_signals().err()).flatten();
    let is_raised = raised.is_some();
    RAISED.with_borrow_mut(|kept| *kept = raised);
    is_raised
}

/// Waits without the GIL, until a signal raises an error.
fn waiting<T: Send>(py: Python<'_>, call: impl FnOnce() -> Result<T> + Send) -> PyResult<T> {
    let outcome = py.detach(|| guarded(call));
    match RAISED.take() {
        Some(raised) => Err(raised),
        None => outcome,
    }
}

fn to_tuple(version: Version) -> VersionTuple {
    let since = version.modified.and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
    let modified_ns = since.map_or(0, |since| since.as_nanos() as u64);
    (version.nbytes, modified_ns, version.tag, version.generation)
}

fn of_tuple((nbytes, modified_ns, tag, generation): VersionTuple) -> Version {
    let modified = (modified_ns > 0).then(|| SystemTime::UNIX_EPOCH + Duration::from_nanos(modified_ns));
    Version { tag, generation, nbytes, modified }
}
