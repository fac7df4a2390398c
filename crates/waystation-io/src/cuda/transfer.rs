//! Rows of device memory to rows of host memory, asynchronously.
//!
//! The copies of one call share a stream for each device, and an event behind them. Invariants: a stream
//! has copies of one call only; it is reused when they are done, and destroyed, after waiting, when
//! anything about them failed.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;

use cudarc::driver::sys;
use waystation_format::Result;

use super::driver::{Device, Driver, Lane};
use super::pins;
use crate::write::{DeviceCopies, DeviceCopy, DeviceRows};

/// Fills the staging blocks of write jobs from CUDA devices.
pub struct CudaCopy;

impl DeviceCopy for CudaCopy {
    fn prepare_staging(&self, address: usize, nbytes: usize) -> Result<()> {
        Driver::get()?;
        pins::lend(address, nbytes);
        Ok(())
    }

    fn release_staging(&self, address: usize, nbytes: usize) {
        pins::give_back(address, nbytes);
    }

    unsafe fn start(&self, copies: &[DeviceRows]) -> Result<Box<dyn DeviceCopies>> {
        // SAFETY: as the caller promises.
        Ok(Box::new(unsafe { start(copies)? }))
    }
}

/// Starts copies of rows from any devices.
///
/// # Safety
/// As for [`DeviceCopy::start`].
pub(super) unsafe fn start(copies: &[DeviceRows]) -> Result<Copies> {
    let driver = Driver::get()?;
    let mut started = Copies(Vec::new());
    let mut rest = copies;
    while let Some(first) = rest.first() {
        // Runs of one device; a call has few.
        let count = rest.iter().take_while(|rows| rows.device == first.device).count();
        let device = driver.device(first.device)?;
        started.0.push(OnLane::start(device, FROM_DEVICE, |device, stream| {
            rest[..count].iter().try_for_each(|rows| {
                pins::pin(device, rows.destination);
                // SAFETY: as the caller promises.
                unsafe { copy_rows(device, rows, stream) }
            })
        })?);
        rest = &rest[count..];
    }
    Ok(started)
}

/// What a failure of a copy that was under way is called.
const FROM_DEVICE: &str = "copying to the host failed on";

/// Copies under way; dropping them waits.
pub(super) struct Copies(pub Vec<OnLane>);

impl DeviceCopies for Copies {
    fn wait(&mut self) -> Result<()> {
        // Every one is waited for, whatever became of the others.
        self.0.drain(..).map(OnLane::wait).fold(Ok(()), Result::and)
    }

    fn are_over(&self) -> bool {
        self.0.iter().all(OnLane::is_over)
    }
}

/// Copies under way on one stream.
pub(super) struct OnLane {
    device: Arc<Device>,
    lane: Option<Lane>,
    failure: &'static str,
}

impl OnLane {
    /// Takes a lane and has copies put on its stream. What fails later is called `failure`.
    pub fn start(
        device: Arc<Device>,
        failure: &'static str,
        enqueue: impl FnOnce(&Arc<Device>, sys::CUstream) -> Result<()>,
    ) -> Result<Self> {
        let current = device.make_current()?;
        let Lane { stream, event } = device.take_lane()?;
        let under_way = Self { device: Arc::clone(&device), lane: Some(Lane { stream, event }), failure };
        enqueue(&device, stream)?;
        // SAFETY: both handles belong to the lane.
        device.check("could not follow copies on", unsafe { sys::cuEventRecord(event, stream) })?;
        drop(current);
        Ok(under_way)
    }

    /// Whether its event has been reached, or would be reported as failed.
    fn is_over(&self) -> bool {
        let Some(lane) = &self.lane else { return true };
        // SAFETY: the event belongs to the lane, and was recorded when the copies were started.
        unsafe { sys::cuEventQuery(lane.event) != sys::CUresult::CUDA_ERROR_NOT_READY }
    }

