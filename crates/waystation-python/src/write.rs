//! `start_write`: plans of files to be written become a background [`Job`]. `start_copy`: so do those that are
//! made of files of another storage. `compress_zstd`: what is written
//! compressed is compressed before. `chunk_checksums`: what is written as it is, is summed before.
//! `start_comparison`: what was written before is compared with what is to be written now.

use std::path::PathBuf;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};
use waystation_format::{Error, Kind};
use waystation_io::mode::Mode;
use waystation_io::read::{self, plan::ReadFile};
use waystation_io::write::{self, BlocksInput, CopiedFile, Extent, FileInput, Options, Sources, Statistics};

use crate::directory::{Root, storage_of};
use crate::error::{guarded, to_py};
use crate::files::{SyncGroup, durability};
use crate::format::{Bytes, plan_words};
use crate::job::{IntoDictionary, Job};
use crate::memory::Slab;
use crate::throttle::open_throttle;

/// A file as Python gives it: path, header, size, words.
type FileTuple<'py> = (String, Bound<'py, PyBytes>, u64, Bound<'py, PyAny>);

impl IntoDictionary for Statistics {
    fn into_dictionary(self, py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
        let packed = self.checksums.iter().map(|blocks| {
            let bytes: Vec<u8> = blocks.iter().flat_map(|checksum| checksum.to_le_bytes()).collect();
            PyBytes::new(py, &bytes)
        });
        let dictionary = PyDict::new(py);
        dictionary.set_item("checksums", PyList::new(py, packed)?)?;
        dictionary.set_item("mode", self.mode.map_or("none", Mode::name))?;
        dictionary.set_item("bytes_written", self.bytes_written)?;
        dictionary.set_item("gather_s", self.gather_time.as_secs_f64())?;
        dictionary.set_item("write_s", self.write_time.as_secs_f64())?;
        dictionary.set_item("sync_s", self.sync_time.as_secs_f64())?;
        Ok(dictionary)
    }
}

#[pyfunction]
#[pyo3(signature = (
    files, owners, /, *, sync=true, group=None, mode=None, block_bytes=None, depth=None, threads=None, staging_bytes=None,
    first=None, throttle=None, root=None
))]
#[allow(clippy::too_many_arguments)] // the stub's
fn start_write(
    py: Python<'_>,
    files: Vec<FileTuple<'_>>,
    owners: Py<PyAny>,
    sync: bool,
    group: Option<PyRef<'_, SyncGroup>>,
    mode: Option<&str>,
    block_bytes: Option<usize>,
    depth: Option<usize>,
    threads: Option<usize>,
    staging_bytes: Option<usize>,
    first: Option<Vec<(u64, u64)>>,
    throttle: Option<PathBuf>,
    root: Option<Root<'_>>,
) -> PyResult<Job> {
    let storage = storage_of(root);
    let mode = mode.map(str::parse).transpose().map_err(to_py)?;
    let first = first.unwrap_or_default().into_iter().map(|(begin, end)| begin..end).collect();
    let throttle = open_throttle(throttle).map_err(to_py)?;
    let durability = durability(sync, group);
    let options = Options { durability, mode, block_bytes, depth, threads, staging_bytes, first, throttle };
    let inputs = files.iter().map(read_file).collect::<PyResult<Vec<_>>>()?;
    // SAFETY: only Waystation calls this module; it hands over addresses of memory that `owners` keeps
    // alive, and the job keeps `owners` until no thread reads it.
    let handle = py.detach(|| guarded(|| unsafe { write::start(storage, inputs, options) }))?;
    Ok(Job::new(handle, owners))
}

/// A new file as Python gives it: path, header, words of extents, size, checksums of its blocks, that of all of it.
type CopyTuple<'py> =
    (PathBuf, Bound<'py, PyBytes>, Bound<'py, PyAny>, u64, Option<Bound<'py, PyAny>>, Option<u64>);

/// A file that extents are of: path, size, checksums of its blocks, version.
type SourceTuple<'py> = (PathBuf, u64, Option<Bound<'py, PyAny>>, Option<String>);

#[pyfunction]
#[pyo3(signature = (
    files, sources, /, *, source=None, root=None, sync=true, group=None, mode=None, read_mode=None,
    block_bytes=None, depth=None, threads=None, readers, staging_bytes=None, throttle=None
))]
#[allow(clippy::too_many_arguments)] // the stub's
fn start_copy(
    py: Python<'_>,
    files: Vec<CopyTuple<'_>>,
    sources: Vec<SourceTuple<'_>>,
    source: Option<Root<'_>>,
    root: Option<Root<'_>>,
    sync: bool,
    group: Option<PyRef<'_, SyncGroup>>,
    mode: Option<&str>,
    read_mode: Option<&str>,
    block_bytes: Option<usize>,
    depth: Option<usize>,
    threads: Option<usize>,
    readers: usize,
    staging_bytes: Option<usize>,
    throttle: Option<PathBuf>,
) -> PyResult<Job> {
    let (source, destination) = (storage_of(source), storage_of(root));
    let mode = mode.map(str::parse).transpose().map_err(to_py)?;
    let read_mode = read_mode.map(str::parse).transpose().map_err(to_py)?;
    let throttle = open_throttle(throttle).map_err(to_py)?;
    let durability = durability(sync, group);
    let files = files.iter().map(copied_file).collect::<PyResult<Vec<_>>>()?;
    let sources = sources.into_iter().map(read_source).collect::<PyResult<Vec<_>>>()?;
    let handle = py.detach(|| {
        guarded(|| {
            let reading =
                read::Options { mode: read_mode, threads: Some(1), throttle, ..read::Options::default() };
            let sources = Sources {
                storage: source,
                sources,
                files,
                options: reading,
                readers,
                memory_bytes: staging_bytes,
            };
            let options = Options {
                durability,
                mode,
                block_bytes,
                depth,
                threads,
                staging_bytes,
                first: Vec::new(),
                throttle: None,
            };
            write::start_copy(destination, sources, options)
        })
    })?;
    Ok(Job::new(handle, py.None()))
}

