//! The `# format` section of `_native.pyi`: headers, tables and sealed JSON. Pure calls on bytes.

use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use waystation_format::{Error, Kind, checksum};

use crate::error::{guarded, to_py};

/// Adds the names of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("BLOCK_BYTES", checksum::BLOCK_BYTES)?;
    module.add("ERROR_KINDS", PyTuple::new(module.py(), Kind::ALL.map(Kind::name))?)?;
    module.add_function(wrap_pyfunction!(crc64, module)?)?;
    Ok(())
}

/// A contiguous buffer of any Python object, held for the length of one call.
pub struct Bytes(PyUntypedBuffer);

impl Bytes {
    /// The buffer of `owner`, which must be C-contiguous; its element type does not matter.
    pub fn of(owner: &Bound<'_, PyAny>) -> PyResult<Self> {
        let buffer = PyUntypedBuffer::get(owner)?;
        if !buffer.is_c_contiguous() {
            return Err(to_py(Error::new(Kind::InvalidInput, "a buffer must be C-contiguous")));
        }
        Ok(Self(buffer))
    }

    /// Its bytes.
    pub fn as_slice(&self) -> &[u8] {
        if self.0.len_bytes() == 0 {
            return &[];
        }
        // SAFETY: the buffer is contiguous, non-empty and stays exported while `self` lives. Only
        // Waystation calls this module, and it hands over buffers that nobody writes meanwhile.
        unsafe { std::slice::from_raw_parts(self.0.buf_ptr().cast::<u8>(), self.0.len_bytes()) }
    }
}

#[pyfunction]
#[pyo3(signature = (data, /))]
fn crc64(py: Python<'_>, data: &Bound<'_, PyAny>) -> PyResult<u64> {
    let data = Bytes::of(data)?;
    py.detach(|| guarded(|| Ok(checksum::crc64(data.as_slice()))))
}
