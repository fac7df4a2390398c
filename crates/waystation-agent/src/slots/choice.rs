//! Which slot a version goes to.
//!
//! Invariants: a shard has at most so many versions at a time; its newest committed version stays; what is
//! sealed and newer than that stays too, because its commit may be on its way; nothing of another shard is
//! taken. Choosing changes nothing: whether a candidate's bytes are still in use is tried by the caller, in
//! the order given.

use waystation_format::slot::{Header, Key, State, Version};
use waystation_format::{Error, Kind, Result};

/// What bounds the choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Writers of lower epochs are refused.
    pub epoch: u64,
    /// How many versions of one shard there may be at a time.
    pub versions_per_shard: usize,
    /// Whether the agents of several hosts decide together what stays and what comes: then only free slots are given, of
    /// whatever epoch the version is.
    pub is_shared: bool,
}

/// The newest committed version of a shard of a run.
pub fn newest_committed(headers: &[Header], key: &Key) -> Option<Version> {
    let versions = headers.iter().filter_map(|header| match &header.state {
        State::Committed(tenant, _) if is_of_shard(&tenant.key, key) => Some(tenant.key.version),
        _ => None,
    });
    versions.max()
}

/// The places of the slots that `key` may be written to, the best first: a free one, or the oldest version of
/// the same shard that nobody needs any more.
///
/// Fenced if its epoch is over, Conflict if it is there already or not newer than what is committed,
/// Unavailable if nothing can be overwritten now.
pub fn candidates(headers: &[Header], key: &Key, limits: Limits) -> Result<Vec<usize>> {
    check(headers, key, limits).map_err(|error| named(error, key))?;
    let free = |(place, header): (usize, &Header)| (header.state == State::Free).then_some(place);
    let free: Vec<usize> = headers.iter().enumerate().filter_map(free).collect();
    if limits.is_shared {
        return if free.is_empty() { Err(named(exhausted(0, limits, true), key)) } else { Ok(free) };
    }
    let newest = newest_committed(headers, key);
    let held: Vec<(usize, Version, bool)> = headers
        .iter()
        .enumerate()
        .filter_map(|(place, header)| {
            let (tenant, may_retire) = match &header.state {
                State::Free | State::Quarantined(_) => return None,
                State::Writing(tenant) => (tenant, false),
                State::Sealed(tenant, _) | State::Committed(tenant, _) => (tenant, true),
            };
            let version = tenant.key.version;
            let is_old = may_retire && newest.is_some_and(|newest| version < newest);
            is_of_shard(&tenant.key, key).then_some((place, version, is_old))
        })
        .collect();
    let mut old: Vec<(Version, usize)> =
        held.iter().filter(|(_, _, is_old)| *is_old).map(|&(place, version, _)| (version, place)).collect();
    old.sort_unstable();
    let has_room = held.len() < limits.versions_per_shard;
    let free = if has_room { free } else { Vec::new() };
    let found: Vec<usize> = free.into_iter().chain(old.into_iter().map(|(_, place)| place)).collect();
    if found.is_empty() {
        return Err(named(exhausted(held.len(), limits, has_room), key));
    }
    Ok(found)
}

fn check(headers: &[Header], key: &Key, limits: Limits) -> Result<()> {
    if !limits.is_shared && key.version.epoch < limits.epoch {
        let message = format!("epoch {} is over; the epoch is {} now", key.version.epoch, limits.epoch);
        return Err(Error::new(Kind::Fenced, message));
    }
    let same = headers.iter().find(|header| match &header.state {
        State::Writing(tenant) | State::Sealed(tenant, _) | State::Committed(tenant, _) => tenant.key == *key,
        State::Free | State::Quarantined(_) => false,
    });
    if let Some(same) = same {
        let message = format!("this version of the shard is in a slot already, {}", same.state.name());
        return Err(Error::new(Kind::Conflict, message).with("slot", same.slot.to_string()));
    }
    match newest_committed(headers, key) {
        Some(newest) if newest >= key.version && !limits.is_shared => {
            let message = "a newer version of the shard is committed already";
            Err(Error::new(Kind::Conflict, message)
                .with("committed_epoch", newest.epoch.to_string())
                .with("committed_step", newest.step.to_string()))
        }
        _ => Ok(()),
    }
}

