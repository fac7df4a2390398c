//! The seam to the place where checkpoints are: the local file system, or a store.
//!
//! A storage gets a whole job at once, so that it decides alone how many requests are in flight, how large they are,
//! and which threads wait for them. Nothing passes the seam for each block. Design 7 explains it. There is no
//! rename, no append and no time of a file.

use std::fmt::Debug;
use std::path::Path;

use waystation_format::Result;

use crate::mode::Mode;
use crate::{read, write};

/// Where checkpoints are.
pub trait Storage: Debug + Send + Sync {
    /// Opens a file, to read small parts of it. Corrupt if something else has its name.
    fn open(&self, path: &Path) -> Result<Box<dyn StoredFile>>;

    /// Reads everything that a batch needs, in any order, and concludes each unit. When this returns, no request
    /// uses memory of the batch any more.
    ///
    /// The first failure stops the batch. Errors name the path; a file that ends early is Corrupt. A batch that is
    /// to stop begins nothing more.
    ///
    /// # Safety
    /// Until this returns, every destination of the plan must be writable memory that nobody else uses.
    unsafe fn read(&self, batch: &read::Batch<'_>) -> Result<read::Statistics>;

    /// Refuses a plan of new files that cannot be written, as far as that is known at once: a name is taken, the
    /// directory of a file is missing, there is no room.
    fn check_new(&self, plan: &write::Plan) -> Result<()>;

    /// Begins the files of a plan. None of them need exist before the first of its blocks is written.
    fn begin<'a>(
        &'a self,
        plan: &'a write::Plan,
        options: &'a write::Options,
    ) -> Result<Box<dyn NewFiles + 'a>>;
}

/// One version of a file, of which small parts are read.
pub trait StoredFile: Send + Sync {
    /// Its length.
    fn nbytes(&self) -> u64;

    /// Fills `bytes` with what the file has from `offset` on. An error names the path and the offset.
    fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> Result<()>;
}

/// The new files of one job. They are written, then finished; a job that fails or is cancelled aborts them.
pub trait NewFiles {
    /// The length of the blocks that the files are cut into; the last of each may be shorter.
    fn block_bytes(&self) -> usize;

    /// Gathers and writes every block, in any order, and counts each. When this returns, nobody reads the sources
    /// of the plan any more. The first failure stops the job; one that is to stop begins no more blocks.
    ///
    /// # Safety
    /// Until this returns, the sources of the plan must be readable memory that nobody writes, but for those that
    /// the gather position has passed.
    unsafe fn write(&self, blocks: &write::Blocks<'_>) -> Result<()>;

    /// Makes all files whole, and durable as the options of the job say. All their blocks have been written.
    fn finish(&self) -> Result<()>;

    /// Removes every trace of the files, also of those that were finished. The failure that led here is the one
    /// that is reported.
    fn abort(&self);

    /// How the files were written, where the storage has several modes.
    fn mode(&self) -> Option<Mode>;
}
