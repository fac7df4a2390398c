//! What belongs to one process: a child that is forked from it makes its own.
//!
//! Invariants: nothing is asked of what a forebear made, so no lock is waited for that a thread of it held, and no
//! connection of it is used; what a forebear made is never freed here, because its threads do not exist here.

use std::cell::RefCell;
use std::pin::pin;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use waystation_format::{Error, Kind, Result};

/// Threads that move bytes between sockets and memory, and encrypt them. Others wait for them, copy and verify.
const MOST_THREADS: usize = 4;

/// How often whoever waits for requests asks whether to give up.
const PATIENCE: Duration = Duration::from_millis(100);

static GIVE_UP: OnceLock<fn() -> bool> = OnceLock::new();

/// Sets what says whether the main thread, which handles signals, is to wait for its requests no longer. It is called
/// there, and outside of the runtime, so it may run any code, also such as makes requests.
pub fn give_up_if(check: fn() -> bool) {
    // The first one stays: they are all the same.
    GIVE_UP.get_or_init(|| check);
}

/// Waits of threads that work for another one, which ends them all when it works on itself no longer.
///
/// A thread that works for one that works for another gives up with both.
#[derive(Clone, Debug)]
pub struct Waits {
    is_over: Arc<AtomicBool>,
    /// Of the thread that these threads work for.
    of_thread: Option<Box<Waits>>,
}

thread_local! {
    static OWN: RefCell<Option<Waits>> = const { RefCell::new(None) };
}

impl Waits {
    /// Those of threads that work for this one.
    pub fn new() -> Self {
        Self { is_over: Arc::default(), of_thread: OWN.with_borrow(|own| own.clone().map(Box::new)) }
    }

    /// The waits of this thread, from now on, are among these.
    pub fn join(&self) {
        OWN.with_borrow_mut(|own| *own = Some(self.clone()));
    }

    /// Ends them, those that are to come as well.
    pub fn end(&self) {
        self.is_over.store(true, Ordering::Release);
    }

    fn are_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire) || self.of_thread.as_ref().is_some_and(|waits| waits.are_over())
    }
}

impl Default for Waits {
    fn default() -> Self {
        Self::new()
    }
}

/// Waits for requests. Cancelled, if the thread is to give up; what has been sent may still arrive then.
pub fn wait_for<T>(requests: impl Future<Output = Result<T>>) -> Result<T> {
    let runtime = runtime()?;
    let mut requests = pin!(requests);
    loop {
        let waited = runtime.block_on(async { tokio::time::timeout(PATIENCE, requests.as_mut()).await });
        if let Ok(outcome) = waited {
            return outcome;
        }
        let is_over = OWN.with_borrow(|own| own.as_ref().is_some_and(Waits::are_over));
        if is_over || (is_main_thread() && GIVE_UP.get().is_some_and(|check| check())) {
            return Err(Error::new(Kind::Cancelled, "the wait for the store was interrupted"));
        }
    }
}

fn is_main_thread() -> bool {
    rustix::thread::gettid() == rustix::process::getpid()
}

/// A value of this process, made when it is first asked for.
pub struct PerProcess<T> {
    current: AtomicPtr<(u32, T)>,
}

// SAFETY: it owns the value, which may be sent.
unsafe impl<T: Send> Send for PerProcess<T> {}
// SAFETY: it lends the value, which may be shared, and takes one that another thread has made.
unsafe impl<T: Send + Sync> Sync for PerProcess<T> {}

impl<T> PerProcess<T> {
    /// Nothing yet.
    pub const fn new() -> Self {
        Self { current: AtomicPtr::new(ptr::null_mut()) }
    }

    /// A value that this process has made.
    pub fn of(value: T) -> Self {
        Self { current: AtomicPtr::new(Box::into_raw(Box::new((std::process::id(), value)))) }
    }

    /// The value of this process. Of threads that make it at the same time one wins.
    pub fn get(&self, make: impl FnOnce() -> Result<T>) -> Result<&T> {
        let process = std::process::id();
        let mut current = self.current.load(Ordering::Acquire);
        // SAFETY: null, or from a box that lives as long as `self`.
        if let Some((_, value)) = unsafe { current.as_ref() }.filter(|(maker, _)| *maker == process) {
            return Ok(value);
        }
        let mut made = Box::new((process, make()?));
        loop {
            let new = Box::into_raw(made);
            match self.current.compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire) {
                // SAFETY: it was just made, and lives as long as `self`.
                Ok(_) => return Ok(unsafe { &(*new).1 }),
                Err(other) => {
                    // SAFETY: nobody else has seen it.
                    made = unsafe { Box::from_raw(new) };
                    // SAFETY: as for the first.
                    let found = unsafe { other.as_ref() }.filter(|(maker, _)| *maker == process);
                    if let Some((_, value)) = found {
                        return Ok(value);
                    }
                    current = other;
                }
            }
        }
    }
}

impl<T> Drop for PerProcess<T> {
    fn drop(&mut self) {
        let current = *self.current.get_mut();
        // SAFETY: null, or from a box that lives as long as `self`.
        if unsafe { current.as_ref() }.is_some_and(|(maker, _)| *maker == std::process::id()) {
            // SAFETY: it came from a box, and nobody can borrow from it any more.
            drop(unsafe { Box::from_raw(current) });
        }
    }
}

/// The runtime of all stores of this process; started at the first request.
pub fn runtime() -> Result<&'static Runtime> {
    static RUNTIME: PerProcess<Runtime> = PerProcess::new();
    RUNTIME.get(|| {
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(MOST_THREADS);
        let mut builder = Builder::new_multi_thread();
        builder.worker_threads(threads).thread_name("waystation-store").enable_all();
        builder.build().map_err(|error| {
            Error::new(
                Kind::Unavailable,
                format!("could not start the threads that talk to object stores: {error}"),
            )
        })
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_made_once_and_again_in_a_child() {
        let value = PerProcess::new();
        assert_eq!(*value.get(|| Ok(1)).unwrap(), 1);
        assert_eq!(*value.get(|| Ok(2)).unwrap(), 1);
        // As a child finds it: made by another process.
        let inherited = PerProcess { current: AtomicPtr::new(Box::into_raw(Box::new((0, 1)))) };
        assert_eq!(*inherited.get(|| Ok(2)).unwrap(), 2);
        assert_eq!(*inherited.get(|| Ok(3)).unwrap(), 2);
    }

    #[test]
    fn what_cannot_be_made_is_tried_again() {
        let value = PerProcess::new();
        assert!(value.get(|| Err(Error::new(Kind::Unavailable, "not now"))).is_err());
        assert_eq!(*value.get(|| Ok(1)).unwrap(), 1);
    }
}
