//! What those are told who watch: how this agent stands with the others, and how long its last recovery took.

use std::time::{Duration, Instant};

use super::driver::Driver;
use super::{Cluster, Shared};
use crate::local::message::HostStanding;
use crate::peers::bulk::TrafficCounts;
use crate::protocol::Agent;
use crate::protocol::names::Epoch;

/// An agent among others, at a moment.
#[derive(Clone, Debug)]
pub struct Watched {
    /// Whether the controller that it follows, or wants others to follow, runs beside it.
    pub is_controller: bool,
    /// Whether it has the orders of its epoch, by which trainers go on.
    pub is_training: bool,
    /// Whom it hears.
    pub hosts: Vec<HostStanding>,
    /// What has gone to others.
    pub sent: TrafficCounts,
    /// What has come from others.
    pub received: TrafficCounts,
    /// How often it was without orders and got new ones.
    pub recoveries: u64,
    /// How long that took the last time.
    pub last_recovery: Option<Recovery>,
}

/// How long an agent was without orders while a program waited for them, by what it waited for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recovery {
    /// Until it had the decision that was carried out: a new epoch, what all agents have, one version for all.
    pub decide: Duration,
    /// From then on until every agent had what it is to have of the version.
    pub transfer: Duration,
}

impl Recovery {
    /// Both together.
    pub fn total(&self) -> Duration {
        self.decide + self.transfer
    }
}

/// Since when there are no orders, and how long it took before.
#[derive(Debug, Default)]
pub(super) struct Recoveries {
    under_way: Option<UnderWay>,
    count: u64,
    last: Option<Recovery>,
}

#[derive(Debug)]
struct UnderWay {
    since: Instant,
    /// The decision that is being carried out, and when it came.
    decided: Option<((Epoch, u32), Instant)>,
}

impl Recoveries {
    /// Takes note of how things are, whenever something has happened; returns a recovery that has just ended.
    pub fn note(&mut self, driver: &Driver) -> Option<Recovery> {
        let now = Instant::now();
        let decision = driver.agent().and_then(Agent::decision);
        let Some(UnderWay { since, decided }) = &mut self.under_way else {
            // Without a program nobody waits for orders.
            let is_awaited = driver.agent().is_some_and(|agent| agent.memory().program.is_some());
            if is_awaited && driver.orders().is_none() {
                let decided = decision.map(|decision| (decision, now));
                self.under_way = Some(UnderWay { since: now, decided });
            }
            return None;
        };
        if driver.orders().is_none() {
            if decided.map(|(of, _)| of) != decision {
                *decided = decision.map(|decision| (decision, now));
            }
            return None;
        }
        let at = decided.map_or(now, |(_, at)| at);
        let ended = Recovery { decide: at - *since, transfer: now - at };
        self.under_way = None;
        self.count += 1;
        self.last = Some(ended);
        self.last
    }
}

impl Cluster {
    /// How things are.
    pub fn watched(&self) -> Watched {
        let standing = self.standing();
        let Shared { ways, intake, .. } = &*self.shared;
        let inner = self.shared.lock();
        Watched {
            is_controller: inner.driver.is_controller(),
            is_training: standing.is_training,
            hosts: standing.hosts,
            sent: ways.order.pacer.traffic().counts(),
            received: intake.traffic().counts(),
            recoveries: inner.recoveries.count,
            last_recovery: inner.recoveries.last,
        }
    }
}
