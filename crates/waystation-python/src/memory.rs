//! Host memory from the arena, and copies within host memory.
//!
//! Invariants: a `Slab` is a Python object whose memory is returned to the pool when the object dies, and with
//! it all arrays that frameworks have made of its DLPack capsules; views of it (through the buffer protocol)
//! refer to the object, so memory outlives every view.

use std::ffi::c_int;
use std::sync::Arc;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use waystation_format::plan::{HostCopy, each};
use waystation_format::{Error, Kind};
use waystation_io::arena::{self, Arena};
use waystation_io::batch::copy_all;
use waystation_io::first_touch;

use crate::error::guarded;
use crate::format::plan_words;

/// Host memory from the arena: page-aligned, writable through the buffer protocol.
#[pyclass(frozen, module = "waystation._native")]
pub struct Slab(pub(crate) Arc<arena::Slab>);

impl Slab {
    pub fn new(memory: arena::Slab) -> Self {
        Self(Arc::new(memory))
    }
}

#[pymethods]
impl Slab {
    #[getter]
    fn address(&self) -> usize {
        self.0.address().as_ptr() as usize
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.0.nbytes()
    }

    /// # Safety
    /// Called by the interpreter with a view that it wants filled.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let memory = &slf.get().0;
        let nbytes = ffi::Py_ssize_t::try_from(memory.nbytes())
            .map_err(|_| PyBufferError::new_err("the slab is too large for a buffer"))?;
        let address = memory.address().as_ptr().cast();
        // SAFETY: the memory lives as long as the object, to which the view takes a reference.
        let filled = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), address, nbytes, 0, flags) };
        if filled == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}

#[pyfunction]
#[pyo3(signature = (nbytes, /))]
fn allocate(py: Python<'_>, nbytes: usize) -> PyResult<Slab> {
    py.detach(|| guarded(|| Arena::global().allocate(nbytes))).map(Slab::new)
}

#[pyfunction]
fn arena_statistics(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let statistics = Arena::global().statistics();
    let dictionary = PyDict::new(py);
    dictionary.set_item("live_bytes", statistics.live_bytes)?;
    dictionary.set_item("idle_bytes", statistics.idle_bytes)?;
    dictionary.set_item("reused_bytes", statistics.reused_bytes)?;
    dictionary.set_item("mapped_bytes", statistics.mapped_bytes)?;
    dictionary.set_item("limit_bytes", statistics.limit_bytes)?;
    Ok(dictionary)
}

#[pyfunction]
fn trim_arena(py: Python<'_>) -> PyResult<u64> {
    py.detach(|| guarded(|| Ok(Arena::global().trim())))
}

#[pyfunction]
#[pyo3(signature = (address, nbytes, /))]
fn prepare_memory(py: Python<'_>, address: usize, nbytes: usize) -> PyResult<()> {
    py.detach(|| {
        guarded(|| {
            first_touch::prepare(address, nbytes);
            Ok(())
        })
    })
}

#[pyfunction]
#[pyo3(signature = (words, owners, /, *, threads=None))]
fn copy_batch(
    py: Python<'_>,
    words: &Bound<'_, PyAny>,
    owners: &Bound<'_, PyAny>,
    threads: Option<usize>,
) -> PyResult<()> {
    let words = plan_words(words)?;
    let result = py.detach(|| {
        guarded(|| {
            let copies = each(&words, |_, copy| checked(copy))?;
            // SAFETY: only Waystation calls this module; it hands over addresses of memory that the owners
            // keep alive.
            unsafe { copy_all(&copies, threads) }
        })
    });
    // The caller's reference keeps the memory alive until here.
    let _ = owners;
    result
}

fn checked(copy: HostCopy) -> Result<HostCopy, Error> {
    let HostCopy { destination, source, nbytes } = copy;
    let invalid = |message: &'static str| Err(Error::new(Kind::InvalidInput, message));
    if nbytes > 0 && (destination == 0 || source == 0) {
        return invalid("a copy has no address");
    }
    if destination.checked_add(nbytes).is_none() || source.checked_add(nbytes).is_none() {
        return invalid("a copy reaches beyond the address space");
    }
    Ok(copy)
}

/// Adds the names of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Slab>()?;
    module.add_function(wrap_pyfunction!(allocate, module)?)?;
    module.add_function(wrap_pyfunction!(arena_statistics, module)?)?;
    module.add_function(wrap_pyfunction!(trim_arena, module)?)?;
    module.add_function(wrap_pyfunction!(prepare_memory, module)?)?;
    module.add_function(wrap_pyfunction!(copy_batch, module)?)
}
