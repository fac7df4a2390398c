//! Memory of simulated devices, and host memory that is pinned.

use std::collections::BTreeMap;
use std::ffi::c_uint;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex};

use crate::{ALREADY_REGISTERED, INVALID_VALUE, NO_CONTEXT, NOT_REGISTERED, OUT_OF_MEMORY, SUCCESS, Status};
use crate::{TOTAL_BYTES, has_context, number};

/// No process has host memory there.
const DEVICE_BASE: u64 = 1 << 50;
const ALIGN_BYTES: usize = 512;

/// An allocation: where it really is, where in that it begins, and its bytes.
struct Allocation {
    memory: Box<[u8]>,
    skipped: usize,
    nbytes: usize,
}

/// All memory.
#[derive(Default)]
pub struct Memory {
    allocations: Mutex<BTreeMap<u64, Allocation>>,
    pins: Mutex<BTreeMap<usize, usize>>,
    pub pinned_bytes: AtomicU64,
    pub most_pinned_bytes: AtomicU64,
}

pub static MEMORY: LazyLock<Memory> = LazyLock::new(Memory::default);

/// The host memory behind a range of device memory, if that was allocated.
pub fn behind(address: u64, nbytes: usize) -> Option<*mut u8> {
    let allocations = MEMORY.allocations.lock().unwrap();
    let (start, own) = allocations.range(..=address).next_back()?;
    let offset = (address - start) as usize;
    let found = own.memory.as_ptr().wrapping_add(own.skipped + offset).cast_mut();
    (offset.checked_add(nbytes)? <= own.nbytes).then_some(found)
}

/// The same for a library beside this one; null if there is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn simulated_behind(address: u64, nbytes: usize) -> *mut u8 {
    behind(address, nbytes).unwrap_or(std::ptr::null_mut())
}

/// Whether all of a range is pinned.
pub fn is_pinned(address: usize, nbytes: usize) -> bool {
    let pins = MEMORY.pins.lock().unwrap();
    pins.range(..=address).next_back().is_some_and(|(start, size)| address + nbytes <= start + size)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, nbytes: usize) -> Status {
    if !has_context() {
        return NO_CONTEXT;
    }
    if nbytes == 0 || nbytes > TOTAL_BYTES {
        return OUT_OF_MEMORY;
    }
    let memory = vec![0xa5u8; nbytes + ALIGN_BYTES].into_boxed_slice();
    let skipped = memory.as_ptr().align_offset(ALIGN_BYTES);
    let found = DEVICE_BASE + memory.as_ptr() as u64 + skipped as u64;
    MEMORY.allocations.lock().unwrap().insert(found, Allocation { memory, skipped, nbytes });
    unsafe { *address = found };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFree_v2(address: u64) -> Status {
    MEMORY.allocations.lock().unwrap().remove(&address).map_or(INVALID_VALUE, |_| SUCCESS)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostAlloc(address: *mut usize, nbytes: usize, _flags: c_uint) -> Status {
    let memory = vec![0u8; nbytes].leak();
    unsafe { *address = memory.as_ptr() as usize };
    unsafe { cuMemHostRegister_v2(memory.as_ptr() as usize, nbytes, 0) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFreeHost(address: usize) -> Status {
    unsafe { cuMemHostUnregister(address) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostRegister_v2(address: usize, nbytes: usize, _flags: c_uint) -> Status {
    if number("SIMULATED_CUDA_REFUSING_PINS").is_some() {
        return OUT_OF_MEMORY;
    }
    let mut pins = MEMORY.pins.lock().unwrap();
    let before = pins.range(..address + nbytes).next_back();
    if before.is_some_and(|(start, size)| start + size > address) {
        return ALREADY_REGISTERED;
    }
    pins.insert(address, nbytes);
    let bytes = MEMORY.pinned_bytes.fetch_add(nbytes as u64, Ordering::SeqCst) + nbytes as u64;
    MEMORY.most_pinned_bytes.fetch_max(bytes, Ordering::SeqCst);
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostUnregister(address: usize) -> Status {
    let Some(nbytes) = MEMORY.pins.lock().unwrap().remove(&address) else { return NOT_REGISTERED };
    MEMORY.pinned_bytes.fetch_sub(nbytes as u64, Ordering::SeqCst);
    SUCCESS
}
