//! Rows of host memory to rows of device memory, asynchronously: what read jobs do with what is for devices.
//! And from one place of a device's memory to another, where it was read to that.
//!
//! The copies of one call share a stream for each device, and an event behind them (see
//! [`super::transfer`]); the next call has other streams, so that a device's bus is never idle between two.

use std::ffi::c_void;
use std::ptr::null_mut;

use cudarc::driver::sys;
use waystation_format::Result;

use super::driver::{Device, Driver};
use super::transfer::{Copies, CudaCopy, OnLane, Shape, shape_of};
use super::{near, pins};
use crate::read::device::{CopyToDevice, HostRows};
use crate::write::DeviceCopies;

/// What a failure of a copy that was under way is called.
const TO_DEVICE: &str = "copying from the host failed on";

impl CopyToDevice for CudaCopy {
    fn prepare_staging(&self, address: usize, nbytes: usize, device: u32) -> Result<()> {
        let device = Driver::get()?.device(device)?;
        let current = device.make_current()?;
        pins::lend(address, nbytes);
        if let Some(unpinned) = pins::unpinned(address) {
            pins::populate(unpinned);
            pins::pin(&device, address);
        }
        drop(current);
        Ok(())
    }

    fn release_staging(&self, address: usize, nbytes: usize) {
        pins::give_back(address, nbytes);
    }

    fn stay_near(&self, device: u32) {
        // A device that is not there is an error when staging memory is prepared for it.
        if let Ok(device) = Driver::get().and_then(|driver| driver.device(device)) {
            near::stay_near(&device.pci_bus_id);
        }
    }

    unsafe fn start(&self, copies: &[HostRows]) -> Result<Box<dyn DeviceCopies>> {
        // SAFETY: as the caller promises.
        unsafe { start(copies, Origin::Host) }
    }
}

/// Where rows come from.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Origin {
    Host,
    SameDevice,
}

/// Starts copies whose sources are memory of the devices that they go to.
///
/// # Safety
/// As for [`CopyToDevice::start`].
pub(super) unsafe fn start_within(copies: &[HostRows]) -> Result<Box<dyn DeviceCopies>> {
    // SAFETY: as the caller promises.
    unsafe { start(copies, Origin::SameDevice) }
}

/// # Safety
/// As for [`CopyToDevice::start`].
unsafe fn start(copies: &[HostRows], origin: Origin) -> Result<Box<dyn DeviceCopies>> {
    let driver = Driver::get()?;
    let mut started = Copies(Vec::new());
    // Runs of one device; a unit has few.
    for run in copies.chunk_by(|one, next| one.device == next.device) {
        let device = driver.device(run[0].device)?;
        started.0.push(OnLane::start(device, TO_DEVICE, |device, stream| {
            // SAFETY: as the caller promises.
            run.iter().try_for_each(|rows| unsafe { copy_rows(device, rows, origin, stream) })
        })?);
    }
    Ok(Box::new(started))
}

/// # Safety
/// As for [`CopyToDevice::start`]; the device's context must be current.
unsafe fn copy_rows(device: &Device, rows: &HostRows, origin: Origin, stream: sys::CUstream) -> Result<()> {
    let copy = |source: usize, destination: u64, nbytes: usize| {
        // SAFETY: as the caller promises.
        let status = unsafe {
            match origin {
                Origin::Host => {
                    sys::cuMemcpyHtoDAsync_v2(destination, source as *const c_void, nbytes, stream)
                }
                Origin::SameDevice => sys::cuMemcpyDtoDAsync_v2(destination, source as u64, nbytes, stream),
            }
        };
        device.check("could not copy to", status)
    };
    let extent = (rows.rows, rows.row_bytes);
    match shape_of(extent, rows.destination_step, rows.source_step, device.largest_pitch) {
        Shape::Contiguous => copy(rows.source, rows.destination, rows.row_bytes * rows.rows),
        Shape::Pitched => {
            let description = pitched(rows, origin);
            // SAFETY: as the caller promises; the description is read before the call returns.
            let status = unsafe { sys::cuMemcpy2DAsync_v2(&raw const description, stream) };
            device.check("could not copy to", status)
        }
        Shape::Single => (0..rows.rows).try_for_each(|row| {
            let skipped = rows.destination_step.wrapping_mul(row as i64);
            let source = rows.source + row * rows.source_step as usize;
            copy(source, rows.destination.wrapping_add_signed(skipped), rows.row_bytes)
        }),
    }
}

fn pitched(rows: &HostRows, origin: Origin) -> sys::CUDA_MEMCPY2D {
    use sys::CUmemorytype_enum::{CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_HOST};
    let is_host = origin == Origin::Host;
    sys::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: if is_host { CU_MEMORYTYPE_HOST } else { CU_MEMORYTYPE_DEVICE },
        srcHost: if is_host { rows.source as *const c_void } else { std::ptr::null() },
        srcDevice: if is_host { 0 } else { rows.source as u64 },
        srcArray: null_mut(),
        srcPitch: rows.source_step as usize,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: CU_MEMORYTYPE_DEVICE,
        dstHost: null_mut(),
        dstDevice: rows.destination,
        dstArray: null_mut(),
        dstPitch: rows.destination_step as usize,
        WidthInBytes: rows.row_bytes,
        Height: rows.rows,
    }
}
