//! The thin boundary between the engine and Python: buffers, plain plans, handles.

use pyo3::prelude::*;

#[pymodule]
fn _native(_module: &Bound<'_, PyModule>) -> PyResult<()> {
    Ok(())
}
