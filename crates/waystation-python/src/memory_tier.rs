//! The `# memory tier` section of `_native.pyi`: a process of the program before the agent of its host.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};
use waystation_agent::client::{Client, Saved, Shard};
use waystation_agent::local::message::{At, Beginning, HexNumber, Request, SlotReport, Standing, Status};
use waystation_agent::protocol::placement;
use waystation_agent::reader::SlotReader;
use waystation_agent::writer::Placed;
use waystation_format::slot::{Entry, Id, ItemBox, Version, encode_contents, place};
use waystation_format::{Error, Kind, Result};
use waystation_io::write::host_segments;

use crate::error::{guarded, to_py};
use crate::format::plan_words;
use crate::job::{IntoDictionary, Job};

/// A box of an array as Python gives it: path, dtype, shape of the array, offset, shape, bytes.
type EntryTuple = (String, String, Vec<u64>, Vec<u64>, Vec<u64>, u64);

/// Adds the names of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(place_shard, module)?)?;
    module.add_function(wrap_pyfunction!(place_hosts, module)?)?;
    module.add_class::<AgentClient>()?;
    module.add_class::<HeldShard>()
}

#[pyfunction]
#[pyo3(signature = (entries, /))]
fn place_shard(py: Python<'_>, entries: Vec<EntryTuple>) -> PyResult<(Bound<'_, PyBytes>, Vec<u64>, u64)> {
    let (contents, offsets, data_bytes) = guarded(|| {
        let (offsets, data_bytes) = place(entries.iter().map(|entry| entry.5))
            .ok_or_else(|| Error::new(Kind::InvalidInput, "the sizes of the arrays of a shard overflow"))?;
        let placed: Vec<Entry> = entries.into_iter().zip(&offsets).map(entry_at).collect();
        Ok((encode_contents(&placed, data_bytes)?, offsets, data_bytes))
    })?;
    Ok((PyBytes::new(py, &contents), offsets, data_bytes))
}

#[pyfunction]
#[pyo3(signature = (domains, copies, /))]
fn place_hosts(py: Python<'_>, domains: Vec<String>, copies: usize) -> Vec<Vec<usize>> {
    py.detach(|| placement::place(&domains, copies))
}

fn entry_at(((path, dtype, array_shape, offset, shape, length), &place): (EntryTuple, &u64)) -> Entry {
    Entry { path, dtype, item_box: ItemBox { array_shape, offset, shape }, offset: place, length }
}

/// The agent of a host, seen from a process of the program.
#[pyclass(frozen, module = "waystation._native")]
struct AgentClient(Arc<Client>);

impl AgentClient {
    /// Calls the client without the GIL; Ctrl-C is noticed while it waits, and raised.
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        run: impl FnOnce(&Client, &dyn Fn() -> bool) -> Result<T> + Send,
    ) -> PyResult<T> {
        interruptible(py, |stop| run(&self.0, stop))
    }

    fn change(&self, py: Python<'_>, request: &Request) -> PyResult<Vec<u32>> {
        self.call(py, |client, stop| client.change(request, stop))
    }
}

#[pymethods]
impl AgentClient {
    #[new]
    #[pyo3(signature = (directory, /, *, run=None, timeout_s=30.0))]
    fn new(py: Python<'_>, directory: PathBuf, run: Option<&str>, timeout_s: f64) -> PyResult<Self> {
        let run: Option<Id> = run.map(str::parse).transpose().map_err(to_py)?;
        let patience = Duration::try_from_secs_f64(timeout_s).map_err(|error| {
            to_py(Error::new(Kind::InvalidInput, format!("timeout_s is no time to wait: {error}")))
        })?;
        let client = interruptible(py, |stop| Client::connect(&directory, run, patience, stop))?;
        Ok(Self(Arc::new(client)))
    }

