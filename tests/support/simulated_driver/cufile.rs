//! A simulated cuFile beside the simulated driver, over whose devices' memory it reads files.
//!
//! What storage wants and the real library repairs at a price is refused: offsets, lengths and places that are
//! no whole pages; so is a thread without a context, memory that was not allocated, a handle that was not
//! registered. It says nothing of speed, nor of what real storage supports. Environment, each
//! `SIMULATED_CUDA_CUFILE_` and: `STATUS` is what opening returns. `CLOSES_INPUT` has it close descriptor 0.
//! `COMPATIBLE` has it find no storage. `REFUSING_FILES` and `REFUSING_BUFFERS` refuse to register these.
//! `WRONG_READ`, `SHORT_READ` and `FAILING_READ` are the number of a read that gives a wrong byte, gives a page
//! alone, or fails, from 0; so do those that follow a failing one.

#![allow(non_snake_case)]

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fs::File;
use std::mem::ManuallyDrop;
use std::os::fd::FromRawFd;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

const SUCCESS: u32 = 0;
const NOT_SUPPORTED: u32 = 5008;
const POINTER_INVALID: u32 = 5012;
const RANGE_ERROR: u32 = 5014;
const INVALID_VALUE: u32 = 5022;
const NOT_REGISTERED: u32 = 5027;
const PINNING_FAILED: u32 = 5036;
const IO_ERROR: u32 = 5044;
const INVALID_CONTEXT: u32 = 5047;
const PAGE_BYTES: usize = 4096;
const NVME: u32 = 1 << 4;

static FILES: Mutex<BTreeMap<usize, c_int>> = Mutex::new(BTreeMap::new());
static BUFFERS: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());
static READS: AtomicU64 = AtomicU64::new(0);
static READ_BYTES: AtomicU64 = AtomicU64::new(0);

unsafe extern "C" {
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
    fn close(descriptor: c_int) -> c_int;
}

#[repr(C)]
pub struct Status {
    own: u32,
    of_driver: u32,
}

fn status(own: u32) -> Status {
    Status { own, of_driver: 0 }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(format!("SIMULATED_CUDA_CUFILE_{name}")).ok()?.parse().ok()
}

/// A function of the simulated driver.
fn of_driver(name: &CStr) -> *mut c_void {
    const NOW: c_int = 2;
    let found = unsafe { dlsym(dlopen(c"libcuda.so.1".as_ptr(), NOW), name.as_ptr()) };
    assert!(!found.is_null(), "the driver is no simulated one");
    found
}

fn behind(address: usize, nbytes: usize) -> *mut u8 {
    type Behind = unsafe extern "C" fn(u64, usize) -> *mut u8;
    let ask: Behind = unsafe { std::mem::transmute(of_driver(c"simulated_behind")) };
    unsafe { ask(address as u64, nbytes) }
}