fn exhausted(held: usize, limits: Limits, has_room: bool) -> Error {
    let message = if has_room {
        "all slots of the store are taken; give up or retire versions, or make a store of more slots"
            .to_owned()
    } else {
        format!(
            "the shard has {held} of {} versions, and none of them may go: save again once the newest is \
             committed or given up",
            limits.versions_per_shard
        )
    };
    Error::new(Kind::Unavailable, message)
}

fn is_of_shard(one: &Key, other: &Key) -> bool {
    one.run == other.run && one.shard == other.shard
}

fn named(error: Error, key: &Key) -> Error {
    error
        .with("shard", &*key.shard)
        .with("epoch", key.version.epoch.to_string())
        .with("step", key.version.step.to_string())
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;
    use waystation_format::slot::{Id, Sums, Tenant, Writer};

    use super::*;
    use crate::slots::{Event, next};

    const LIMITS: Limits = Limits { epoch: 1, versions_per_shard: 2, is_shared: false };

    fn key(shard: &str, epoch: u64, step: u64) -> Key {
        Key { run: Id([1; 16]), shard: shard.to_owned(), version: Version { epoch, step } }
    }

    fn tenant(key: Key) -> Tenant {
        Tenant { key, contents_bytes: 8, data_bytes: 0, writer: Writer::default() }
    }

    fn headers(states: impl IntoIterator<Item = State>) -> Vec<Header> {
        let header = |(slot, state): (usize, State)| Header {
            store: Id([2; 16]),
            slot: slot as u32,
            slot_bytes: 1 << 20,
            sequence: 8,
            state,
        };
        states.into_iter().enumerate().map(header).collect()
    }

    fn writing(step: u64) -> State {
        State::Writing(tenant(key("a", 1, step)))
    }

    fn sealed(step: u64) -> State {
        State::Sealed(tenant(key("a", 1, step)), Sums::default())
    }

    fn committed(step: u64) -> State {
        State::Committed(tenant(key("a", 1, step)), Sums::default())
    }

    fn chosen(states: Vec<State>, key: &Key) -> Result<Vec<usize>, Kind> {
        candidates(&headers(states), key, LIMITS).map_err(|error| error.kind())
    }

    #[test]
    fn free_slots_come_first_then_the_oldest_that_may_go() {
        let new = key("a", 1, 40);
        assert_eq!(chosen(vec![State::Free, State::Free], &new), Ok(vec![0, 1]));
        assert_eq!(chosen(vec![committed(10), State::Free], &new), Ok(vec![1]));
        assert_eq!(chosen(vec![committed(20), committed(10), State::Free], &new), Ok(vec![1]));
        assert_eq!(chosen(vec![sealed(10), committed(20)], &new), Ok(vec![0]));
        let roomy = Limits { versions_per_shard: 4, ..LIMITS };
        let states = [committed(20), committed(10), sealed(5), State::Free];
        let found = candidates(&headers(states), &new, Limits { versions_per_shard: 5, ..roomy }).unwrap();
        assert_eq!(found, [3, 2, 1]);
    }

    #[test]
    fn what_may_still_be_needed_stays() {
        let new = key("a", 1, 40);
        for states in [
            vec![committed(10), sealed(20)],
            vec![committed(10), writing(20)],
            vec![sealed(10), sealed(20)],
            vec![committed(10), State::Quarantined(Some(tenant(key("a", 1, 5))))],
            vec![State::Quarantined(None), State::Committed(tenant(key("b", 1, 10)), Sums::default())],
        ] {
            assert_eq!(chosen(states.clone(), &new), Err(Kind::Unavailable), "{states:?}");
        }
        // A shard that has its share does not take what others may need.
        assert_eq!(chosen(vec![committed(10), sealed(20), State::Free], &new), Err(Kind::Unavailable));
    }

    #[test]
    fn nothing_gives_way_where_agents_decide_together() {
        let shared = Limits { is_shared: true, ..LIMITS };
        let found = |states: Vec<State>, key: &Key| {
            candidates(&headers(states), key, shared).map_err(|error| error.kind())
        };
        let (new, old) = (key("a", 1, 40), key("a", 0, 5));
        assert_eq!(found(vec![committed(20), committed(10)], &new), Err(Kind::Unavailable));
        // Copies of earlier epochs come from elsewhere, also where something newer was committed.
        let states = vec![committed(20), sealed(10), State::Free, State::Free];
        assert_eq!((found(states.clone(), &old), found(states, &new)), (Ok(vec![2, 3]), Ok(vec![2, 3])));
        assert_eq!(found(vec![sealed(40), State::Free], &new), Err(Kind::Conflict));
    }

    #[test]
    fn what_comes_too_late_is_refused() {
        assert_eq!(chosen(vec![State::Free], &key("a", 0, 40)), Err(Kind::Fenced));
        for there in [writing(40), sealed(40), committed(40), committed(41)] {
            assert_eq!(chosen(vec![there, State::Free], &key("a", 1, 40)), Err(Kind::Conflict));
        }
        // After a recovery an earlier step comes again, in a later epoch.
        assert_eq!(chosen(vec![committed(41), State::Free], &key("a", 2, 40)), Ok(vec![1]));
        let of_other_run = Key { run: Id([9; 16]), ..key("a", 1, 40) };
        assert_eq!(chosen(vec![committed(40), State::Free], &of_other_run), Ok(vec![1]));
    }

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Begin(u8),
        Seal(usize),
        Commit(usize),
        GiveUp(usize),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        vec(
            prop_oneof![
                (0u8..3).prop_map(Step::Begin),
                (0usize..6).prop_map(Step::Seal),
                (0usize..6).prop_map(Step::Commit),
                (0usize..6).prop_map(Step::GiveUp),
            ],
            0..120,
        )
    }

    proptest! {
        /// Whatever happens, in any order: once a shard has a committed version it always has one, which
        /// only ever gets newer, and it never has more versions than it may.
        #[test]
        fn the_newest_committed_version_is_never_lost(steps in steps()) {
            let mut headers = headers(vec![State::Free; 6]);
            let mut newest = [None; 3];
            for (step, number) in steps.into_iter().zip(1u64..) {
                match step {
                    Step::Begin(shard) => {
                        let key = key(&shard.to_string(), 1, number);
                        if let Ok(found) = candidates(&headers, &key, LIMITS) {
                            let place = found[0];
                            if headers[place].state != State::Free {
                                let newest = newest_committed(&headers, &key).unwrap();
                                headers[place] = next(&headers[place], Event::Retire { newest }).unwrap();
                            }
                            headers[place] = next(&headers[place], Event::Begin(tenant(key))).unwrap();
                        }
                    }
                    Step::Seal(place) => {
                        let ticket = headers[place].sequence;
                        apply(&mut headers[place], Event::Seal { ticket, sums: Sums::default() });
                    }
                    Step::Commit(place) => apply(&mut headers[place], Event::Commit),
                    Step::GiveUp(place) => apply(&mut headers[place], Event::GiveUp),
                }
                for shard in 0..3u8 {
                    let key = key(&shard.to_string(), 1, 0);
                    let found = newest_committed(&headers, &key);
                    prop_assert!(found >= newest[usize::from(shard)]);
                    newest[usize::from(shard)] = found;
                    let held = headers.iter().filter_map(|header| header.state.tenant());
                    prop_assert!(held.filter(|tenant| tenant.key.shard == key.shard).count() <= 2);
                }
            }
        }
    }

    /// Lets happen what may happen.
    fn apply(header: &mut Header, event: Event) {
        if let Ok(after) = next(header, event) {
            *header = after;
        }
    }
}
