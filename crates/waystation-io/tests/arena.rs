//! The arena: reuse, limits, refusals and forks.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use proptest::prelude::*;
use waystation_io::Kind;
use waystation_io::aligned::{AlignedBlock, HUGE_PAGE_BYTES, PAGE_BYTES};
use waystation_io::arena::{Arena, Slab, memory_bytes};

const MIB: usize = 1 << 20;

fn fill(slab: &Slab, value: u8) {
    // SAFETY: the slab is writable for its length and used by this test alone.
    unsafe { slab.address().as_ptr().write_bytes(value, slab.nbytes()) };
}

fn is_filled(slab: &Slab, value: u8) -> bool {
    // SAFETY: the slab was filled by `fill`, and nobody writes it meanwhile.
    let bytes = unsafe { std::slice::from_raw_parts(slab.address().as_ptr(), slab.nbytes()) };
    bytes.iter().all(|&byte| byte == value)
}

#[test]
fn the_same_size_is_reused() {
    let arena = Arena::new(64 * MIB as u64);
    let first = arena.allocate(5 * MIB + 3).unwrap();
    let address = first.address();
    drop(first);
    let second = arena.allocate(5 * MIB - 100_000).unwrap();
    assert_eq!(second.address(), address);
    let statistics = arena.statistics();
    assert_eq!(statistics.reused_bytes, statistics.mapped_bytes);
    assert_eq!(statistics.live_bytes, statistics.mapped_bytes);
    assert_eq!(statistics.idle_bytes, 0);
}

#[test]
fn a_much_larger_block_is_not_wasted() {
    let arena = Arena::new(64 * MIB as u64);
    drop(arena.allocate(8 * MIB).unwrap());
    let small = arena.allocate(MIB).unwrap();
    assert_eq!(arena.statistics().idle_bytes, 8 * MIB as u64);
    drop(small);
    assert_eq!(arena.trim(), 9 * MIB as u64);
    assert_eq!(arena.statistics().idle_bytes, 0);
}

#[test]
fn the_longest_idle_goes_first() {
    let arena = Arena::new(3 * MIB as u64);
    let slabs: Vec<Slab> = (0..4).map(|_| arena.allocate(MIB).unwrap()).collect();
    let addresses: Vec<_> = slabs.iter().map(Slab::address).collect();
    for slab in slabs {
        drop(slab);
    }
    assert_eq!(arena.statistics().idle_bytes, 3 * MIB as u64);
    let again: Vec<Slab> = (0..3).map(|_| arena.allocate(MIB).unwrap()).collect();
    let reused: Vec<_> = again.iter().map(Slab::address).collect();
    assert_eq!(reused, [addresses[3], addresses[2], addresses[1]]);
    let huge = arena.allocate(4 * MIB).unwrap();
    drop(huge);
    assert_eq!(arena.statistics().idle_bytes, 0);
}

#[test]
fn a_refusal_is_an_error() {
    let arena = Arena::new(0);
    for nbytes in [usize::MAX, isize::MAX as usize, 1 << 46] {
        assert_eq!(arena.allocate(nbytes).map(|_| ()).unwrap_err().kind(), Kind::Unavailable);
    }
    assert_eq!(arena.statistics().live_bytes, 0);
}

#[test]
fn blocks_are_aligned_zero_and_populated() {
    for nbytes in [0, 1, PAGE_BYTES + 1, HUGE_PAGE_BYTES, 70 * MIB + 5] {
        let block = AlignedBlock::map(nbytes).unwrap();
        let alignment = if nbytes < HUGE_PAGE_BYTES { PAGE_BYTES } else { HUGE_PAGE_BYTES };
        assert_eq!(block.address().as_ptr() as usize % alignment, 0);
        assert!(block.nbytes() >= nbytes.max(1) && block.nbytes() < nbytes + 2 * PAGE_BYTES);
        block.populate(nbytes, 4);
        // SAFETY: the mapping is readable and this test's alone.
        let bytes = unsafe { std::slice::from_raw_parts(block.address().as_ptr(), block.nbytes()) };
        assert!(bytes.iter().all(|&byte| byte == 0));
    }
}

#[test]
fn memory_is_a_plausible_number() {
    assert!((64 << 20..1 << 50).contains(&memory_bytes()));
}

#[test]
fn threads_share_the_pool() {
    let arena = Arena::new(8 * MIB as u64);
    std::thread::scope(|scope| {
        for value in 1..5u8 {
            let arena = &arena;
            scope.spawn(move || {
                for round in 0..200usize {
                    let slab = arena.allocate(1 + round * 997).unwrap();
                    fill(&slab, value);
                    std::thread::yield_now();
                    assert!(is_filled(&slab, value), "a block was handed out twice");
                }
            });
        }
    });
    let statistics = arena.statistics();
    assert_eq!(statistics.live_bytes, 0);
    assert!(statistics.idle_bytes <= statistics.limit_bytes);
}

#[test]
fn a_forked_child_starts_with_its_own_pool() {
    let parent = Arena::global();
    let slab = parent.allocate(MIB).unwrap();
    fill(&slab, 7);
    drop(parent.allocate(4 * MIB).unwrap());
    let busy = Arc::clone(&parent);
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        // A thread that holds the pool's lock much of the time, so that a child may inherit it locked.
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                busy.statistics();
            }
        });
        for _ in 0..50 {
            // SAFETY: the child only uses the arena, allocates little, and leaves by `_exit`.
            match unsafe { libc::fork() } {
                0 => {
                    let own = Arena::global();
                    let mut good = !Arc::ptr_eq(&own, &parent) && own.statistics().idle_bytes == 0;
                    let mine = own.allocate(MIB);
                    good &= mine.is_ok_and(|mine| mine.address() != slab.address()) && is_filled(&slab, 7);
                    // SAFETY: takes the slab over to drop it as an inherited Python object would be.
                    drop(unsafe { std::ptr::read(&raw const slab) });
                    // SAFETY: ends the child without running the parent's handlers.
                    unsafe { libc::_exit(i32::from(!good)) };
                }
                child => {
                    let mut status = 0;
                    // SAFETY: waits for the child made above.
                    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
                    assert_eq!(status, 0, "the child failed");
                }
            }
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    assert!(is_filled(&slab, 7));
}

proptest! {
    #[test]
    fn accounts_balance(steps in prop::collection::vec((0usize..3 * MIB, any::<bool>(), any::<u8>()), 1..60)) {
        let arena = Arena::new(4 * MIB as u64);
        let mut slabs: Vec<Slab> = Vec::new();
        for (nbytes, release, pick) in steps {
            if release && !slabs.is_empty() {
                let index = pick as usize % slabs.len();
                slabs.swap_remove(index);
            } else {
                slabs.push(arena.allocate(nbytes).unwrap());
            }
            let statistics = arena.statistics();
            let asked: usize = slabs.iter().map(Slab::nbytes).sum();
            prop_assert!(statistics.live_bytes >= asked as u64);
            // An eighth for the class, an eighth for the fit, two pages where both are small.
            let bound = asked + asked / 3 + slabs.len() * 2 * PAGE_BYTES;
            prop_assert!(statistics.live_bytes <= bound as u64);
            prop_assert!(statistics.idle_bytes <= statistics.limit_bytes);
        }
        slabs.clear();
        prop_assert_eq!(arena.statistics().live_bytes, 0);
    }
}
