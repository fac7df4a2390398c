//! `start_read`: plain plans to jobs; and the decoding of what they have read.

use std::path::PathBuf;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use waystation_format::{Kind, Result};
use waystation_io::cuda::{CuFile, CudaCopy};
use waystation_io::mode::Mode;
use waystation_io::read::device::{Devices, Region};
use waystation_io::read::gpu_direct::GpuDirect;
use waystation_io::read::plan::{Plan, ReadFile};
use waystation_io::read::{self, Options, Statistics};

use crate::directory::{Root, storage_of};
use crate::error::guarded;
use crate::format::{Bytes, plan_words};
use crate::job::{IntoDictionary, Job};
use crate::throttle::open_throttle;

/// Adds the names of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(start_read, module)?)?;
    module.add_function(wrap_pyfunction!(decode_chunks, module)?)?;
    module.add_function(wrap_pyfunction!(decompress_zstd_frame, module)?)
}

#[pyfunction]
#[pyo3(signature = (
    files, words, owners, /, *, mode=None, block_bytes=None, depth=None, threads=None, throttle=None,
    device_memory=None, staging_bytes=None, announce=false,
    gpu_direct=false, among=None, root=None, may_be_longer=false, versions=None
))]
#[allow(clippy::too_many_arguments)] // they are the keywords of the Python function
fn start_read(
    py: Python<'_>,
    files: Vec<(PathBuf, u64, Option<Bound<'_, PyAny>>)>,
    words: &Bound<'_, PyAny>,
    owners: Py<PyAny>,
    mode: Option<&str>,
    block_bytes: Option<usize>,
    depth: Option<usize>,
    threads: Option<usize>,
    throttle: Option<PathBuf>,
    device_memory: Option<Vec<(u32, usize, usize)>>,
    staging_bytes: Option<usize>,
    announce: bool,
    gpu_direct: bool,
    among: Option<(usize, usize)>,
    root: Option<Root<'_>>,
    may_be_longer: bool,
    versions: Option<Vec<Option<String>>>,
) -> PyResult<Job> {
    let words = plan_words(words)?;
    let storage = storage_of(root);
    let regions = device_memory.map(|regions| {
        let region = |(device, address, nbytes)| Region { device, address, nbytes };
        regions.into_iter().map(region).collect()
    });
    let held: Vec<(PathBuf, u64, Option<Bytes>)> = files
        .into_iter()
        .map(|(path, nbytes, checksums)| Ok((path, nbytes, checksums.as_ref().map(Bytes::of).transpose()?)))
        .collect::<PyResult<_>>()?;
    let handle = py.detach(|| {
        guarded(|| {
            let mode = mode.map(str::parse::<Mode>).transpose()?;
            let versions = versions.unwrap_or_default().into_iter().chain(std::iter::repeat(None));
            let files = held.into_iter().zip(versions).map(read_file).collect::<Result<_>>()?;
            let plan = Plan::new(files, &words)?;
            let throttle = open_throttle(throttle)?;
            let devices = regions.map(|regions| Devices::new(Arc::new(CudaCopy), regions)).transpose()?;
            let gpu_direct =
                if gpu_direct && devices.is_some() { open_cufile()? } else { GpuDirect::Unwanted };
            let options = Options {
                mode,
                block_bytes,
                depth,
                threads,
                throttle,
                devices,
                staging_bytes,
                gpu_direct,
                announce,
                among,
                may_be_longer,
            };
            // SAFETY: `Job` keeps the owners of the destinations until the job has finished, and only
            // Waystation calls this module, with destinations that are nobody else's meanwhile.
            unsafe { read::start(storage, plan, options) }
        })
    })?;
    Ok(Job::new(handle, owners))
}

#[pyfunction]
#[pyo3(signature = (words, owners, /, *, threads=None))]
fn decode_chunks(
    py: Python<'_>,
    words: &Bound<'_, PyAny>,
    owners: &Bound<'_, PyAny>,
    threads: Option<usize>,
) -> PyResult<()> {
    let words = plan_words(words)?;
    let result = py.detach(|| {
        guarded(|| {
            // SAFETY: only Waystation calls this module; it hands over addresses of memory that the owners
            // keep alive, and of destinations that are nobody else's meanwhile.
            unsafe { read::decode_chunks(&words, threads) }
        })
    });
    // The caller's reference keeps the memory alive until here.
    let _ = owners;
    result
}

#[pyfunction]
#[pyo3(signature = (frame, /, *, limit_bytes))]
fn decompress_zstd_frame<'py>(
    py: Python<'py>,
    frame: &Bound<'py, PyAny>,
    limit_bytes: usize,
) -> PyResult<Bound<'py, PyBytes>> {
    let frame = Bytes::of(frame)?;
    let content = py.detach(|| guarded(|| read::decompress_one(frame.as_slice(), limit_bytes)))?;
    Ok(PyBytes::new(py, &content))
}

/// Where files cannot be read straight to devices, why: a load goes on without.
fn open_cufile() -> Result<GpuDirect> {
    match CuFile::open() {
        Ok(reader) => Ok(GpuDirect::By(Arc::new(reader))),
        Err(error) if error.kind() == Kind::Unsupported => Ok(GpuDirect::Refused(error.message().to_owned())),
        Err(error) => Err(error),
    }
}

fn read_file(
    ((path, file_bytes, checksums), version): ((PathBuf, u64, Option<Bytes>), Option<String>),
) -> Result<ReadFile> {
    let checksums = checksums.map(|bytes| bytes.words(u64::from_le_bytes)).transpose()?;
    Ok(ReadFile { path, file_bytes, checksums, version })
}

impl IntoDictionary for Statistics {
    fn into_dictionary(self, py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
        let modes: Vec<&str> = self.modes.iter().map(|mode| mode.map_or("none", Mode::name)).collect();
        let dictionary = PyDict::new(py);
        dictionary.set_item("bytes_read", self.bytes_read)?;
        dictionary.set_item("bytes_needed", self.bytes_needed)?;
        dictionary.set_item("modes", modes)?;
        dictionary.set_item("first_touch_s", self.first_touch.as_secs_f64())?;
        dictionary.set_item("gpu_direct_bytes", self.gpu_direct_bytes)?;
        dictionary.set_item("gpu_direct_reason", self.gpu_direct_reason)?;
        dictionary.set_item("cached_bytes", self.cached_bytes)?;
        dictionary.set_item("cache_problem", self.cache_problem)?;
        dictionary.set_item("repeated_requests", self.repeated_requests)?;
        Ok(dictionary)
    }
}
