//! The directory of a store: private, in memory, and of one agent at a time.
//!
//! Invariants: everything is reached from one open directory, never again by its path, and no symbolic link
//! is followed; nobody but this user can have put anything there; as long as a [`Directory`] exists, no other
//! does of the same path, in any process.

use std::fs::{DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, RenameFlags};
use rustix::io::{Errno, retry_on_intr};
use waystation_format::{Error, Kind, Result};

/// The file whose lock is the right to the store.
const LOCK: &str = "lock";
/// What `statfs` calls file systems that live in memory: tmpfs and ramfs.
const MEMORY_FILE_SYSTEMS: [u64; 2] = [0x0102_1994, 0x8584_58f6];

/// An open, locked directory.
#[derive(Debug)]
pub(super) struct Directory {
    path: PathBuf,
    opened: File,
    /// Its lock ends with it.
    _lock: File,
}

impl Directory {
    /// Opens a directory, makes it if there is none, and locks it.
    pub fn open(path: &Path, allow_disk: bool) -> Result<Self> {
        match DirBuilder::new().mode(0o700).create(path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(Error::from_io(error, "make the directory of a store", path));
            }
            _ => {}
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened =
            retry_on_intr(|| rustix::fs::open(path, flags, Mode::empty())).map_err(|errno| match errno {
                Errno::LOOP | Errno::NOTDIR => refused(path, "is a link or a file; name a directory itself"),
                errno => Error::from_io(errno.into(), "open the directory of a store", path),
            })?;
        let opened = File::from(opened);
        check_owner(&opened, path)?;
        check_memory(&opened, path, allow_disk)?;
        let lock = lock(&opened, path)?;
        Ok(Self { path: path.to_owned(), opened, _lock: lock })
    }

    /// The path of a file in it.
    pub fn path_of(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes a file, which must not be there.
    pub fn create_file(&self, name: &str) -> Result<File> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR;
        let made = retry_on_intr(|| rustix::fs::openat(&self.opened, name, flags, mode));
        made.map(File::from).map_err(|errno| self.failed(errno, "make a file of the store", name))
    }

    /// Opens a file; `None` if there is none. Corrupt if it is anything but a file of this user alone.
    pub fn open_file(&self, name: &str) -> Result<Option<File>> {
        // Without NONBLOCK, opening a named pipe that somebody put there would wait for ever.
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = match retry_on_intr(|| rustix::fs::openat(&self.opened, name, flags, Mode::empty())) {
            Ok(file) => File::from(file),
            Err(Errno::NOENT) => return Ok(None),
            Err(Errno::LOOP | Errno::ISDIR | Errno::NXIO) => return Err(self.not_ours(name)),
            Err(errno) => return Err(self.failed(errno, "open a file of the store", name)),
        };
        let metadata =
            file.metadata().map_err(|error| Error::from_io(error, "examine", &self.path_of(name)))?;
        let is_private = metadata.mode() & 0o077 == 0 && metadata.nlink() == 1;
        if !metadata.is_file() || !is_private || metadata.uid() != user() {
            return Err(self.not_ours(name));
        }
        Ok(Some(file))
    }

    /// Removes a file, if it is there.
    pub fn remove(&self, name: &str) -> Result<()> {
        match rustix::fs::unlinkat(&self.opened, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(self.failed(errno, "remove a file of the store", name)),
        }
    }

    /// Gives a file the name by which it counts, and which no other has.
    pub fn rename_new(&self, source: &str, target: &str) -> Result<()> {
        let failed = |errno| self.failed(errno, "name a file of the store", target);
        match rustix::fs::renameat_with(&self.opened, source, &self.opened, target, RenameFlags::NOREPLACE) {
            // A sandbox, or an old kernel, refuses such renames. To look first is enough, as the lock keeps
            // other agents out, and other users cannot enter.
            Err(Errno::PERM | Errno::NOSYS | Errno::INVAL | Errno::OPNOTSUPP) => {
                match rustix::fs::statat(&self.opened, target, AtFlags::SYMLINK_NOFOLLOW) {
                    Ok(_) => Err(failed(Errno::EXIST)),
                    Err(Errno::NOENT) => {
                        rustix::fs::renameat(&self.opened, source, &self.opened, target).map_err(failed)
                    }
                    Err(errno) => Err(failed(errno)),
                }
            }
            outcome => outcome.map_err(failed),
        }
    }

    /// Puts a file in the place of another, at once.
    pub fn replace(&self, source: &str, target: &str) -> Result<()> {
        rustix::fs::renameat(&self.opened, source, &self.opened, target)
            .map_err(|errno| self.failed(errno, "replace a file of the store", target))
    }

    /// The names of all files but the lock.
    pub fn names(&self) -> Result<Vec<String>> {
        let failed = |errno| self.failed(errno, "list the directory of the store", "");
        let mut names = Vec::new();
        let listing = retry_on_intr(|| rustix::fs::Dir::read_from(&self.opened)).map_err(failed)?;
        for entry in listing {
            let name = entry.map_err(failed)?.file_name().to_string_lossy().into_owned();
            if ![".", "..", LOCK].contains(&name.as_str()) {
                names.push(name);
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    fn failed(&self, errno: Errno, action: &str, name: &str) -> Error {
        Error::from_io(errno.into(), action, &self.path_of(name))
    }

    fn not_ours(&self, name: &str) -> Error {
        let message =
            "a file of the store has been replaced by something that is not a private file of this user";
        Error::new(Kind::Corrupt, message).with("path", self.path_of(name).display().to_string())
    }
}

fn check_owner(opened: &File, path: &Path) -> Result<()> {
    let metadata =
        opened.metadata().map_err(|error| Error::from_io(error, "examine the directory of a store", path))?;
    if metadata.uid() != user() {
        return Err(refused(path, "belongs to another user"));
    }
    if metadata.mode() & 0o077 != 0 {
        return Err(refused(path, "can be entered by other users; make it private (chmod 700)"));
    }
    Ok(())
}

fn check_memory(opened: &File, path: &Path, allow_disk: bool) -> Result<()> {
    let space = rustix::fs::fstatfs(opened)
        .map_err(|errno| Error::from_io(errno.into(), "examine the file system of a store", path))?;
    // The type of the field is another one on other machines.
    if allow_disk || MEMORY_FILE_SYSTEMS.contains(&(space.f_type as u32).into()) {
        return Ok(());
    }
    Err(refused(path, "is not in memory (tmpfs or ramfs); mount a tmpfs there, or allow a disk"))
}

fn lock(opened: &File, path: &Path) -> Result<File> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let failed = |errno: Errno| Error::from_io(errno.into(), "lock the store", &path.join(LOCK));
    let mode = Mode::RUSR | Mode::WUSR;
    let made = retry_on_intr(|| rustix::fs::openat(opened, LOCK, flags, mode));
    let mut file = File::from(made.map_err(failed)?);
    match retry_on_intr(|| rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => {
            let owner = io::read_to_string(&file).unwrap_or_default();
            return Err(Error::new(
                Kind::Conflict,
                "another agent uses this store; stop it, or give this one another directory",
            )
            .with("path", path.display().to_string())
            .with("process", owner.trim()));
        }
        Err(errno) => return Err(failed(errno)),
    }
    // For people who wonder who has it; the lock itself is the kernel's.
    let described = file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id()));
    described.map_err(|error| Error::from_io(error, "lock the store", &path.join(LOCK)))?;
    Ok(file)
}

fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

fn refused(path: &Path, why: &str) -> Error {
    Error::new(Kind::InvalidInput, format!("'{}' cannot hold a store: it {why}", path.display()))
        .with("path", path.display().to_string())
}
