//! Small whole files, directories and renames: what a commit is made of.
//!
//! Invariants: nothing that existed before is overwritten; a failed batch removes what it created; when
//! a call has returned that makes durable, its bytes are on stable storage (the *names* are once the directory
//! has been synced too). Syncs run in parallel, because a journal commits what waits together at once. Files that
//! were written are closed by [`close`]: some file systems tell only then that they did not take the bytes.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, IntoRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::UNIX_EPOCH;

use rustix::fs::{CWD, Mode, OFlags, RawDir, RenameFlags};
use waystation_format::{Error, Kind, Result};

use crate::directory::{Directory, open_to_read};
use crate::job::each_in_parallel;
use crate::local::irregular;
use crate::sync_group::Durability;

/// Files that wait for their sync while open: a process may have no more than a thousand or so.
const MOST_OPEN_FILES: u64 = 128;
/// Paths from which on a head start for the syncs of all pays.
pub(crate) const MANY_PATHS: usize = 64;

/// A file that was written, and where it is.
pub(crate) type Written = (PathBuf, File);

/// How many files may wait for their sync while open: a quarter of the descriptors that the process has left.
pub(crate) fn most_open_files() -> usize {
    let allowed = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
    // Without /proc nobody knows; half of them are then taken to be in use.
    let left = allowed.saturating_sub(open_descriptors().unwrap_or(allowed / 2));
    (left / 4).clamp(1, MOST_OPEN_FILES) as usize
}

/// How many descriptors the process has open. The standard library's iterator would panic where a close fails.
fn open_descriptors() -> Option<u64> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::open("/proc/self/fd", flags, Mode::empty()).ok()?;
    let mut buffer = [MaybeUninit::uninit(); 8192];
    let mut entries = RawDir::new(&directory, &mut buffer);
    let mut count = 0;
    while let Some(entry) = entries.next() {
        entry.ok()?;
        count += 1;
    }
    Some(count)
}

/// Creates each file and writes it.
pub fn write_small_files<P: AsRef<Path> + Sync>(files: &[(P, &[u8])], durability: &Durability) -> Result<()> {
    let created: Vec<AtomicBool> = files.iter().map(|_| AtomicBool::new(false)).collect();
    let write = |index: usize| create(files[index].0.as_ref(), files[index].1, &created[index]);
    let outcome = match durability {
        Durability::Now => {
            // All bytes go into the page cache first, so that the syncs that follow share journal commits.
            let most = most_open_files();
            (0..files.len().div_ceil(most)).try_for_each(|batch| {
                let first = batch * most;
                let count = most.min(files.len() - first);
                sync_and_close(each_in_parallel(count, |index| write(first + index))?)
            })
        }
        Durability::Together(group) => each_in_parallel(files.len(), |index| {
            let (path, file) = write(index)?;
            group.add(&path, file)
        })
        .map(drop),
        Durability::Whenever => {
            each_in_parallel(files.len(), |index| close_all(vec![write(index)?])).map(drop)
        }
    };
    if outcome.is_err() {
        for (path, _) in
            files.iter().zip(created).filter_map(|(file, created)| created.into_inner().then_some(file))
        {
            // The first error is the one to report; a file that cannot be removed is a leftover that
            // belongs to an attempt nobody committed.
            drop(fs::remove_file(path));
        }
    }
    outcome
}

fn create(path: &Path, bytes: &[u8], created: &AtomicBool) -> Result<Written> {
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(path)
        .map_err(|error| Error::from_io(error, "create the file", path))?;
    created.store(true, Ordering::Relaxed);
    file.write_all(bytes).map_err(|error| Error::from_io(error, "write the file", path))?;
    Ok((path.to_owned(), file))
}

