//! The cuFile library (GPUDirect Storage): files read straight to the memory of devices.
//!
//! It is found by its name when it is first asked for, like the driver, and its functions one by one. They
//! return numbers here, not the constants of one version: a newer library may have others. Failure sequence:
//! no driver or device, no library, one that lacks a function, that does not open, or that could only copy
//! through the memory of the host itself (all Unsupported, with the reason); a file that is refused
//! (Unsupported); no memory for a block, a read that fails (Unavailable). Invariant: whatever the library
//! does to descriptor 0 while it opens is undone.

use std::ffi::{CStr, c_int, c_void};
use std::fs::File;
use std::mem::{MaybeUninit, transmute_copy};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys;
use waystation_format::{Error, Kind, Result};

use super::driver::{Device, Driver};
use super::to_device::start_within;
use crate::read::device::HostRows;
use crate::read::gpu_direct::{DeviceBlock, DirectFile, ReadToDevice};
use crate::write::DeviceCopies;

const NAMES: [&CStr; 2] = [c"libcufile.so.0", c"libcufile.so"];
const SUCCESS: u32 = 0;
const ALREADY_OPEN: u32 = 5026;
/// Of a description of a file: it is given by a descriptor.
const BY_DESCRIPTOR: c_int = 1;
/// Registered memory is cut from a device's in pieces of this.
const BLOCK_ALIGN_BYTES: usize = 64 << 10;

// ---- the library -------------------------------------------------------------------------------

/// A status of the library, and one of the driver.
#[repr(C)]
#[derive(Clone, Copy)]
struct Status {
    own: u32,
    of_driver: u32,
}

/// The first fields of what the library says of itself, and room for what newer ones add.
#[repr(C)]
struct Properties {
    driver_version: [u32; 2],
    poll_threshold: usize,
    most_direct_bytes: usize,
    /// A bit for each kind of storage that is read past the host.
    supported: u32,
    rest: [u32; 64],
}

#[repr(C)]
struct Description {
    kind: c_int,
    handle: Handle,
    operations: *const c_void,
}

/// Of a union with a pointer.
#[repr(C, align(8))]
struct Handle {
    descriptor: c_int,
}

type Open = unsafe extern "C" fn() -> Status;
type GetProperties = unsafe extern "C" fn(*mut Properties) -> Status;
type RegisterHandle = unsafe extern "C" fn(*mut *mut c_void, *mut Description) -> Status;
type DeregisterHandle = unsafe extern "C" fn(*mut c_void);
type RegisterBuffer = unsafe extern "C" fn(*const c_void, usize, c_int) -> Status;
type DeregisterBuffer = unsafe extern "C" fn(*const c_void) -> Status;
type Read = unsafe extern "C" fn(*mut c_void, *mut c_void, usize, libc::off_t, libc::off_t) -> isize;

#[derive(Debug)]
struct Library {
    process: u32,
    register_handle: RegisterHandle,
    deregister_handle: DeregisterHandle,
    register_buffer: RegisterBuffer,
    deregister_buffer: DeregisterBuffer,
    read: Read,
}

impl Library {
    /// Opens the library at the first call.
    fn get() -> Result<&'static Self> {
        static LIBRARY: OnceLock<std::result::Result<Library, String>> = OnceLock::new();
        Driver::get()?;
        match LIBRARY.get_or_init(Self::start) {
            Ok(library) if library.process == std::process::id() => Ok(library),
            Ok(_) => Err(unsupported("cuFile was opened before this process was forked")),
            Err(reason) => Err(unsupported(reason)),
        }
    }

    fn start() -> std::result::Result<Self, String> {
        let handle = NAMES.iter().find_map(|name| {
            // SAFETY: runs the initialisers of the library, as every program that uses it does.
            let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
            (!handle.is_null()).then_some(handle)
        });
        let Some(handle) = handle else {
            return Err("there is no cuFile library here (libcufile.so.0 was not found)".to_owned());
        };
        // SAFETY: the types are those of the functions.
        unsafe {
            open(function(handle, c"cuFileDriverOpen")?, function(handle, c"cuFileDriverGetProperties")?)?;
            Ok(Self {
                process: std::process::id(),
                register_handle: function(handle, c"cuFileHandleRegister")?,
                deregister_handle: function(handle, c"cuFileHandleDeregister")?,
                register_buffer: function(handle, c"cuFileBufRegister")?,
                deregister_buffer: function(handle, c"cuFileBufDeregister")?,
                read: function(handle, c"cuFileRead")?,
            })
        }
    }
}

