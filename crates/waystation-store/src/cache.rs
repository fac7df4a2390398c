//! A cache of what loads have read, in a directory of this machine that several processes share.
//!
//! It holds whole blocks of objects, each in a file of its own, by the location of the object, its version and the
//! range. A file says what it holds, with checksums, so what is damaged counts as not there. Nothing in it is needed:
//! whatever goes wrong with a cache, a load reads from the store.
//!
//! Who is to fetch a block claims it: it locks the file that the block is written to, which gets its name at the end.
//! The system releases the lock of a process that dies. So one process fetches a block that several need, a file is
//! whole once it has its name, and what a killed process has left is a file that nobody has locked, which the next one
//! removes or writes anew. Whoever waits for another one does so for a bounded time, and fetches the block itself then.
//!
//! Blocks that were not used for the longest time go first. Invariants: no wait for a lock blocks a thread; a block is
//! never given to a reader before its checksums are verified; all processes together have no more than the limit in
//! the directory, but for what those that write at the same moment are about to add.

use std::ffi::OsStr;
use std::fs::{DirBuilder, File, OpenOptions, read_dir, remove_file, rename};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use ring::digest::{SHA256, digest};
use rustix::fs::{FlockOperation, OFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, flock, futimens};
use waystation_format::checksum::{BLOCK_BYTES, crc64};
use waystation_io::arena::{Arena, Slab};

/// Where blocks begin, and how long they are, but for the last of an object.
pub const CACHED_BYTES: u64 = 8 << 20;
/// What stands before the block in its file.
const HEAD_BYTES: usize = 4096;
const MAGIC: &[u8; 8] = b"wstcache";
const FORMAT: u32 = 1;
/// Of the head: magic, format, bytes of the key, bytes of the block.
const FIXED_BYTES: usize = 8 + 4 + 4 + 8;
const NAME_DIGITS: usize = 40;
const BEING_WRITTEN: &str = "part";
/// For so long nothing is written after that has failed.
const REST_S: u64 = 60;
/// The directory is looked through again once this part of the limit was written.
const STEP: u64 = 64;
/// So much of the limit is left free then.
const SLACK: u64 = 16;
const MOST_TRIES: usize = 100;

/// A directory with blocks.
#[derive(Debug)]
pub struct Cache {
    directory: PathBuf,
    limit_bytes: u64,
    was_seen: AtomicBool,
    /// What was in the directory when it was last looked through, and what this process has added since.
    present_bytes: AtomicU64,
    added_bytes: AtomicU64,
    /// Seconds since 1970 until when nothing is written.
    rests_until_s: AtomicU64,
}

/// One block of one version of an object.
#[derive(Clone, Debug)]
pub struct Entry {
    cache: Arc<Cache>,
    key: String,
    name: String,
    /// The range of the object.
    pub block: Range<u64>,
}

/// Who fetches a block.
#[derive(Debug)]
pub enum Claim {
    /// This caller does.
    Own(Claimed),
    /// Somebody else does so now.
    Another,
    /// Nothing can be written: why, where that is news.
    Impossible(Option<String>),
}

/// A block that its holder is to write. It is given up when this is dropped.
#[derive(Debug)]
pub struct Claimed {
    entry: Entry,
    file: File,
    is_published: bool,
}

impl Cache {
    /// A cache in a directory, which need not be there yet.
    pub fn new(directory: PathBuf, limit_bytes: u64) -> Self {
        Self {
            directory,
            limit_bytes,
            was_seen: AtomicBool::new(false),
            present_bytes: AtomicU64::new(0),
            added_bytes: AtomicU64::new(0),
            rests_until_s: AtomicU64::new(0),
        }
    }

