//! The driver: loaded once, asked for devices, contexts and streams. Its statuses become errors here.
//!
//! Failure sequence: no driver library, no device, a driver that was started before a fork (all
//! Unsupported); an ordinal beyond the devices (InvalidInput); whatever a call returns (Unavailable: most
//! are sticky, which means that the process must be restarted).

use std::ffi::{CStr, c_char, c_int};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use cudarc::driver::sys;
use waystation_format::{Error, Kind, Result};

/// Longest name that a device may have.
const NAME_BYTES: usize = 256;
/// Of a name such as `0000:65:00.0`, with room for longer domains.
const BUS_ID_BYTES: usize = 32;

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// As this process counts devices.
    pub ordinal: u32,
    /// Its product name.
    pub name: String,
    /// Its memory.
    pub total_bytes: u64,
    /// Where it is on the PCI bus.
    pub pci_bus_id: String,
    /// Major and minor version of what it can compute.
    pub compute_capability: (i32, i32),
}

/// The devices that this process can use; none without a driver. Makes no context, but starts the driver,
/// after which children forked from this process cannot use CUDA.
pub fn devices() -> Result<Vec<DeviceInfo>> {
    match Driver::get() {
        Ok(driver) => (0..driver.devices.len() as u32).map(describe).collect(),
        Err(error) if error.kind() == Kind::Unsupported => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

fn describe(ordinal: u32) -> Result<DeviceInfo> {
    let handle = handle_of(ordinal)?;
    let mut total_bytes = 0usize;
    // SAFETY: the pointer is to a local.
    let status = unsafe { sys::cuDeviceTotalMem_v2(&raw mut total_bytes, handle) };
    check("could not read the size of", ordinal, status)?;
    let mut name = [0 as c_char; NAME_BYTES];
    // SAFETY: the buffer is as long as is said.
    let status = unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), NAME_BYTES as c_int, handle) };
    check("could not read the name of", ordinal, status)?;
    use sys::CUdevice_attribute_enum::{
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
    };
    Ok(DeviceInfo {
        ordinal,
        name: text_of(&name),
        total_bytes: total_bytes as u64,
        pci_bus_id: pci_bus_id(ordinal, handle)?,
        compute_capability: (attribute(ordinal, handle, MAJOR)?, attribute(ordinal, handle, MINOR)?),
    })
}

fn pci_bus_id(ordinal: u32, handle: sys::CUdevice) -> Result<String> {
    let mut bus_id = [0 as c_char; BUS_ID_BYTES];
    // SAFETY: the buffer is as long as is said.
    let status = unsafe { sys::cuDeviceGetPCIBusId(bus_id.as_mut_ptr(), BUS_ID_BYTES as c_int, handle) };
    check("could not read the address of", ordinal, status)?;
    Ok(text_of(&bus_id))
}

fn attribute(ordinal: u32, handle: sys::CUdevice, which: sys::CUdevice_attribute) -> Result<i32> {
    let mut value: c_int = 0;
    // SAFETY: the pointer is to a local.
    let status = unsafe { sys::cuDeviceGetAttribute(&raw mut value, which, handle) };
    check("could not ask", ordinal, status).map(|()| value)
}

