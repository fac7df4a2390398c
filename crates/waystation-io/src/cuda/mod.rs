//! Memory of CUDA devices: copied to the host and from it at the speed of the bus.
//!
//! Three users: write jobs, whose staging blocks are filled from devices ([`CudaCopy`]); read jobs, which
//! read for devices to staging blocks and copy these on (the same); and snapshots, which copy whole arrays
//! into slabs of the arena ([`snapshot`]). Where there is GPUDirect Storage, files can be read past the
//! host ([`CuFile`]). Invariants: the driver library is loaded when
//! the first device block is met, not before, and its absence is an error like any other; devices are used
//! through their primary contexts, as the frameworks use them, and no thread's current context is changed
//! for longer than a call; copies run on streams of our own, so whoever names device memory must have
//! waited for the kernels that use it; host memory is pinned once and stays so in the arena's pool
//! (`pins`), and where it cannot be pinned copies are slower, not wrong. A forked child cannot use what
//! its parent has started: it gets an error.

mod cufile;
mod driver;
mod near;
mod pins;
pub mod snapshot;
mod to_device;
mod transfer;

pub use self::cufile::CuFile;
pub use self::driver::{DeviceInfo, devices};
pub use self::transfer::CudaCopy;
