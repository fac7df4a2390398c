//! The thin boundary between the engine and Python: buffers, plain plans, handles.
//!
//! One file per section of `_native.pyi`, each with a `register` that adds its names. Invariants:
//! what may block runs without the GIL; errors and panics leave only through `error`.

use pyo3::prelude::*;

mod device;
mod directory;
mod dlpack;
mod error;
mod files;
mod format;
mod job;
mod memory;
mod memory_tier;
mod of_process;
mod peers;
mod read;
mod store;
mod tables;
mod throttle;
mod transport;
mod views;
mod write;

#[pymodule(gil_used = true)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    device::register(module)?;
    directory::register(module)?;
    dlpack::register(module)?;
    files::register(module)?;
    format::register(module)?;
    job::register(module)?;
    memory::register(module)?;
    memory_tier::register(module)?;
    peers::register(module)?;
    read::register(module)?;
    store::register(module)?;
    tables::register(module)?;
    throttle::register(module)?;
    transport::register(module)?;
    views::register(module)?;
    write::register(module)?;
    // PyO3 keeps a list of what was added; it would only repeat the stub.
    module.delattr("__all__")?;
    Ok(())
}