    /// The block of an object that has a range; `None` where it is not to be kept: the range has parts of several
    /// blocks, or the block has no room.
    ///
    /// `object` says which object is meant, and `tag` which version of it.
    pub fn entry(
        self: &Arc<Self>,
        object: &str,
        tag: &str,
        file_bytes: u64,
        range: &Range<u64>,
    ) -> Option<Entry> {
        let start = range.start / CACHED_BYTES * CACHED_BYTES;
        let end = (start + CACHED_BYTES).min(file_bytes);
        let key = format!("{object}\n{tag}\n{file_bytes}\n{start}");
        let checksums = (end.saturating_sub(start) as usize).div_ceil(BLOCK_BYTES);
        let fits = FIXED_BYTES + key.len() + 8 * checksums + 8 <= HEAD_BYTES;
        let has_room = end.saturating_sub(start) + HEAD_BYTES as u64 <= self.limit_bytes;
        if range.end > end || !fits || !has_room {
            return None;
        }
        let digits = digest(&SHA256, key.as_bytes());
        let name: String = digits.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        Some(Entry { cache: Arc::clone(self), key, name: name[..NAME_DIGITS].to_owned(), block: start..end })
    }

    /// Looks the directory through, the first time in this process: what killed ones have left is removed.
    pub fn prepare(&self) {
        if !self.was_seen.swap(true, Ordering::Relaxed) {
            self.look_through();
        }
    }

    fn path_of(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Lets blocks go until there is room for one that is being written, whose file has its length already; false if
    /// there is none.
    fn make_room(&self, nbytes: u64) -> bool {
        let added = nbytes + self.added_bytes.fetch_add(nbytes, Ordering::Relaxed);
        let is_full = self.present_bytes.load(Ordering::Relaxed) + added > self.limit_bytes;
        if is_full || added > self.limit_bytes / STEP {
            self.look_through();
        }
        self.present_bytes.load(Ordering::Relaxed) <= self.limit_bytes
    }

    fn look_through(&self) {
        let Ok(entries) = read_dir(&self.directory) else { return };
        let (mut blocks, mut present) = (Vec::new(), 0);
        for entry in entries.flatten() {
            let path = entry.path();
            let is_being_written = path.extension().is_some_and(|extension| extension == BEING_WRITTEN);
            if !is_being_written && !is_name(&entry.file_name())
                || is_being_written && remove_abandoned(&path)
            {
                continue;
            }
            let Ok(found) = entry.metadata() else { continue };
            present += found.size();
            if !is_being_written {
                blocks.push(((found.mtime(), found.mtime_nsec()), found.size(), path));
            }
        }
        if present > self.limit_bytes {
            blocks.sort_unstable();
            for (_, nbytes, path) in &blocks {
                if present <= self.limit_bytes - self.limit_bytes / SLACK {
                    break;
                }
                drop(remove_file(path)); // another process may have done so
                present -= nbytes;
            }
        }
        self.present_bytes.store(present, Ordering::Relaxed);
        self.added_bytes.store(0, Ordering::Relaxed);
    }

    fn is_resting(&self) -> bool {
        now_s() < self.rests_until_s.load(Ordering::Relaxed)
    }

    /// Writes nothing for a while; returns what to tell.
    fn rest(&self, error: &io::Error) -> String {
        self.rests_until_s.store(now_s() + REST_S, Ordering::Relaxed);
        format!("could not write to the cache '{}': {error}", self.directory.display())
    }
}

impl Entry {
    /// A range of the block, verified; `None` where it is not there. What is damaged is removed.
    pub fn read(&self, range: &Range<u64>) -> Option<Bytes> {
        let path = self.cache.path_of(&self.name);
        let mut options = OpenOptions::new();
        let file = options.read(true).custom_flags(OFlags::NOFOLLOW.bits() as i32).open(&path).ok()?;
        let found = self.read_from(&file, range);
        match &found {
            Ok(_) => drop(futimens(&file, &USED_NOW)), // of somebody else's directory it stays as it is
            Err(_) => drop(remove_file(path)),
        }
        found.ok()
    }