/// Closes a file that was written. Unlike a drop it tells what the file system says: FUSE and network file
/// systems may give bytes to their server only now. The descriptor is gone also after an error.
pub fn close(file: File) -> io::Result<()> {
    // SAFETY: the descriptor is owned, and given up here.
    match unsafe { libc::close(file.into_raw_fd()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Closes files that were written, and tells of the first that does not take that.
pub(crate) fn close_all(files: Vec<Written>) -> Result<()> {
    files.into_iter().try_for_each(|(path, file)| {
        close(file).map_err(|error| Error::from_io(error, "close the file", &path))
    })
}

/// Makes files durable, in parallel, and closes them.
pub(crate) fn sync_and_close(files: Vec<Written>) -> Result<()> {
    each_in_parallel(files.len(), |index| sync_file(&files[index].1, &files[index].0))?;
    close_all(files)
}

fn sync_file(file: &File, path: &Path) -> Result<()> {
    file.sync_all().map_err(|error| Error::from_io(error, "make the file durable", path))
}

/// Reads whole files, each with the most bytes that it may have. A larger one is Corrupt before memory is taken
/// for it. With `root` they are opened beneath it.
pub fn read_small_files<P: AsRef<Path> + Sync>(
    files: &[(P, u64)],
    root: Option<&Directory>,
) -> Result<Vec<Vec<u8>>> {
    each_in_parallel(files.len(), |index| read_small_file(files[index].0.as_ref(), files[index].1, root))
}

fn read_small_file(path: &Path, limit_bytes: u64, root: Option<&Directory>) -> Result<Vec<u8>> {
    let file = open_to_read(root, path, OFlags::empty(), "open the file")?;
    let metadata = file.metadata().map_err(|error| Error::from_io(error, "examine the file", path))?;
    let named = |kind, message: String| Error::new(kind, message).with("path", path.display().to_string());
    // Beneath a checkpoint it is damage, wherever it comes from; else the caller has named it.
    if metadata.is_dir() && root.is_none() {
        return Err(named(Kind::InvalidInput, "a file was expected, but this is a directory".to_owned()));
    }
    if !metadata.is_file() {
        return Err(irregular(path));
    }
    let too_large = |nbytes: u64| {
        named(Kind::Corrupt, format!("the file has {nbytes} bytes, but may have no more than {limit_bytes}"))
    };
    if metadata.len() > limit_bytes {
        return Err(too_large(metadata.len()));
    }
    let mut bytes = Vec::new();
    let capacity = usize::try_from(metadata.len()).unwrap_or(usize::MAX);
    bytes.try_reserve_exact(capacity.saturating_add(1)).map_err(|_| {
        named(Kind::Unavailable, format!("there is no memory for the {capacity} bytes of this file"))
    })?;
    // One byte more than allowed tells a file that grows meanwhile.
    file.take(limit_bytes.saturating_add(1))
        .read_to_end(&mut bytes)
        .map_err(|error| Error::from_io(error, "read the file", path))?;
    if bytes.len() as u64 > limit_bytes {
        return Err(too_large(bytes.len() as u64));
    }
    Ok(bytes)
}

/// Makes files and directories durable, in parallel: what files hold, and for directories the entries
/// that were created in them, renamed into and out of them.
pub fn sync_paths<P: AsRef<Path> + Sync>(paths: &[P]) -> Result<()> {
    sync_all(&[], paths)
}

/// When what is at a path was created, in nanoseconds since 1970; none where the file system does not tell. A
/// rename keeps it, no copy has that of its original, and no program can set it.
pub fn created_ns(path: &Path) -> Result<Option<u64>> {
    let found = fs::symlink_metadata(path).map_err(|error| Error::from_io(error, "look at", path))?;
    let since_1970 = found.created().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    Ok(since_1970.and_then(|time| u64::try_from(time.as_nanos()).ok()))
}

/// Makes files that are open, and what is at paths, durable in parallel.
pub(crate) fn sync_all<P: AsRef<Path> + Sync>(files: &[Written], paths: &[P]) -> Result<()> {
    let count = files.len() + paths.len();
    let path = |index: usize| paths[index - files.len()].as_ref();
    if count >= MANY_PATHS {
        // The first syncs then commit to the journal what all of them have to.
        each_in_parallel(count, |index| {
            match files.get(index) {
                Some((_, file)) => begin_write_back(file),
                // What cannot be opened here cannot be opened when it is synced either.
                None => open(path(index)).iter().for_each(begin_write_back),
            }
            Ok(())
        })?;
    }
    each_in_parallel(count, |index| match files.get(index) {
        Some((path, file)) => sync_file(file, path),
        None => sync_path(path(index)),
    })
    .map(drop)
}

/// Has the system begin to move to the disk what a file has in the page cache. Only a head start: what fails
/// here, fails again when the file is synced.
fn begin_write_back(file: &File) {
    // SAFETY: refers to no memory.
    unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, libc::SYNC_FILE_RANGE_WRITE) };
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)
}

