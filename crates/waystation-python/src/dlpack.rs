//! Arrays over memory of the arena as DLPack capsules, which frameworks take for theirs without a copy.
//!
//! A capsule owns its part of the slab's memory, as the specification has it: whoever takes the array calls
//! the deleter once, from any thread and without the GIL; the capsule itself does so where nobody has taken
//! it. (DLPack, "Python Specification" and `dlpack.h`, the unversioned structure of DLPack 0.x, which every
//! consumer still takes.)

use std::ffi::{CStr, c_void};
use std::sync::Arc;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyList;
use waystation_format::{Error, Kind};
use waystation_io::arena;

use crate::error::guarded;
use crate::memory::Slab;

const NEW: &CStr = c"dltensor";
const CPU: i32 = 1; // kDLCPU

#[repr(C)]
struct Device {
    kind: i32,
    ordinal: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: Device,
    axes: i32,
    dtype: DataType,
    shape: *mut i64,
    strides: *mut i64, // none: C-contiguous
    byte_offset: u64,
}

#[repr(C)]
struct ManagedTensor {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedTensor)>,
}

/// What a consumer holds: the structure first, so that its address is that of all of it.
#[repr(C)]
struct Held {
    managed: ManagedTensor,
    shape: Box<[i64]>,
    _memory: Option<Arc<arena::Slab>>,
}

/// # Safety
/// Called once, with what [`hold`] has made.
unsafe extern "C" fn delete(managed: *mut ManagedTensor) {
    // SAFETY: the structure is the first field of what was boxed, with C's layout.
    drop(unsafe { Box::from_raw(managed.cast::<Held>()) });
}

/// # Safety
/// Called by the interpreter when the capsule dies.
unsafe extern "C" fn delete_if_not_taken(capsule: *mut ffi::PyObject) {
    // SAFETY: the capsule is alive; who takes the array renames it.
    let is_new = unsafe { ffi::PyCapsule_IsValid(capsule, NEW.as_ptr()) } == 1;
    if is_new {
        // SAFETY: a capsule of that name was made below, of a structure that nobody has taken.
        unsafe { delete(ffi::PyCapsule_GetPointer(capsule, NEW.as_ptr()).cast()) };
    }
}

fn hold(
    memory: Option<Arc<arena::Slab>>,
    offset: usize,
    shape: Vec<i64>,
    dtype: DataType,
) -> Result<Box<Held>, Error> {
    let invalid = |message: &str| Error::new(Kind::InvalidInput, message.to_owned());
    let items = shape
        .iter()
        .try_fold(1_usize, |items, &extent| items.checked_mul(usize::try_from(extent).ok()?))
        .ok_or_else(|| invalid("an array has too many elements, or a negative extent"))?;
    let nbytes = items
        .checked_mul(usize::from(dtype.bits / 8) * usize::from(dtype.lanes))
        .ok_or_else(|| invalid("an array has too many bytes"))?;
    let data = match &memory {
        Some(slab) if offset.checked_add(nbytes).is_some_and(|end| end <= slab.nbytes()) => {
            slab.address().as_ptr().wrapping_add(offset)
        }
        None if nbytes == 0 => std::ptr::null_mut(),
        _ => return Err(invalid("an array reaches beyond its slab")),
    };
    let axes = i32::try_from(shape.len()).map_err(|_| invalid("an array has too many axes"))?;
    let mut shape = shape.into_boxed_slice();
    let tensor = Tensor {
        data: data.cast(),
        device: Device { kind: CPU, ordinal: 0 },
        axes,
        dtype,
        shape: shape.as_mut_ptr(), // the elements do not move with the box
        strides: std::ptr::null_mut(),
        byte_offset: 0,
    };
    let managed = ManagedTensor { tensor, context: std::ptr::null_mut(), deleter: Some(delete) };
    Ok(Box::new(Held { managed, shape, _memory: memory }))
}

#[pyfunction]
#[pyo3(signature = (slabs, offsets, shapes, dtypes, /))]
fn dlpack_capsules<'py>(
    py: Python<'py>,
    slabs: Vec<Option<Bound<'py, Slab>>>,
    offsets: Vec<usize>,
    shapes: Vec<Vec<i64>>,
    dtypes: Vec<(u8, u8)>,
) -> PyResult<Bound<'py, PyList>> {
    if [offsets.len(), shapes.len(), dtypes.len()].iter().any(|&length| length != slabs.len()) {
        return guarded(|| {
            Err(Error::new(Kind::InvalidInput, "slabs, offsets, shapes and dtypes differ in number"))
        });
    }
    let capsules = PyList::empty(py);
    let places = slabs.iter().zip(offsets).zip(shapes).zip(dtypes);
    for (((slab, offset), shape), (code, bits)) in places {
        let memory = slab.as_ref().map(|slab| Arc::clone(&slab.get().0));
        let held = guarded(|| hold(memory, offset, shape, DataType { code, bits, lanes: 1 }))?;
        let pointer = Box::into_raw(held);
        // SAFETY: the GIL is held; the destructor frees the structure unless somebody takes it.
        let capsule = unsafe {
            let made = ffi::PyCapsule_New(pointer.cast(), NEW.as_ptr(), Some(delete_if_not_taken));
            if made.is_null() {
                drop(Box::from_raw(pointer));
            }
            Bound::from_owned_ptr_or_err(py, made)
        }?;
        capsules.append(capsule)?;
    }
    Ok(capsules)
}

/// Adds the names of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(dlpack_capsules, module)?)
}
