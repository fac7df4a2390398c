//! Many objects at once: the memory of arrays by the buffer protocol, and which objects are the same.
//!
//! A state has thousands of arrays of few shapes. One pass over them says of each where it begins and which
//! others it is like, so that all else is decided once for each kind.

use std::collections::HashMap;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyList};
use waystation_format::{Error, Kind};

use crate::error::to_py;

const NONE: i64 = -1;

/// A view of one array.
struct View(ffi::Py_buffer);

// SAFETY: the fields are only read before the view is kept; then it is only dropped, by the interpreter.
unsafe impl Send for View {}
// SAFETY: as above.
unsafe impl Sync for View {}

impl Drop for View {
    fn drop(&mut self) {
        // SAFETY: the structure was filled by PyObject_GetBuffer, and is released once, with the GIL: it is
        // dropped in `view_arrays`, or by the deallocation of a Python object.
        unsafe { ffi::PyBuffer_Release(&raw mut self.0) };
    }
}

/// Views that keep the memory of arrays for as long as the object lives.
#[pyclass(frozen, module = "waystation._native")]
struct Views {
    #[allow(dead_code)] // held, until it is dropped
    held: Vec<View>,
}

impl View {
    /// The view of an array; none if it has no buffer (of this kind).
    fn of(array: &Bound<'_, PyAny>) -> Option<Self> {
        let mut view = ffi::Py_buffer::new();
        // SAFETY: the GIL is held, and the structure is the callee's to fill. Without PyBUF_FORMAT, exporters
        // need not know how to spell their dtype.
        let status = unsafe { ffi::PyObject_GetBuffer(array.as_ptr(), &raw mut view, ffi::PyBUF_STRIDES) };
        if status == 0 {
            return Some(Self(view));
        }
        drop(PyErr::take(array.py()));
        None
    }

    fn axes(&self) -> usize {
        usize::try_from(self.0.ndim).unwrap_or(0)
    }

    fn shape(&self) -> &[isize] {
        // SAFETY: the exporter was asked for the shape, which has as many entries as there are axes.
        if self.axes() == 0 { &[] } else { unsafe { std::slice::from_raw_parts(self.0.shape, self.axes()) } }
    }

    fn is_contiguous(&self) -> bool {
        if self.axes() == 0 || self.0.len == 0 || self.0.strides.is_null() {
            return true;
        }
        // SAFETY: the exporter has given strides, as many as there are axes.
        let strides = unsafe { std::slice::from_raw_parts(self.0.strides, self.axes()) };
        let mut expected = self.0.itemsize;
        self.shape().iter().zip(strides).rev().all(|(&extent, &stride)| {
            let fits = extent == 1 || stride == expected;
            expected = expected.saturating_mul(extent);
            fits
        })
    }
}

#[pyfunction]
#[pyo3(signature = (arrays, alike, /, *, hold))]
fn view_arrays<'py>(
    py: Python<'py>,
    arrays: &Bound<'py, PyList>,
    alike: &Bound<'py, PyList>,
    hold: bool,
) -> PyResult<(Bound<'py, PyBytes>, Bound<'py, PyBytes>, Option<Views>)> {
    if arrays.len() != alike.len() {
        return Err(to_py(Error::new(Kind::InvalidInput, "the lists differ in length")));
    }
    let mut known: HashMap<Vec<isize>, i64> = HashMap::new();
    let mut key: Vec<isize> = Vec::new();
    let (mut kinds, mut addresses) = (Vec::with_capacity(arrays.len()), Vec::with_capacity(arrays.len()));
    let mut held = Vec::new();
    for (array, like) in arrays.iter().zip(alike.iter()) {
        let found = if like.is_none() { None } else { View::of(&array).filter(View::is_contiguous) };
        let Some(view) = found else {
            kinds.push(NONE);
            addresses.push(0);
            continue;
        };
        key.clear();
        key.push(like.as_ptr() as isize);
        key.extend_from_slice(view.shape());
        let next = i64::try_from(known.len()).unwrap_or(i64::MAX);
        let kind = match known.get(key.as_slice()) {
            Some(&kind) => kind,
            None => *known.entry(key.clone()).or_insert(next),
        };
        kinds.push(kind);
        addresses.push(view.0.buf as i64);
        if hold {
            held.push(view);
        }
    }
    Ok((packed(py, &kinds), packed(py, &addresses), hold.then_some(Views { held })))
}

#[pyfunction]
#[pyo3(signature = (objects, /))]
fn distinct_objects<'py>(
    py: Python<'py>,
    objects: &Bound<'py, PyList>,
) -> PyResult<(Bound<'py, PyList>, Bound<'py, PyByteArray>)> {
    let distinct = PyList::empty(py);
    let mut known: HashMap<usize, i64> = HashMap::new();
    let mut which = Vec::with_capacity(objects.len());
    // Neighbours are often the same object, and need no look-up.
    let mut last = (0, NONE);
    for object in objects.iter() {
        let identity = object.as_ptr() as usize;
        if identity != last.0 {
            let next = i64::try_from(known.len()).unwrap_or(i64::MAX);
            let place = *known.entry(identity).or_insert(next);
            if place == next {
                distinct.append(object)?;
            }
            last = (identity, place);
        }
        which.push(last.1);
    }
    Ok((distinct, PyByteArray::new(py, &bytes_of(&which))))
}

fn packed<'py>(py: Python<'py>, numbers: &[i64]) -> Bound<'py, PyBytes> {
    PyBytes::new(py, &bytes_of(numbers))
}

fn bytes_of(numbers: &[i64]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_ne_bytes()).collect()
}

/// Adds the names of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Views>()?;
    module.add_function(wrap_pyfunction!(distinct_objects, module)?)?;
    module.add_function(wrap_pyfunction!(view_arrays, module)?)
}
