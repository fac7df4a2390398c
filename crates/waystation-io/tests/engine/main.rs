//! The engine, in one program: to link one for every file takes longer than to run them. What changes the process
//! (limits, its environment, a copy to devices) has a program of its own.
#![allow(clippy::panic, clippy::unwrap_used)]

mod device_support;
mod files;
mod memory_storage;
mod probe;
mod read;
mod read_device;
mod read_errors;
mod read_frames;
mod read_gpu_direct;
mod read_support;
mod storage;
#[path = "../../../waystation-store/tests/support/mod.rs"]
mod store_support;
mod sync_group;
mod table_pages;
mod unmapping;
mod write_compress;
mod write_copy;
mod write_files;
mod write_refusals;
mod write_support;

/// How many cases a test tries: `usual` in `make test`, `whole` in `make test-long`, which sets `WAYSTATION_TEST_LONG`.
fn cases(usual: u32, whole: u32) -> u32 {
    if std::env::var_os("WAYSTATION_TEST_LONG").is_some() { whole } else { usual }
}
