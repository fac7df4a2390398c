//! Many files and directories made durable at once.
//!
//! A sync of each waits for the disk each time, however little there is to write. `syncfs` writes back all
//! that is dirty in a file system and waits once, but it tells of a failure only whoever opened the file
//! system before it happened, not of which file, and only since Linux 5.8; and it writes what other programs
//! have left dirty too. So a point is opened *before* the first of the files is made, and all at once is what
//! happens where many paths are at stake, the file system is one that is known to tell, and there is not
//! more of others' to write than the syncs of each would cost; in memory there is nothing to write. Everything
//! else is synced one by one.
//!
//! What can fail, in order: opening; a path that is gone; write-back, of which the point tells even where the
//! syncs of each, which follow in order to name the file, find nothing any more. Invariants: when a sync
//! returns, every path is on stable storage; what lies on another file system is synced by itself.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use waystation_format::{Error, Result};

use crate::files::{MANY_PATHS, sync_paths};
use crate::filesystem::FileSystem;
use crate::probe::{kernel_release, memory_information};

/// What a disk writes while one path among many is synced.
const BYTES_PER_SYNC: u64 = 128 << 10;
/// File systems of which a sync as a whole writes, waits, flushes the disk and tells of failures.
const TELLING: [&str; 7] = ["ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "tmpfs"];
/// The first kernel that tells of failed write-back.
const TELLING_KERNEL: (u32, u32) = (5, 8);

/// A moment before something is written, from which on no failure of write-back is missed.
pub struct SyncPoint {
    root: File,
    path: PathBuf,
    device: u64,
    tells: bool,
    is_memory: bool,
}

impl SyncPoint {
    /// The point, for what will be written on the file system of `directory`.
    pub fn open(directory: &Path) -> Result<Self> {
        let failed = |error| Error::from_io(error, "open", directory);
        let root =
            OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY).open(directory).map_err(failed)?;
        let device = root.metadata().map_err(failed)?.dev();
        let filesystem = FileSystem::of(directory)?;
        let tells = kernel_tells(&kernel_release()) && TELLING.contains(&filesystem.kind.as_str());
        Ok(Self { root, path: directory.to_owned(), device, tells, is_memory: filesystem.is_memory() })
    }

    /// Makes files and directories durable that were written since: what files hold, and of directories the
    /// entries that were made in them.
    pub fn sync<P: AsRef<Path> + Sync>(&self, paths: &[P]) -> Result<()> {
        if !self.tells || paths.len() < MANY_PATHS {
            return sync_paths(paths);
        }
        let found = self.divide(paths)?;
        let others_bytes = if self.is_memory { 0 } else { dirty_bytes().saturating_sub(found.own_bytes) };
        if others_bytes > paths.len() as u64 * BYTES_PER_SYNC {
            return sync_paths(paths);
        }
        match rustix::fs::syncfs(&self.root) {
            Ok(()) => sync_paths(&found.elsewhere),
            Err(Errno::NOSYS | Errno::PERM | Errno::INVAL | Errno::OPNOTSUPP) => sync_paths(paths),
            Err(errno) => {
                sync_paths(paths)?;
                let action = "make durable what was written under the path";
                Err(Error::from_io(errno.into(), action, &self.path))
            }
        }
    }

    /// Which paths are not on the point's file system, and what the files on it hold.
    fn divide<'a, P: AsRef<Path>>(&self, paths: &'a [P]) -> Result<Divided<'a>> {
        let mut divided = Divided { own_bytes: 0, elsewhere: Vec::new() };
        for path in paths.iter().map(AsRef::as_ref) {
            let metadata = fs::metadata(path).map_err(|error| Error::from_io(error, "examine", path))?;
            if metadata.dev() == self.device {
                divided.own_bytes += metadata.len();
            } else {
                divided.elsewhere.push(path);
            }
        }
        Ok(divided)
    }
}

struct Divided<'a> {
    own_bytes: u64,
    elsewhere: Vec<&'a Path>,
}

/// Bytes in the page cache of the whole machine that no disk has yet.
fn dirty_bytes() -> u64 {
    memory_information("Dirty:") + memory_information("Writeback:")
}

/// Whether a release such as `6.1.0-18-amd64` is late enough.
fn kernel_tells(release: &str) -> bool {
    let mut numbers =
        release.split(|other: char| !other.is_ascii_digit()).map_while(|part| part.parse().ok());
    match (numbers.next(), numbers.next()) {
        (Some(major), Some(minor)) => (major, minor) >= TELLING_KERNEL,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_and_strange_kernels_do_not_tell() {
        for release in ["5.8", "5.10.0-28-cloud", "6.1.0", "10.0.1+"] {
            assert!(kernel_tells(release), "{release}");
        }
        for release in ["4.4.0", "5.7.19", "3.10.0-1160.el7.x86_64", "6", "", "strange 6.1"] {
            assert!(!kernel_tells(release), "{release}");
        }
    }
}
