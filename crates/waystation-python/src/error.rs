//! Errors and panics of the engine, as Python sees them.
//!
//! Invariants: every engine error becomes the class of `waystation.errors` that its kind names, with
//! its context; no panic crosses the boundary, it becomes `Internal` instead.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use pyo3::prelude::*;
use pyo3::types::PyDict;
use waystation_format::{Error, Kind};

/// The Python exception of an engine error.
pub fn to_py(error: Error) -> PyErr {
    exception_of(&error)
}

/// An exception of Python for an error that is kept.
pub fn exception_of(error: &Error) -> PyErr {
    Python::attach(|py| match build(py, error) {
        Ok(exception) => PyErr::from_value(exception),
        Err(failure) => failure,
    })
}

/// Runs engine code so that neither an error nor a panic escapes untyped. Holding the GIL or not is
/// up to the caller.
pub fn guarded<T>(run: impl FnOnce() -> Result<T, Error>) -> PyResult<T> {
    // Whatever `run` had borrowed is dropped or unreachable once it has panicked: a panic ends the
    // call, and handles shared with other threads recover from poisoned locks themselves.
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(result) => result.map_err(to_py),
        Err(payload) => Err(to_py(of_panic(payload.as_ref()))),
    }
}

fn build<'py>(py: Python<'py>, error: &Error) -> PyResult<Bound<'py, PyAny>> {
    let context = PyDict::new(py);
    for (key, value) in error.contexts() {
        context.set_item(*key, value)?;
    }
    py.import("waystation._errors")?.getattr("from_native")?.call1((
        error.kind().name(),
        error.message(),
        context,
    ))
}

fn of_panic(payload: &(dyn Any + Send)) -> Error {
    let said = payload
        .downcast_ref::<&'static str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message");
    Error::new(Kind::Internal, format!("the engine panicked: {said}; please report this"))
}
