//! Waystation's engine: arenas, durable writes, planned reads, calibration.
//!
//! Bytes, files and threads; arrays, trees and policy live above, in Python.

pub mod aligned;
pub mod arena;
pub mod batch;
pub mod copy;
pub mod cuda;
pub mod first_touch;
pub mod job;
pub mod local;
pub mod mode;
pub mod read;
#[cfg(test)]
mod refusals;
pub mod segment;
pub mod staging;
pub mod storage;
pub mod table_pages;
pub mod throttle;
pub mod write;

pub use local::{calibrate, directory, files, filesystem, parts, probe, ring, sync_group};
pub use waystation_format::{Error, Kind, Result};
