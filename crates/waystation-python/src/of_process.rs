//! What works by threads of the process that made it: in a forked child it can be neither used nor dropped.
//!
//! Invariants: in a child nothing is asked of the value, so no lock is waited for that a thread of the parent
//! held, and no thread is joined that does not exist there; the child keeps the memory of its copy.

use std::mem::ManuallyDrop;

use waystation_format::{Error, Kind, Result};

/// A value of this process, and of no child of it.
pub struct OfProcess<T> {
    value: ManuallyDrop<T>,
    process: u32,
}

impl<T> OfProcess<T> {
    /// A value of this process.
    pub fn new(value: T) -> Self {
        Self { value: ManuallyDrop::new(value), process: std::process::id() }
    }

    /// The value. InvalidInput in a child that was forked since.
    pub fn get(&self) -> Result<&T> {
        if self.is_foreign() {
            let message = format!(
                "this belongs to process {}, from which this one was forked; make one here",
                self.process
            );
            return Err(Error::new(Kind::InvalidInput, message));
        }
        Ok(&self.value)
    }

    fn is_foreign(&self) -> bool {
        self.process != std::process::id()
    }
}

impl<T> Drop for OfProcess<T> {
    fn drop(&mut self) {
        if !self.is_foreign() {
            // SAFETY: this is being dropped, so nobody uses the value again.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}
