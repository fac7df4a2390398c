//! One batch of reads or writes in the background: progress, cancellation, first error, completion.
//!
//! Invariants: the first error wins and stops the others at their next block; a job is finished only
//! when no worker will touch the caller's memory again; nothing here knows about Python.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use waystation_format::{Error, Kind, Result};

/// Threads that wait for answers of a storage side by side. They sleep, so cores do not count.
const PARALLEL_CALLS: usize = 16;

struct State<T> {
    outcome: Option<Result<T>>,
    sealed: bool,
    finished: bool,
}

/// What the workers of a job and its observers share.
pub struct Shared<T> {
    total_bytes: u64,
    done_bytes: AtomicU64,
    front: AtomicU64,
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
            front: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            state: Mutex::new(State { outcome: None, sealed: false, finished: false }),
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

    /// Says that everything before `position` is over. A write counts source bytes, in plan order, that have
    /// been copied out and will not be read again (of those that go first, where the job says which); a read
    /// that announces counts records of its plan that are in place. Only moves forward.
    pub fn set_front(&self, position: u64) {
        if self.front.fetch_max(position, Ordering::Release) < position {
            let _guard = self.lock();
            self.changed.notify_all();
        }
    }

    /// How far the front is.
    pub fn front(&self) -> u64 {
        self.front.load(Ordering::Acquire)
    }

    /// `(done, total)` bytes.
    pub fn progress(&self) -> (u64, u64) {
        (self.done_bytes.load(Ordering::Relaxed).min(self.total_bytes), self.total_bytes)
    }

