//! The ways in which the engine moves bytes between memory and files.
//!
//! A mode says how the system is asked; a way adds how much at once and how many at a time. The names
//! are stable: callers give them, statistics and remembered calibrations show them.

use std::fmt;
use std::str::FromStr;

use waystation_format::{Error, Kind, Result};

/// How the system is asked to move bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Past the page cache, many requests in flight through io_uring.
    DirectRing,
    /// Past the page cache, one request in flight per thread.
    DirectThreads,
    /// Through the page cache, one request in flight per thread.
    Buffered,
}

impl Mode {
    /// Every mode, the most demanding of the system first.
    pub const ALL: [Mode; 3] = [Mode::DirectRing, Mode::DirectThreads, Mode::Buffered];

    /// The stable name.
    pub fn name(self) -> &'static str {
        match self {
            Mode::DirectRing => "direct-ring",
            Mode::DirectThreads => "direct-threads",
            Mode::Buffered => "buffered",
        }
    }

    /// Whether it goes past the page cache, and so needs aligned requests.
    pub fn is_direct(self) -> bool {
        self != Mode::Buffered
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Mode {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Mode::ALL.into_iter().find(|mode| mode.name() == name).ok_or_else(|| {
            let message = format!(
                "mode '{name}' is unknown; use 'direct-ring', 'direct-threads' or 'buffered', or none to have \
                 the engine choose"
            );
            Error::new(Kind::InvalidInput, message)
        })
    }
}

/// One complete way to move bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Way {
    /// How the system is asked.
    pub mode: Mode,
    /// Bytes of one request.
    pub block_bytes: usize,
    /// Requests in flight, all threads together; of meaning to [`Mode::DirectRing`] only.
    pub depth: usize,
    /// Threads that ask.
    pub threads: usize,
}
