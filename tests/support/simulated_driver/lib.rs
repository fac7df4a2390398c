//! A simulated CUDA driver: the calls that Waystation makes, over host memory. Tests put it in the place of
//! `libcuda.so.1` on machines without a GPU; `simulated_driver/__init__.py` builds it with `rustc`.
//!
//! Device addresses are no host addresses, so whoever mistakes one for the other crashes. Every stream is a
//! thread, and copies on it are done late. What a real driver would refuse is refused: memory that was not
//! allocated, a thread without a context, a range that is registered twice. It says nothing of speed, of
//! real devices' memory, or of what frameworks do. Environment:
//! `SIMULATED_CUDA_FAILING_COPY` is the number of a copy that fails while it is under way, from 0.
//! `SIMULATED_CUDA_HELD_COPY` is the number of the first copy that waits until the file exists that
//! `SIMULATED_CUDA_RELEASE` names; it says in a file beside that it does. `SIMULATED_CUDA_REFUSING_PINS` refuses to register memory. `SIMULATED_CUDA_LATE_US` is how late copies are.

#![allow(non_snake_case)]

mod copies;
mod memory;
mod streams;

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int, c_uint};
use std::sync::atomic::Ordering;

use memory::MEMORY;

/// What the driver answers.
pub type Status = u32;
pub const SUCCESS: Status = 0;
pub const INVALID_VALUE: Status = 1;
pub const OUT_OF_MEMORY: Status = 2;
pub const NO_CONTEXT: Status = 201;
pub const NOT_READY: Status = 600;
pub const ALREADY_REGISTERED: Status = 712;
pub const NOT_REGISTERED: Status = 713;
pub const LAUNCH_FAILED: Status = 719;

const DEVICES: c_int = 2;
/// Of every device.
pub const TOTAL_BYTES: usize = 4 << 30;

thread_local! {
    static CONTEXTS: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// A number that the environment sets.
pub fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Whether this thread may ask for anything.
pub fn has_context() -> bool {
    CONTEXTS.with_borrow(|stack| !stack.is_empty())
}

/// The same for a library beside this one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn simulated_has_context() -> bool {
    has_context()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuInit(_flags: c_uint) -> Status {
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> Status {
    unsafe { *count = DEVICES };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> Status {
    unsafe { *device = ordinal };
    if (0..DEVICES).contains(&ordinal) { SUCCESS } else { INVALID_VALUE }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceTotalMem_v2(nbytes: *mut usize, _device: c_int) -> Status {
    unsafe { *nbytes = TOTAL_BYTES };
    SUCCESS
}

unsafe fn put_text(text: &str, target: *mut c_char, room: c_int) {
    let bytes: Vec<u8> = text.bytes().chain([0]).take(room as usize).collect();
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), target, bytes.len()) };
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, room: c_int, _device: c_int) -> Status {
    unsafe { put_text("simulated device", name, room) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetPCIBusId(name: *mut c_char, room: c_int, device: c_int) -> Status {
    unsafe { put_text(&format!("FFFF:F{device}:00.0"), name, room) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, which: c_uint, _device: c_int) -> Status {
    const MAX_PITCH: c_uint = 11;
    unsafe { *value = if which == MAX_PITCH { c_int::MAX } else { 9 } };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int) -> Status {
    unsafe { *context = 1 + device as usize };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxPushCurrent_v2(context: usize) -> Status {
    CONTEXTS.with_borrow_mut(|stack| stack.push(context));
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxPopCurrent_v2(context: *mut usize) -> Status {
    let Some(popped) = CONTEXTS.with_borrow_mut(Vec::pop) else { return NO_CONTEXT };
    unsafe { *context = popped };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(status: Status, text: *mut *const c_char) -> Status {
    let found: &CStr = match status {
        OUT_OF_MEMORY => c"out of simulated memory",
        LAUNCH_FAILED => c"a simulated copy failed",
        _ => c"a simulated failure",
    };
    unsafe { *text = found.as_ptr() };
    SUCCESS
}

/// Fills: pinned bytes now, most of them at a time, copies, those of memory that was not pinned, bytes to
/// devices. For tests.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn simulated_statistics(values: *mut u64) {
    let found = [
        MEMORY.pinned_bytes.load(Ordering::SeqCst),
        MEMORY.most_pinned_bytes.load(Ordering::SeqCst),
        copies::COPIES.load(Ordering::SeqCst),
        copies::UNPINNED_COPIES.load(Ordering::SeqCst),
        copies::TO_DEVICE_BYTES.load(Ordering::SeqCst),
    ];
    unsafe { std::ptr::copy_nonoverlapping(found.as_ptr(), values, found.len()) };
}
