//! The `Job` class: a batch of reads or writes that runs in the background.
//!
//! Invariants: the owners of the job's memory are dropped on a Python thread, and only once no engine
//! thread can touch that memory; whatever waits does so without the GIL and notices signals. In a
//! forked child a job is dead: it raises instead of waiting for threads that do not exist there.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;
use waystation_format::{Error, Kind};
use waystation_io::job::Handle;

use crate::error::{exception_of, to_py};

/// How long Ctrl-C may go unnoticed.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(50);

/// The outcome of a kind of job, as Python sees it.
pub trait IntoDictionary: Send + 'static {
    /// The statistics that `Job.result` returns.
    fn into_dictionary(self, py: Python<'_>) -> PyResult<Bound<'_, PyDict>>;
}

/// A [`Handle`] without the type of its outcome.
trait Running: Send + Sync {
    fn is_foreign(&self) -> bool;
    fn is_finished(&self) -> bool;
    fn progress(&self) -> (u64, u64);
    fn cancel(&self);
    fn join(&self);
    fn wait(&self, timeout: Duration) -> bool;
    fn front(&self) -> u64;
    fn wait_front(&self, position: u64, timeout: Duration) -> bool;
    fn take_outcome(&self, py: Python<'_>) -> Option<Result<Py<PyDict>, Error>>;
}

impl<T: IntoDictionary> Running for Handle<T> {
    fn is_foreign(&self) -> bool {
        Handle::is_foreign(self)
    }

    fn is_finished(&self) -> bool {
        self.shared().is_finished()
    }

    fn progress(&self) -> (u64, u64) {
        self.shared().progress()
    }

    fn cancel(&self) {
        self.shared().cancel();
    }

    fn join(&self) {
        Handle::join(self);
    }

    fn wait(&self, timeout: Duration) -> bool {
        self.shared().wait(Some(timeout))
    }

    fn front(&self) -> u64 {
        self.shared().front()
    }

    fn wait_front(&self, position: u64, timeout: Duration) -> bool {
        self.shared().wait_front(position, Some(timeout))
    }

    fn take_outcome(&self, py: Python<'_>) -> Option<Result<Py<PyDict>, Error>> {
        let outcome = self.shared().take_outcome()?;
        let internal = |error: PyErr| Error::new(Kind::Internal, error.to_string());
        Some(outcome.and_then(|value| Ok(value.into_dictionary(py).map_err(internal)?.unbind())))
    }
}

/// A batch of reads or writes in the background. Dropping it cancels it and waits.
#[pyclass(frozen, module = "waystation._native")]
pub struct Job {
    running: Box<dyn Running>,
    owners: Mutex<Option<Py<PyAny>>>,
    // No exception of Python: its traceback has the frames that hold the job.
    result: PyOnceLock<Result<Py<PyDict>, Error>>,
}

impl Job {
    /// The Python side of a job that uses memory of `owners`.
    pub fn new<T: IntoDictionary>(handle: Handle<T>, owners: Py<PyAny>) -> Self {
        let owners = Mutex::new(Some(owners));
        Self { running: Box::new(handle), owners, result: PyOnceLock::new() }
    }

    fn check_process(&self) -> PyResult<()> {
        if self.running.is_foreign() {
            let message = "this job belongs to the parent of this forked process; use it there, or start \
                           a new one here";
            return Err(to_py(Error::new(Kind::InvalidInput, message)));
        }
        Ok(())
    }

    /// Waits in slices, so that signals are noticed, until `ready` is true or the timeout has passed.
    fn wait_while_checking(
        &self,
        py: Python<'_>,
        timeout_s: Option<f64>,
        ready: impl Fn(Duration) -> bool + Sync,
    ) -> PyResult<bool> {
        self.check_process()?;
        // A timeout that no clock can count to is none.
        let timeout = timeout_s.and_then(|seconds| Duration::try_from_secs_f64(seconds.max(0.0)).ok());
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let left = deadline.map_or(SIGNAL_INTERVAL, |at| at.saturating_duration_since(Instant::now()));
            if py.detach(|| ready(left.min(SIGNAL_INTERVAL))) {
                self.release_if_finished();
                return Ok(true);
            }
            py.check_signals()?;
            if deadline.is_some_and(|at| Instant::now() >= at) {
                return Ok(false);
            }
        }
    }

    /// Lets go of the owners as soon as it is known that nothing reads them any more.
    fn release_if_finished(&self) {
        if self.running.is_finished() {
            // Dropped after the lock is released: it may run any Python code.
            let owners = self.owners.lock().unwrap_or_else(PoisonError::into_inner).take();
            drop(owners);
        }
    }
}

#[pymethods]
impl Job {
    #[pyo3(signature = (timeout_s=None, /))]
    fn wait(&self, py: Python<'_>, timeout_s: Option<f64>) -> PyResult<bool> {
        self.wait_while_checking(py, timeout_s, |slice| self.running.wait(slice))
    }

    #[pyo3(signature = (position, timeout_s=None, /))]
    fn wait_gathered(&self, py: Python<'_>, position: u64, timeout_s: Option<f64>) -> PyResult<bool> {
        self.wait_while_checking(py, timeout_s, |slice| self.running.wait_front(position, slice))
    }

    #[pyo3(signature = (records, timeout_s=None, /))]
    fn wait_arrived(&self, py: Python<'_>, records: u64, timeout_s: Option<f64>) -> PyResult<bool> {
        self.wait_while_checking(py, timeout_s, |slice| self.running.wait_front(records, slice))
    }

    fn arrived(&self) -> PyResult<u64> {
        self.check_process()?;
        Ok(self.running.front())
    }

    fn done(&self) -> PyResult<bool> {
        self.check_process()?;
        self.release_if_finished();
        Ok(self.running.is_finished())
    }

    fn progress(&self) -> PyResult<(u64, u64)> {
        self.check_process()?;
        Ok(self.running.progress())
    }

    fn cancel(&self) -> PyResult<()> {
        self.check_process()?;
        self.running.cancel();
        Ok(())
    }

    fn result(&self, py: Python<'_>) -> PyResult<Py<PyDict>> {
        self.wait(py, None)?;
        py.detach(|| self.running.join());
        let lost = || Err(Error::new(Kind::Internal, "a finished job has no outcome"));
        match self.result.get_or_init(py, || self.running.take_outcome(py).unwrap_or_else(lost)) {
            Ok(statistics) => Ok(statistics.clone_ref(py)),
            Err(error) => Err(exception_of(error)),
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if self.running.is_foreign() {
            return;
        }
        self.running.cancel();
        // Without an interpreter to wait beside, the handle's own drop waits.
        Python::try_attach(|py| py.detach(|| self.running.join()));
    }
}

/// Adds the class.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Job>()
}
