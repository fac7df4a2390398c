//! Memory of others that this side reads or writes: what is held, and since when it is not any more.
//!
//! Invariants: the number of a [`Held`] or a [`Lease`] is told to be released once, when nothing here can
//! touch its memory any more; the mark of a block changes before that, so that another process that has read
//! the memory can tell whether it was still that of the block.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use waystation_format::{Error, Kind, Result};

/// What marks begin at: nobody's memory is likely to have such words by chance.
const FIRST_MARK: u64 = 0x5761_7973_0000_0001;
const MARKS_AT_ONCE: usize = 512;
/// How long releases are gathered before they are told, so that whoever is told is not woken for each.
const GATHERING: Duration = Duration::from_millis(5);

/// Marks that no block has. They are never given back to the system, for others read them at any time.
static FREE_MARKS: Mutex<Vec<&'static AtomicU64>> = Mutex::new(Vec::new());

/// A word that changes when a block is let go.
#[derive(Debug)]
pub struct Mark(&'static AtomicU64);

impl Mark {
    /// A mark that nobody else has.
    pub fn take() -> Self {
        let mut free = FREE_MARKS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(mark) = free.pop() {
            return Self(mark);
        }
        let made: Vec<AtomicU64> = (0..MARKS_AT_ONCE).map(|_| AtomicU64::new(FIRST_MARK)).collect();
        let made: &'static [AtomicU64] = made.leak();
        free.extend(&made[1..]);
        Self(&made[0])
    }

    /// Where it is, and what it is now.
    pub fn words(&self) -> [u64; 2] {
        [std::ptr::from_ref(self.0).addr() as u64, self.0.load(Ordering::Relaxed)]
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Release);
        // What is done to the memory of the block from now on comes after the change.
        fence(Ordering::SeqCst);
        FREE_MARKS.lock().unwrap_or_else(PoisonError::into_inner).push(self.0);
    }
}

/// Memory that somebody else keeps until he is told that its number is released.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    /// The address of its first byte.
    pub address: usize,
    /// How long it is.
    pub nbytes: usize,
    /// What is told once it is not needed any more.
    pub number: u64,
}

/// What is held, and what was released.
#[derive(Debug, Default)]
pub struct Ledger {
    counts: Mutex<Counts>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Counts {
    bytes: u64,
    blocks: u64,
    /// Numbers that were given and are not released.
    outstanding: u64,
    released: VecDeque<u64>,
    is_closed: bool,
}

impl Ledger {
    /// How many bytes and blocks are held.
    pub fn held(&self) -> (u64, u64) {
        let counts = self.lock();
        (counts.bytes, counts.blocks)
    }

    /// Waits for numbers that are released; nothing once it is closed and all have been told.
    pub fn released(&self) -> Option<Vec<u64>> {
        let is_ended = |counts: &Counts| counts.is_closed && counts.outstanding == 0;
        let waits = |counts: &mut Counts| counts.released.is_empty() && !is_ended(counts);
        let counts = self.changed.wait_while(self.lock(), waits).unwrap_or_else(PoisonError::into_inner);
        let is_closed = counts.is_closed;
        drop(counts);
        if !is_closed {
            thread::sleep(GATHERING);
        }
        let mut counts = self.lock();
        if counts.released.is_empty() { None } else { Some(counts.released.drain(..).collect()) }
    }

    /// Waits until less is held than a limit. Unavailable if that takes too long.
    pub fn wait_below(&self, limit_bytes: u64, within: Duration) -> Result<()> {
        let end = Instant::now() + within;
        let mut counts = self.lock();
        while counts.bytes >= limit_bytes && !counts.is_closed {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let (blocks, bytes) = (counts.blocks, counts.bytes);
                let message = format!(
                    "{blocks} blocks of {bytes} bytes are offered and have not been fetched within {} s; whoever \
                     should fetch them is slow, or gone",
                    within.as_secs_f64()
                );
                return Err(
                    Error::new(Kind::Unavailable, message).with("limit_bytes", limit_bytes.to_string())
                );
            }
            counts = self.changed.wait_timeout(counts, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    /// Nobody is to wait any more.
    pub fn close(&self) {
        self.lock().is_closed = true;
        self.changed.notify_all();
    }

    fn release(&self, number: u64, held_bytes: Option<usize>) {
        let mut counts = self.lock();
        counts.outstanding -= 1;
        if let Some(nbytes) = held_bytes {
            counts.bytes -= nbytes as u64;
            counts.blocks -= 1;
        }
        counts.released.push_back(number);
        drop(counts);
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Counts> {
        // Each change is whole, so the counts of a poisoned lock are right.
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A block that is offered.
#[derive(Debug)]
pub struct Held {
    block: Block,
    mark: Option<Mark>,
    ledger: Arc<Ledger>,
}

impl Held {
    /// Takes a block.
    ///
    /// # Safety
    ///
    /// The memory is readable, and does not change, until its number is released.
    pub unsafe fn new(block: Block, ledger: &Arc<Ledger>) -> Self {
        let mut counts = ledger.lock();
        counts.bytes += block.nbytes as u64;
        counts.blocks += 1;
        counts.outstanding += 1;
        drop(counts);
        Self { block, mark: Some(Mark::take()), ledger: Arc::clone(ledger) }
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        if self.block.nbytes == 0 {
            return &[];
        }
        // SAFETY: whoever made this has promised that the memory is readable as long as it lives.
        unsafe { std::slice::from_raw_parts(self.block.address as *const u8, self.block.nbytes) }
    }

    /// The words of its mark.
    pub fn mark(&self) -> [u64; 2] {
        self.mark.as_ref().map_or([0; 2], Mark::words)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        drop(self.mark.take());
        self.ledger.release(self.block.number, Some(self.block.nbytes));
    }
}

/// Memory that is written to until this is dropped.
#[derive(Debug)]
pub struct Lease {
    number: u64,
    ledger: Arc<Ledger>,
}

impl Lease {
    /// Takes the memory of that number.
    pub fn new(number: u64, ledger: &Arc<Ledger>) -> Self {
        ledger.lock().outstanding += 1;
        Self { number, ledger: Arc::clone(ledger) }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.ledger.release(self.number, None);
    }
}