fn copied_file((path, header, words, file_bytes, checksums, crc64): &CopyTuple<'_>) -> PyResult<CopiedFile> {
    let words = plan_words(words)?;
    let (rows, rest) = words.as_chunks::<3>();
    if !rest.is_empty() {
        return Err(to_py(Error::new(Kind::InvalidInput, "an extent has three numbers")));
    }
    let header = header.as_bytes().to_vec();
    Ok(CopiedFile {
        path: path.clone(),
        extents: Extent::all_after(header.len(), rows).map_err(to_py)?,
        header,
        file_bytes: *file_bytes,
        checksums: checksum_words(checksums.as_ref())?,
        crc64: *crc64,
    })
}

fn read_source((path, file_bytes, checksums, version): SourceTuple<'_>) -> PyResult<ReadFile> {
    Ok(ReadFile { path, file_bytes, checksums: checksum_words(checksums.as_ref())?, version })
}

fn checksum_words(checksums: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Vec<u64>>> {
    let words = |bytes: &Bound<'_, PyAny>| Bytes::of(bytes)?.words(u64::from_le_bytes).map_err(to_py);
    checksums.map(words).transpose()
}

#[pyfunction]
#[pyo3(signature = (words, owners, /, *, level, checksum, threads=None))]
fn compress_zstd(
    py: Python<'_>,
    words: &Bound<'_, PyAny>,
    owners: &Bound<'_, PyAny>,
    level: i32,
    checksum: bool,
    threads: Option<usize>,
) -> PyResult<(Slab, Vec<(usize, usize)>)> {
    let words = plan_words(words)?;
    // SAFETY: only Waystation calls this module; it hands over addresses of memory that the owners keep alive.
    let compressed = py.detach(|| guarded(|| unsafe { write::compress(&words, level, checksum, threads) }));
    // The caller's reference keeps the memory alive until here.
    let _ = owners;
    let compressed = compressed?;
    let places = compressed.values.iter().map(|value| (value.start, value.len())).collect();
    Ok((Slab::new(compressed.memory), places))
}

impl IntoDictionary for Vec<bool> {
    fn into_dictionary(self, py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
        let equal: Vec<u8> = self.into_iter().map(u8::from).collect();
        let dictionary = PyDict::new(py);
        dictionary.set_item("equal", PyBytes::new(py, &equal))?;
        Ok(dictionary)
    }
}

#[pyfunction]
#[pyo3(signature = (words, pieces, counts, expected, owners, /, *, threads=None))]
fn start_comparison(
    py: Python<'_>,
    words: &Bound<'_, PyAny>,
    pieces: &Bound<'_, PyAny>,
    counts: &Bound<'_, PyAny>,
    expected: &Bound<'_, PyAny>,
    owners: Py<PyAny>,
    threads: Option<usize>,
) -> PyResult<Job> {
    let expected = Bytes::of(expected)?.words(u64::from_le_bytes).map_err(to_py)?;
    let (words, pieces, counts) = (plan_words(words)?, plan_words(pieces)?, plan_words(counts)?);
    let input = BlocksInput { words, pieces, counts, expected };
    // SAFETY: only Waystation calls this module; it hands over addresses of memory that `owners` keeps
    // alive, and the job keeps `owners` until no thread reads it.
    let handle = py.detach(|| guarded(|| unsafe { write::start_comparison(input, threads) }))?;
    Ok(Job::new(handle, owners))
}

#[pyfunction]
#[pyo3(signature = (words, owners, /, *, threads=None))]
fn chunk_checksums(
    py: Python<'_>,
    words: &Bound<'_, PyAny>,
    owners: &Bound<'_, PyAny>,
    threads: Option<usize>,
) -> PyResult<Vec<u32>> {
    let words = plan_words(words)?;
    // SAFETY: only Waystation calls this module; it hands over addresses of memory that the owners keep alive.
    let sums = py.detach(|| guarded(|| unsafe { write::chunk_checksums(&words, threads) }));
    // The caller's reference keeps the memory alive until here.
    let _ = owners;
    sums
}

fn read_file((path, header, file_bytes, words): &FileTuple<'_>) -> PyResult<FileInput> {
    Ok(FileInput {
        path: path.into(),
        header: header.as_bytes().to_vec(),
        file_bytes: *file_bytes,
        words: plan_words(words)?,
    })
}

/// Adds the names of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(start_write, module)?)?;
    module.add_function(wrap_pyfunction!(start_copy, module)?)?;
    module.add_function(wrap_pyfunction!(start_comparison, module)?)?;
    module.add_function(wrap_pyfunction!(chunk_checksums, module)?)?;
    module.add_function(wrap_pyfunction!(compress_zstd, module)?)
}
