//! The first touch of memory from the arena, in pages of the size that costs less right now.
//!
//! A huge page costs one fault where small ones cost 512, and takes a quarter of their time, if the machine has the
//! memory at hand. On a virtual machine that gives free memory back to its host (free page reporting), blocks of
//! just that size are the ones that the host has taken: each costs milliseconds, while small pages come from
//! blocks that are in use already. The same is so where the system has to move pages before it finds a huge one. No
//! setting of the system tells. So whoever is about to fill memory touches it through [`prepare`], which
//! measures what huge pages cost, takes small ones where those are cheaper, and tries huge ones again after some.
//!
//! Invariants: contents do not change; each page of the arena is prepared once; what pages a block gets is told to
//! the system when that changes, and not for each piece, as all threads that touch memory wait meanwhile. What fails
//! here is left to the fault.

use std::cell::Cell;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::aligned::{HUGE_PAGE_BYTES, advise, fault_in};
use crate::arena::Arena;

/// What small pages for as much as a huge one cost, until it is measured.
const USUAL_SMALL_NS: u64 = 1_000_000;
/// Huge pages' worth of small ones until huge ones are tried again: at first, and at most.
const FIRST_RUN: u32 = 8;
const LONGEST_RUN: u32 = 128;

/// What pages cost in this process, and which are to be taken next.
static POLICY: Policy = Policy::new();

#[derive(Debug)]
struct Policy {
    /// The least that small pages have cost of late, for as much as a huge page.
    small_ns: AtomicU64,
    /// How much more is to come in small pages, in huge pages.
    small_left: AtomicU32,
    /// How much of it there was to be when huge ones were too dear for the last time.
    run: AtomicU32,
}

impl Policy {
    const fn new() -> Self {
        Self {
            small_ns: AtomicU64::new(USUAL_SMALL_NS),
            small_left: AtomicU32::new(0),
            run: AtomicU32::new(0),
        }
    }

    /// Of the next `count` huge pages, how many to take as small ones; with 0 a huge one is to be tried. Meanwhile
    /// other threads take small ones, if huge ones were too dear before.
    fn small_of(&self, count: u32) -> u32 {
        let run = self.run.load(Ordering::Relaxed);
        let take = |left: u32| Some(if left == 0 { run } else { left - left.min(count) });
        let before = self.small_left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
        before.map_or(0, |left| left.min(count))
    }

    /// Whether huge pages were too dear when they were taken last.
    fn is_trying(&self) -> bool {
        self.run.load(Ordering::Relaxed) > 0
    }

    fn note_small(&self, count: u32, cost: Duration) {
        let each = cost.as_nanos() as u64 / u64::from(count.max(1));
        // Threads that write at the same time lose a sample.
        let before = self.small_ns.load(Ordering::Relaxed);
        // The least of late: others who want the processor make it look dearer, and never cheaper.
        self.small_ns.store(each.min(before + before / 32), Ordering::Relaxed);
    }

    fn note_huge(&self, cost: Duration) {
        if cost.as_nanos() as u64 <= self.small_ns.load(Ordering::Relaxed) {
            self.run.store(0, Ordering::Relaxed);
            self.small_left.store(0, Ordering::Relaxed);
            return;
        }
        let run = (2 * self.run.load(Ordering::Relaxed)).clamp(FIRST_RUN, LONGEST_RUN);
        self.run.store(run, Ordering::Relaxed);
        self.small_left.store(run, Ordering::Relaxed);
    }
}

