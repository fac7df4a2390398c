//! Copies on their way to other agents: one transfer of a version to each, some of them at a time.
//!
//! The machine says again and again what is to be brought where, until it hears that it is kept; so a transfer that has
//! failed is begun again soon, by the next word of the machine; one to an agent that is elsewhere now begins there at once,
//! rather than when nobody has answered at the old address for long enough. Invariant: of one version there is one transfer to an agent
//! at a time.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::select;
use tokio::sync::Semaphore;
use waystation_format::slot::Key;
use waystation_format::{Error, Kind, Result};

use super::mail::Place;
use crate::daemon::log;
use crate::peers::Credentials;
use crate::peers::bulk::{Intake, Order, Route, fetch, replicate};
use crate::protocol::names::AgentId;
use crate::store::Store;

/// So many transfers send at a time; others wait.
const MOST_SENDING: usize = 4;
/// How often in a row a transfer is tried without getting further.
const ATTEMPTS: u32 = 3;
/// How long a connection may take to be made.
const CONNECT_WITHIN: Duration = Duration::from_secs(3);
/// How long after a transfer has ended the next one of the same version begins.
const PAUSE: Duration = Duration::from_millis(500);

/// How bytes go to other agents, and come from them.
#[derive(Clone, Debug)]
pub struct Ways {
    /// What this side proves itself with.
    pub credentials: Credentials,
    /// How fast.
    pub order: Order,
}

impl Ways {
    /// The way to an agent, where it is now.
    pub async fn route(&self, place: &Place) -> Result<Route> {
        Ok(Route {
            peer: place.peer().await?,
            credentials: self.credentials.clone(),
            order: self.order.clone(),
            streams: 1,
            attempts: ATTEMPTS,
            connect_within: CONNECT_WITHIN,
        })
    }

    /// Receives a version from an agent into a slot.
    pub async fn fetch(&self, intake: &Arc<Intake>, key: &Key, digest: u64, place: &Place) -> Result<()> {
        fetch(intake, key, Some(digest), &self.route(place).await?).await.map(drop)
    }
}

/// What is on its way to others.
#[derive(Debug)]
pub struct Transfers {
    store: Arc<Store>,
    ways: Ways,
    sending: Arc<Semaphore>,
    /// When each may begin; None while it is on its way.
    begun: Mutex<HashMap<(AgentId, Key), Option<Instant>>>,
}

impl Transfers {
    /// None yet.
    pub fn new(store: Arc<Store>, ways: Ways) -> Arc<Self> {
        let sending = Arc::new(Semaphore::new(MOST_SENDING));
        Arc::new(Self { store, ways, sending, begun: Mutex::default() })
    }

    /// Brings a version to an agent, unless it is on its way there. `failed` hears of a copy that is damaged here.
    pub fn begin(
        self: &Arc<Self>,
        runtime: &Handle,
        to: AgentId,
        place: Arc<Place>,
        key: Key,
        failed: impl FnOnce() + Send + 'static,
    ) {
        let now = Instant::now();
        let mut begun = self.lock();
        begun.retain(|_, next| next.is_none_or(|next| now < next));
        if begun.contains_key(&(to, key.clone())) {
            return;
        }
        begun.insert((to, key.clone()), None);
        drop(begun);
        let transfers = Arc::clone(self);
        runtime.spawn(async move {
            let sent = transfers.send(&place, &key).await;
            transfers.lock().insert((to, key.clone()), Some(Instant::now() + PAUSE));
            match sent {
                Err(error) if error.kind() == Kind::Corrupt => {
                    log::error("copy_not_sent", &named(error, &key));
                    failed();
                }
                // It is not there any more, or not wanted now: as its holder knows.
                Err(error) if [Kind::NotFound, Kind::Cancelled].contains(&error.kind()) => {}
                Err(error) => log::error("copy_not_sent", &named(error, &key)),
                Ok(()) => {}
            }
        });
    }

    async fn send(&self, place: &Place, key: &Key) -> Result<()> {
        let _turn = self.sending.acquire().await;
        loop {
            let moved = place.moved();
            let sent = async { replicate(&self.store, key, &self.ways.route(place).await?).await.map(drop) };
            select! {
                sent = sent => return sent,
                () = moved => {}
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<(AgentId, Key), Option<Instant>>> {
        self.begun.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn named(error: Error, key: &Key) -> Error {
    error.with("shard", &*key.shard).with("step", key.version.step.to_string())
}