/// # Safety
/// `F` must be the type of the function, a pointer.
unsafe fn function<F: Copy>(library: *mut c_void, name: &CStr) -> std::result::Result<F, String> {
    // SAFETY: the library stays open for ever.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    if found.is_null() {
        return Err(format!("the cuFile library here has no {}", name.to_string_lossy()));
    }
    // SAFETY: as the caller promises.
    Ok(unsafe { transmute_copy(&found) })
}

/// # Safety
/// The functions must be the library's.
unsafe fn open(open: Open, get_properties: GetProperties) -> std::result::Result<(), String> {
    let kept = keep_standard_input();
    // SAFETY: takes nothing.
    let status = unsafe { open() };
    restore_standard_input(kept);
    if !matches!(status.own, SUCCESS | ALREADY_OPEN) {
        return Err(format!("cuFile did not open: {}", reason(status)));
    }
    let mut properties = MaybeUninit::<Properties>::zeroed();
    // SAFETY: the memory is as long as any version of the library fills, and zero is a value of all fields.
    let (status, properties) = unsafe { (get_properties(properties.as_mut_ptr()), properties.assume_init()) };
    if status.own != SUCCESS {
        return Err(format!("cuFile does not say what it supports: {}", reason(status)));
    }
    if properties.supported == 0 {
        let message = "cuFile would copy through the memory of the host: it finds no storage that it can \
                       read past it (is the kernel module nvidia-fs loaded?)";
        return Err(message.to_owned());
    }
    Ok(())
}

/// On a host that is set up by half, opening the library is known to close descriptor 0.
fn keep_standard_input() -> Option<OwnedFd> {
    // SAFETY: borrowed for one call, which reports a descriptor that is not open.
    unsafe { BorrowedFd::borrow_raw(0) }.try_clone_to_owned().ok()
}

fn restore_standard_input(kept: Option<OwnedFd>) {
    let Some(kept) = kept else { return };
    // SAFETY: asks for flags alone.
    let is_closed = unsafe { libc::fcntl(0, libc::F_GETFD) } == -1;
    if is_closed {
        // SAFETY: nobody has descriptor 0.
        unsafe { libc::dup2(kept.as_fd().as_raw_fd(), 0) };
    }
}

fn reason(status: Status) -> String {
    let known = match status.own {
        5001 => "its driver is not there",
        5004 | 5005 => "its driver is of another version",
        5007 => "it does not support this machine",
        5008 => "it does not support this file system",
        5009 => "it does not support this device",
        5010 | 5033 => "the kernel module nvidia-fs failed",
        5018..=5020 => "it takes no file of this kind",
        5025 => "permission denied",
        5036 => "memory of the device could not be pinned",
        _ => "",
    };
    let told = if known.is_empty() { String::new() } else { format!("{known} ") };
    match status.of_driver {
        0 => format!("{told}(cuFile error {})", status.own),
        code => format!("{told}(cuFile error {}, CUDA error {code})", status.own),
    }
}

fn unsupported(message: impl Into<String>) -> Error {
    Error::new(Kind::Unsupported, message.into())
}

// ---- what read jobs use ------------------------------------------------------------------------

