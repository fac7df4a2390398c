//! A pool of page-aligned memory, so that a save or load reuses what the one before has faulted in.
//!
//! Invariants: a block is either handed out once or idle; idle bytes never exceed the limit (the block
//! idle longest goes first); a block serves a request only if little of it is wasted. Memory returns to
//! the pool when its [`Slab`] is dropped. No system call that may take long runs under the lock.
//!
//! Forks: the pool belongs to one process. A child starts with an empty one and unmaps slabs that it
//! inherited, so it neither waits for a lock that a thread of its parent held nor trusts a list that
//! such a thread was changing.

use std::collections::BTreeMap;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use waystation_format::{Error, Kind, Result};

use crate::aligned::{AlignedBlock, HUGE_PAGE_BYTES, PAGE_BYTES, advise};

/// What an arena holds and has done, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Handed out now.
    pub live_bytes: u64,
    /// Kept for reuse now.
    pub idle_bytes: u64,
    /// Served from idle blocks so far.
    pub reused_bytes: u64,
    /// Taken from the system so far.
    pub mapped_bytes: u64,
    /// How much may be idle.
    pub limit_bytes: u64,
}

#[derive(Default)]
struct Pool {
    /// By size, then by how long they have been idle.
    idle: BTreeMap<(usize, u64), AlignedBlock>,
    next_age: u64,
    statistics: Statistics,
    /// The parts of blocks that nobody has prepared yet, each by its first address: whole huge pages, but for the
    /// end of a block.
    untouched: BTreeMap<usize, usize>,
    /// The ends of blocks that have huge pages, by their first addresses, and whether the system was told last to
    /// take those, or small ones.
    advised: BTreeMap<usize, (usize, bool)>,
}

/// A pool of blocks of one process.
pub struct Arena {
    process: u32,
    pool: Mutex<Pool>,
}

/// Memory from an arena. Its bytes are unspecified at first.
pub struct Slab {
    block: Option<AlignedBlock>,
    address: NonNull<u8>,
    nbytes: usize,
    arena: Arc<Arena>,
}

// SAFETY: the address is that of the block, which may move between threads.
unsafe impl Send for Slab {}
// SAFETY: a shared reference gives no access to the bytes without `unsafe`.
unsafe impl Sync for Slab {}

impl Arena {
    /// An arena that keeps up to `limit_bytes` idle.
    pub fn new(limit_bytes: u64) -> Arc<Self> {
        let statistics = Statistics { limit_bytes, ..Statistics::default() };
        let pool = Mutex::new(Pool { statistics, ..Pool::default() });
        Arc::new(Self { process: std::process::id(), pool })
    }

    /// The arena of this process. Keeps up to a quarter of the memory that the process may use.
    pub fn global() -> Arc<Self> {
        // Arenas of the process and of its forebears: never freed, so a reference is always good.
        static GLOBAL: AtomicPtr<Arc<Arena>> = AtomicPtr::new(std::ptr::null_mut());
        let mut current = GLOBAL.load(Ordering::Acquire);
        loop {
            // SAFETY: null, or leaked below.
            if let Some(arena) = unsafe { current.as_ref() }
                && arena.process == std::process::id()
            {
                return Arc::clone(arena);
            }
            let fresh = Box::into_raw(Box::new(Arena::new(memory_bytes() / 4)));
            match GLOBAL.compare_exchange(current, fresh, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => current = fresh,
                Err(other) => {
                    current = other;
                    // SAFETY: made above and not published.
                    drop(unsafe { Box::from_raw(fresh) });
                }
            }
        }
    }

    /// Memory of `nbytes` bytes: an idle block that fits well, else a new one. Unavailable when the
    /// system has none, also after every idle block was given back.
    pub fn allocate(self: &Arc<Self>, nbytes: usize) -> Result<Slab> {
        let wanted = size_class(nbytes).ok_or_else(|| {
            Error::new(Kind::Unavailable, format!("could not allocate {nbytes} bytes of memory"))
        })?;
        let idle = self.lock().take(wanted);
        let block = match idle {
            Some(block) => block,
            None => self.map(wanted)?,
        };
        Ok(Slab { address: block.address(), nbytes, block: Some(block), arena: Arc::clone(self) })
    }

    fn map(&self, wanted: usize) -> Result<AlignedBlock> {
        let block = match AlignedBlock::map(wanted) {
            Err(error) if self.trim() == 0 => return Err(error),
            Err(_) => AlignedBlock::map(wanted)?,
            Ok(block) => block,
        };
        let mut pool = self.lock();
        pool.statistics.live_bytes += block.nbytes() as u64;
        pool.statistics.mapped_bytes += block.nbytes() as u64;
        if block.nbytes() >= HUGE_PAGE_BYTES {
            let start = block.address().as_ptr() as usize;
            pool.untouched.insert(start, start + block.nbytes());
            pool.advised.insert(start, (start + block.nbytes(), true));
        }
        Ok(block)
    }

    /// Gives all idle memory back to the system; returns the bytes freed.
    pub fn trim(&self) -> u64 {
        let idle = {
            let mut pool = self.lock();
            pool.statistics.idle_bytes = 0;
            let idle = std::mem::take(&mut pool.idle);
            idle.values().for_each(|block| pool.forget(block));
            idle
        };
        idle.values().map(|block| block.nbytes() as u64).sum()
    }

    /// What of some addresses nobody has touched yet, as whole huge pages: whoever asks is about to.
    pub fn claim_untouched(&self, range: Range<usize>) -> Vec<Range<usize>> {
        self.lock().claim_untouched(range)
    }

