//! What has happened in a store since its agent began, counted, and how long each slot has been as it is.
//!
//! It is for those who watch: nothing is decided by it, and nothing of it outlives the agent.

use std::time::{Duration, Instant};

use waystation_format::slot::{Header, State, StoreRecord, Tenant};

/// Counts of what has happened to slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// How many were sealed.
    pub sealed: u64,
    /// How many bytes were in these: tables of contents and data.
    pub sealed_bytes: u64,
    /// How many were committed.
    pub committed: u64,
    /// How long these had been sealed by then, added up.
    pub commit_wait: Duration,
    /// How many were taken from their writers.
    pub aborted: u64,
    /// How many that were sealed or committed were freed: given up, or not needed any more.
    pub freed: u64,
    /// How many were quarantined.
    pub quarantined: u64,
    /// How often bytes were not what they should be when all of a slot was verified.
    pub damaged: u64,
}

/// A store at a moment.
#[derive(Clone, Debug)]
pub struct Observation {
    /// What all slots have in common.
    pub record: StoreRecord,
    /// The header of each slot, and how long it has been that.
    pub slots: Vec<(Header, Duration)>,
    /// What has happened.
    pub counts: Counts,
}

/// Counts, and since when each slot is as it is.
#[derive(Debug)]
pub(super) struct Tally {
    counts: Counts,
    since: Vec<Instant>,
}

impl Tally {
    /// Of so many slots, from now on.
    pub fn new(slot_count: usize) -> Self {
        Self { counts: Counts::default(), since: vec![Instant::now(); slot_count] }
    }

    /// Counts a change of a slot.
    pub fn note(&mut self, place: usize, before: &State, after: &State) {
        let now = Instant::now();
        let lasted = self.since.get_mut(place).map(|since| now - std::mem::replace(since, now));
        let counts = &mut self.counts;
        match (before, after) {
            (_, State::Sealed(tenant, _)) => {
                counts.sealed += 1;
                counts.sealed_bytes += tenant_bytes(tenant);
            }
            (_, State::Committed(..)) => {
                counts.committed += 1;
                counts.commit_wait += lasted.unwrap_or_default();
            }
            (_, State::Quarantined(_)) => counts.quarantined += 1,
            (State::Writing(_), State::Free) => counts.aborted += 1,
            (State::Sealed(..) | State::Committed(..), State::Free) => counts.freed += 1,
            (_, State::Free | State::Writing(_)) => {}
        }
    }

    /// Counts bytes that were not what they should be.
    pub fn note_damage(&mut self) {
        self.counts.damaged += 1;
    }

    /// What there is to be seen.
    pub fn observe(&self, record: &StoreRecord, headers: &[Header]) -> Observation {
        let ages = self.since.iter().map(Instant::elapsed);
        Observation {
            record: record.clone(),
            slots: headers.iter().cloned().zip(ages).collect(),
            counts: self.counts,
        }
    }
}

/// What a tenant keeps in its slot.
pub fn tenant_bytes(tenant: &Tenant) -> u64 {
    tenant.contents_bytes.saturating_add(tenant.data_bytes)
}

#[cfg(test)]
mod tests {
    use waystation_format::slot::{Id, Key, Sums, Version, Writer};

    use super::*;

    #[test]
    fn every_change_is_counted_once() {
        let key = Key { run: Id([1; 16]), shard: "a".to_owned(), version: Version::default() };
        let tenant = Tenant { key, contents_bytes: 8, data_bytes: 100, writer: Writer::default() };
        let sums = Sums { contents: 1, digest: 2 };
        let life = [
            State::Free,
            State::Writing(tenant.clone()),
            State::Free,
            State::Writing(tenant.clone()),
            State::Sealed(tenant.clone(), sums),
            State::Free,
            State::Writing(tenant.clone()),
            State::Sealed(tenant.clone(), sums),
            State::Committed(tenant.clone(), sums),
            State::Free,
            State::Writing(tenant.clone()),
            State::Quarantined(Some(tenant)),
            State::Free,
        ];
        let mut tally = Tally::new(1);
        for change in life.windows(2) {
            tally.note(0, &change[0], &change[1]);
        }
        let expected = Counts {
            sealed: 2,
            sealed_bytes: 216,
            committed: 1,
            aborted: 1,
            freed: 2,
            quarantined: 1,
            commit_wait: tally.counts.commit_wait,
            damaged: 0,
        };
        assert_eq!(tally.counts, expected);
    }
}
