//! The families of an agent that is one of several.

use super::exposition::{Exposition, Type};
use crate::daemon::cluster::Watched;
use crate::peers::bulk::TrafficCounts;

/// How it stands with the others.
pub(super) fn of_others(to: &mut Exposition, watched: &Watched) {
    let one = |is_so: bool| f64::from(u8::from(is_so));
    let help = "Whether a controller of all agents runs in this one.";
    to.one(Type::Gauge, "is_controller", help, one(watched.is_controller));
    let help = "Whether the agent has the orders of its epoch, by which trainers go on.";
    to.one(Type::Gauge, "is_training", help, one(watched.is_training));
    let heard = watched.hosts.iter().map(|host| (vec![("host", &*host.name)], one(host.is_heard)));
    to.family(Type::Gauge, "host_heard", "Whether the agent of a host was heard lately.", heard);
    let help = "How often the agent was without orders while a program ran, and got new ones.";
    to.one(Type::Counter, "recoveries_total", help, watched.recoveries as f64);
    let help = "How long that took the last time.";
    let last = watched.last_recovery;
    to.one(Type::Gauge, "last_recovery_seconds", help, last.map(|recovery| recovery.total().as_secs_f64()));
    let help = "What of that passed until there was a decision, and until all agents had carried it out.";
    let phases = last.map(|recovery| [("decide", recovery.decide), ("transfer", recovery.transfer)]);
    let phases = phases.into_iter().flatten();
    let phases = phases.map(|(phase, time)| (vec![("phase", phase)], time.as_secs_f64()));
    to.family(Type::Gauge, "last_recovery_phase_seconds", help, phases);
    of_peers(to, watched.sent, watched.received);
}

/// What goes between agents.
fn of_peers(to: &mut Exposition, sent: TrafficCounts, received: TrafficCounts) {
    for (name, help, value) in [
        ("sent_bytes_total", "Bytes of shards that went to other agents.", sent.bytes),
        ("received_bytes_total", "Bytes of shards that came from other agents.", received.bytes),
        (
            "damaged_blocks_total",
            "Blocks that came with other bytes than were sent.",
            received.damaged_blocks,
        ),
    ] {
        to.one(Type::Counter, name, help, value as f64);
    }
    for (name, help, of) in [
        ("transfers_total", "Shards that went whole.", [sent.whole, received.whole]),
        ("transfers_failed_total", "Transfers that were given up.", [sent.failed, received.failed]),
        (
            "transfers_resumed_total",
            "How often a transfer went on over another connection.",
            [sent.resumed, received.resumed],
        ),
    ] {
        let samples = ["sent", "received"].into_iter().zip(of);
        let samples = samples.map(|(direction, count)| (vec![("direction", direction)], count as f64));
        to.family(Type::Counter, name, help, samples);
    }
}