    fn wait(mut self) -> Result<()> {
        let Some(lane) = &self.lane else { return Ok(()) };
        let current = self.device.make_current()?;
        // SAFETY: the event belongs to the lane, and was recorded when the copies were started.
        let status = unsafe { sys::cuEventSynchronize(lane.event) };
        self.device.check(self.failure, status)?;
        drop(current);
        if let Some(lane) = self.lane.take() {
            self.device.put_back(lane);
        }
        Ok(())
    }
}

impl Drop for OnLane {
    fn drop(&mut self) {
        if let Some(lane) = self.lane.take() {
            self.device.abandon(&lane);
        }
    }
}

/// How rows are copied.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Shape {
    /// All in one piece.
    Contiguous,
    /// At constant steps that the device's copy engine takes.
    Pitched,
    /// One after another.
    Single,
}

/// How rows are copied that are so many bytes apart on the device and on the host.
pub(super) fn shape_of(
    (rows, row_bytes): (usize, usize),
    device_step: i64,
    host_step: u64,
    largest_pitch: u64,
) -> Shape {
    let row_bytes = row_bytes as u64;
    if rows == 1 {
        return Shape::Contiguous;
    }
    let Ok(device_step) = u64::try_from(device_step) else { return Shape::Single };
    let is_pitch = |step: u64| (row_bytes..=largest_pitch).contains(&step);
    if device_step == row_bytes && host_step == row_bytes {
        Shape::Contiguous
    } else if is_pitch(device_step) && is_pitch(host_step) {
        Shape::Pitched
    } else {
        Shape::Single
    }
}

/// # Safety
/// As for [`DeviceCopy::start`]; the device's context must be current.
unsafe fn copy_rows(device: &Device, rows: &DeviceRows, stream: sys::CUstream) -> Result<()> {
    let copy = |source: u64, destination: usize, nbytes: usize| {
        // SAFETY: as the caller promises.
        let status = unsafe { sys::cuMemcpyDtoHAsync_v2(destination as *mut c_void, source, nbytes, stream) };
        device.check("could not copy from", status)
    };
    let extent = (rows.rows, rows.row_bytes);
    match shape_of(extent, rows.source_step, rows.destination_step, device.largest_pitch) {
        Shape::Contiguous => copy(rows.source, rows.destination, rows.row_bytes * rows.rows),
        Shape::Pitched => {
            let description = pitched(rows);
            // SAFETY: as the caller promises; the description is read before the call returns.
            let status = unsafe { sys::cuMemcpy2DAsync_v2(&raw const description, stream) };
            device.check("could not copy from", status)
        }
        Shape::Single => (0..rows.rows).try_for_each(|row| {
            let source = rows.source.wrapping_add_signed(rows.source_step.wrapping_mul(row as i64));
            copy(source, rows.destination + row * rows.destination_step as usize, rows.row_bytes)
        }),
    }
}

fn pitched(rows: &DeviceRows) -> sys::CUDA_MEMCPY2D {
    sys::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: sys::CUmemorytype_enum::CU_MEMORYTYPE_DEVICE,
        srcHost: std::ptr::null(),
        srcDevice: rows.source,
        srcArray: null_mut(),
        srcPitch: rows.source_step as usize,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: sys::CUmemorytype_enum::CU_MEMORYTYPE_HOST,
        dstHost: rows.destination as *mut c_void,
        dstDevice: 0,
        dstArray: null_mut(),
        dstPitch: rows.destination_step as usize,
        WidthInBytes: rows.row_bytes,
        Height: rows.rows,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_steps_that_the_engine_takes_are_pitched() {
        let shape = |device_step, host_step, count| shape_of((count, 8), device_step, host_step, 1 << 10);
        assert_eq!(shape(0, 0, 1), Shape::Contiguous);
        assert_eq!(shape(8, 8, 5), Shape::Contiguous);
        assert_eq!(shape(8, 16, 5), Shape::Pitched);
        assert_eq!(shape(16, 1 << 10, 5), Shape::Pitched);
        assert_eq!(shape(8, (1 << 10) + 1, 5), Shape::Single);
        assert_eq!(shape(-8, 8, 5), Shape::Single);
        assert_eq!(shape(0, 8, 5), Shape::Single);
    }
}
