//! The seam to memory that is not the host's: who can copy from a device registers here.
//!
//! A worker starts the copies of several staging blocks before it waits for the first, so that the
//! device's bus is busy while earlier blocks are checksummed and written. Invariants: staging memory is
//! prepared before the first copy into it and released after the last has been waited for; every copy
//! that was started is waited for, also when the job fails.

use std::sync::{Arc, OnceLock};

use waystation_format::{Error, Kind, Result};

/// Rows of device memory that go to rows of host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceRows {
    /// Ordinal of the device.
    pub device: u32,
    /// Address of the first row on the device.
    pub source: u64,
    /// Bytes from one row to the next on the device.
    pub source_step: i64,
    /// Address of the first row in host memory.
    pub destination: usize,
    /// Bytes from one row to the next in host memory.
    pub destination_step: u64,
    /// Contiguous bytes of each row.
    pub row_bytes: usize,
    /// Number of rows; the steps matter only if there are several.
    pub rows: usize,
}

/// Copies that were started and not waited for yet.
pub trait DeviceCopies: Send {
    /// Blocks until all of them are done. Afterwards, in the good case and the bad, nothing writes to
    /// their destinations any more.
    fn wait(&mut self) -> Result<()>;

    /// Whether [`DeviceCopies::wait`] would return at once; false where that is not known.
    fn are_over(&self) -> bool {
        false
    }
}

/// Copies device memory to host memory asynchronously. Called from the threads of write jobs, several
/// at a time.
pub trait DeviceCopy: Send + Sync {
    /// Makes staging memory a good target, as by pinning it. Memory comes from a pool, so the same
    /// addresses return: keeping them prepared until [`DeviceCopy::release_staging`] is cheap, doing it
    /// for each block is not.
    fn prepare_staging(&self, address: usize, nbytes: usize) -> Result<()>;

    /// Undoes [`DeviceCopy::prepare_staging`] before the memory goes back to its pool.
    fn release_staging(&self, address: usize, nbytes: usize);

    /// Starts copies, in any order and at once, and returns without waiting.
    ///
    /// # Safety
    /// Sources must stay valid device memory, destinations writable host memory that nobody else
    /// touches, until the copies have been waited for.
    unsafe fn start(&self, copies: &[DeviceRows]) -> Result<Box<dyn DeviceCopies>>;
}

static REGISTERED: OnceLock<Arc<dyn DeviceCopy>> = OnceLock::new();

/// Makes device blocks writable from now on. Conflict if that was done before.
pub fn register_device_copy(device_copy: Arc<dyn DeviceCopy>) -> Result<()> {
    REGISTERED
        .set(device_copy)
        .map_err(|_| Error::new(Kind::Conflict, "something copies from devices already in this process"))
}

/// Whoever copies from devices, or Unsupported.
pub fn registered() -> Result<Arc<dyn DeviceCopy>> {
    REGISTERED.get().cloned().ok_or_else(|| {
        Error::new(
            Kind::Unsupported,
            "no CUDA in this build: copy the arrays to the host before writing them",
        )
    })
}

/// Copies under way into one staging block; dropping it waits for them.
pub struct UnderWay(Option<Box<dyn DeviceCopies>>);

impl UnderWay {
    /// Copies that were started, if there were any to make.
    pub fn new(copies: Option<Box<dyn DeviceCopies>>) -> Self {
        Self(copies)
    }

    /// Waits for them.
    pub fn wait(mut self) -> Result<()> {
        self.0.take().map_or(Ok(()), |mut copies| copies.wait())
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        if let Some(mut copies) = self.0.take() {
            // The job has failed for another reason, which is the one to report.
            drop(copies.wait());
        }
    }
}