/// Reads files by cuFile.
#[derive(Debug)]
pub struct CuFile(&'static Library);

impl CuFile {
    /// Unsupported, with the reason, where files cannot be read to devices past the host.
    pub fn open() -> Result<Self> {
        Library::get().map(Self)
    }
}

impl ReadToDevice for CuFile {
    fn open(&self, file: File) -> Result<Box<dyn DirectFile>> {
        let mut description = Description {
            kind: BY_DESCRIPTOR,
            handle: Handle { descriptor: file.as_raw_fd() },
            operations: std::ptr::null(),
        };
        let mut handle = std::ptr::null_mut();
        // SAFETY: the pointers are to locals; the descriptor is open until the handle is deregistered.
        let status = unsafe { (self.0.register_handle)(&raw mut handle, &raw mut description) };
        if status.own != SUCCESS {
            return Err(unsupported(format!("cuFile does not take the file: {}", reason(status))));
        }
        Ok(Box::new(Registered { library: self.0, handle, _file: file }))
    }

    fn allocate(&self, device: u32, nbytes: usize) -> Result<Box<dyn DeviceBlock>> {
        let device = Driver::get()?.device(device)?;
        let current = device.make_current()?;
        let mut allocated = 0;
        // SAFETY: the pointer is to a local.
        let status = unsafe { sys::cuMemAlloc_v2(&raw mut allocated, nbytes + BLOCK_ALIGN_BYTES) };
        device.check("no memory for reads straight to", status)?;
        let address = allocated.next_multiple_of(BLOCK_ALIGN_BYTES as u64);
        // SAFETY: memory of the device that was allocated above. Where it is refused, the library takes its own
        // memory between, and the copies on are as right.
        let status = unsafe { (self.0.register_buffer)(address as *const c_void, nbytes, 0) };
        drop(current);
        let is_registered = status.own == SUCCESS;
        Ok(Box::new(Block { library: self.0, device, allocated, address, is_registered }))
    }

    unsafe fn start(&self, copies: &[HostRows]) -> Result<Box<dyn DeviceCopies>> {
        // SAFETY: as the caller promises.
        unsafe { start_within(copies) }
    }
}

#[derive(Debug)]
struct Registered {
    library: &'static Library,
    handle: *mut c_void,
    _file: File,
}

// SAFETY: a handle of the library, which may be used from any thread and from several at a time.
unsafe impl Send for Registered {}
// SAFETY: as above.
unsafe impl Sync for Registered {}

impl DirectFile for Registered {
    unsafe fn read(
        &self,
        block: &dyn DeviceBlock,
        position: usize,
        nbytes: usize,
        offset: u64,
    ) -> Result<usize> {
        let device = Driver::get()?.device(block.device())?;
        let current = device.make_current()?;
        let address = block.address() as *mut c_void;
        // SAFETY: the place lies in the block, which nobody else uses there.
        let count =
            unsafe { (self.library.read)(self.handle, address, nbytes, offset as i64, position as i64) };
        let failed = std::io::Error::last_os_error();
        drop(current);
        match usize::try_from(count) {
            Ok(count) => Ok(count),
            Err(_) if count == -1 => {
                Err(Error::new(Kind::Unavailable, format!("cuFile could not read the file: {failed}")))
            }
            Err(_) => {
                let status = Status { own: count.unsigned_abs() as u32, of_driver: 0 };
                Err(Error::new(
                    Kind::Unavailable,
                    format!("cuFile could not read the file: {}", reason(status)),
                ))
            }
        }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // SAFETY: registered by `open`; nobody reads by it any more.
        unsafe { (self.library.deregister_handle)(self.handle) };
    }
}

struct Block {
    library: &'static Library,
    device: Arc<Device>,
    allocated: u64,
    address: u64,
    is_registered: bool,
}

impl DeviceBlock for Block {
    fn device(&self) -> u32 {
        self.device.ordinal
    }

    fn address(&self) -> u64 {
        self.address
    }

    fn fetch(&self, bytes: &mut [u8]) -> Result<()> {
        let current = self.device.make_current()?;
        // SAFETY: the block is longer than what is fetched of it.
        let status = unsafe { sys::cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), self.address, bytes.len()) };
        drop(current);
        self.device.check("could not copy from", status)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let current = self.device.make_current();
        // What fails here is of no consequence but for the memory, which the process gives back at its end.
        // SAFETY: allocated and registered by `allocate`; copies out of it have been waited for.
        unsafe {
            if self.is_registered {
                (self.library.deregister_buffer)(self.address as *const c_void);
            }
            let _ = sys::cuMemFree_v2(self.allocated);
        }
        drop(current);
    }
}