fn has_context() -> bool {
    type HasContext = unsafe extern "C" fn() -> bool;
    let ask: HasContext = unsafe { std::mem::transmute(of_driver(c"simulated_has_context")) };
    unsafe { ask() }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileDriverOpen() -> Status {
    if number("CLOSES_INPUT").is_some() {
        unsafe { close(0) };
    }
    status(number("STATUS").map_or(SUCCESS, |found| found as u32))
}

#[repr(C)]
pub struct Properties {
    version: [u32; 2],
    poll_threshold: usize,
    most_direct_bytes: usize,
    supported: u32,
    control: u32,
    others: [u32; 6],
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileDriverGetProperties(properties: *mut Properties) -> Status {
    let supported = if number("COMPATIBLE").is_some() { 0 } else { NVME };
    let (version, others) = ([2, 25], [7; 6]);
    let found = Properties { version, poll_threshold: 4, most_direct_bytes: 16 << 10, supported, control: 2, others };
    unsafe { *properties = found };
    status(SUCCESS)
}

#[repr(C)]
pub struct Description {
    kind: c_int,
    descriptor: usize, // of a union that is as long as a pointer
    operations: *const c_void,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileHandleRegister(handle: *mut usize, description: *mut Description) -> Status {
    const BY_DESCRIPTOR: c_int = 1;
    let given = unsafe { &*description };
    if given.kind != BY_DESCRIPTOR {
        return status(INVALID_VALUE);
    }
    if number("REFUSING_FILES").is_some() {
        return status(NOT_SUPPORTED);
    }
    let mut files = FILES.lock().unwrap();
    let own = files.last_key_value().map_or(1, |(last, _)| last + 1);
    files.insert(own, given.descriptor as c_int);
    unsafe { *handle = own };
    status(SUCCESS)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileHandleDeregister(handle: usize) {
    if FILES.lock().unwrap().remove(&handle).is_none() {
        eprintln!("a handle was deregistered that was not registered");
        std::process::abort();
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileBufRegister(address: usize, nbytes: usize, _flags: c_int) -> Status {
    if number("REFUSING_BUFFERS").is_some() {
        return status(PINNING_FAILED);
    }
    if behind(address, nbytes).is_null() {
        return status(POINTER_INVALID);
    }
    BUFFERS.lock().unwrap().insert(address, nbytes);
    status(SUCCESS)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileBufDeregister(address: usize) -> Status {
    status(BUFFERS.lock().unwrap().remove(&address).map_or(INVALID_VALUE, |_| SUCCESS))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileRead(
    handle: usize,
    base: usize,
    nbytes: usize,
    offset: i64,
    position: i64,
) -> isize {
    match read(handle, base, nbytes, offset as u64, position as usize) {
        Ok(count) => count as isize,
        Err(status) => -(status as isize),
    }
}

fn read(handle: usize, base: usize, nbytes: usize, offset: u64, position: usize) -> Result<usize, u32> {
    if !has_context() {
        return Err(INVALID_CONTEXT);
    }
    if offset % PAGE_BYTES as u64 != 0 || [nbytes, base, position].iter().any(|size| size % PAGE_BYTES != 0) {
        return Err(INVALID_VALUE);
    }
    let Some(&descriptor) = FILES.lock().unwrap().get(&handle) else { return Err(NOT_REGISTERED) };
    let target = behind(base + position, nbytes);
    if target.is_null() {
        return Err(RANGE_ERROR);
    }
    let count = READS.fetch_add(1, Ordering::SeqCst);
    if number("FAILING_READ").is_some_and(|first| count >= first) {
        return Err(IO_ERROR);
    }
    let most = if number("SHORT_READ") == Some(count) { PAGE_BYTES } else { nbytes };
    let file = ManuallyDrop::new(unsafe { File::from_raw_fd(descriptor) });
    // The descriptor may be one for direct transfers, which want memory that is aligned.
    let mut pages = vec![[0u8; PAGE_BYTES]; most / PAGE_BYTES + 1];
    let start = pages.as_mut_ptr().cast::<u8>();
    let start = start.wrapping_add(start.align_offset(PAGE_BYTES));
    let bytes = unsafe { std::slice::from_raw_parts_mut(start, most) };
    let mut filled = 0;
    while filled < most {
        match file.read_at(&mut bytes[filled..], offset + filled as u64) {
            Ok(0) => break,
            Ok(more) => filled += more,
            Err(_) => return Err(IO_ERROR),
        }
        if filled % PAGE_BYTES != 0 {
            break;
        }
    }
    if number("WRONG_READ") == Some(count) {
        bytes[filled / 2] ^= 1;
    }
    unsafe { std::ptr::copy_nonoverlapping(start, target, filled) };
    READ_BYTES.fetch_add(filled as u64, Ordering::SeqCst);
    Ok(filled)
}

/// Fills: reads, their bytes, files and buffers that are registered now. For tests.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn simulated_cufile_statistics(values: *mut u64) {
    let found = [
        READS.load(Ordering::SeqCst),
        READ_BYTES.load(Ordering::SeqCst),
        FILES.lock().unwrap().len() as u64,
        BUFFERS.lock().unwrap().len() as u64,
    ];
    unsafe { std::ptr::copy_nonoverlapping(found.as_ptr(), values, found.len()) };
}
