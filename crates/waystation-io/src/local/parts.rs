//! Small parts of one file, each read on the thread of its caller.
//!
//! Invariant: the bytes of a part are those of the version of the file that the caller named, or the caller is
//! told that the file is another one by now.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::num::NonZeroU64;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};

use rustix::fs::{Advice, Stat};
use rustix::io::{Errno, ReadWriteFlags};
use waystation_format::{Error, Result};

// What is not cached is read with its neighbourhood, which doubles with each such part: whoever misses often
// reads much of the file, in whatever order, and large requests keep a disk at its speed.
const LEAST_NEIGHBOURHOOD_BYTES: u64 = 256 << 10;
const MOST_NEIGHBOURHOOD_BYTES: u64 = 4 << 20;

// No time of a file.
const NEVER: i64 = i64::MIN;

/// What tells a version of a file from others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Version {
    /// The device that it is on.
    pub device: u64,
    /// Its number there.
    pub inode: u64,
    /// Its length.
    pub nbytes: u64,
    /// When its content changed last.
    pub modified_ns: i128,
}

/// Reads small parts of one version of a file, from any threads.
pub struct PartReader {
    file: File,
    path: PathBuf,
    version: Version,
    neighbourhood_bytes: AtomicU64,
    /// Whether the system can say that what is wanted is not cached.
    can_refuse: AtomicBool,
    /// When the status of the file had changed last as the path was seen to lead to it.
    status_ns: AtomicI64,
}

impl PartReader {
    /// Reads from an open file, by a descriptor of its own.
    ///
    /// # Errors
    /// There is no room for a further descriptor.
    ///
    /// # Safety
    /// The descriptor is open for the length of this call.
    pub unsafe fn of(descriptor: RawFd, path: &Path, version: Version) -> Result<Self> {
        // SAFETY: the caller says so.
        let own = unsafe { BorrowedFd::borrow_raw(descriptor) }.try_clone_to_owned();
        Ok(Self::new(own.map_err(|error| Error::from_io(error, "open", path))?, path, version))
    }

    fn new(file: OwnedFd, path: &Path, version: Version) -> Self {
        Self {
            file: file.into(),
            path: path.to_owned(),
            version,
            neighbourhood_bytes: AtomicU64::new(LEAST_NEIGHBOURHOOD_BYTES),
            can_refuse: AtomicBool::new(true),
            status_ns: AtomicI64::new(NEVER),
        }
    }

    /// Fills a view with the part that begins at an offset. False where the file is not that version any more;
    /// what the view has then counts for nothing.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read(&self, view: &mut [u8], offset: u64) -> Result<bool> {
        let read =
            self.fill(view, offset).and_then(|filled| Ok(filled == view.len() && self.is_unchanged()?));
        read.map_err(|error| Error::from_io(error, "read", &self.path))
    }

    /// Fills a view as far as the file reaches; returns how far that is.
    fn fill(&self, view: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut filled = if self.can_refuse.load(Ordering::Relaxed) { self.cached(view, offset) } else { 0 };
        if filled < view.len() {
            self.bring_neighbourhood(offset + filled as u64, offset + view.len() as u64);
        }
        while filled < view.len() {
            match rustix::io::pread(&self.file, &mut view[filled..], offset + filled as u64) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(filled)
    }

    /// Fills what it can of a view from the page cache.
    fn cached(&self, view: &mut [u8], offset: u64) -> usize {
        match rustix::io::preadv2(&self.file, &mut [IoSliceMut::new(view)], offset, ReadWriteFlags::NOWAIT) {
            Ok(count) => count,
            Err(Errno::AGAIN | Errno::INTR) => 0,
            // A file system without it, or a sandbox; what else is wrong, a plain read says.
            Err(_) => {
                self.can_refuse.store(false, Ordering::Relaxed);
                0
            }
        }
    }

    /// Has the system read what is around a range, all of it at once.
    fn bring_neighbourhood(&self, begin: u64, end: u64) {
        let nbytes = self.neighbourhood_bytes.load(Ordering::Relaxed);
        self.neighbourhood_bytes.store((2 * nbytes).min(MOST_NEIGHBOURHOOD_BYTES), Ordering::Relaxed);
        let (begin, end) = neighbourhood(begin, end, nbytes);
        // Advice: where the system takes none, the part alone is read.
        let _ = rustix::fs::fadvise(&self.file, begin, NonZeroU64::new(end - begin), Advice::WillNeed);
    }

    /// Whether the file is still the version, and is what the path leads to.
    fn is_unchanged(&self) -> io::Result<bool> {
        let found = rustix::fs::fstat(&self.file)?;
        if Version::of(&found) != self.version || found.st_nlink == 0 {
            return Ok(false);
        }
        // A file that gets or loses a name changes its status: its path may lead to another one since.
        let status_ns = i64::try_from(nanoseconds(found.st_ctime, found.st_ctime_nsec)).unwrap_or(i64::MAX);
        if self.status_ns.load(Ordering::Relaxed) == status_ns {
            return Ok(true);
        }
        let is_there = match rustix::fs::stat(&self.path) {
            Ok(present) => Version::of(&present) == self.version,
            Err(Errno::NOENT | Errno::NOTDIR) => false,
            Err(error) => return Err(error.into()),
        };
        if is_there {
            self.status_ns.store(status_ns, Ordering::Relaxed);
        }
        Ok(is_there)
    }
}

