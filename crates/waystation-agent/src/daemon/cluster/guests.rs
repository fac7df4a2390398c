//! Versions that trainers of this host read, though it is not for this host to keep them: brought from others when they are
//! asked for.
//!
//! A *guest* lies in a slot as a copy does, but the agents do not count it among the copies. It goes when its room is
//! needed, or when a newer version is committed; who reads it then keeps its bytes until they are done. Invariant: of one
//! version there is one fetch at a time, whoever asks for it.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use waystation_format::Result;
use waystation_format::slot::{Key, Version};

/// So many outcomes are kept for who has asked.
const MOST_OUTCOMES: usize = 64;

/// The versions that are here, and those that are on their way.
#[derive(Debug, Default)]
pub struct Guests {
    known: Mutex<Known>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Known {
    here: BTreeSet<(Version, String)>,
    /// None as long as it is on its way.
    coming: HashMap<Key, Option<Result<()>>>,
}

impl Guests {
    /// Counts a version among the guests.
    pub fn add(&self, key: &Key) {
        self.lock().here.insert((key.version, key.shard.clone()));
    }

    /// It is a copy now, or gone.
    pub fn remove(&self, key: &Key) {
        self.lock().here.remove(&(key.version, key.shard.clone()));
    }

    /// All, the oldest first.
    pub fn all(&self) -> Vec<(Version, String)> {
        self.lock().here.iter().cloned().collect()
    }

    /// Whether a version is one.
    pub fn contains(&self, key: &Key) -> bool {
        self.lock().here.contains(&(key.version, key.shard.clone()))
    }

    /// Those before a version.
    pub fn before(&self, version: Version) -> Vec<(Version, String)> {
        self.lock().here.iter().take_while(|(older, _)| *older < version).cloned().collect()
    }

    /// Says that a version will be fetched; false if it is on its way.
    pub fn begin(&self, key: &Key) -> bool {
        let mut known = self.lock();
        let is_new = !known.coming.contains_key(key);
        if is_new {
            if known.coming.len() >= MOST_OUTCOMES {
                known.coming.retain(|_, outcome| outcome.is_none());
            }
            known.coming.insert(key.clone(), None);
        }
        is_new
    }

    /// Whether a version is on its way.
    pub fn is_coming(&self, key: &Key) -> bool {
        self.lock().coming.get(key).is_some_and(Option::is_none)
    }

    /// How that went.
    pub fn end(&self, key: &Key, outcome: Result<()>) {
        let mut known = self.lock();
        if outcome.is_ok() {
            known.here.insert((key.version, key.shard.clone()));
        }
        known.coming.insert(key.clone(), Some(outcome));
        drop(known);
        self.changed.notify_all();
    }

    /// How the fetch of a version went; None if it goes on after so long. Who comes too late to hear it asks anew.
    pub fn wait(&self, key: &Key, time: Duration) -> Option<Result<()>> {
        let until = Instant::now() + time;
        let mut known = self.lock();
        loop {
            match known.coming.get(key) {
                None => return Some(Ok(())),
                Some(Some(_)) => return known.coming.remove(key).flatten(),
                Some(None) => {}
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            known = self.changed.wait_timeout(known, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use waystation_format::slot::Id;
    use waystation_format::{Error, Kind};

    use super::*;

    fn key(step: u64) -> Key {
        Key { run: Id([1; 16]), shard: "a".to_owned(), version: Version { epoch: 1, step } }
    }

    #[test]
    fn a_fetch_is_begun_once_and_its_outcome_heard() {
        let guests = Guests::default();
        assert!(guests.begin(&key(1)) && !guests.begin(&key(1)));
        assert!(guests.wait(&key(1), Duration::ZERO).is_none());
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| guests.wait(&key(1), Duration::from_secs(60)));
            guests.end(&key(1), Err(Error::new(Kind::NotFound, "nowhere")));
            assert_eq!(waiting.join().unwrap().unwrap().unwrap_err().kind(), Kind::NotFound);
        });
        assert!(guests.begin(&key(1)), "it may be tried again");
        guests.end(&key(1), Ok(()));
        assert!(guests.wait(&key(1), Duration::ZERO).unwrap().is_ok());
    }

    #[test]
    fn the_oldest_guest_goes_first() {
        let guests = Guests::default();
        [3, 1, 2].into_iter().for_each(|step| guests.add(&key(step)));
        assert_eq!(guests.all()[0].0.step, 1);
        assert_eq!(guests.before(key(3).version).len(), 2);
        guests.remove(&key(1));
        assert_eq!(guests.all()[0].0.step, 2);
    }
}