fn text_of(text: &[c_char]) -> String {
    let bytes: Vec<u8> = text.iter().map(|&letter| letter as u8).take_while(|&letter| letter != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

// ---- the driver --------------------------------------------------------------------------------

/// The driver of this process, started.
pub(super) struct Driver {
    process: u32,
    devices: Vec<Mutex<Option<Arc<Device>>>>,
}

impl Driver {
    /// Starts the driver at the first call.
    pub fn get() -> Result<&'static Self> {
        static DRIVER: OnceLock<std::result::Result<Driver, (Kind, String)>> = OnceLock::new();
        match DRIVER.get_or_init(Self::start) {
            Ok(driver) if driver.process != std::process::id() => {
                Err(Error::new(Kind::Unsupported, AFTER_FORK))
            }
            Ok(driver) => Ok(driver),
            Err((kind, message)) => Err(Error::new(*kind, message.clone())),
        }
    }

    fn start() -> std::result::Result<Self, (Kind, String)> {
        let unsupported = |message: &str| (Kind::Unsupported, message.to_owned());
        // SAFETY: runs the initialisers of the library, as every program that uses CUDA does.
        if !unsafe { sys::is_culib_present() } {
            return Err(unsupported("there is no CUDA driver here (libcuda.so.1 was not found)"));
        }
        // SAFETY: the library is there; the first call to make.
        let mut status = unsafe { sys::cuInit(0) };
        let mut count: c_int = 0;
        if status == sys::CUresult::CUDA_SUCCESS {
            // SAFETY: the pointer is to a local.
            status = unsafe { sys::cuDeviceGetCount(&raw mut count) };
        }
        match status {
            sys::CUresult::CUDA_SUCCESS if count > 0 => Ok(Self {
                process: std::process::id(),
                devices: (0..count).map(|_| Mutex::new(None)).collect(),
            }),
            sys::CUresult::CUDA_SUCCESS | sys::CUresult::CUDA_ERROR_NO_DEVICE => {
                Err(unsupported("the CUDA driver sees no device (is CUDA_VISIBLE_DEVICES empty?)"))
            }
            sys::CUresult::CUDA_ERROR_STUB_LIBRARY => {
                Err(unsupported("the CUDA library found first is a stub for linking, not a driver"))
            }
            sys::CUresult::CUDA_ERROR_NOT_INITIALIZED => Err(unsupported(AFTER_FORK)),
            status => Err((Kind::Unavailable, format!("the CUDA driver did not start: {}", reason(status)))),
        }
    }

    /// A device, its primary context made if that has not been done yet.
    pub fn device(&self, ordinal: u32) -> Result<Arc<Device>> {
        let Some(place) = self.devices.get(ordinal as usize) else {
            let message =
                format!("there is no CUDA device {ordinal}: this process sees {}", self.devices.len());
            return Err(Error::new(Kind::InvalidInput, message));
        };
        let mut place = lock(place);
        match &*place {
            Some(device) => Ok(Arc::clone(device)),
            None => Ok(Arc::clone(place.insert(Arc::new(Device::open(ordinal)?)))),
        }
    }
}

const AFTER_FORK: &str = "CUDA was started before this process was forked and cannot be used in it; start \
                          processes by 'spawn' or 'forkserver'";

// ---- devices -----------------------------------------------------------------------------------

/// A stream to copy on, and the event that tells when its copies are done.
pub(super) struct Lane {
    pub stream: sys::CUstream,
    pub event: sys::CUevent,
}

// SAFETY: handles of the driver, which may be used from any thread.
unsafe impl Send for Lane {}

/// A device in use. Kept until the process ends, as its primary context is.
pub(super) struct Device {
    pub ordinal: u32,
    pub largest_pitch: u64,
    /// Where it is on the PCI bus.
    pub pci_bus_id: String,
    context: sys::CUcontext,
    idle_lanes: Mutex<Vec<Lane>>,
}

// SAFETY: the context is a handle of the driver, which may be used from any thread.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

/// While it lives, a device's context is the current one of this thread.
pub(super) struct Current<'a>(std::marker::PhantomData<(&'a Device, *const ())>);

