//! The `# transport` section of `_native.pyi`: blocks between the hosts of a runtime.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use waystation_format::plan::{Fetch, Key, Offer, each};
use waystation_format::{Error, Kind, Result};
use waystation_transport::{Block, Scope, Target, Transport, Waiting};

use crate::error::{guarded, to_py};
use crate::format::plan_words;
use crate::of_process::OfProcess;

/// How long a wait goes on before Ctrl-C is looked for.
const SLICE: Duration = Duration::from_millis(100);

/// Adds the names of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<BlockTransport>()?;
    module.add_class::<BlockFetch>()
}

#[pyclass(frozen, module = "waystation._native")]
struct BlockTransport(OfProcess<Arc<Transport>>);

#[pymethods]
impl BlockTransport {
    #[new]
    #[pyo3(signature = (name, secret, listen_at, reads_memory, /))]
    fn new(py: Python<'_>, name: &str, secret: &[u8], listen_at: &str, reads_memory: bool) -> PyResult<Self> {
        let started = py.detach(|| {
            guarded(|| {
                let listen_at: SocketAddr = listen_at.parse().map_err(|_| {
                    let message = format!("'{listen_at}' is no address to listen at: IP:PORT");
                    Error::new(Kind::InvalidInput, message)
                })?;
                Transport::start(name, secret, listen_at, reads_memory)
            })
        })?;
        Ok(Self(OfProcess::new(Arc::new(started))))
    }

    #[getter]
    fn address(&self) -> PyResult<&str> {
        Ok(self.0.get().map_err(to_py)?.address())
    }

    fn held(&self) -> PyResult<(u64, u64)> {
        Ok(self.0.get().map_err(to_py)?.held())
    }

    #[pyo3(signature = (words, /))]
    fn offer(&self, py: Python<'_>, words: &Bound<'_, PyAny>) -> PyResult<()> {
        let words = plan_words(words)?;
        py.detach(|| {
            guarded(|| {
                let offered = |_, offer: Offer| {
                    let Offer { address, nbytes, number, .. } = offer;
                    Ok((key(offer.key), Block { address, nbytes, number }))
                };
                // SAFETY: only Waystation calls this module; it hands over addresses of memory that it keeps
                // until the numbers are released.
                unsafe { self.0.get()?.offer(each(&words, offered)?) }
            })
        })
    }

    #[pyo3(signature = (address, words, number, deadline_s, /))]
    fn fetch(
        &self,
        py: Python<'_>,
        address: &str,
        words: &Bound<'_, PyAny>,
        number: u64,
        deadline_s: f64,
    ) -> PyResult<BlockFetch> {
        let words = plan_words(words)?;
        let waiting = py.detach(|| {
            guarded(|| {
                let within = duration(deadline_s)?;
                let targets = each(&words, |_, Fetch { key: of, address, nbytes }| {
                    Ok(Target { key: key(of), address, nbytes })
                })?;
                // SAFETY: only Waystation calls this module; it hands over addresses of memory that it keeps,
                // and that nobody uses, until the number is released.
                unsafe { self.0.get()?.fetch(address, targets, number, within) }
            })
        })?;
        Ok(BlockFetch(OfProcess::new(Mutex::new(Some(Arc::new(waiting))))))
    }

    fn released(&self, py: Python<'_>) -> PyResult<Option<Vec<u64>>> {
        py.detach(|| guarded(|| Ok(self.0.get()?.released())))
    }

    #[pyo3(signature = (kind, message, run, epoch, /))]
    fn end(&self, py: Python<'_>, kind: &str, message: String, run: u64, epoch: Option<u64>) -> PyResult<()> {
        py.detach(|| {
            guarded(|| {
                self.0.get()?.end(Scope { run, epoch }, &said(kind, message));
                Ok(())
            })
        })
    }

    #[pyo3(signature = (kind, message, address, /))]
    fn lose(&self, py: Python<'_>, kind: &str, message: String, address: &str) -> PyResult<()> {
        py.detach(|| {
            guarded(|| {
                self.0.get()?.lose(address, &said(kind, message));
                Ok(())
            })
        })
    }

    #[pyo3(signature = (limit_bytes, deadline_s, /))]
    fn wait_below(&self, py: Python<'_>, limit_bytes: u64, deadline_s: f64) -> PyResult<()> {
        py.detach(|| guarded(|| self.0.get()?.wait_below(limit_bytes, duration(deadline_s)?)))
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| {
            guarded(|| {
                self.0.get()?.close();
                Ok(())
            })
        })
    }
}

#[pyclass(frozen, module = "waystation._native")]
struct BlockFetch(OfProcess<Mutex<Option<Arc<Waiting>>>>);

impl BlockFetch {
    fn lock(&self) -> PyResult<MutexGuard<'_, Option<Arc<Waiting>>>> {
        Ok(self.0.get().map_err(to_py)?.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn waiting(&self) -> PyResult<Option<Arc<Waiting>>> {
        Ok(self.lock()?.clone())
    }
}

#[pymethods]
impl BlockFetch {
    fn done(&self) -> PyResult<bool> {
        Ok(self.waiting()?.is_none_or(|waiting| waiting.is_over()))
    }

    #[pyo3(signature = (timeout_s, /))]
    fn wait(&self, py: Python<'_>, timeout_s: Option<f64>) -> PyResult<bool> {
        let Some(waiting) = self.waiting()? else { return Ok(true) };
        let mut left = timeout_s.map(duration).transpose().map_err(to_py)?.unwrap_or(Duration::MAX);
        loop {
            let slice = left.min(SLICE);
            if let Some(outcome) = py.detach(|| guarded(|| waiting.wait(slice).transpose()))? {
                let () = outcome;
                return Ok(true);
            }
            left = left.saturating_sub(slice);
            if left.is_zero() {
                return Ok(false);
            }
            py.check_signals()?;
        }
    }

    fn release(&self, py: Python<'_>) -> PyResult<()> {
        let waiting = self.lock()?.take();
        py.detach(|| drop(waiting));
        Ok(())
    }
}

fn key(Key { run, epoch, transfer }: Key) -> waystation_transport::Key {
    waystation_transport::Key { run, epoch, transfer }
}

fn duration(seconds: f64) -> Result<Duration> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|error| Error::new(Kind::InvalidInput, format!("{seconds} is no time to wait: {error}")))
}

/// The error of a kind's name.
fn said(kind: &str, message: String) -> Error {
    let kind = Kind::ALL.into_iter().find(|known| known.name() == kind).unwrap_or(Kind::Internal);
    Error::new(kind, message)
}