    /// Whether workers should stop at their next block.
    pub fn should_stop(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Records an error unless there is one already, and stops the other workers. Nothing happens to a
    /// job that was sealed or has finished.
    pub fn fail(&self, error: Error) {
        let mut state = self.lock();
        if state.sealed || state.finished {
            return;
        }
        if state.outcome.is_none() {
            state.outcome = Some(Err(error));
        }
        self.stop.store(true, Ordering::Release);
        self.changed.notify_all();
    }

    /// Asks the workers to stop; the job then fails with [`Kind::Cancelled`], unless it was sealed or has
    /// finished.
    pub fn cancel(&self) {
        self.fail(Error::new(Kind::Cancelled, "the operation was cancelled"));
    }

    /// Decides that the job succeeds: from now on cancellation comes too late. False if the job has failed
    /// or was cancelled before. For jobs that undo their effects unless they succeed.
    pub fn seal(&self) -> bool {
        let mut state = self.lock();
        state.sealed = state.outcome.is_none();
        state.sealed
    }

    /// Called once, when no worker touches the caller's memory any more. An error recorded before wins.
    pub fn finish(&self, outcome: Result<T>) {
        let mut state = self.lock();
        if state.outcome.is_none() {
            state.outcome = Some(outcome);
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

    /// Waits until the front reaches `position` or the job has finished.
    pub fn wait_front(&self, position: u64, timeout: Option<Duration>) -> bool {
        self.wait_until(timeout, |state| state.finished || self.front() >= position)
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

/// A job and the thread that runs it. The thread joins its workers before the job counts as finished.
///
/// Dropping the handle cancels the job and waits for it. In a child that was forked meanwhile there is
/// no such thread: there a handle only reports [`Handle::is_foreign`] and its drop does nothing.
pub struct Handle<T> {
    shared: Arc<Shared<T>>,
    thread: Mutex<Option<JoinHandle<()>>>,
    process: u32,
}

impl<T: Send + 'static> Handle<T> {
    /// Runs `body` on a new thread. A panic in it is the job's failure.
    pub fn spawn(
        name: &str,
        total_bytes: u64,
        body: impl FnOnce(&Shared<T>) -> Result<T> + Send + 'static,
    ) -> Result<Self> {
        let shared = Shared::new(total_bytes);
        let inner = Arc::clone(&shared);
        let run = move || {
            let outcome = catch_unwind(AssertUnwindSafe(|| body(&inner)));
            inner.finish(outcome.unwrap_or_else(|_| Err(panicked())));
        };
        let thread = Builder::new().name(name.to_owned()).spawn(run).map_err(|error| {
            Error::new(Kind::Unavailable, format!("could not start a thread for the job: {error}"))
        })?;
        Ok(Self { shared, thread: Mutex::new(Some(thread)), process: std::process::id() })
    }
}

impl<T> Handle<T> {
    /// What observers may ask of the job.
    pub fn shared(&self) -> &Shared<T> {
        &self.shared
    }

    /// Whether this is a forked child's copy of its parent's handle: nothing in it will ever change.
    pub fn is_foreign(&self) -> bool {
        self.process != std::process::id()
    }

    /// Waits until the job has finished and its thread is gone.
    pub fn join(&self) {
        if self.is_foreign() {
            return;
        }
        self.shared.wait(None);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // The body's panics were caught and reported; there is nothing more to learn here.
            drop(thread.join());
        }
    }
}

impl<T> Drop for Handle<T> {
    fn drop(&mut self) {
        if self.is_foreign() {
            // Not even to be detached: the C library has reused what described the parent's thread.
            let thread = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner);
            std::mem::forget(thread.take());
        } else {
            self.shared.cancel();
            self.join();
        }
    }
}

/// Runs `body` on this thread and on up to `threads - 1` others, fewer where the system grants no more.
/// Waits for all; the first error in order of threads is the result, a panic is Internal.
pub fn in_parallel(threads: usize, name: &str, body: &(impl Fn() -> Result<()> + Sync)) -> Result<()> {
    std::thread::scope(|scope| {
        let spawn = |_| Builder::new().name(name.to_owned()).spawn_scoped(scope, body).ok();
        let others: Vec<_> = (1..threads).map_while(spawn).collect();
        let mut outcome = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|_| Err(panicked()));
        for other in others {
            outcome = outcome.and(other.join().unwrap_or_else(|_| Err(panicked())));
        }
        outcome
    })
}

/// Calls `call` with every index below `count`, several at a time, and returns the results in order, or
/// the error of the lowest index among those that were called.
pub(crate) fn each_in_parallel<T: Send>(
    count: usize,
    call: impl Fn(usize) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    if count <= 1 {
        return (0..count).map(call).collect();
    }
    let next = AtomicUsize::new(0);
    let failed = AtomicBool::new(false);
    let results: Mutex<Vec<(usize, Result<T>)>> = Mutex::new(Vec::with_capacity(count));
    let work = || {
        while !failed.load(Ordering::Relaxed) {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= count {
                return;
            }
            let result = call(index);
            failed.fetch_or(result.is_err(), Ordering::Relaxed);
            results.lock().unwrap_or_else(PoisonError::into_inner).push((index, result));
        }
    };
    std::thread::scope(|scope| {
        let helpers: Vec<_> = (1..count.min(PARALLEL_CALLS))
            // Where the system grants no thread, those there are do all the work.
            .map_while(|_| Builder::new().spawn_scoped(scope, work).ok())
            .collect();
        work();
        helpers.into_iter().try_for_each(|helper| helper.join().map_err(|_| panicked()))
    })?;
    let mut results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    results.sort_unstable_by_key(|(index, _)| *index);
    results.into_iter().map(|(_, result)| result).collect()
}

/// The error of a worker that panicked.
pub fn panicked() -> Error {
    Error::new(Kind::Internal, "a worker thread panicked; please report this with the panic message above")
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::*;

    #[test]
    fn the_first_error_wins_over_the_outcome() {
        let job = Handle::spawn("test", 1, |shared| {
            shared.fail(Error::new(Kind::Corrupt, "first"));
            shared.fail(Error::new(Kind::Internal, "second"));
            Ok(1)
        })
        .unwrap();
        job.join();
        assert_eq!(job.shared().take_outcome().unwrap().unwrap_err().kind(), Kind::Corrupt);
    }

    #[test]
    fn a_panic_is_an_internal_error() {
        let job: Handle<()> = Handle::spawn("test", 1, |_| panic!("on purpose")).unwrap();
        assert!(job.shared().wait(None));
        assert_eq!(job.shared().take_outcome().unwrap().unwrap_err().kind(), Kind::Internal);
    }

    #[test]
    fn dropping_cancels_and_waits() {
        let seen = Arc::new(AtomicBool::new(false));
        let inner = Arc::clone(&seen);
        let job = Handle::spawn("test", 1, move |shared: &Shared<()>| {
            while !shared.should_stop() {
                std::thread::yield_now();
            }
            inner.store(true, Ordering::Release);
            Ok(())
        })
        .unwrap();
        assert!(!job.shared().wait(Some(Duration::from_millis(1))));
        drop(job);
        assert!(seen.load(Ordering::Acquire));
    }

    #[test]
    fn a_sealed_job_cannot_be_cancelled_nor_a_cancelled_one_sealed() {
        let sealed = Shared::new(0);
        assert!(sealed.seal());
        sealed.cancel();
        sealed.finish(Ok(1));
        assert_eq!(sealed.take_outcome().unwrap().unwrap(), 1);
        let cancelled = Shared::new(0);
        cancelled.cancel();
        assert!(!cancelled.seal());
        cancelled.finish(Ok(1));
        assert_eq!(cancelled.take_outcome().unwrap().unwrap_err().kind(), Kind::Cancelled);
    }

    #[test]
    fn the_front_wakes_its_waiters_and_never_goes_back() {
        let job = Handle::spawn("test", 10, |shared: &Shared<()>| {
            shared.set_front(7);
            shared.set_front(3);
            while !shared.should_stop() {
                std::thread::yield_now();
            }
            Ok(())
        })
        .unwrap();
        assert!(job.shared().wait_front(7, None));
        assert!(!job.shared().wait_front(8, Some(Duration::from_millis(1))));
        job.shared().cancel();
        assert!(job.shared().wait_front(8, None));
    }
}
