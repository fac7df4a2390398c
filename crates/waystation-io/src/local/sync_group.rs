//! Files that are made durable together, through the descriptors that wrote them.
//!
//! The system tells of a failed write-back whoever had the file open when it happened; who opens it later may
//! not hear of it. So whatever writes a file gives its descriptor to the group, which closes it once it is
//! synced. A process has few descriptors: before they are too many, the group syncs those that it has, or leaves
//! them to a sync of the whole file system.
//!
//! A sync of each file waits for the disk each time, however little there is to write. `syncfs` writes back all
//! that is dirty in a file system and waits once, but it tells of a failure only whoever opened the file
//! system before it happened, not of which file, and only since Linux 5.8; and it writes what other programs
//! have left dirty too. So a group is opened *before* the first of its files is made, and all at once is what
//! happens where many paths are at stake, the file system is one that is known to tell, and there is not
//! more of others' to write than the syncs of each would cost; in memory there is nothing to write. Everything
//! else is synced one by one.
//!
//! A child that is forked meanwhile has copies of the descriptors until it ends or runs another program, and so
//! keeps the file system from being unmounted. It does not close them earlier. A close flushes the file on network
//! file systems and FUSE: the child could wait for the whole write-back in the middle of the fork, and the system
//! could tell the child of a failure, and then the sync of the parent no more.
//!
//! What can fail, in order: opening; a path that is gone; write-back, of which the group tells even where the
//! syncs of each, which follow in order to name the file, find nothing any more; closing. Invariants: when a sync
//! returns, everything that was added is on stable storage and closed; what lies on another file system is synced
//! by itself.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::{Errno, retry_on_intr};
use waystation_format::{Error, Result};

use crate::files::{MANY_PATHS, Written, close_all, most_open_files, sync_all, sync_and_close, sync_paths};
use crate::filesystem::FileSystem;
use crate::probe::{kernel_release, memory_information};

