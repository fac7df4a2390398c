//! How many may be at the door, and how many may be in.
//!
//! Invariants: a place is given back when its guard is dropped, whatever became of the connection; one
//! address cannot take the places at the door that others need; who is proven keeps nobody at the door.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// What bounds the connections of a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// How long a client may take to prove itself.
    pub handshake: Duration,
    /// How many may be about to prove themselves.
    pub unproven: usize,
    /// How many of them from one address.
    pub unproven_per_address: usize,
    /// How many may be proven.
    pub proven: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { handshake: Duration::from_secs(5), unproven: 256, unproven_per_address: 32, proven: 1024 }
    }
}

/// The door of one listener.
#[derive(Debug)]
pub(crate) struct Gate {
    limits: Limits,
    counts: Mutex<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    unproven: HashMap<IpAddr, usize>,
    unproven_in_all: usize,
    proven: usize,
}

/// A place at the door.
#[derive(Debug)]
pub(crate) struct Unproven {
    gate: Arc<Gate>,
    address: IpAddr,
}

/// A place inside.
#[derive(Debug)]
pub struct Proven(Arc<Gate>);

impl Gate {
    pub fn new(limits: Limits) -> Arc<Self> {
        Arc::new(Self { limits, counts: Mutex::default() })
    }

    /// A place at the door for a client from an address, if there is one.
    pub fn enter(self: &Arc<Self>, address: IpAddr) -> Option<Unproven> {
        let mut counts = self.lock();
        let from_there = counts.unproven.get(&address).copied().unwrap_or(0);
        if counts.unproven_in_all >= self.limits.unproven || from_there >= self.limits.unproven_per_address {
            return None;
        }
        counts.unproven_in_all += 1;
        counts.unproven.insert(address, from_there + 1);
        Some(Unproven { gate: Arc::clone(self), address })
    }

    /// How many are proven.
    pub fn proven(&self) -> usize {
        self.lock().proven
    }

    fn lock(&self) -> MutexGuard<'_, Counts> {
        // Each change of the counts is whole, so those of a poisoned lock are right.
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Unproven {
    /// A place inside, if there is one; the one at the door is given back in any case.
    pub fn admit(self) -> Option<Proven> {
        let mut counts = self.gate.lock();
        let has_room = counts.proven < self.gate.limits.proven;
        counts.proven += usize::from(has_room);
        drop(counts);
        has_room.then(|| Proven(Arc::clone(&self.gate)))
    }
}

impl Drop for Unproven {
    fn drop(&mut self) {
        let mut counts = self.gate.lock();
        counts.unproven_in_all -= 1;
        let left = counts.unproven.remove(&self.address).map_or(0, |count| count - 1);
        if left > 0 {
            counts.unproven.insert(self.address, left);
        }
    }
}

impl Drop for Proven {
    fn drop(&mut self) {
        self.0.lock().proven -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits =
        Limits { handshake: Duration::ZERO, unproven: 3, unproven_per_address: 2, proven: 1 };

    fn address(number: u8) -> IpAddr {
        IpAddr::from([127, 0, 0, number])
    }

    #[test]
    fn one_address_leaves_places_to_others() {
        let gate = Gate::new(LIMITS);
        let (first, second) = (gate.enter(address(1)), gate.enter(address(1)));
        assert!(first.is_some() && second.is_some() && gate.enter(address(1)).is_none());
        let third = gate.enter(address(2));
        assert!(third.is_some() && gate.enter(address(3)).is_none());
        drop(first);
        assert!(gate.enter(address(1)).is_some());
        drop((second, third));
        assert!(gate.lock().unproven.is_empty() && gate.lock().unproven_in_all == 0);
    }

    #[test]
    fn who_is_proven_frees_the_door() {
        let gate = Gate::new(LIMITS);
        let proven = gate.enter(address(1)).unwrap().admit().unwrap();
        assert_eq!((gate.proven(), gate.lock().unproven_in_all), (1, 0));
        assert!(gate.enter(address(1)).unwrap().admit().is_none());
        assert_eq!((gate.proven(), gate.lock().unproven_in_all), (1, 0));
        drop(proven);
        assert_eq!(gate.proven(), 0);
        assert!(gate.enter(address(1)).unwrap().admit().is_some());
    }
}
