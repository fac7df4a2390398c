//! Locks that say who uses the bytes of a slot's file, across processes and beyond their deaths.
//!
//! They belong to open file descriptions, and a mapping keeps its description open. So a lock is let go when
//! the last descriptor *and* the last mapping made through it are gone, in whatever process, and not before:
//! whoever gets the writer's lock knows that no thread of any earlier writer can touch the bytes any more,
//! even where the process cannot be seen from here. Nothing here waits.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// What is locked: each a byte of the file that stands for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The right to write, which one has alone.
    Writer,
    /// The right to read, which many share.
    Readers,
    /// Both at once.
    Both,
}

/// Takes a part alone; false if somebody else has it.
pub fn try_exclusive(file: &File, part: Part) -> io::Result<bool> {
    set(file, part, libc::F_WRLCK)
}

/// Takes a part together with others; false if somebody has it alone.
pub fn try_shared(file: &File, part: Part) -> io::Result<bool> {
    set(file, part, libc::F_RDLCK)
}

/// Lets a part go.
pub fn unlock(file: &File, part: Part) -> io::Result<()> {
    set(file, part, libc::F_UNLCK).map(drop)
}

fn set(file: &File, part: Part, kind: libc::c_int) -> io::Result<bool> {
    let (start, length) = match part {
        Part::Writer => (0, 1),
        Part::Readers => (1, 1),
        Part::Both => (0, 2),
    };
    let lock = libc::flock64 {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: start,
        l_len: length,
        l_pid: 0,
    };
    // SAFETY: the call reads the structure, which outlives it, and refers to no other memory.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) } == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EACCES) => Ok(false),
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::ptr::null_mut;

    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

    use super::*;

    #[test]
    fn a_mapping_keeps_the_lock_of_a_file_that_was_closed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("slot");
        let open =
            || OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path).unwrap();
        let (writer, agent) = (open(), open());
        writer.set_len(4096).unwrap();
        assert!(try_exclusive(&writer, Part::Writer).unwrap());
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping that only this test knows of.
        let mapping = unsafe { mmap(null_mut(), 4096, access, MapFlags::SHARED, &writer, 0) }.unwrap();
        drop(writer);
        assert!(!try_exclusive(&agent, Part::Both).unwrap());
        assert!(try_exclusive(&agent, Part::Readers).unwrap());
        // SAFETY: the mapping made above.
        unsafe { munmap(mapping, 4096) }.unwrap();
        assert!(try_exclusive(&agent, Part::Both).unwrap());
    }

    #[test]
    fn readers_share_what_a_writer_has_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("slot");
        let open =
            || OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path).unwrap();
        let (first, second, agent) = (open(), open(), open());
        assert!(try_shared(&first, Part::Readers).unwrap() && try_shared(&second, Part::Readers).unwrap());
        assert!(!try_exclusive(&agent, Part::Both).unwrap());
        assert!(try_exclusive(&agent, Part::Writer).unwrap());
        assert!(!try_exclusive(&first, Part::Writer).unwrap());
        unlock(&first, Part::Readers).unwrap();
        assert!(!try_exclusive(&agent, Part::Both).unwrap());
        drop(second);
        assert!(try_exclusive(&agent, Part::Both).unwrap());
        assert!(!try_shared(&first, Part::Readers).unwrap());
        unlock(&agent, Part::Both).unwrap();
        assert!(try_shared(&first, Part::Readers).unwrap());
    }
}
