//! One batch of reads or writes in the background: progress, cancellation, first error, completion.
//!
//! Invariants: the first error wins and stops the others at their next block; a job is finished only
//! when no worker will touch the caller's memory again; nothing here knows about Python.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use waystation_format::{Error, Kind, Result};

struct State<T> {
    outcome: Option<Result<T>>,
    finished: bool,
}

/// What the workers of a job and its observers share.
pub struct Shared<T> {
    total_bytes: u64,
    done_bytes: AtomicU64,
    gathered_bytes: AtomicU64,
    stop: AtomicBool,
    state: Mutex<State<T>>,
    changed: Condvar,
}

impl<T> Shared<T> {
    /// A job of `total_bytes` that has not begun.
    pub fn new(total_bytes: u64) -> Arc<Self> {
        Arc::new(Self {
            total_bytes,
            done_bytes: AtomicU64::new(0),
            gathered_bytes: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            state: Mutex::new(State { outcome: None, finished: false }),
            changed: Condvar::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        // A worker that panicked left plain data behind, so a poisoned lock is still usable.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts bytes that reached their destination.
    pub fn add_done(&self, bytes: u64) {
        self.done_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Says that every source byte before plan position `position` has been copied out and will not
    /// be read again. Only moves forward.
    pub fn set_gathered(&self, position: u64) {
        if self.gathered_bytes.fetch_max(position, Ordering::Release) < position {
            let _guard = self.lock();
            self.changed.notify_all();
        }
    }

    /// `(done, total)` bytes.
    pub fn progress(&self) -> (u64, u64) {
        (self.done_bytes.load(Ordering::Relaxed).min(self.total_bytes), self.total_bytes)
    }

    /// Whether workers should stop at their next block.
    pub fn should_stop(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Records an error unless there is one already, and stops the other workers.
    pub fn fail(&self, error: Error) {
        let mut state = self.lock();
        if state.outcome.is_none() {
            state.outcome = Some(Err(error));
        }
        self.stop.store(true, Ordering::Release);
        self.changed.notify_all();
    }

    /// Asks the workers to stop; the job then fails with [`Kind::Cancelled`], unless it had finished.
    pub fn cancel(&self) {
        let finished = self.lock().finished;
        if !finished {
            self.fail(Error::new(Kind::Cancelled, "the operation was cancelled"));
        }
    }

    /// Called once, by the last worker, when no worker touches the caller's memory any more.
    pub fn finish(&self, value: T) {
        let mut state = self.lock();
        if state.outcome.is_none() {
            state.outcome = Some(Ok(value));
        }
        state.finished = true;
        self.changed.notify_all();
    }

    /// Whether the job has finished, well or not.
    pub fn is_finished(&self) -> bool {
        self.lock().finished
    }

    /// Waits until finished; false when `timeout` passed first.
    pub fn wait(&self, timeout: Option<Duration>) -> bool {
        self.wait_until(timeout, |state| state.finished)
    }

    /// Waits until the gather position reaches `position` or the job has finished.
    pub fn wait_gathered(&self, position: u64, timeout: Option<Duration>) -> bool {
        self.wait_until(timeout, |state| {
            state.finished || self.gathered_bytes.load(Ordering::Acquire) >= position
        })
    }

    fn wait_until(&self, timeout: Option<Duration>, ready: impl Fn(&State<T>) -> bool) -> bool {
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        let mut state = self.lock();
        while !ready(&state) {
            state = match deadline {
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return false;
                    }
                    self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        true
    }

    /// Takes the outcome, once, after the job has finished.
    pub fn take_outcome(&self) -> Option<Result<T>> {
        let mut state = self.lock();
        if state.finished { state.outcome.take() } else { None }
    }
}
