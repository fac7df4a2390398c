//! An open directory, and files that are opened beneath it.
//!
//! A directory that has been renamed, or replaced at its path, is still the one that was opened: whoever reads
//! several files beneath it never gets files of two directories. Invariants: unless links out of the directory
//! are allowed, nothing outside of it is opened, whatever symbolic links are in it; where the system has no
//! `openat2`, no symbolic link beneath the directory is followed at all. Opening never waits for a named pipe.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Stat, fstat, openat, openat2, stat, statat,
};
use rustix::io::{Errno, retry_on_intr};
use waystation_format::{Error, Kind, Result};

/// Without O_NONBLOCK, opening a named pipe that somebody put there would wait for ever.
const READING: OFlags = OFlags::RDONLY.union(OFlags::CLOEXEC).union(OFlags::NONBLOCK).union(OFlags::NOCTTY);
/// The kernel answers EAGAIN where a rename came between the steps of a path with `..` in it.
const MOST_ATTEMPTS: usize = 64;

/// A directory that stays the same whatever happens to its name.
#[derive(Debug)]
pub struct Directory {
    descriptor: OwnedFd,
    path: PathBuf,
    follows_links_out: bool,
    /// Set once the system has refused `openat2`.
    walks: AtomicBool,
}

impl Directory {
    /// Opens the directory at a path; the path itself may be a symbolic link. With `follows_links_out`, symbolic
    /// links beneath it may lead anywhere.
    pub fn open(path: &Path, follows_links_out: bool) -> Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let descriptor = retry_on_intr(|| openat(CWD, path, flags, Mode::empty()))
            .map_err(|errno| Error::from_io(errno.into(), "open the directory", path))?;
        Ok(Self { descriptor, path: path.to_owned(), follows_links_out, walks: AtomicBool::new(false) })
    }

    /// The path by which it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether its path still leads to it.
    pub fn is_current(&self) -> Result<bool> {
        let failed = |errno: Errno| Error::from_io(errno.into(), "examine the directory", &self.path);
        let ours = retry_on_intr(|| fstat(&self.descriptor)).map_err(failed)?;
        match retry_on_intr(|| stat(&self.path)) {
            Ok(theirs) => Ok((ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino)),
            Err(Errno::NOENT | Errno::NOTDIR) => Ok(false),
            Err(errno) => Err(failed(errno)),
        }
    }

    /// Opens what is at a path that begins with the directory's own.
    pub fn open_beneath(&self, path: &Path, flags: OFlags, action: &str) -> Result<File> {
        let relative = path.strip_prefix(&self.path).map_err(|_| {
            Error::new(
                Kind::InvalidInput,
                format!("could not {action}: it is not beneath the open directory"),
            )
            .with("path", path.display().to_string())
            .with("directory", self.path.display().to_string())
        })?;
        let relative = if relative.as_os_str().is_empty() { Path::new(".") } else { relative };
        let flags = flags | OFlags::CLOEXEC;
        let opened = if self.follows_links_out {
            retry_on_intr(|| openat(&self.descriptor, relative, flags, Mode::empty()))
        } else if self.walks.load(Ordering::Relaxed) {
            self.walk(relative, flags)
        } else {
            self.resolve(relative, flags)
        };
        match opened {
            Ok(descriptor) => Ok(File::from(descriptor)),
            Err(Errno::XDEV | Errno::LOOP) if !self.follows_links_out => Err(self.refused(path)),
            // Of a directory that another machine has removed, a network file system knows nothing more.
            Err(Errno::STALE) => Err(Error::from_io(Errno::NOENT.into(), action, path)),
            Err(errno) => Err(Error::from_io(errno.into(), action, path)),
        }
    }

    /// Sandboxes refuse `openat2` with EPERM or an error of their choice, older kernels with ENOSYS.
    fn resolve(&self, relative: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        let rules = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        let mut outcome = Err(Errno::AGAIN);
        for _ in 0..MOST_ATTEMPTS {
            outcome = retry_on_intr(|| openat2(&self.descriptor, relative, flags, Mode::empty(), rules));
            if !matches!(outcome, Err(Errno::AGAIN)) {
                break;
            }
        }
        let is_refused = match outcome {
            Err(Errno::NOSYS | Errno::PERM) => true,
            // It may be about this file alone: nothing is wrong with the directory itself then.
            Err(errno @ (Errno::ACCESS | Errno::INVAL)) => {
                let flags = OFlags::PATH | OFlags::CLOEXEC;
                openat2(&self.descriptor, ".", flags, Mode::empty(), rules).err() == Some(errno)
            }
            _ => false,
        };
        if is_refused {
            self.walks.store(true, Ordering::Relaxed);
            return self.walk(relative, flags);
        }
        outcome
    }

    /// Opens one component after the other, none of which may be a symbolic link.
    fn walk(&self, relative: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        let mut above: Option<OwnedFd> = None;
        let mut components = relative.components().peekable();
        while let Some(component) = components.next() {
            let name: &OsStr = match component {
                Component::Normal(name) => name,
                Component::CurDir => OsStr::new("."),
                _ => return Err(Errno::XDEV), // what `RESOLVE_BENEATH` says of a way out
            };
            let directory = above.as_ref().map_or(self.descriptor.as_fd(), AsFd::as_fd);
            let is_last = components.peek().is_none();
            let own = if is_last { flags } else { OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC };
            above = Some(step(directory, name, own)?);
        }
        above.ok_or(Errno::NOENT)
    }

    fn refused(&self, path: &Path) -> Error {
        let what = if self.walks.load(Ordering::Relaxed) {
            "a symbolic link is on the way to this file, and this system lacks openat2, which would tell whether \
             it leads out of the directory"
        } else {
            "a symbolic link leads out of the directory on the way to this file"
        };
        let message = format!(
            "{what}; put the file itself there, or, if you trust the links, load with file.follow_links_out = True"
        );
        Error::new(Kind::Unsupported, message)
            .with("path", path.display().to_string())
            .with("directory", self.path.display().to_string())
    }
}

