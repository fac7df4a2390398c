//! What those are told who watch: how this agent stands with the others, and how long its last recovery took.

use std::time::{Duration, Instant};

use super::driver::Driver;
use super::{Cluster, Shared};
use crate::local::message::HostStanding;
use crate::peers::bulk::TrafficCounts;

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
    pub last_recovery: Option<Duration>,
}

/// Since when there were no orders, and how long it took before.
#[derive(Debug, Default)]
pub(super) struct Recoveries {
    since: Option<Instant>,
    count: u64,
    last: Option<Duration>,
}

impl Recoveries {
    /// Takes note of how things are, whenever something has happened.
    pub fn note(&mut self, driver: &Driver) {
        // Without a program nobody waits for orders.
        let is_awaited = driver.agent().is_some_and(|agent| agent.memory().program.is_some());
        match (self.since, driver.orders().is_some()) {
            (None, false) if is_awaited => self.since = Some(Instant::now()),
            (Some(since), true) => {
                self.since = None;
                self.count += 1;
                self.last = Some(since.elapsed());
            }
            _ => {}
        }
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
