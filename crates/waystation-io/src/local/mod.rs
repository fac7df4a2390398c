//! The local file system, and whatever else is mounted as one: the first [`Storage`].
//!
//! All that asks the system about files of checkpoints is in here. Files are opened by their paths, or beneath a
//! directory that is held open.

pub mod calibrate;
pub mod directory;
pub mod files;
pub mod filesystem;
pub mod parts;
pub mod probe;
pub mod read;
pub mod ring;
pub mod sync_group;
pub mod write;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::OFlags;
use waystation_format::{Error, Kind, Result};

use self::directory::{Directory, open_to_read};
use crate::read::{Batch, Statistics};
use crate::storage::{NewFiles, Storage, StoredFile};
use crate::write::{Options, Plan};

/// Files of this system.
#[derive(Clone, Debug, Default)]
pub struct Local {
    root: Option<Arc<Directory>>,
}

impl Local {
    /// Files by their paths.
    pub fn by_path() -> Arc<dyn Storage> {
        Arc::new(Self::default())
    }

    /// Files beneath a directory, whatever has its path by now; without one, by their paths.
    pub fn beneath(root: Option<Arc<Directory>>) -> Arc<dyn Storage> {
        Arc::new(Self { root })
    }
}

impl Storage for Local {
    fn open(&self, path: &Path) -> Result<Box<dyn StoredFile>> {
        let file = open_to_read(self.root.as_deref(), path, OFlags::empty(), "open the file")?;
        let metadata = file.metadata().map_err(|error| Error::from_io(error, "examine the file", path))?;
        if !metadata.is_file() {
            return Err(irregular(path));
        }
        Ok(Box::new(LocalFile { file, nbytes: metadata.len(), path: path.to_owned() }))
    }

    unsafe fn read(&self, batch: &Batch<'_>) -> Result<Statistics> {
        // SAFETY: as the caller promises.
        unsafe { read::read(self.root.as_ref(), batch) }
    }

    fn check_new(&self, plan: &Plan) -> Result<()> {
        write::check_new(plan)
    }

    fn begin<'a>(&'a self, plan: &'a Plan, options: &'a Options) -> Result<Box<dyn NewFiles + 'a>> {
        Ok(Box::new(write::Files::begin(plan, options)?))
    }
}

struct LocalFile {
    file: File,
    nbytes: u64,
    path: PathBuf,
}

impl StoredFile for LocalFile {
    fn nbytes(&self) -> u64 {
        self.nbytes
    }

    fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> Result<()> {
        self.file.read_exact_at(bytes, offset).map_err(|error| {
            Error::from_io(error, "read the file", &self.path).with("offset", offset.to_string())
        })
    }
}

/// The error of a name that should stand for a file, and does not.
fn irregular(path: &Path) -> Error {
    let message = "a regular file was expected here";
    Error::new(Kind::Corrupt, message).with("path", path.display().to_string())
}
