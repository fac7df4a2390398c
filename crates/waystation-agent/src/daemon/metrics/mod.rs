//! What an agent tells those who watch it: numbers that Prometheus scrapes, and `waystation top` shows.
//!
//! `families` and `others` are which there are, `exposition` their form, `server` where they can be had over HTTP. Processes
//! of the host can also ask for the same text over the agent's socket. Invariant: whoever watches changes nothing, and
//! takes no more than a bounded number of connections for a bounded time.

mod exposition;
mod families;
mod others;
mod server;

use std::sync::Arc;
use std::time::SystemTime;

use self::exposition::Exposition;
pub(super) use self::server::Server;
use super::cluster::Watched;
use crate::store::Store;

/// What the numbers of an agent are taken from.
#[derive(Debug)]
pub(super) struct Metrics {
    store: Arc<Store>,
    began: SystemTime,
    /// How many slots were damaged when the agent took them over.
    damaged_at_start: usize,
}

impl Metrics {
    /// Of an agent that begins.
    pub fn new(store: Arc<Store>, damaged_at_start: usize) -> Self {
        Self { store, began: SystemTime::now(), damaged_at_start }
    }

    /// All of them, as they are now, of the agent of a host (its name is empty if the agent is alone).
    pub fn text(&self, process_count: usize, host: &str, watched: Option<&Watched>) -> String {
        let mut exposition = Exposition::default();
        families::of_agent(&mut exposition, self, host, process_count);
        families::of_store(&mut exposition, self);
        if let Some(watched) = watched {
            others::of_others(&mut exposition, watched);
        }
        exposition.into_text()
    }
}