    fn read_from(&self, file: &File, range: &Range<u64>) -> io::Result<Bytes> {
        let damaged = || io::Error::from(io::ErrorKind::InvalidData);
        let mut head = [0; HEAD_BYTES];
        file.read_exact_at(&mut head, 0)?;
        let block_bytes = (self.block.end - self.block.start) as usize;
        let checksums = self.checksums_in(&head).ok_or_else(damaged)?;
        let first = (range.start - self.block.start) as usize / BLOCK_BYTES;
        let begin = first * BLOCK_BYTES;
        let end = ((range.end - self.block.start) as usize).next_multiple_of(BLOCK_BYTES).min(block_bytes);
        let mut slab = Memory::new(end - begin)?;
        file.read_exact_at(slab.bytes(), (HEAD_BYTES + begin) as u64)?;
        let parts = slab.bytes().chunks(BLOCK_BYTES).zip(checksums.get(first..).unwrap_or_default());
        if !parts.clone().all(|(part, expected)| crc64(part) == *expected)
            || parts.len() * BLOCK_BYTES < end - begin
        {
            return Err(damaged());
        }
        let skipped = (range.start - self.block.start) as usize - begin;
        Ok(Bytes::from_owner(slab).slice(skipped..skipped + (range.end - range.start) as usize))
    }

    /// The checksums of a head; `None` if it is not that of this block, or damaged.
    fn checksums_in(&self, head: &[u8; HEAD_BYTES]) -> Option<Vec<u64>> {
        let word = |at: usize| Some(u64::from_le_bytes(head.get(at..at + 8)?.try_into().ok()?));
        let count = ((self.block.end - self.block.start) as usize).div_ceil(BLOCK_BYTES);
        let after_key = FIXED_BYTES + self.key.len();
        let is_whole = word(HEAD_BYTES - 8)? == crc64(&head[..HEAD_BYTES - 8]);
        let is_own =
            head[..FIXED_BYTES] == self.fixed() && &head[FIXED_BYTES..after_key] == self.key.as_bytes();
        (is_whole && is_own).then(|| (0..count).map_while(|index| word(after_key + 8 * index)).collect())
    }

    fn fixed(&self) -> [u8; FIXED_BYTES] {
        let mut fixed = [0; FIXED_BYTES];
        fixed[..8].copy_from_slice(MAGIC);
        fixed[8..12].copy_from_slice(&FORMAT.to_le_bytes());
        fixed[12..16].copy_from_slice(&(self.key.len() as u32).to_le_bytes());
        fixed[16..24].copy_from_slice(&(self.block.end - self.block.start).to_le_bytes());
        fixed
    }

    fn head_of(&self, content: &[u8]) -> [u8; HEAD_BYTES] {
        let mut head = [0; HEAD_BYTES];
        head[..FIXED_BYTES].copy_from_slice(&self.fixed());
        let mut position = FIXED_BYTES + self.key.len();
        head[FIXED_BYTES..position].copy_from_slice(self.key.as_bytes());
        for part in content.chunks(BLOCK_BYTES) {
            head[position..position + 8].copy_from_slice(&crc64(part).to_le_bytes());
            position += 8;
        }
        let seal = crc64(&head[..HEAD_BYTES - 8]);
        head[HEAD_BYTES - 8..].copy_from_slice(&seal.to_le_bytes());
        head
    }

    /// Claims the block. Whoever gets it looks once more whether it is there: the last holder may have written it.
    pub fn claim(&self) -> Claim {
        if self.cache.is_resting() {
            return Claim::Impossible(None);
        }
        match self.try_to_claim() {
            Ok(Some(file)) => Claim::Own(Claimed { entry: self.clone(), file, is_published: false }),
            Ok(None) => Claim::Another,
            Err(error) => Claim::Impossible(Some(self.cache.rest(&error))),
        }
    }

    fn try_to_claim(&self) -> io::Result<Option<File>> {
        let path = self.part();
        for _ in 0..MOST_TRIES {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false).mode(0o600);
            options.custom_flags(OFlags::NOFOLLOW.bits() as i32);
            let file = match options.open(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    DirBuilder::new().recursive(true).mode(0o700).create(&self.cache.directory)?;
                    continue;
                }
                file => file?,
            };
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
                locked => locked?,
            }
            if is_at(&path, &file) {
                return Ok(Some(file)); // else it got its name, or was removed, before it was locked
            }
        }
        Ok(None)
    }

    fn part(&self) -> PathBuf {
        self.cache.path_of(&self.name).with_extension(BEING_WRITTEN)
    }
}

