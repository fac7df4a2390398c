//! Who uses the bytes of a slot in this process: a count of readers, and a lid.
//!
//! Invariants: while the lid is on, nobody comes to read; it goes on only when nobody reads. So whoever has
//! put it on may let the bytes be overwritten, and whoever reads sees bytes that nobody overwrites. Neither
//! waits for the other.

use std::sync::atomic::{AtomicU64, Ordering};

const CLOSED: u64 = 1 << 63;

/// What a [`Hold`] needs of an atomic word: so much that a model of one can stand in for it.
pub trait Word {
    /// A word of that value.
    fn new(value: u64) -> Self;
    /// Its value.
    fn load(&self) -> u64;
    /// Replaces `current` by `new`, with the effects of acquiring; the value that was found otherwise.
    fn replace(&self, current: u64, new: u64) -> Result<(), u64>;
    /// Takes `amount` off, with the effects of releasing.
    fn take(&self, amount: u64);
}

impl Word for AtomicU64 {
    fn new(value: u64) -> Self {
        AtomicU64::new(value)
    }

    fn load(&self) -> u64 {
        self.load(Ordering::Relaxed)
    }

    fn replace(&self, current: u64, new: u64) -> Result<(), u64> {
        self.compare_exchange(current, new, Ordering::Acquire, Ordering::Relaxed).map(drop)
    }

    fn take(&self, amount: u64) {
        self.fetch_sub(amount, Ordering::Release);
    }
}

/// Readers and lid of one slot.
#[derive(Debug)]
pub struct Hold<W = AtomicU64>(W);

impl<W: Word> Hold<W> {
    /// Without readers, the lid on.
    pub fn closed() -> Self {
        Self(W::new(CLOSED))
    }

    /// Begins to read, unless the lid is on.
    pub fn acquire(&self) -> bool {
        let mut found = self.0.load();
        while found & CLOSED == 0 {
            match self.0.replace(found, found + 1) {
                Ok(()) => return true,
                Err(other) => found = other,
            }
        }
        false
    }

    /// Ends what a successful [`Hold::acquire`] has begun.
    pub fn release(&self) {
        self.0.take(1);
    }

    /// Puts the lid on, unless somebody reads or it is on.
    pub fn close(&self) -> bool {
        self.0.replace(0, CLOSED).is_ok()
    }

    /// Takes the lid off, which the caller has put on or found on.
    pub fn open(&self) {
        self.0.take(CLOSED);
    }

    /// How many read.
    pub fn readers(&self) -> u64 {
        self.0.load() & !CLOSED
    }
}

/// Every order of what threads do, and of what they see of each other; of `make test-long`.
#[cfg(all(test, feature = "loom"))]
mod models {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicU64 as ModelledWord;
    use loom::thread;

    use super::*;

    impl Word for ModelledWord {
        fn new(value: u64) -> Self {
            ModelledWord::new(value)
        }

        fn load(&self) -> u64 {
            self.load(Ordering::Relaxed)
        }

        fn replace(&self, current: u64, new: u64) -> Result<(), u64> {
            self.compare_exchange(current, new, Ordering::Acquire, Ordering::Relaxed).map(drop)
        }

        fn take(&self, amount: u64) {
            self.fetch_sub(amount, Ordering::Release);
        }
    }

    /// A slot of one byte. The model fails if it is written while it is read, or read before a write that
    /// was finished can be seen.
    struct Slot {
        hold: Hold<ModelledWord>,
        byte: UnsafeCell<u8>,
    }

    impl Slot {
        fn read(&self) -> Option<u8> {
            self.hold.acquire().then(|| {
                // SAFETY: held, so nobody writes; the model checks it.
                let byte = self.byte.with(|byte| unsafe { *byte });
                self.hold.release();
                byte
            })
        }

        fn overwrite(&self, value: u8) -> bool {
            let is_ours = self.hold.close();
            if is_ours {
                // SAFETY: closed, so nobody reads or writes; the model checks it.
                self.byte.with_mut(|byte| unsafe { *byte = value });
                self.hold.open();
            }
            is_ours
        }
    }

    fn open_slot() -> Arc<Slot> {
        let slot = Slot { hold: Hold::closed(), byte: UnsafeCell::new(1) };
        slot.hold.open();
        Arc::new(slot)
    }

    #[test]
    fn nobody_reads_what_is_overwritten() {
        loom::model(|| {
            let slot = open_slot();
            let readers: Vec<_> = (0..2)
                .map(|_| {
                    let slot = Arc::clone(&slot);
                    thread::spawn(move || slot.read())
                })
                .collect();
            let is_written = slot.overwrite(2);
            for reader in readers {
                let seen = reader.join().unwrap();
                assert!(matches!(seen, None | Some(1 | 2)));
                assert!(is_written || seen == Some(1));
            }
            assert_eq!(slot.hold.readers(), 0);
            assert_eq!(slot.read(), Some(if is_written { 2 } else { 1 }));
        });
    }

    #[test]
    fn of_two_who_overwrite_each_has_it_alone() {
        loom::model(|| {
            let slot = open_slot();
            let other = Arc::clone(&slot);
            let second = thread::spawn(move || other.overwrite(3));
            let first = slot.overwrite(2);
            assert!(second.join().unwrap() || first);
            assert!(matches!(slot.read(), Some(2 | 3)));
        });
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn a_lid_keeps_readers_out_and_a_reader_keeps_the_lid_off() {
        let hold: Hold = Hold::closed();
        assert!(!hold.acquire() && !hold.close());
        hold.open();
        assert!(hold.acquire() && hold.acquire() && !hold.close());
        assert_eq!(hold.readers(), 2);
        hold.release();
        hold.release();
        assert!(hold.close() && !hold.acquire());
    }

    /// Both halves are written while nobody reads, so whoever reads finds them equal.
    #[test]
    fn threads_read_no_halves_of_two_writes() {
        const WRITES: u64 = 1000;
        let hold: Hold = Hold::closed();
        let halves = [AtomicU64::new(0), AtomicU64::new(0)];
        let read = || {
            let mut seen = 0;
            while seen < WRITES {
                if hold.acquire() {
                    let [first, second] = halves.each_ref().map(|half| half.load(Ordering::Relaxed));
                    hold.release();
                    assert!(first == second && first >= seen);
                    seen = first;
                }
                thread::yield_now();
            }
        };
        hold.open();
        thread::scope(|scope| {
            scope.spawn(read);
            scope.spawn(read);
            let mut written = 0;
            while written < WRITES {
                if hold.close() {
                    written += 1;
                    halves.iter().for_each(|half| half.store(written, Ordering::Relaxed));
                    hold.open();
                }
                thread::yield_now();
            }
        });
        assert_eq!(hold.readers(), 0);
    }
}