fn sync_path(path: &Path) -> Result<()> {
    let opened = open(path).map_err(|error| Error::from_io(error, "open", path))?;
    match opened.sync_all() {
        // Some network and FUSE file systems refuse it for directories: they have nothing to flush.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) && path.is_dir() => Ok(()),
        outcome => outcome.map_err(|error| Error::from_io(error, "make durable", path)),
    }
}

/// Atomically renames `source` to `target`, which must not exist.
pub fn rename_new(source: &Path, target: &Path) -> Result<()> {
    if target != source && target.starts_with(source) {
        // The system's answer, EINVAL, is also what a file system without the operation says.
        return Err(Error::new(Kind::InvalidInput, "a directory cannot be renamed into itself")
            .with("path", source.display().to_string())
            .with("target", target.display().to_string()));
    }
    rename(source, target, RenameFlags::NOREPLACE, "rename")
}

/// Atomically swaps two names that both exist.
pub fn rename_exchange(first: &Path, second: &Path) -> Result<()> {
    if first != second && (first.starts_with(second) || second.starts_with(first)) {
        return Err(Error::new(Kind::InvalidInput, "a directory cannot be swapped with what is inside it")
            .with("path", first.display().to_string())
            .with("target", second.display().to_string()));
    }
    rename(first, second, RenameFlags::EXCHANGE, "swap")
}

fn rename(source: &Path, target: &Path, flags: RenameFlags, action: &str) -> Result<()> {
    let Err(mut errno) = rustix::fs::renameat_with(CWD, source, CWD, target, flags) else { return Ok(()) };
    if errno == rustix::io::Errno::PERM && is_refused(flags) {
        errno = rustix::io::Errno::NOSYS;
    }
    let error = io::Error::from(errno);
    let described = |kind, message: &str| {
        Error::new(kind, message.to_owned())
            .with("path", source.display().to_string())
            .with("target", target.display().to_string())
            .with("errno", errno.raw_os_error().to_string())
    };
    Err(match errno {
        rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS | rustix::io::Errno::OPNOTSUPP => described(
            Kind::Unsupported,
            "this file system has no atomic rename of that kind; commit by a record instead",
        ),
        rustix::io::Errno::XDEV => {
            described(Kind::InvalidInput, "source and target of a rename must lie on one file system")
        }
        rustix::io::Errno::EXIST | rustix::io::Errno::NOTEMPTY => {
            Error::from_io(error, &format!("{action} '{}'", source.display()), target)
        }
        _ => Error::from_io(error, &format!("{action} the path"), source)
            .with("target", target.display().to_string()),
    })
}

/// Whether a sandbox refuses the call itself: where it is made, names that are empty are not found.
fn is_refused(flags: RenameFlags) -> bool {
    rustix::fs::renameat_with(CWD, "", CWD, "", flags) == Err(rustix::io::Errno::PERM)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::refusals::{in_a_thread, refuse};

    /// Some file systems tell only when a file is closed that they have not taken its bytes.
    #[test]
    fn an_error_of_closing_fails_the_batch_and_leaves_nothing() {
        for durability in [Durability::Now, Durability::Whenever] {
            let directory = tempfile::tempdir().unwrap();
            let paths: Vec<_> = (0..3).map(|index| directory.path().join(format!("{index}"))).collect();
            let files: Vec<_> = paths.iter().map(|path| (path, &b"abc"[..])).collect();
            in_a_thread(|| {
                refuse(&[libc::SYS_close], libc::EIO);
                let error = write_small_files(&files, &durability).unwrap_err();
                assert!(error.message().contains("close the file"), "{error}");
                assert!(error.context("path").is_some());
            });
            assert!(paths.iter().all(|path| !path.exists()));
        }
    }
}
