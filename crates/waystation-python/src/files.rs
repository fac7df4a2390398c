//! Small files, directories, renames, and what the engine knows about file systems.

use std::path::PathBuf;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use waystation_io::calibrate::{calibrate as measure, calibration as remembered};
use waystation_io::parts::{self, Version};
use waystation_io::sync_group::{self, Durability};
use waystation_io::{Error, Kind, files, probe as probing};

use crate::directory::{Directory, opened};
use crate::error::guarded;
use crate::format::{Bytes, WritableBytes};

/// Adds the names of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PartReader>()?;
    module.add_class::<SyncGroup>()?;
    module.add_function(wrap_pyfunction!(write_small_files, module)?)?;
    module.add_function(wrap_pyfunction!(read_small_files, module)?)?;
    module.add_function(wrap_pyfunction!(sync_paths, module)?)?;
    module.add_function(wrap_pyfunction!(created_ns, module)?)?;
    module.add_function(wrap_pyfunction!(rename_new, module)?)?;
    module.add_function(wrap_pyfunction!(rename_exchange, module)?)?;
    module.add_function(wrap_pyfunction!(probe, module)?)?;
    module.add_function(wrap_pyfunction!(calibrate, module)?)?;
    module.add_function(wrap_pyfunction!(calibration, module)?)?;
    Ok(())
}

/// One version of a file of which small parts are read on the caller's thread; it has a descriptor of its own.
#[pyclass(frozen, module = "waystation._native")]
struct PartReader(parts::PartReader);

// What frameworks align memory to.
const ALIGN_BYTES: usize = 64;

#[pymethods]
impl PartReader {
    #[new]
    #[pyo3(signature = (path, descriptor, identity, /))]
    fn new(path: PathBuf, descriptor: i32, identity: (u64, u64, u64, i128)) -> PyResult<Self> {
        let (device, inode, nbytes, modified_ns) = identity;
        let version = Version { device, inode, nbytes, modified_ns };
        // SAFETY: the caller's descriptor is open for the length of this call.
        guarded(|| unsafe { parts::PartReader::of(descriptor, &path, version) }).map(Self)
    }

    #[pyo3(signature = (offset, nbytes, memory, /))]
    fn read(
        &self,
        py: Python<'_>,
        offset: u64,
        nbytes: usize,
        memory: &Bound<'_, PyAny>,
    ) -> PyResult<Option<usize>> {
        let mut memory = WritableBytes::of(memory)?;
        py.detach(|| {
            guarded(|| {
                let all = memory.as_mut_slice();
                let first = all.as_ptr().align_offset(ALIGN_BYTES);
                let view = first.checked_add(nbytes).and_then(|end| all.get_mut(first..end));
                let view = view.ok_or_else(|| Error::new(Kind::InvalidInput, "the memory is too small"))?;
                Ok(self.0.read(view, offset)?.then_some(first))
            })
        })
    }
}

/// Files that were written and directories that were changed, to be synced together.
#[pyclass(frozen, module = "waystation._native")]
pub struct SyncGroup(Arc<sync_group::SyncGroup>);

#[pymethods]
impl SyncGroup {
    #[new]
    #[pyo3(signature = (directory, /))]
    fn new(py: Python<'_>, directory: PathBuf) -> PyResult<Self> {
        py.detach(|| guarded(|| sync_group::SyncGroup::open(&directory))).map(|it| Self(Arc::new(it)))
    }

    #[pyo3(signature = (paths, /))]
    fn add(&self, paths: Vec<PathBuf>) {
        self.0.add_paths(paths);
    }

    fn sync(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| guarded(|| self.0.sync()))
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.0.close());
    }
}

/// When files are durable, as Python says it: `sync` says nothing of files that go into a group.
pub fn durability(sync: bool, group: Option<PyRef<'_, SyncGroup>>) -> Durability {
    match group {
        Some(group) => Durability::Together(Arc::clone(&group.0)),
        None if sync => Durability::Now,
        None => Durability::Whenever,
    }
}

