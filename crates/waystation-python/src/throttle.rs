//! Throttles: files that hold a limit for all jobs that name them.

use std::path::PathBuf;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use waystation_format::Result;
use waystation_io::throttle::{self, Limits, Throttle};

use crate::error::guarded;

/// Adds the names of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(create_throttle, module)?)?;
    module.add_function(wrap_pyfunction!(throttle_usage, module)?)
}

/// The throttle of a job, if it has one.
pub fn open_throttle(path: Option<PathBuf>) -> Result<Option<Arc<Throttle>>> {
    path.map(|path| Throttle::open(&path).map(Arc::new)).transpose()
}

#[pyfunction]
#[pyo3(signature = (path, /, *, bytes_per_s=None, requests_per_s=None))]
fn create_throttle(
    py: Python<'_>,
    path: PathBuf,
    bytes_per_s: Option<u64>,
    requests_per_s: Option<u64>,
) -> PyResult<()> {
    py.detach(|| guarded(|| throttle::create(&path, Limits { bytes_per_s, requests_per_s })))
}

#[pyfunction]
#[pyo3(signature = (path, /))]
fn throttle_usage(py: Python<'_>, path: PathBuf) -> PyResult<Bound<'_, PyDict>> {
    let usage = py.detach(|| guarded(|| Ok(Throttle::open(&path)?.usage())))?;
    let dictionary = PyDict::new(py);
    dictionary.set_item("bytes", usage.bytes)?;
    dictionary.set_item("requests", usage.requests)?;
    Ok(dictionary)
}
