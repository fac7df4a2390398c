//! The end of the agent, which every thread that waits for something waits for as well.
//!
//! It is a pipe that nobody writes to: once its writing end is closed, all who poll the other end wake up, and
//! whoever polls later does at once.

use std::io::{PipeReader, PipeWriter, pipe};
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use waystation_format::{Error, Result};

/// Whether the agent is to end.
#[derive(Debug)]
pub(super) struct Stop {
    reader: PipeReader,
    writer: Mutex<Option<PipeWriter>>,
}

/// Why a thread has woken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Woken {
    /// The agent is to end.
    Stop,
    /// What it waited for is ready.
    Ready,
}

impl Stop {
    /// Not yet.
    pub fn new() -> Result<Self> {
        let (reader, writer) = pipe().map_err(|error| Error::from_io(error, "make", Path::new("pipe")))?;
        Ok(Self { reader, writer: Mutex::new(Some(writer)) })
    }

    /// Wakes all who wait, from now on.
    pub fn now(&self) {
        drop(self.writer.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    /// Waits until something can be read, or the agent is to end.
    pub fn wait_for(&self, awaited: BorrowedFd<'_>) -> Woken {
        let mut polled =
            [PollFd::new(&self.reader, PollFlags::IN), PollFd::from_borrowed_fd(awaited, PollFlags::IN)];
        loop {
            match poll(&mut polled, None) {
                Err(Errno::INTR) => {}
                // What cannot be waited for is found out by whoever tries to read it.
                Err(_) => return Woken::Ready,
                Ok(_) if !polled[0].revents().is_empty() => return Woken::Stop,
                Ok(_) if !polled[1].revents().is_empty() => return Woken::Ready,
                Ok(_) => {}
            }
        }
    }
}
