//! CUDA devices: what there is, and copies of their memory to slabs.
//!
//! Invariants: nothing here touches CUDA before a device is asked about or copied from; copies run on
//! engine threads while the caller waits without the GIL and notices signals; a caller that leaves early
//! has waited until nothing writes to its slabs any more.

use std::ops::Range;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use waystation_format::Kind;
use waystation_format::plan::{ArrayCopy, each};
use waystation_io::cuda::{self, CudaCopy, snapshot};
use waystation_io::write::register_device_copy;

use crate::error::{guarded, to_py};
use crate::format::plan_words;
use crate::job::{IntoDictionary, Job};
use crate::memory::Slab;

impl IntoDictionary for u64 {
    fn into_dictionary(self, py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
        let dictionary = PyDict::new(py);
        dictionary.set_item("bytes_copied", self)?;
        Ok(dictionary)
    }
}

#[pyfunction]
fn devices(py: Python<'_>) -> PyResult<Vec<Bound<'_, PyDict>>> {
    let found = py.detach(|| guarded(cuda::devices))?;
    let describe = |device: cuda::DeviceInfo| {
        let dictionary = PyDict::new(py);
        dictionary.set_item("ordinal", device.ordinal)?;
        dictionary.set_item("name", device.name)?;
        dictionary.set_item("total_bytes", device.total_bytes)?;
        dictionary.set_item("pci_bus_id", device.pci_bus_id)?;
        dictionary.set_item("compute_capability", device.compute_capability)?;
        Ok(dictionary)
    };
    found.into_iter().map(describe).collect()
}

/// Why files cannot be read straight to memory of devices; nothing if they can be.
#[pyfunction]
fn gpu_direct_problem(py: Python<'_>) -> PyResult<Option<String>> {
    py.detach(|| {
        guarded(|| match cuda::CuFile::open() {
            Ok(_) => Ok(None),
            Err(error) if error.kind() == Kind::Unsupported => Ok(Some(error.message().to_owned())),
            Err(error) => Err(error),
        })
    })
}

#[pyfunction]
#[pyo3(signature = (words, slabs, owners, /))]
fn copy_from_devices(
    py: Python<'_>,
    words: &Bound<'_, PyAny>,
    slabs: Vec<Bound<'_, Slab>>,
    owners: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let mut copies: Vec<ArrayCopy> = each(&plan_words(words)?, |_, copy| Ok(copy)).map_err(to_py)?;
    copies.retain(|copy| copy.nbytes() > 0);
    if copies.is_empty() {
        return Ok(());
    }
    let ranges = slabs.iter().map(range_of).collect::<PyResult<Vec<_>>>()?;
    // SAFETY: only Waystation calls this module; it hands over addresses of memory that the owners keep
    // alive, and slabs that nobody else uses yet. The job keeps both until no thread touches them.
    let handle = py.detach(|| guarded(|| unsafe { snapshot::start(copies, ranges) }))?;
    let kept = PyTuple::new(py, [PyTuple::new(py, &slabs)?.as_any(), owners])?;
    // Ctrl-C leaves here by an error; dropping the job then cancels it and waits.
    let job = Bound::new(py, Job::new(handle, kept.into_any().unbind()))?;
    job.call_method0("result").map(drop)
}

fn range_of(slab: &Bound<'_, Slab>) -> PyResult<Range<usize>> {
    let start: usize = slab.getattr("address")?.extract()?;
    let nbytes: usize = slab.getattr("nbytes")?.extract()?;
    Ok(start..start + nbytes)
}

/// Adds the names of this file to the module, and makes device blocks writable by write jobs.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    // Costs nothing until a plan has a device block. Whoever came first in this process stays.
    drop(register_device_copy(Arc::new(CudaCopy)));
    module.add_function(wrap_pyfunction!(devices, module)?)?;
    module.add_function(wrap_pyfunction!(gpu_direct_problem, module)?)?;
    module.add_function(wrap_pyfunction!(copy_from_devices, module)?)
}