    fn status<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let status = self.call(py, |client, stop| client.status(stop))?;
        status_dictionary(py, status)
    }

    fn metrics(&self, py: Python<'_>) -> PyResult<String> {
        self.call(py, |client, stop| client.metrics(stop))
    }

    fn inventory<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let slots = self.call(py, |client, stop| client.inventory(stop))?;
        let slots = slots.into_iter().map(|slot| slot_dictionary(py, slot)).collect::<PyResult<Vec<_>>>()?;
        PyList::new(py, slots)
    }

    #[pyo3(signature = (epoch, step, shard, contents, words, owners, /, *, data_bytes, threads=None))]
    #[allow(clippy::too_many_arguments)] // the stub's
    fn start_save(
        &self,
        py: Python<'_>,
        epoch: u64,
        step: u64,
        shard: String,
        contents: Bound<'_, PyBytes>,
        words: &Bound<'_, PyAny>,
        owners: Py<PyAny>,
        data_bytes: u64,
        threads: Option<usize>,
    ) -> PyResult<Job> {
        let words = plan_words(words)?;
        let contents = contents.as_bytes().to_vec();
        let handle = py.detach(|| {
            guarded(|| {
                let placed = |(offset, segment)| Placed { offset, segment };
                let parts = host_segments(&words)?.into_iter().map(placed).collect();
                let version = Version { epoch, step };
                let shard = Shard { name: shard, version, contents, data_bytes, parts };
                // SAFETY: only Waystation calls this module; it hands over addresses of memory that `owners`
                // keeps alive, and the job keeps `owners` until no thread reads it.
                unsafe { self.0.save(shard, threads) }
            })
        })?;
        Ok(Job::new(handle, owners))
    }

    #[pyo3(signature = (epoch, step, shard, /))]
    fn hold(&self, py: Python<'_>, epoch: u64, step: u64, shard: &str) -> PyResult<HeldShard> {
        let reader = self.call(py, |client, stop| client.hold(shard, Version { epoch, step }, stop))?;
        Ok(HeldShard::new(reader))
    }

    #[pyo3(signature = (epoch, step, shard, /))]
    fn bring(&self, py: Python<'_>, epoch: u64, step: u64, shard: &str) -> PyResult<HeldShard> {
        let reader = self.call(py, |client, stop| client.bring(shard, Version { epoch, step }, stop))?;
        Ok(HeldShard::new(reader))
    }

    fn standing<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let standing = self.call(py, |client, stop| client.standing(stop))?;
        standing_dictionary(py, standing)
    }

    #[pyo3(signature = (program, sequence, owners, /))]
    fn begin<'py>(
        &self,
        py: Python<'py>,
        program: u64,
        sequence: &str,
        owners: Vec<String>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let sequence = u64::from_str_radix(sequence, 16).map(HexNumber).map_err(|error| {
            to_py(Error::new(Kind::InvalidInput, format!("a sequence is 16 hex digits: {error}")))
        })?;
        let beginning = Beginning { program, sequence, owners };
        let standing = self.call(py, |client, stop| client.begin(beginning, stop))?;
        standing_dictionary(py, standing)
    }

    #[pyo3(signature = (epoch, step, /))]
    fn commit(&self, py: Python<'_>, epoch: u64, step: u64) -> PyResult<Vec<u32>> {
        self.change(py, &Request::Commit(At { epoch, step }))
    }

    #[pyo3(signature = (epoch, step, /))]
    fn give_up(&self, py: Python<'_>, epoch: u64, step: u64) -> PyResult<Vec<u32>> {
        self.change(py, &Request::GiveUp(At { epoch, step }))
    }

    #[pyo3(signature = (epoch, step, /))]
    fn retire_before(&self, py: Python<'_>, epoch: u64, step: u64) -> PyResult<Vec<u32>> {
        self.change(py, &Request::RetireBefore(At { epoch, step }))
    }

    #[pyo3(signature = (epoch, step, /))]
    fn quarantine(&self, py: Python<'_>, epoch: u64, step: u64) -> PyResult<Vec<u32>> {
        self.change(py, &Request::Quarantine(At { epoch, step }))
    }

    #[pyo3(signature = (slot, /))]
    fn discard_quarantined(&self, py: Python<'_>, slot: u32) -> PyResult<()> {
        self.change(py, &Request::DiscardQuarantined { slot }).map(drop)
    }

    fn verify(&self, py: Python<'_>) -> PyResult<()> {
        self.change(py, &Request::Verify {}).map(drop)
    }

    #[pyo3(signature = (epoch, /))]
    fn raise_epoch(&self, py: Python<'_>, epoch: u64) -> PyResult<u64> {
        self.call(py, |client, stop| client.raise_epoch(epoch, stop))
    }
}