impl AsFd for Directory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

fn step(directory: BorrowedFd<'_>, name: &OsStr, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    let is_link = |found: &Stat| FileType::from_raw_mode(found.st_mode) == FileType::Symlink;
    match retry_on_intr(|| openat(directory, name, flags | OFlags::NOFOLLOW, Mode::empty())) {
        // A link that is no directory is told as that.
        Err(Errno::NOTDIR) => {
            let found = retry_on_intr(|| statat(directory, name, AtFlags::SYMLINK_NOFOLLOW))?;
            Err(if is_link(&found) { Errno::LOOP } else { Errno::NOTDIR })
        }
        // O_PATH opens the link itself.
        Ok(opened) if flags.contains(OFlags::PATH) && is_link(&retry_on_intr(|| fstat(&opened))?) => {
            Err(Errno::LOOP)
        }
        outcome => outcome,
    }
}

/// Flags of open(2) as other languages give them.
pub fn flags(bits: u32) -> OFlags {
    OFlags::from_bits_retain(bits)
}

/// Opens a file for reading: beneath `root`, or, without one, by its path. `flags` come in addition; O_PATH stands
/// alone, as `openat2` has it.
pub fn open_to_read(root: Option<&Directory>, path: &Path, flags: OFlags, action: &str) -> Result<File> {
    let flags = if flags.contains(OFlags::PATH) { flags | OFlags::CLOEXEC } else { flags | READING };
    match root {
        Some(root) => root.open_beneath(path, flags, action),
        None => retry_on_intr(|| openat(CWD, path, flags, Mode::empty()))
            .map(File::from)
            .map_err(|errno| Error::from_io(io::Error::from(errno), action, path)),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs;
    use std::io::Read;
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::refusals::{in_a_thread, refuse};

    const REFUSALS: [i32; 4] = [libc::ENOSYS, libc::EPERM, libc::EACCES, libc::EINVAL];

    /// Runs `body` as the system is, and where it refuses `openat2` in either way.
    fn on_every_system(body: impl Fn(bool) + Sync) {
        in_a_thread(|| body(false));
        for errno in REFUSALS {
            in_a_thread(|| {
                refuse(&[libc::SYS_openat2], errno);
                body(true);
            });
        }
    }

    fn content(root: &Directory, path: &Path) -> Result<String> {
        let mut text = String::new();
        open_to_read(Some(root), path, OFlags::empty(), "open the file")?.read_to_string(&mut text).unwrap();
        Ok(text)
    }

    #[test]
    fn a_directory_that_was_replaced_is_still_the_one_that_was_opened() {
        on_every_system(|_| {
            let place = tempfile::tempdir().unwrap();
            let (path, aside) = (place.path().join("a"), place.path().join("b"));
            fs::create_dir_all(path.join("in")).unwrap();
            fs::write(path.join("in/file"), "old").unwrap();
            let root = Directory::open(&path, false).unwrap();
            assert!(root.is_current().unwrap());
            fs::rename(&path, &aside).unwrap();
            assert!(!root.is_current().unwrap());
            fs::create_dir_all(path.join("in")).unwrap();
            fs::write(path.join("in/file"), "new").unwrap();
            assert!(!root.is_current().unwrap());
            assert_eq!(content(&root, &path.join("in/file")).unwrap(), "old");
            fs::remove_dir_all(&aside).unwrap();
            assert_eq!(content(&root, &path.join("in/file")).unwrap_err().kind(), Kind::NotFound);
        });
    }

    #[test]
    fn links_out_are_refused_unless_they_are_allowed() {
        on_every_system(|walks| {
            let place = tempfile::tempdir().unwrap();
            let path = place.path().join("inside");
            fs::create_dir_all(path.join("in")).unwrap();
            fs::write(place.path().join("outside"), "outside").unwrap();
            fs::write(path.join("in/file"), "inside").unwrap();
            symlink(place.path().join("outside"), path.join("absolute")).unwrap();
            symlink("../../outside", path.join("in/relative")).unwrap();
            symlink(place.path(), path.join("directory")).unwrap();
            symlink("in/file", path.join("within")).unwrap();
            let root = Directory::open(&path, false).unwrap();
            let trusting = Directory::open(&path, true).unwrap();
            for name in ["absolute", "in/relative", "directory/outside"] {
                let error = content(&root, &path.join(name)).unwrap_err();
                assert_eq!(error.kind(), Kind::Unsupported, "{name}: {error}");
                assert!(error.message().contains("symbolic link"), "{error}");
                let named = open_to_read(Some(&root), &path.join(name), OFlags::PATH, "examine the file");
                assert_eq!(named.unwrap_err().kind(), Kind::Unsupported);
                assert_eq!(content(&trusting, &path.join(name)).unwrap(), "outside");
            }
            let within = content(&root, &path.join("within"));
            if walks {
                assert!(within.unwrap_err().message().contains("openat2"));
            } else {
                assert_eq!(within.unwrap(), "inside");
            }
            assert_eq!(content(&root, &path.join("in/file")).unwrap(), "inside");
            let missing = content(&root, &path.join("in/file/below")).unwrap_err();
            assert_eq!(missing.kind(), Kind::InvalidInput, "{missing}");
        });
    }

    #[test]
    fn what_is_not_beneath_is_not_opened() {
        on_every_system(|_| {
            let place = tempfile::tempdir().unwrap();
            let path = place.path().join("inside");
            fs::create_dir(&path).unwrap();
            fs::write(place.path().join("outside"), "outside").unwrap();
            let root = Directory::open(&path, false).unwrap();
            for outside in [place.path().join("outside"), path.join("../outside")] {
                assert!(content(&root, &outside).is_err());
            }
            assert!(
                root.open_beneath(&path, OFlags::DIRECTORY, "list").unwrap().metadata().unwrap().is_dir()
            );
        });
    }

    #[test]
    fn a_named_pipe_is_opened_at_once() {
        let place = tempfile::tempdir().unwrap();
        let pipe = place.path().join("pipe");
        rustix::fs::mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let root = Directory::open(place.path(), false).unwrap();
        let opened = open_to_read(Some(&root), &pipe, OFlags::empty(), "open the file").unwrap();
        assert!(!opened.metadata().unwrap().is_file());
    }
}
