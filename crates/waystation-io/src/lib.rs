//! Waystation's engine: arenas, durable writes, planned reads, calibration.
//!
//! Bytes, files and threads; arrays, trees and policy live above, in Python.

pub mod aligned;
pub mod arena;
pub mod batch;
pub mod calibrate;
pub mod copy;
pub mod cuda;
pub mod directory;
pub mod files;
pub mod filesystem;
pub mod first_touch;
pub mod job;
pub mod mode;
pub mod probe;
pub mod read;
#[cfg(test)]
mod refusals;
pub mod ring;
pub mod segment;
pub mod staging;
pub mod sync_group;
pub mod table_pages;
pub mod throttle;
pub mod write;

pub use waystation_format::{Error, Kind, Result};