impl Device {
    fn open(ordinal: u32) -> Result<Self> {
        let handle = handle_of(ordinal)?;
        let pitch = attribute(ordinal, handle, sys::CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_MAX_PITCH)?;
        let pci_bus_id = pci_bus_id(ordinal, handle)?;
        let mut context = null_mut();
        // SAFETY: the pointer is to a local. The context is never released: it is the process's own.
        let status = unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, handle) };
        check("could not use", ordinal, status)?;
        let largest_pitch = u64::try_from(pitch).unwrap_or(0);
        Ok(Self { ordinal, largest_pitch, pci_bus_id, context, idle_lanes: Mutex::new(Vec::new()) })
    }

    /// Makes the context current on this thread until the result is dropped.
    pub fn make_current(&self) -> Result<Current<'_>> {
        // SAFETY: the context was retained.
        self.check("could not use", unsafe { sys::cuCtxPushCurrent_v2(self.context) })?;
        Ok(Current(std::marker::PhantomData))
    }

    /// A lane that nobody uses. The context must be current.
    pub fn take_lane(&self) -> Result<Lane> {
        if let Some(lane) = lock(&self.idle_lanes).pop() {
            return Ok(lane);
        }
        let mut lane = Lane { stream: null_mut(), event: null_mut() };
        let streams = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the pointer is to a local.
        let status = unsafe { sys::cuStreamCreate(&raw mut lane.stream, streams) };
        self.check("could not make a stream on", status)?;
        // Waiting threads sleep: the processor belongs to the training.
        let events = sys::CUevent_flags_enum::CU_EVENT_BLOCKING_SYNC as u32
            | sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: the pointer is to a local.
        let status = unsafe { sys::cuEventCreate(&raw mut lane.event, events) };
        if let Err(error) = self.check("could not make an event on", status) {
            // SAFETY: made above; nothing was started on it.
            let _ = unsafe { sys::cuStreamDestroy_v2(lane.stream) };
            return Err(error);
        }
        Ok(lane)
    }

    /// Takes a lane back whose copies are done.
    pub fn put_back(&self, lane: Lane) {
        lock(&self.idle_lanes).push(lane);
    }

    /// Waits until nothing runs on a lane, then destroys it. For lanes with failed or unknown copies.
    pub fn abandon(&self, lane: &Lane) {
        // Only handles of ours are touched; what fails here has been reported, or is of no consequence.
        let current = self.make_current();
        // SAFETY: handles made by `take_lane` that nobody else has.
        unsafe {
            let _ = sys::cuStreamSynchronize(lane.stream);
            let _ = sys::cuEventDestroy_v2(lane.event);
            let _ = sys::cuStreamDestroy_v2(lane.stream);
        }
        drop(current);
    }

    /// An error for a status other than success; `what` is completed by the device.
    pub fn check(&self, what: &str, status: sys::CUresult) -> Result<()> {
        check(what, self.ordinal, status)
    }
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let mut context = null_mut();
        // SAFETY: pops what was pushed on this thread, which this value never leaves.
        let _ = unsafe { sys::cuCtxPopCurrent_v2(&raw mut context) };
    }
}

fn handle_of(ordinal: u32) -> Result<sys::CUdevice> {
    let mut handle = 0;
    // SAFETY: the pointer is to a local.
    let status = unsafe { sys::cuDeviceGet(&raw mut handle, ordinal as c_int) };
    check("could not find", ordinal, status).map(|()| handle)
}

fn check(what: &str, ordinal: u32, status: sys::CUresult) -> Result<()> {
    if status == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let message = format!("{what} CUDA device {ordinal}: {}", reason(status));
    Err(Error::new(Kind::Unavailable, message).with("device", ordinal.to_string()))
}

fn reason(status: sys::CUresult) -> String {
    let mut text = std::ptr::null();
    // SAFETY: the pointer is to a local.
    let told = unsafe { sys::cuGetErrorString(status, &raw mut text) };
    let code = status as u32;
    if told != sys::CUresult::CUDA_SUCCESS || text.is_null() {
        return format!("CUDA error {code}");
    }
    // SAFETY: a string that the driver keeps for ever.
    let text = unsafe { CStr::from_ptr(text) };
    format!("{} (CUDA error {code})", text.to_string_lossy())
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is guarded here is changed in single steps, so a panic leaves it whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