impl Claimed {
    /// Writes the block. What cannot be written is removed, and told. Nothing is synced: a file that a loss of power
    /// has torn is found by its checksums.
    pub fn publish(mut self, content: &[u8]) -> Result<(), String> {
        let nbytes = (HEAD_BYTES + content.len()) as u64;
        let write = || {
            self.file.set_len(nbytes)?; // so that all who look know how much there will be
            if !self.entry.cache.make_room(nbytes) {
                return Ok(false);
            }
            self.file.write_all_at(&self.entry.head_of(content), 0)?;
            self.file.write_all_at(content, HEAD_BYTES as u64)?;
            rename(self.entry.part(), self.entry.cache.path_of(&self.entry.name))?;
            Ok(true)
        };
        let outcome: io::Result<bool> = write();
        self.is_published = matches!(outcome, Ok(true));
        outcome.map(drop).map_err(|error| self.entry.cache.rest(&error))
    }
}

impl Drop for Claimed {
    fn drop(&mut self) {
        if !self.is_published {
            drop(remove_file(self.entry.part())); // nobody else does while it is locked
        }
    }
}

/// Pooled memory, as bytes.
pub struct Memory {
    slab: Slab,
    nbytes: usize,
}

impl Memory {
    /// So many bytes, with any content.
    pub fn new(nbytes: usize) -> io::Result<Self> {
        let slab =
            Arena::global().allocate(nbytes).map_err(|error| io::Error::other(error.message().to_owned()))?;
        Ok(Self { slab, nbytes })
    }

    /// Them, to be filled.
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the slab is at least as long, initialised by the system, and nobody else's.
        unsafe { std::slice::from_raw_parts_mut(self.slab.address().as_ptr(), self.nbytes) }
    }
}

impl AsRef<[u8]> for Memory {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: as for `bytes`; nobody writes to it while it is borrowed.
        unsafe { std::slice::from_raw_parts(self.slab.address().as_ptr(), self.nbytes) }
    }
}

/// When a file was last used.
const USED_NOW: Timestamps = Timestamps {
    last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
    last_modification: Timespec { tv_sec: 0, tv_nsec: UTIME_NOW },
};

/// Removes a file that is being written, if nobody does so any more; whether it did.
fn remove_abandoned(path: &Path) -> bool {
    let options = OpenOptions::new().read(true).custom_flags(OFlags::NOFOLLOW.bits() as i32).open(path);
    options.is_ok_and(|file| {
        flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok()
            && is_at(path, &file)
            && remove_file(path).is_ok()
    })
}

fn is_at(path: &Path, file: &File) -> bool {
    let place = |found: std::fs::Metadata| (found.dev(), found.ino());
    let found = path.symlink_metadata().ok().map(place);
    found.is_some() && found == file.metadata().ok().map(place)
}

