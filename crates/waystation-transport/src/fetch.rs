//! What a consumer waits for: blocks of one host, asked for together, with one deadline.
//!
//! Invariants: a fetch has one outcome, the first; its memory is released (`Lease`) when no connection can
//! write to it any more, which after a failure may be later than the outcome.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use waystation_format::{Error, Result};

use crate::key::Key;

/// Where a block goes.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Which block.
    pub key: Key,
    /// The address that its first byte comes to.
    pub address: usize,
    /// How long it is.
    pub nbytes: usize,
}

/// Blocks that are fetched.
#[derive(Debug)]
pub struct Fetch {
    targets: Vec<Target>,
    deadline: Instant,
    state: Mutex<State>,
    changed: Condvar,
    is_over: AtomicBool,
}

#[derive(Debug)]
struct State {
    missing: usize,
    failure: Option<Error>,
}

impl Fetch {
    /// A fetch of some blocks.
    ///
    /// # Safety
    ///
    /// The targets are writable, and nobody else uses them, as long as anybody has a lease that comes with it.
    pub unsafe fn new(targets: Vec<Target>, deadline: Instant) -> Self {
        let state = State { missing: targets.len(), failure: None };
        Self {
            is_over: AtomicBool::new(targets.is_empty()),
            targets,
            deadline,
            state: Mutex::new(state),
            changed: Condvar::new(),
        }
    }

    /// The blocks.
    pub fn targets(&self) -> &[Target] {
        &self.targets
    }

    /// When it fails at the latest.
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Whether it has an outcome.
    pub fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// Whether all blocks are in place.
    pub fn is_whole(&self) -> bool {
        self.lock().missing == 0
    }

    /// A piece of the memory of a block.
    ///
    /// # Safety
    ///
    /// The range is within the block, and no other piece of it is used at the same time.
    #[allow(clippy::mut_from_ref)] // the memory is not this value's own
    pub unsafe fn piece(&self, target: usize, offset: usize, nbytes: usize) -> &mut [u8] {
        if nbytes == 0 {
            return &mut [];
        }
        // SAFETY: whoever made this has promised the memory; the range is the caller's promise.
        unsafe { std::slice::from_raw_parts_mut((self.targets[target].address + offset) as *mut u8, nbytes) }
    }

    /// A block is in place.
    pub fn note_block(&self) {
        let mut state = self.lock();
        state.missing -= 1;
        if state.missing == 0 {
            self.end(state);
        }
    }

    /// It fails, unless it has an outcome already.
    pub fn fail(&self, error: Error) {
        let mut state = self.lock();
        if state.missing > 0 && state.failure.is_none() {
            state.failure = Some(error);
            self.end(state);
        }
    }

    /// Waits for the outcome, at most so long; nothing if there is none yet.
    pub fn wait(&self, within: Duration) -> Option<Result<()>> {
        let waits = |state: &mut State| state.missing > 0 && state.failure.is_none();
        let waited = self.changed.wait_timeout_while(self.lock(), within, waits);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match &state.failure {
            Some(error) => Some(Err(again(error))),
            None if state.missing == 0 => Some(Ok(())),
            None => None,
        }
    }

    fn end(&self, state: MutexGuard<'_, State>) {
        self.is_over.store(true, Ordering::Release);
        drop(state);
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change is whole, so the state of a poisoned lock is right.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The same error, for somebody else.
pub fn again(error: &Error) -> Error {
    let said = Error::new(error.kind(), error.message().to_owned());
    error.contexts().iter().fold(said, |said, (key, value)| said.with(key, value.clone()))
}
