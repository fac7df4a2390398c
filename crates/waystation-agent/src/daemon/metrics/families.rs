//! The families of an agent's numbers. Names and units are those that Prometheus recommends: bytes, seconds,
//! and `_total` for what only grows.

use std::collections::BTreeSet;
use std::time::{Duration, UNIX_EPOCH};

use waystation_format::slot::{Header, State, Version};

use super::Metrics;
use super::exposition::{Exposition, Type};
use crate::store::{Counts, Observation, tenant_bytes};

/// The names of the states that a slot can be in.
const STATES: [&str; 5] = ["free", "writing", "sealed", "committed", "quarantined"];

/// The agent itself.
pub(super) fn of_agent(to: &mut Exposition, metrics: &Metrics, host: &str, process_count: usize) {
    let run = metrics.store.record().run.to_string();
    let labels = vec![("version", env!("CARGO_PKG_VERSION")), ("run", &*run), ("host", host)];
    to.family(Type::Gauge, "info", "The release of the agent, and the run that it serves.", [(labels, 1.0)]);
    let began = metrics.began.duration_since(UNIX_EPOCH).unwrap_or_default();
    let help = "When the agent began, in seconds since 1970.";
    to.one(Type::Gauge, "start_time_seconds", help, began.as_secs_f64());
    let help = "Processes that have greeted the agent and still run.";
    to.one(Type::Gauge, "processes", help, process_count as f64);
}

/// The store and what is in it.
pub(super) fn of_store(to: &mut Exposition, metrics: &Metrics) {
    let observed = metrics.store.observe();
    of_memory(to, metrics.store.cap_bytes(), &observed);
    of_slots(to, &observed);
    of_versions(to, &observed);
    of_counts(to, &observed.counts, metrics.damaged_at_start);
}

fn of_memory(to: &mut Exposition, cap_bytes: u64, observed: &Observation) {
    let record = &observed.record;
    let help = "The length of each slot's file.";
    to.one(Type::Gauge, "slot_size_bytes", help, record.slot_bytes as f64);
    let taken = record.slot_bytes.saturating_mul(record.slot_count.into());
    to.one(Type::Gauge, "memory_bytes", "Memory that the slots take.", taken as f64);
    to.one(Type::Gauge, "memory_cap_bytes", "Memory that the store may take.", cap_bytes as f64);
}

fn of_slots(to: &mut Exposition, observed: &Observation) {
    let of_state = |state: &'static str| {
        observed.slots.iter().map(|(header, _)| header).filter(move |header| header.state.name() == state)
    };
    let count = |state| (vec![("state", state)], of_state(state).count() as f64);
    to.family(Type::Gauge, "slots", "Slots by state.", STATES.map(count));
    let held = |header: &Header| header.state.tenant().map_or(0, tenant_bytes);
    let nbytes = |state| (vec![("state", state)], of_state(state).map(held).sum::<u64>() as f64);
    to.family(Type::Gauge, "slots_held_bytes", "Bytes of shards in slots, by state.", STATES.map(nbytes));
}

fn of_versions(to: &mut Exposition, observed: &Observation) {
    to.one(Type::Gauge, "epoch", "Writers of lower epochs are refused.", observed.record.epoch as f64);
    let [sealed, committed] = ["sealed", "committed"].map(|state| versions(observed, state));
    let kept = [("sealed", sealed.len()), ("committed", committed.len())];
    let kept = kept.map(|(state, count)| (vec![("state", state)], count as f64));
    to.family(Type::Gauge, "versions", "Versions of which there are shards here, by state.", kept);
    let newest = committed.last();
    let of_all = [("sealed", sealed.last().max(newest)), ("committed", newest)];
    let newest_by = |part: fn(&Version) -> u64| {
        let value = move |(state, version): (_, Option<&Version>)| {
            version.map(|version| (vec![("state", state)], part(version) as f64))
        };
        of_all.into_iter().filter_map(value)
    };
    let help = "The step of the newest version that is so, or committed as well.";
    to.family(Type::Gauge, "newest_step", help, newest_by(|version| version.step));
    let help = "The epoch of the newest version that is so, or committed as well.";
    to.family(Type::Gauge, "newest_epoch", help, newest_by(|version| version.epoch));
    of_lag(to, observed, newest);
}

/// What is sealed here but not known to be kept by as many hosts as it is to be.
fn of_lag(to: &mut Exposition, observed: &Observation, newest: Option<&Version>) {
    let waiting: Vec<(Version, Duration)> = observed
        .slots
        .iter()
        .filter_map(|(header, age)| match &header.state {
            State::Sealed(tenant, _) => Some((tenant.key.version, *age)),
            _ => None,
        })
        .filter(|(version, _)| newest.is_none_or(|newest| version > newest))
        .collect();
    let lagging: BTreeSet<Version> = waiting.iter().map(|&(version, _)| version).collect();
    let help = "Versions that are sealed here, newer than what is committed, and not committed yet.";
    to.one(Type::Gauge, "replication_lag_versions", help, lagging.len() as f64);
    let oldest = waiting.iter().map(|&(_, age)| age).max().unwrap_or_default();
    let help = "How long the longest of them has waited.";
    to.one(Type::Gauge, "replication_lag_seconds", help, oldest.as_secs_f64());
}

fn of_counts(to: &mut Exposition, counts: &Counts, damaged_at_start: usize) {
    let help = "How long slots were sealed before they were committed.";
    to.summary("commit_wait_seconds", help, counts.commit_wait.as_secs_f64(), counts.committed);
    let damaged = counts.damaged + damaged_at_start as u64;
    for (name, help, value) in [
        ("sealed_slots_total", "Slots that were verified and sealed.", counts.sealed),
        ("sealed_bytes_total", "Bytes of shards that were verified and sealed.", counts.sealed_bytes),
        ("committed_slots_total", "Slots that were committed.", counts.committed),
        ("aborted_slots_total", "Slots that were taken from their writers.", counts.aborted),
        ("freed_slots_total", "Slots that were sealed or committed and were freed.", counts.freed),
        ("quarantined_slots_total", "Slots that were quarantined.", counts.quarantined),
        ("verification_failures_total", "Slots whose bytes were not what they should be.", damaged),
    ] {
        to.one(Type::Counter, name, help, value as f64);
    }
}

/// The versions of which there are slots in a state, in order.
fn versions(observed: &Observation, state: &str) -> BTreeSet<Version> {
    let slots = observed.slots.iter().map(|(header, _)| header);
    let meant = slots.filter(|header| header.state.name() == state);
    meant.filter_map(|header| header.state.tenant().map(|tenant| tenant.key.version)).collect()
}