fn is_name(name: &OsStr) -> bool {
    name.len() == NAME_DIGITS
        && name.to_str().is_some_and(|name| name.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
#[allow(clippy::panic, clippy::unwrap_used)]
mod tests {
    use super::*;

    fn entry(cache: &Arc<Cache>, tag: &str, range: Range<u64>) -> Entry {
        cache.entry("s3://bucket/object", tag, 3 * CACHED_BYTES / 2, &range).unwrap()
    }

    fn content(nbytes: usize, seed: u8) -> Vec<u8> {
        (0..nbytes).map(|index| (index / 7) as u8 ^ seed).collect()
    }

    fn publish(entry: &Entry, content: &[u8]) {
        let Claim::Own(claimed) = entry.claim() else { panic!("it is claimed") };
        claimed.publish(content).unwrap();
    }

    fn names(directory: &Path) -> Vec<String> {
        let found = read_dir(directory).unwrap();
        found.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn a_block_comes_back_by_its_version_only() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Arc::new(Cache::new(directory.path().join("deep/down"), 1 << 30));
        let range = CACHED_BYTES + 300_000..CACHED_BYTES + 900_000;
        let own = entry(&cache, "a", range.clone());
        assert_eq!(own.block, CACHED_BYTES..3 * CACHED_BYTES / 2);
        assert!(own.read(&range).is_none());
        let bytes = content(CACHED_BYTES as usize / 2, 1);
        publish(&own, &bytes);
        assert!(own.read(&range).unwrap() == bytes[300_000..900_000]);
        assert!(own.read(&own.block.clone()).unwrap() == bytes);
        assert!(entry(&cache, "b", range.clone()).read(&range).is_none());
        assert!(
            cache.entry("s3://bucket/object", "a", 3 * CACHED_BYTES / 2, &(0..CACHED_BYTES + 1)).is_none()
        );
    }

    #[test]
    fn what_is_damaged_is_not_there() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Arc::new(Cache::new(directory.path().to_owned(), 1 << 30));
        let own = entry(&cache, "a", 0..10);
        let bytes = content(CACHED_BYTES as usize, 1);
        for damage in [3, 40, HEAD_BYTES - 1, HEAD_BYTES + 5, HEAD_BYTES + BLOCK_BYTES + 5] {
            publish(&own, &bytes);
            let file = File::options().write(true).open(cache.path_of(&own.name)).unwrap();
            let old =
                if damage < HEAD_BYTES { own.head_of(&bytes)[damage] } else { bytes[damage - HEAD_BYTES] };
            file.write_all_at(&[old ^ 1], damage as u64).unwrap();
            let is_elsewhere = damage > HEAD_BYTES + BLOCK_BYTES;
            assert_eq!(own.read(&(0..10)).is_some(), is_elsewhere, "{damage}");
            assert!(own.read(&(0..1 << 20)).is_none(), "{damage}");
            assert!(names(directory.path()).is_empty(), "{damage}");
        }
        publish(&own, &bytes);
        File::options().write(true).open(cache.path_of(&own.name)).unwrap().set_len(1 << 20).unwrap();
        assert!(own.read(&(0..2 << 20)).is_none());
    }

    #[test]
    fn one_at_a_time_has_a_block() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Arc::new(Cache::new(directory.path().to_owned(), 1 << 30));
        let own = entry(&cache, "a", 0..10);
        let Claim::Own(claimed) = own.claim() else { panic!("it is free") };
        assert!(matches!(own.claim(), Claim::Another));
        cache.prepare();
        assert_eq!(names(directory.path()).len(), 1, "what is being written stays");
        drop(claimed);
        assert!(names(directory.path()).is_empty());
        std::fs::write(own.part(), b"of a process that was killed").unwrap();
        publish(&own, &content(CACHED_BYTES as usize, 1));
        std::fs::write(own.part(), b"of another one").unwrap();
        Cache::new(directory.path().to_owned(), 1 << 30).prepare();
        assert_eq!(names(directory.path()), [own.name]);
    }

    #[test]
    fn what_was_not_used_for_longest_goes() {
        let directory = tempfile::tempdir().unwrap();
        let block = CACHED_BYTES + HEAD_BYTES as u64;
        let cache = Arc::new(Cache::new(directory.path().to_owned(), 3 * block + (1 << 20)));
        let entries = ["a", "b", "c", "d"].map(|tag| entry(&cache, tag, 0..10));
        let bytes = content(CACHED_BYTES as usize, 1);
        for own in &entries[..3] {
            publish(own, &bytes);
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        assert!(entries[0].read(&(0..10)).is_some());
        publish(&entries[3], &bytes);
        let present = entries.each_ref().map(|own| own.read(&(0..10)).is_some());
        assert!(present[3] && !present[1], "{present:?}");
        assert!(names(directory.path()).len() <= 3);
        let small = Arc::new(Cache::new(directory.path().to_owned(), 1 << 20));
        assert!(small.entry("s3://bucket/object", "a", 1 << 30, &(0..10)).is_none());
    }

    #[test]
    fn what_cannot_be_written_is_told_once() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        std::fs::write(&file, b"").unwrap();
        let cache = Arc::new(Cache::new(file.join("below"), 1 << 30));
        let own = entry(&cache, "a", 0..10);
        assert!(own.read(&(0..10)).is_none());
        let Claim::Impossible(Some(problem)) = own.claim() else { panic!("a file is no directory") };
        assert!(problem.contains("below"), "{problem}");
        assert!(matches!(own.claim(), Claim::Impossible(None)));
    }
}
