//! Waystation's engine: arenas, durable writes, planned reads, calibration.
//!
//! Bytes, files and threads; arrays, trees and policy live above, in Python.

pub mod job;

pub use waystation_format::{Error, Kind, Result};