impl Version {
    fn of(found: &Stat) -> Self {
        Self {
            device: found.st_dev,
            inode: found.st_ino,
            nbytes: u64::try_from(found.st_size).unwrap_or(0),
            modified_ns: nanoseconds(found.st_mtime, found.st_mtime_nsec),
        }
    }
}

fn nanoseconds<S: Into<i128>, N: Into<i128>>(seconds: S, rest: N) -> i128 {
    seconds.into() * 1_000_000_000 + rest.into()
}

/// The stretches of a length, counted from the beginning of the file, that a range touches.
fn neighbourhood(begin: u64, end: u64, nbytes: u64) -> (u64, u64) {
    (begin / nbytes * nbytes, end.div_ceil(nbytes) * nbytes)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::{Seek, Write};

    use super::*;

    fn opened(content: &[u8]) -> (tempfile::NamedTempFile, PartReader) {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(content).unwrap();
        file.as_file().sync_all().unwrap();
        let version = Version::of(&rustix::fs::fstat(file.as_file()).unwrap());
        let own = file.reopen().unwrap();
        let reader = PartReader::new(own.into(), file.path(), version);
        (file, reader)
    }

    fn is_read(reader: &PartReader) -> bool {
        reader.read(&mut [0; 100], 0).unwrap()
    }

    #[test]
    fn parts_are_read_cached_and_not() {
        let content: Vec<u8> = (0..3u32 << 20).map(|number| (number % 251) as u8).collect();
        let (file, reader) = opened(&content);
        for begin in [0, 4095, 1 << 20, content.len() - 5000] {
            for _ in 0..2 {
                let mut part = [0; 5000];
                assert!(reader.read(&mut part, begin as u64).unwrap());
                assert_eq!(part[..], content[begin..begin + 5000]);
            }
            rustix::fs::fadvise(file.as_file(), 0, None, Advice::DontNeed).unwrap();
        }
    }

    #[test]
    fn a_file_that_changed_is_told() {
        let (mut file, reader) = opened(&[1; 10_000]);
        assert!(is_read(&reader));
        file.write_all(&[2]).unwrap(); // longer
        assert!(!is_read(&reader));

        let (file, reader) = opened(&[1; 10_000]);
        file.as_file().set_len(50).unwrap(); // shorter than the part
        assert!(!is_read(&reader));

        let (mut file, reader) = opened(&[1; 10_000]);
        file.rewind().unwrap();
        file.write_all(&[1; 10_000]).unwrap(); // written to
        file.as_file().set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
        assert!(!is_read(&reader));

        let (file, reader) = opened(&[1; 10_000]);
        drop(file); // removed
        assert!(!is_read(&reader));
    }

    #[test]
    fn a_path_that_leads_to_another_file_is_told_though_the_file_has_a_name() {
        let (file, reader) = opened(&[1; 10_000]);
        assert!(is_read(&reader));
        let other = file.path().with_extension("other");
        std::fs::hard_link(file.path(), &other).unwrap();
        assert!(is_read(&reader)); // a further name changes nothing
        let path = file.path().to_owned();
        drop(file);
        assert!(!is_read(&reader));
        std::fs::write(&path, [2; 10_000]).unwrap();
        assert!(!is_read(&reader));
        std::fs::rename(&other, &path).unwrap(); // it is back
        assert!(is_read(&reader));
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_neighbourhood_holds_the_range_and_grows_with_the_misses() {
        assert_eq!(neighbourhood(10, 20, 100), (0, 100));
        assert_eq!(neighbourhood(99, 101, 100), (0, 200));
        assert_eq!(neighbourhood(100, 200, 100), (100, 200));
        let (_file, reader) = opened(&[0; 100]);
        for _ in 0..10 {
            reader.bring_neighbourhood(0, 10);
        }
        assert_eq!(reader.neighbourhood_bytes.load(Ordering::Relaxed), MOST_NEIGHBOURHOOD_BYTES);
    }
}