/// What a disk writes while one path among many is synced.
const BYTES_PER_SYNC: u64 = 128 << 10;
/// File systems of which a sync as a whole writes, waits, flushes the disk and tells of failures.
const TELLING: [&str; 7] = ["ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "tmpfs"];
/// The first kernel that tells of failed write-back.
const TELLING_KERNEL: (u32, u32) = (5, 8);
/// What says that the system, or a sandbox, has no `syncfs`.
const REFUSALS: [Errno; 4] = [Errno::NOSYS, Errno::PERM, Errno::INVAL, Errno::OPNOTSUPP];

/// When a file that is written becomes durable.
#[derive(Clone, Debug, Default)]
pub enum Durability {
    /// Before whatever writes it ends.
    #[default]
    Now,
    /// When the group is synced, which holds the file until then.
    Together(Arc<SyncGroup>),
    /// When the system likes.
    Whenever,
}

/// Files that were written and directories that were changed, from before the first of them.
#[derive(Debug)]
pub struct SyncGroup {
    /// None once it is closed: an open directory keeps its file system from being unmounted.
    root: Mutex<Option<File>>,
    path: PathBuf,
    device: u64,
    tells: bool,
    is_memory: bool,
    most_open_files: usize,
    unsynced: Mutex<Unsynced>,
    /// Held by whoever syncs files that are too many: only so many more may come to be open meanwhile.
    making_room: Mutex<()>,
}

#[derive(Debug, Default)]
struct Unsynced {
    open: Vec<Written>,
    open_bytes: u64,
    /// Of files that are closed: only the file system as a whole tells of them.
    closed: Vec<PathBuf>,
    closed_bytes: u64,
    /// What others have written, and directories.
    paths: Vec<PathBuf>,
    /// Files that were added, those among them that are synced already.
    file_count: usize,
}

impl SyncGroup {
    /// An empty group, for what will be written on the file system of `directory`.
    pub fn open(directory: &Path) -> Result<Self> {
        let failed = |error| Error::from_io(error, "open", directory);
        let root =
            OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY).open(directory).map_err(failed)?;
        let device = root.metadata().map_err(failed)?.dev();
        let filesystem = FileSystem::of(directory)?;
        Ok(Self {
            root: Mutex::new(Some(root)),
            path: directory.to_owned(),
            device,
            tells: kernel_tells(&kernel_release()) && TELLING.contains(&filesystem.kind.as_str()),
            is_memory: filesystem.is_memory(),
            most_open_files: most_open_files(),
            unsynced: Mutex::default(),
            making_room: Mutex::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Unsynced> {
        self.unsynced.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a file that was written since. Too many open ones are synced, or left to the file system, at once,
    /// and whoever brings as many again meanwhile waits for that.
    pub fn add(&self, path: &Path, file: File) -> Result<()> {
        let metadata = file.metadata().map_err(|error| Error::from_io(error, "examine the file", path))?;
        let written = (path.to_owned(), file);
        if metadata.dev() != self.device {
            return sync_and_close(vec![written]);
        }
        let mut unsynced = self.lock();
        unsynced.open.push(written);
        unsynced.open_bytes += metadata.len();
        unsynced.file_count += 1;
        if unsynced.open.len() < self.most_open_files {
            return Ok(());
        }
        drop(unsynced);
        let _making_room = self.making_room.lock().unwrap_or_else(PoisonError::into_inner);
        let mut unsynced = self.lock();
        if unsynced.open.len() < self.most_open_files {
            return Ok(());
        }
        let overdue = std::mem::take(&mut unsynced.open);
        let overdue_bytes = std::mem::take(&mut unsynced.open_bytes);
        let (file_count, own_bytes) = (unsynced.file_count, unsynced.closed_bytes + overdue_bytes);
        drop(unsynced);
        // All of the files so far count: so those that are synced one by one until this pays cost no more than
        // what others have to write.
        if !self.pays(file_count, own_bytes) || !has_syncfs() {
            return sync_and_close(overdue);
        }
        let paths: Vec<_> = overdue.iter().map(|(path, _)| path.clone()).collect();
        close_all(overdue)?;
        let mut unsynced = self.lock();
        unsynced.closed.extend(paths);
        unsynced.closed_bytes += overdue_bytes;
        Ok(())
    }

    /// Takes directories whose entries were made since, and files that others have written.
    pub fn add_paths(&self, paths: impl IntoIterator<Item = PathBuf>) {
        self.lock().paths.extend(paths);
    }

    /// Makes everything durable that was added, and closes it.
    pub fn sync(&self) -> Result<()> {
        let Unsynced { open, open_bytes, closed, closed_bytes, paths, .. } =
            std::mem::take(&mut *self.lock());
        let count = open.len() + closed.len() + paths.len();
        let each = |open: Vec<Written>| {
            sync_all(&open, &paths)?;
            close_all(open)
        };
        if closed.is_empty() && (!self.tells || count < MANY_PATHS) {
            return each(open);
        }
        let found = self.divide(&paths)?;
        if closed.is_empty() && !self.pays(count, open_bytes + closed_bytes + found.own_bytes) {
            return each(open);
        }
        let root = self.root.lock().unwrap_or_else(PoisonError::into_inner);
        // Of a group that is closed nothing is known from before: a sync of each tells what it can.
        let Some(root) = root.as_ref() else { return each(open) };
        match retry_on_intr(|| rustix::fs::syncfs(root)) {
            Ok(()) => {
                sync_paths(&found.elsewhere)?;
                close_all(open)
            }
            Err(errno) if closed.is_empty() && REFUSALS.contains(&errno) => each(open),
            Err(errno) => {
                each(open)?;
                sync_paths(&closed)?;
                let action = "make durable what was written under the path";
                Err(Error::from_io(errno.into(), action, &self.path))
            }
        }
    }

    /// Closes what was not synced, and the group, which has no more syncs.
    pub fn close(&self) {
        let unsynced = std::mem::take(&mut *self.lock());
        drop(unsynced);
        self.root.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// Whether to write back the whole file system costs less than so many syncs.
    fn pays(&self, count: usize, own_bytes: u64) -> bool {
        let others_bytes = if self.is_memory { 0 } else { dirty_bytes().saturating_sub(own_bytes) };
        self.tells && count >= MANY_PATHS && others_bytes <= count as u64 * BYTES_PER_SYNC
    }

    /// Which paths are not on the group's file system, and what the files on it hold.
    fn divide<'a>(&self, paths: &'a [PathBuf]) -> Result<Divided<'a>> {
        let mut divided = Divided { own_bytes: 0, elsewhere: Vec::new() };
        for path in paths {
            let metadata = fs::metadata(path).map_err(|error| Error::from_io(error, "examine", path))?;
            if metadata.dev() == self.device {
                divided.own_bytes += metadata.len();
            } else {
                divided.elsewhere.push(path.as_path());
            }
        }
        Ok(divided)
    }
}

struct Divided<'a> {
    own_bytes: u64,
    elsewhere: Vec<&'a Path>,
}

/// Whether the system would do it: it is asked to for no file.
fn has_syncfs() -> bool {
    // SAFETY: refers to no memory, and to no descriptor.
    let outcome = unsafe { libc::syncfs(-1) };
    outcome == 0
        || !Errno::from_io_error(&io::Error::last_os_error()).is_some_and(|errno| REFUSALS.contains(&errno))
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
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::refusals::{in_a_thread, refuse};

    /// What a sync says of so many files in memory, where calls fail once the group is open.
    fn outcome(file_count: usize, calls: &[libc::c_long], errno: i32) -> Option<Result<()>> {
        let directory = tempfile::tempdir_in("/dev/shm").ok()?;
        let mut outcome = None;
        in_a_thread(|| {
            let group = SyncGroup::open(directory.path()).unwrap();
            refuse(calls, errno);
            let paths = (0..file_count).map(|index| directory.path().join(index.to_string()));
            let mut added = paths.map(|path| group.add(&path, File::create_new(&path).unwrap()));
            outcome = Some(added.find(Result::is_err).unwrap_or_else(|| group.sync()));
        });
        outcome
    }

    #[test]
    fn what_a_sync_or_a_close_says_is_told_with_the_file() {
        for (count, call, action) in [
            (1, libc::SYS_fsync, "make the file durable"),
            (1, libc::SYS_close, "close the file"),
            (70, libc::SYS_close, "close the file"),
            (300, libc::SYS_close, "close the file"),
        ] {
            let Some(outcome) = outcome(count, &[call], libc::EIO) else { return };
            let error = outcome.unwrap_err();
            assert!(error.message().contains(action), "{error}");
            assert!(
                error
                    .context("path")
                    .is_some_and(|path| Path::new(path).file_name().is_some_and(|name| name == "0"))
            );
        }
    }

    #[test]
    fn a_sync_of_all_that_fails_is_told_of_and_one_that_is_refused_is_done_without() {
        for count in [70, 300] {
            for errno in [libc::ENOSYS, libc::EPERM] {
                assert!(outcome(count, &[libc::SYS_syncfs], errno).is_none_or(|outcome| outcome.is_ok()));
            }
            let Some(outcome) = outcome(count, &[libc::SYS_syncfs], libc::EIO) else { return };
            assert!(outcome.unwrap_err().message().contains("make durable what was written under the path"));
        }
    }

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