/// A version of a shard that is kept while it is read.
#[pyclass(frozen, module = "waystation._native")]
struct HeldShard {
    reader: Mutex<Option<SlotReader>>,
    process: u32,
}

impl HeldShard {
    fn new(reader: SlotReader) -> Self {
        Self { reader: Mutex::new(Some(reader)), process: std::process::id() }
    }

    fn lock(&self) -> MutexGuard<'_, Option<SlotReader>> {
        self.reader.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with<T>(&self, look: impl FnOnce(&SlotReader) -> T) -> PyResult<T> {
        self.lock().as_ref().map(look).ok_or_else(|| {
            to_py(Error::new(Kind::InvalidInput, "the slot has been released; hold the version again"))
        })
    }
}

#[pymethods]
impl HeldShard {
    #[getter]
    fn file<'py>(&self, py: Python<'py>) -> PyResult<(PathBuf, u64, Bound<'py, PyBytes>)> {
        let file = self.with(SlotReader::read_file)?;
        let checksums = file.checksums.unwrap_or_default();
        let packed: Vec<u8> = checksums.iter().flat_map(|checksum| checksum.to_le_bytes()).collect();
        Ok((file.path, file.file_bytes, PyBytes::new(py, &packed)))
    }

    #[getter]
    fn entries<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let entries = self.with(|reader| {
            let placed = |entry: &Entry| (entry.clone(), reader.chunk_offset(entry));
            reader.entries().iter().map(placed).collect::<Vec<_>>()
        })?;
        let tuples = entries.into_iter().map(|(entry, file_offset)| {
            let ItemBox { array_shape, offset, shape } = entry.item_box;
            let tuple = |longs: Vec<u64>| PyTuple::new(py, longs);
            let (array_shape, offset, shape) = (tuple(array_shape)?, tuple(offset)?, tuple(shape)?);
            Ok((entry.path, entry.dtype, array_shape, offset, shape, file_offset, entry.length))
        });
        PyList::new(py, tuples.collect::<PyResult<Vec<_>>>()?)
    }

    /// In a forked child this closes the child's copy of the file, which would keep the slot from being used
    /// again for as long as the child lives; never waits there for a thread that is in the parent only.
    fn release(&self) {
        let held = if self.process == std::process::id() {
            self.lock().take()
        } else {
            self.reader.try_lock().ok().and_then(|mut reader| reader.take())
        };
        drop(held);
    }
}

/// Runs without the GIL something that asks now and then whether to stop, which a signal makes it do.
fn interruptible<T: Send>(
    py: Python<'_>,
    run: impl FnOnce(&dyn Fn() -> bool) -> Result<T> + Send,
) -> PyResult<T> {
    let raised: Mutex<Option<PyErr>> = Mutex::new(None);
    let stop = || match Python::attach(|py| py.check_signals()) {
        Ok(()) => false,
        Err(error) => {
            *raised.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            true
        }
    };
    let outcome = py.detach(|| guarded(|| run(&stop)));
    match raised.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None => outcome,
    }
}