thread_local! {
    /// The huge page that this thread prepared last: of small pieces many lie in one.
    static LAST: Cell<usize> = const { Cell::new(usize::MAX) };
    /// What touching has taken of this thread's time since that was asked for last.
    static COST: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// Touches memory that is about to be filled. Only what comes from the arena of this process and was not touched
/// before takes time.
pub fn prepare(address: usize, nbytes: usize) {
    // Of the last byte: a piece that ends where a huge page begins has not prepared that one.
    let (first, last) = (address / HUGE_PAGE_BYTES, (address + nbytes.max(1) - 1) / HUGE_PAGE_BYTES);
    if first == last && LAST.get() == last {
        return;
    }
    LAST.set(last);
    for range in Arena::global().claim_untouched(address..address + nbytes) {
        touch(&POLICY, range);
    }
}

/// What touching has taken of this thread's time since the last call.
pub fn take_cost() -> Duration {
    COST.take()
}

/// How long this thread has waited for a processor so far, while others had them all. A system that does not tell
/// says zero, always.
fn waited_for_processor() -> Duration {
    let told = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
    let nanoseconds = told.as_deref().and_then(|told| told.split_whitespace().nth(1)?.parse().ok());
    Duration::from_nanos(nanoseconds.unwrap_or(0))
}

/// Touches whole huge pages of a mapping of the arena.
fn touch(policy: &Policy, range: Range<usize>) {
    let mut next = range.start;
    while next < range.end {
        let left = (range.end - next).div_ceil(HUGE_PAGE_BYTES) as u32;
        let small = policy.small_of(left);
        let end = range.end.min(next + HUGE_PAGE_BYTES * small.max(1) as usize);
        let start = next as *mut u8;
        if small == 0 && policy.is_trying() {
            // SAFETY: the arena has the range mapped, since somebody is about to fill it.
            unsafe { advise(start, end - next, true) };
        } else {
            Arena::global().advise(next, small == 0);
        }
        let (begun, waited) = (Instant::now(), waited_for_processor());
        // SAFETY: as above.
        unsafe { fault_in(start, end - next) };
        let waited = waited_for_processor().saturating_sub(waited);
        let elapsed = begun.elapsed();
        COST.set(COST.get() + elapsed);
        // Not the time of the processor: a virtual machine takes from that what its host needs to find the memory.
        let cost = elapsed.saturating_sub(waited);
        if small == 0 {
            policy.note_huge(cost)
        } else {
            policy.note_small(small, cost)
        }
        next = end;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const CHEAP: Duration = Duration::from_micros(300);
    const DEAR: Duration = Duration::from_millis(4);

    #[test]
    fn huge_pages_are_taken_while_they_are_cheap() {
        let policy = Policy::new();
        for _ in 0..100 {
            assert_eq!(policy.small_of(5), 0);
            policy.note_huge(CHEAP);
        }
    }

    #[test]
    fn dear_huge_pages_are_tried_ever_less_often() {
        let policy = Policy::new();
        let mut tried = 0;
        for _ in 0..1000 {
            if policy.small_of(1) == 0 {
                tried += 1;
                policy.note_huge(DEAR);
            } else {
                policy.note_small(1, Duration::from_millis(1));
            }
        }
        assert!((5..=16).contains(&tried), "{tried}");
        // Once they are cheap again, the next that is tried says so.
        let left = policy.small_of(u32::MAX);
        assert!(left <= LONGEST_RUN);
        policy.note_huge(CHEAP);
        assert_eq!(policy.small_of(7), 0);
    }

    #[test]
    fn where_all_is_dear_huge_pages_are_taken() {
        let policy = Policy::new();
        policy.note_huge(DEAR);
        for _ in 0..100 {
            policy.note_small(1, 2 * DEAR);
        }
        policy.small_of(u32::MAX);
        policy.note_huge(DEAR);
        assert_eq!(policy.small_of(1), 0);
    }

    #[test]
    fn pieces_that_end_with_a_huge_page_leave_none_out() {
        let arena = Arena::global();
        let slab = arena.allocate(8 * HUGE_PAGE_BYTES).unwrap();
        let begin = slab.address().as_ptr() as usize;
        let piece = HUGE_PAGE_BYTES / 8;
        for address in (begin..begin + slab.nbytes()).step_by(piece) {
            prepare(address, piece);
            assert_eq!(arena.claim_untouched(address..address + piece), []);
        }
    }

    /// The flags of the mapping that an address is in.
    fn flags(address: usize) -> String {
        let mappings = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut is_in = false;
        for line in mappings.lines() {
            let first = line.split_whitespace().next().unwrap_or("");
            if let Some((start, end)) = first.split_once('-')
                && let (Ok(start), Ok(end)) =
                    (usize::from_str_radix(start, 16), usize::from_str_radix(end, 16))
            {
                is_in = (start..end).contains(&address);
            } else if is_in && let Some(flags) = line.strip_prefix("VmFlags:") {
                return format!("{flags} ");
            }
        }
        String::new()
    }

    #[test]
    fn a_block_is_told_once_which_pages_it_gets() {
        if !std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists() {
            return; // a kernel without huge pages
        }
        let slab = Arena::global().allocate(8 * HUGE_PAGE_BYTES).unwrap();
        let begin = slab.address().as_ptr() as usize;
        assert!(flags(begin).contains(" hg "));
        let policy = Policy::new();
        policy.note_huge(DEAR);
        let mut pieces = Arena::global().claim_untouched(begin..begin + slab.nbytes()).into_iter();
        let range = pieces.next().unwrap();
        touch(&policy, range.start..range.start + HUGE_PAGE_BYTES);
        assert!(flags(begin).contains(" nh ") && flags(range.end - 1).contains(" nh "));
        // A huge page that is tried leaves the others alone.
        policy.small_left.store(0, Ordering::Relaxed);
        let tried = range.start + HUGE_PAGE_BYTES;
        touch(&policy, tried..tried + HUGE_PAGE_BYTES);
        assert!(flags(tried).contains(" hg ") && flags(range.end - 1).contains(" nh "));
        policy.run.store(0, Ordering::Relaxed);
        policy.small_left.store(0, Ordering::Relaxed);
        touch(&policy, tried + HUGE_PAGE_BYTES..tried + 2 * HUGE_PAGE_BYTES);
        assert!(flags(range.end - 1).contains(" hg "));
    }

    #[test]
    fn what_was_touched_keeps_its_contents() {
        let slab = Arena::global().allocate(5 * HUGE_PAGE_BYTES + 12_345).unwrap();
        let address = slab.address().as_ptr();
        // SAFETY: the slab is this test's.
        unsafe { address.add(HUGE_PAGE_BYTES).write(7) };
        let policy = Policy::new();
        policy.small_left.store(2, Ordering::Relaxed);
        let ranges = Arena::global().claim_untouched(address as usize..address as usize + slab.nbytes());
        assert_eq!(ranges.len(), 1);
        ranges.into_iter().for_each(|range| touch(&policy, range));
        // SAFETY: as above.
        assert_eq!(unsafe { address.add(HUGE_PAGE_BYTES).read() }, 7);
        assert!(
            Arena::global().claim_untouched(address as usize..address as usize + slab.nbytes()).is_empty()
        );
    }
}