    /// Has the system take huge pages, or small ones, for what is still untouched of the block at an address.
    pub(crate) fn advise(&self, address: usize, is_huge: bool) {
        let mut pool = self.lock();
        if let Some((&start, (end, before))) = pool.advised.range_mut(..=address).next_back()
            && address < *end
            && *before != is_huge
        {
            *before = is_huge;
            // Within the lock, so that nobody relies on it earlier.
            // SAFETY: a block of the arena, which is forgotten before it is unmapped.
            unsafe { advise(start as *mut u8, *end - start, is_huge) };
        }
    }

    /// What the arena holds and has done.
    pub fn statistics(&self) -> Statistics {
        self.lock().statistics
    }

    fn lock(&self) -> MutexGuard<'_, Pool> {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pool {
    /// The smallest idle block of at least `wanted` bytes that wastes at most an eighth.
    fn take(&mut self, wanted: usize) -> Option<AlignedBlock> {
        let largest = wanted.saturating_add(wanted / 8);
        let (fitting, _) = *self.idle.range((wanted, 0)..=(largest, u64::MAX)).next()?.0;
        // Among equals the one used last: its pages are the most likely to be in caches.
        let newest = *self.idle.range((fitting, 0)..=(fitting, u64::MAX)).next_back()?.0;
        let block = self.idle.remove(&newest)?;
        let bytes = block.nbytes() as u64;
        self.statistics.idle_bytes -= bytes;
        self.statistics.live_bytes += bytes;
        self.statistics.reused_bytes += bytes;
        Some(block)
    }

    /// Keeps a block for reuse; returns those that must go for it.
    fn put(&mut self, block: AlignedBlock) -> Vec<AlignedBlock> {
        let bytes = block.nbytes() as u64;
        self.statistics.live_bytes -= bytes;
        if bytes > self.statistics.limit_bytes {
            self.forget(&block);
            return vec![block];
        }
        self.idle.insert((block.nbytes(), self.next_age), block);
        self.next_age += 1;
        self.statistics.idle_bytes += bytes;
        let mut evicted = Vec::new();
        while self.statistics.idle_bytes > self.statistics.limit_bytes {
            let oldest = self.idle.keys().min_by_key(|(_, age)| *age).copied();
            let Some(block) = oldest.and_then(|key| self.idle.remove(&key)) else { break };
            self.statistics.idle_bytes -= block.nbytes() as u64;
            self.forget(&block);
            evicted.push(block);
        }
        evicted
    }

    /// Knows nothing of a block any more that is about to be unmapped.
    fn forget(&mut self, block: &AlignedBlock) {
        let start = block.address().as_ptr() as usize;
        drop(self.claim_untouched(start..start + block.nbytes()));
        self.advised.remove(&start);
    }

    fn claim_untouched(&mut self, range: Range<usize>) -> Vec<Range<usize>> {
        let mut claimed = Vec::new();
        while let Some((&start, &end)) = self.untouched.range(..range.end).next_back()
            && range.start < end
        {
            let own = range.start.max(start) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
                ..range.end.next_multiple_of(HUGE_PAGE_BYTES).min(end);
            self.untouched.remove(&start);
            if start < own.start {
                self.untouched.insert(start, own.start);
            }
            if own.end < end {
                self.untouched.insert(own.end, end);
            }
            claimed.push(own);
        }
        claimed
    }
}

impl Slab {
    /// The first byte, page-aligned.
    pub fn address(&self) -> NonNull<u8> {
        self.address
    }

    /// Bytes asked for.
    pub fn nbytes(&self) -> usize {
        self.nbytes
    }

    /// Faults the memory in on up to `threads` threads; quick where that was done before.
    pub fn populate(&self, threads: usize) {
        if let Some(block) = &self.block {
            block.populate(self.nbytes, threads);
        }
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        let Some(block) = self.block.take() else { return };
        if self.arena.process == std::process::id() {
            let evicted = self.arena.lock().put(block);
            drop(evicted); // without the lock
        }
    }
}

/// The size of the blocks that serve requests of `nbytes`: an eighth of a power of two apart, so that
/// similar requests meet, in whole pages.
fn size_class(nbytes: usize) -> Option<usize> {
    let nbytes = nbytes.max(1);
    let step = (1usize << nbytes.ilog2() >> 3).max(PAGE_BYTES);
    nbytes.checked_next_multiple_of(step).filter(|&bytes| bytes <= isize::MAX as usize)
}

/// Memory that this process may use: the machine's, or less where a control group says so.
pub fn memory_bytes() -> u64 {
    let machine = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
        line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib * 1024)
    });
    machine.into_iter().chain(control_group_bytes()).min().unwrap_or(4 << 30)
}

/// The lowest memory limit of the process's control groups, of either version.
fn control_group_bytes() -> Option<u64> {
    let membership = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let limits = membership.lines().flat_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, group) = (fields.next().unwrap_or(""), fields.next().unwrap_or("/"));
        let (root, file) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max"),
            "memory" => ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
            _ => return Vec::new(),
        };
        // A container may see its own group as the root, whatever its path is called outside.
        let ancestors = std::path::Path::new(group).ancestors();
        ancestors
            .filter_map(|group| {
                let inner = group.strip_prefix("/").unwrap_or(group);
                std::fs::read_to_string(std::path::Path::new(root).join(inner).join(file)).ok()
            })
            .collect::<Vec<_>>()
    });
    limits.filter_map(|text| text.trim().parse().ok()).min()
}