#[pyfunction]
#[pyo3(signature = (files, /, *, sync=true, group=None))]
fn write_small_files(
    py: Python<'_>,
    files: Vec<(PathBuf, Bound<'_, PyAny>)>,
    sync: bool,
    group: Option<PyRef<'_, SyncGroup>>,
) -> PyResult<()> {
    let held: Vec<(PathBuf, Bytes)> =
        files.into_iter().map(|(path, data)| Ok((path, Bytes::of(&data)?))).collect::<PyResult<_>>()?;
    let durability = durability(sync, group);
    py.detach(|| {
        let files: Vec<_> = held.iter().map(|(path, data)| (path, data.as_slice())).collect();
        guarded(|| files::write_small_files(&files, &durability))
    })
}

/// The most bytes of every file, or of each.
#[derive(FromPyObject)]
enum Limits {
    Common(u64),
    Own(Vec<u64>),
}

#[pyfunction]
#[pyo3(signature = (paths, /, *, limit_bytes, root=None))]
fn read_small_files<'py>(
    py: Python<'py>,
    paths: Vec<PathBuf>,
    limit_bytes: Limits,
    root: Option<PyRef<'_, Directory>>,
) -> PyResult<Vec<Bound<'py, PyBytes>>> {
    let limits = match limit_bytes {
        Limits::Common(limit) => vec![limit; paths.len()],
        Limits::Own(limits) => limits,
    };
    let root = opened(root);
    let contents = py.detach(|| {
        guarded(|| {
            if limits.len() != paths.len() {
                let message = format!("{} limits for {} files", limits.len(), paths.len());
                return Err(Error::new(Kind::InvalidInput, message));
            }
            files::read_small_files(&paths.into_iter().zip(limits).collect::<Vec<_>>(), root.as_deref())
        })
    })?;
    Ok(contents.iter().map(|content| PyBytes::new(py, content)).collect())
}

#[pyfunction]
#[pyo3(signature = (paths, /))]
fn sync_paths(py: Python<'_>, paths: Vec<PathBuf>) -> PyResult<()> {
    py.detach(|| guarded(|| files::sync_paths(&paths)))
}

#[pyfunction]
#[pyo3(signature = (path, /))]
fn created_ns(py: Python<'_>, path: PathBuf) -> PyResult<Option<u64>> {
    py.detach(|| guarded(|| files::created_ns(&path)))
}

#[pyfunction]
#[pyo3(signature = (source, target, /))]
fn rename_new(py: Python<'_>, source: PathBuf, target: PathBuf) -> PyResult<()> {
    py.detach(|| guarded(|| files::rename_new(&source, &target)))
}

#[pyfunction]
#[pyo3(signature = (first, second, /))]
fn rename_exchange(py: Python<'_>, first: PathBuf, second: PathBuf) -> PyResult<()> {
    py.detach(|| guarded(|| files::rename_exchange(&first, &second)))
}

#[pyfunction]
#[pyo3(signature = (directory, /))]
fn probe(py: Python<'_>, directory: PathBuf) -> PyResult<Bound<'_, PyAny>> {
    let json = py.detach(|| guarded(|| Ok(probing::probe(&directory)?.to_json().to_string())))?;
    from_json(py, &json)
}

#[pyfunction]
#[pyo3(signature = (directory, /, *, probe_bytes, force=false))]
fn calibrate(
    py: Python<'_>,
    directory: PathBuf,
    probe_bytes: u64,
    force: bool,
) -> PyResult<Bound<'_, PyAny>> {
    let json =
        py.detach(|| guarded(|| Ok(measure(&directory, probe_bytes, force)?.to_json().to_string())))?;
    from_json(py, &json)
}

#[pyfunction]
#[pyo3(signature = (directory, /))]
fn calibration(py: Python<'_>, directory: PathBuf) -> PyResult<Option<Bound<'_, PyAny>>> {
    let found = py.detach(|| {
        guarded(|| Ok(remembered(&directory)?.map(|calibration| calibration.to_json().to_string())))
    })?;
    found.map(|json| from_json(py, &json)).transpose()
}

fn from_json<'py>(py: Python<'py>, json: &str) -> PyResult<Bound<'py, PyAny>> {
    py.import("json")?.getattr("loads")?.call1((json,))
}
