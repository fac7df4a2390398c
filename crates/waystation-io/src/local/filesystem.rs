//! The file system under a path: which one it is, and a nameless file on it to try things with.
//!
//! Invariants: asking changes nothing; a nameless file leaves nothing behind, whenever the process ends
//! (one that had to be named first is unlinked before it is handed out).

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{AtFlags, CWD, OFlags, StatVfsMountFlags, StatxFlags};
use waystation_format::{Error, Result};

/// What the system says of the file system that holds a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileSystem {
    /// Its type, as mount tables name it: `ext4`, `tmpfs`, `nfs4`, …
    pub kind: String,
    /// Major and minor number of its device.
    pub device: (u32, u32),
    /// What is mounted: a block device, a server's export, …
    pub source: String,
    /// Where it is mounted.
    pub mount_point: PathBuf,
    /// Whether nothing can be written to it.
    pub read_only: bool,
    /// Its size.
    pub total_bytes: u64,
    /// What this user may still write.
    pub available_bytes: u64,
}

impl FileSystem {
    /// The file system of an existing path.
    pub fn of(path: &Path) -> Result<Self> {
        let failed = |error: io::Error| Error::from_io(error, "examine the file system", path);
        let metadata = fs::metadata(path).map_err(failed)?;
        let space = rustix::fs::statvfs(path).map_err(|errno| failed(errno.into()))?;
        let device = (rustix::fs::major(metadata.dev()), rustix::fs::minor(metadata.dev()));
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let mount = find_mount(&table, mount_id(path), device).unwrap_or_default();
        Ok(Self {
            kind: mount.kind,
            device,
            source: mount.source,
            mount_point: mount.point,
            read_only: space.f_flag.contains(StatVfsMountFlags::RDONLY),
            total_bytes: space.f_blocks.saturating_mul(space.f_frsize),
            available_bytes: space.f_bavail.saturating_mul(space.f_frsize),
        })
    }

    /// Whether its files live in memory, where there is no cache to go past.
    pub fn is_memory(&self) -> bool {
        matches!(self.kind.as_str(), "tmpfs" | "ramfs" | "hugetlbfs" | "devtmpfs")
    }
}

/// One line of the mount table.
struct Mount {
    kind: String,
    source: String,
    point: PathBuf,
}

impl Default for Mount {
    fn default() -> Self {
        Self { kind: "unknown".to_owned(), source: "unknown".to_owned(), point: PathBuf::new() }
    }
}

/// The number of the mount that `path` is on (since Linux 5.8).
fn mount_id(path: &Path) -> Option<u64> {
    let status = rustix::fs::statx(CWD, path, AtFlags::empty(), StatxFlags::MNT_ID).ok()?;
    StatxFlags::from_bits_retain(status.stx_mask).contains(StatxFlags::MNT_ID).then_some(status.stx_mnt_id)
}

/// Lines are `id parent major:minor root point options [tags…] - kind source options`.
fn find_mount(table: &str, id: Option<u64>, device: (u32, u32)) -> Option<Mount> {
    let device = format!("{}:{}", device.0, device.1);
    let line = table.lines().rev().find(|line| {
        let mut fields = line.split(' ');
        let (own_id, own_device) = (fields.next(), fields.nth(1));
        match id {
            Some(id) => own_id.and_then(|text| text.parse().ok()) == Some(id),
            None => own_device == Some(device.as_str()),
        }
    })?;
    let (place, what) = line.split_once(" - ")?;
    let mut what = what.split(' ');
    Some(Mount {
        kind: what.next()?.to_owned(),
        source: unescape(what.next()?),
        point: PathBuf::from(unescape(place.split(' ').nth(4)?)),
    })
}

/// Undoes the table's octal escapes of blanks and backslashes.
fn unescape(field: &str) -> String {
    [(r"\040", " "), (r"\011", "\t"), (r"\012", "\n"), (r"\134", "\\")]
        .iter()
        .fold(field.to_owned(), |text, (escape, plain)| text.replace(escape, plain))
}

/// A readable and writable file in `directory` that has no name (any more), and whether the file system
/// could make it without one.
pub fn nameless_file(directory: &Path) -> io::Result<(File, bool)> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    if let Ok(file) = rustix::fs::open(directory, flags, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR) {
        return Ok((File::from(file), true));
    }
    let path = unused_name(directory);
    let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
    fs::remove_file(&path)?;
    Ok((file, false))
}

/// A name in `directory` that nobody else uses.
pub fn unused_name(directory: &Path) -> PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let since_epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let (process, number) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    directory.join(format!(".waystation-probe-{process}-{:x}-{number}", since_epoch.as_nanos()))
}

/// Turns direct I/O on or off for an open file.
pub fn set_direct(file: &File, direct: bool) -> io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(file)?;
    Ok(rustix::fs::fcntl_setfl(file, if direct { flags | OFlags::DIRECT } else { flags - OFlags::DIRECT })?)
}

/// What direct I/O asks of memory addresses and of file offsets and lengths. `None` where the system
/// does not say (before Linux 6.1), or says that there is no direct I/O.
pub fn direct_alignment(file: &File) -> Option<(u32, u32)> {
    let status = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
    let told = StatxFlags::from_bits_retain(status.stx_mask).contains(StatxFlags::DIOALIGN);
    (told && status.stx_dio_offset_align != 0)
        .then_some((status.stx_dio_mem_align, status.stx_dio_offset_align))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n\
                         31 22 0:30 / /my\\040disk rw - fuse.thing the\\134source rw\n\
                         40 22 254:0 /sub /sub rw master:1 propagate_from:2 - ext4 /dev/vda rw\n";

    #[test]
    fn mounts_are_found_by_number_or_device() {
        let mount = find_mount(TABLE, Some(31), (9, 9)).unwrap();
        assert_eq!((mount.kind.as_str(), mount.source.as_str()), ("fuse.thing", "the\\source"));
        assert_eq!(mount.point, Path::new("/my disk"));
        assert_eq!(find_mount(TABLE, None, (0, 30)).unwrap().kind, "fuse.thing");
        assert_eq!(find_mount(TABLE, Some(40), (254, 0)).unwrap().point, Path::new("/sub"));
        assert!(find_mount(TABLE, Some(7), (254, 0)).is_none());
        assert!(find_mount("damaged\n1 2 3", Some(1), (0, 0)).is_none());
    }

    #[test]
    fn nameless_files_leave_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let (file, _) = nameless_file(directory.path()).unwrap();
        assert_eq!(file.metadata().unwrap().nlink(), 0);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}