fn status_dictionary(py: Python<'_>, status: Status) -> PyResult<Bound<'_, PyDict>> {
    let found = PyDict::new(py);
    found.set_item("is_new", status.adoption.is_new)?;
    found.set_item("free", status.adoption.free)?;
    found.set_item("whole", status.adoption.whole)?;
    found.set_item("in_writing", status.adoption.in_writing)?;
    found.set_item("abandoned", status.adoption.abandoned)?;
    found.set_item("quarantined", status.adoption.quarantined)?;
    found.set_item("gone", status.adoption.gone)?;
    found.set_item("damaged", status.adoption.damaged)?;
    let dictionary = PyDict::new(py);
    dictionary.set_item("agent_version", status.agent_version)?;
    dictionary.set_item("process", status.process)?;
    dictionary.set_item("process_count", status.process_count)?;
    dictionary.set_item("directory", status.directory)?;
    dictionary.set_item("run", status.run.0.to_string())?;
    dictionary.set_item("topology", status.topology.0.to_string())?;
    dictionary.set_item("store", status.store.0.to_string())?;
    dictionary.set_item("epoch", status.epoch)?;
    dictionary.set_item("slot_bytes", status.slot_bytes)?;
    dictionary.set_item("slot_count", status.slot_count)?;
    dictionary.set_item("versions_per_shard", status.versions_per_shard)?;
    dictionary.set_item("host", status.host)?;
    dictionary.set_item("agent_count", status.agent_count)?;
    dictionary.set_item("adoption", found)?;
    Ok(dictionary)
}

fn standing_dictionary(py: Python<'_>, standing: Standing) -> PyResult<Bound<'_, PyDict>> {
    let base = match standing.base {
        None => None,
        Some(base) => {
            let dictionary = PyDict::new(py);
            dictionary.set_item("epoch", base.epoch)?;
            dictionary.set_item("step", base.step)?;
            dictionary.set_item("shard_count", base.shard_count)?;
            dictionary.set_item("sequence", format!("{:016x}", base.sequence.0))?;
            Some(dictionary)
        }
    };
    let commits: Vec<(u64, u64)> = standing.commits.iter().map(|at| (at.epoch, at.step)).collect();
    let doubted: Vec<(u64, u64)> = standing.doubted.iter().map(|at| (at.epoch, at.step)).collect();
    let hosts = PyDict::new(py);
    for host in standing.hosts {
        hosts.set_item(host.name, host.is_heard)?;
    }
    let dictionary = PyDict::new(py);
    dictionary.set_item("epoch", standing.epoch)?;
    dictionary.set_item("program", standing.program)?;
    dictionary.set_item("is_training", standing.is_training)?;
    dictionary.set_item("is_open", standing.is_open)?;
    dictionary.set_item("base", base)?;
    dictionary.set_item("commits", commits)?;
    dictionary.set_item("doubted", doubted)?;
    dictionary.set_item("lost", standing.lost.map(|at| (at.epoch, at.step)))?;
    dictionary.set_item("holders", standing.holders)?;
    dictionary.set_item("hosts", hosts)?;
    Ok(dictionary)
}

fn slot_dictionary(py: Python<'_>, slot: SlotReport) -> PyResult<Bound<'_, PyDict>> {
    let dictionary = PyDict::new(py);
    dictionary.set_item("slot", slot.slot)?;
    dictionary.set_item("state", slot.state)?;
    dictionary.set_item("sequence", slot.sequence)?;
    if let Some(tenant) = slot.tenant {
        dictionary.set_item("shard", tenant.shard)?;
        dictionary.set_item("epoch", tenant.epoch)?;
        dictionary.set_item("step", tenant.step)?;
        dictionary.set_item("contents_bytes", tenant.contents_bytes)?;
        dictionary.set_item("data_bytes", tenant.data_bytes)?;
        dictionary.set_item("process", tenant.process)?;
    }
    if let Some(digest) = slot.digest {
        dictionary.set_item("digest", digest)?;
    }
    Ok(dictionary)
}

impl IntoDictionary for Saved {
    fn into_dictionary(self, py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
        let dictionary = PyDict::new(py);
        dictionary.set_item("slot", self.slot)?;
        dictionary.set_item("digest", self.digest)?;
        dictionary.set_item("grant_s", self.grant_time.as_secs_f64())?;
        dictionary.set_item("fill_s", self.fill_time.as_secs_f64())?;
        dictionary.set_item("seal_s", self.seal_time.as_secs_f64())?;
        Ok(dictionary)
    }
}
