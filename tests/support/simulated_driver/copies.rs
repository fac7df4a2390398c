//! Copies between host memory and simulated devices, on streams and at once.

use std::ffi::c_uint;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::memory::{behind, is_pinned};
use crate::streams::enqueue;
use crate::{INVALID_VALUE, LAUNCH_FAILED, SUCCESS, Status, number};

pub static COPIES: AtomicU64 = AtomicU64::new(0);
pub static UNPINNED_COPIES: AtomicU64 = AtomicU64::new(0);
pub static TO_DEVICE_BYTES: AtomicU64 = AtomicU64::new(0);

/// A row to copy: addresses of host memory, and bytes.
struct Row(usize, usize, usize);

/// Copies from the host or to it, of which the given range is used.
fn copy_late(rows: Vec<Row>, host: usize, host_bytes: usize, stream: usize) -> Status {
    if !is_pinned(host, host_bytes) {
        UNPINNED_COPIES.fetch_add(1, Ordering::SeqCst);
    }
    enqueue_late(rows, stream)
}

fn enqueue_late(rows: Vec<Row>, stream: usize) -> Status {
    let count = COPIES.fetch_add(1, Ordering::SeqCst);
    let work = move || {
        if number("SIMULATED_CUDA_HELD_COPY").is_some_and(|held| count >= held) {
            let release = std::env::var_os("SIMULATED_CUDA_RELEASE").expect("what releases held copies");
            let release = std::path::Path::new(&release);
            std::fs::write(release.with_extension("held"), "").expect("a directory to say so in");
            while !release.exists() {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        std::thread::sleep(Duration::from_micros(number("SIMULATED_CUDA_LATE_US").unwrap_or(200)));
        if number("SIMULATED_CUDA_FAILING_COPY") == Some(count) {
            return LAUNCH_FAILED;
        }
        for Row(source, target, nbytes) in rows {
            unsafe { std::ptr::copy_nonoverlapping(source as *const u8, target as *mut u8, nbytes) };
        }
        SUCCESS
    };
    enqueue(stream, Box::new(work))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoDAsync_v2(to: u64, from: usize, nbytes: usize, stream: usize) -> Status {
    let Some(target) = behind(to, nbytes) else { return INVALID_VALUE };
    TO_DEVICE_BYTES.fetch_add(nbytes as u64, Ordering::SeqCst);
    copy_late(vec![Row(from, target as usize, nbytes)], from, nbytes, stream)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoHAsync_v2(to: usize, from: u64, nbytes: usize, stream: usize) -> Status {
    let Some(source) = behind(from, nbytes) else { return INVALID_VALUE };
    copy_late(vec![Row(source as usize, to, nbytes)], to, nbytes, stream)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, nbytes: usize, stream: usize) -> Status {
    let (Some(target), Some(source)) = (behind(to, nbytes), behind(from, nbytes)) else {
        return INVALID_VALUE;
    };
    enqueue_late(vec![Row(source as usize, target as usize, nbytes)], stream)
}

/// The driver's description of a copy of rows.
#[repr(C)]
pub struct Copy2D {
    source_x: usize,
    source_y: usize,
    source_kind: c_uint,
    source_host: usize,
    source_device: u64,
    source_array: usize,
    source_pitch: usize,
    target_x: usize,
    target_y: usize,
    target_kind: c_uint,
    target_host: usize,
    target_device: u64,
    target_array: usize,
    target_pitch: usize,
    width: usize,
    height: usize,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpy2DAsync_v2(description: *const Copy2D, stream: usize) -> Status {
    const HOST: c_uint = 1;
    const DEVICE: c_uint = 2;
    let copy = unsafe { &*description };
    if copy.height == 0 || copy.width > copy.source_pitch || copy.width > copy.target_pitch {
        return INVALID_VALUE;
    }
    let extent = |pitch: usize| pitch * (copy.height - 1) + copy.width;
    if (copy.source_kind, copy.target_kind) == (DEVICE, DEVICE) {
        let source = behind(copy.source_device, extent(copy.source_pitch));
        let target = behind(copy.target_device, extent(copy.target_pitch));
        let (Some(source), Some(target)) = (source, target) else { return INVALID_VALUE };
        return enqueue_late(rows_of(copy, source as usize, target as usize), stream);
    }
    let (is_to_device, device, device_pitch) = match copy.source_kind {
        HOST => (true, copy.target_device, copy.target_pitch),
        _ => (false, copy.source_device, copy.source_pitch),
    };
    let Some(device) = behind(device, extent(device_pitch)) else { return INVALID_VALUE };
    let (source, target, host, host_pitch) = if is_to_device {
        (copy.source_host, device as usize, copy.source_host, copy.source_pitch)
    } else {
        (device as usize, copy.target_host, copy.target_host, copy.target_pitch)
    };
    copy_late(rows_of(copy, source, target), host, extent(host_pitch), stream)
}

fn rows_of(copy: &Copy2D, source: usize, target: usize) -> Vec<Row> {
    let row = |row| Row(source + row * copy.source_pitch, target + row * copy.target_pitch, copy.width);
    (0..copy.height).map(row).collect()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoD_v2(to: u64, from: usize, nbytes: usize) -> Status {
    let Some(target) = behind(to, nbytes) else { return INVALID_VALUE };
    unsafe { std::ptr::copy_nonoverlapping(from as *const u8, target, nbytes) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoH_v2(to: usize, from: u64, nbytes: usize) -> Status {
    let Some(source) = behind(from, nbytes) else { return INVALID_VALUE };
    unsafe { std::ptr::copy_nonoverlapping(source, to as *mut u8, nbytes) };
    SUCCESS
}
