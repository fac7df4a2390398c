//! An agent's side that faces other agents: one address, behind it all services.
//!
//! It runs in a thread of its own, so that a daemon without a runtime has one call to start it and one to
//! stop it. Invariants: once it has stopped, nothing listens, no connection is open, and no thread of it is
//! left that could touch a slot.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};
use waystation_format::{Error, Kind, Result};

use super::bulk::BulkService;
use super::control::ControlService;
use super::{Credentials, Limits, Listener, Purpose};

/// How often it is looked for what nobody sends any more.
const TICK: Duration = Duration::from_secs(5);
/// How long what was begun is kept for who sent it.
const KEEP_INCOMING: Duration = Duration::from_secs(60);

/// What a server answers with.
#[derive(Clone, Debug)]
pub struct Services {
    /// For bytes of slots.
    pub bulk: Arc<BulkService>,
    /// For calls.
    pub control: Arc<ControlService>,
    /// Is told of a client that was turned away, and of how many were, once in a minute at most.
    pub turned_away: fn(&Error),
}

/// A server that runs.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    runtime: Handle,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    services: Services,
}

impl Server {
    /// Listens on an address, and serves whoever proves that they belong to the job.
    pub fn start(
        address: SocketAddr,
        credentials: Credentials,
        limits: Limits,
        services: Services,
    ) -> Result<Self> {
        let failed = |error| Error::new(Kind::Unavailable, format!("the server cannot be started: {error}"));
        let runtime = Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let (handle, serving) = (runtime.handle().clone(), services.clone());
        let (stop, stopped) = oneshot::channel();
        let (sender, bound) = mpsc::sync_channel(1);
        let run = move || {
            runtime.block_on(async move {
                let listener = match Listener::bind(address, credentials, limits).await {
                    Ok(listener) => listener,
                    Err(error) => return drop(sender.send(Err(error))),
                };
                drop(sender.send(listener.address()));
                serve(listener, serving, async { drop(stopped.await) }).await;
            });
            // Transfers that were begun by this side have their connections ended with the runtime.
            runtime.shutdown_background();
        };
        let thread = thread::Builder::new().name("waystation-peers".to_owned()).spawn(run).map_err(failed)?;
        let bound = bound.recv().unwrap_or_else(|_| Err(waystation_io::job::panicked()));
        Ok(Self { address: bound?, runtime: handle, stop: Some(stop), thread: Some(thread), services })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where calls and transfers of this side can run, as long as the server does.
    pub fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// What it answers with.
    pub fn services(&self) -> &Services {
        &self.services
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stop.take());
        // A thread that has panicked has printed why.
        drop(self.thread.take().map(JoinHandle::join));
    }
}

/// Serves whoever a listener lets in, until it is told to stop.
pub async fn serve(mut listener: Listener, services: Services, stop: impl Future<Output = ()>) {
    let mut calls = JoinSet::new();
    let mut ticks = interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut stop = std::pin::pin!(stop);
    loop {
        let connection = tokio::select! {
            () = &mut stop => break,
            _ = ticks.tick() => None,
            connection = listener.accept() => Some(connection),
        };
        let Some(connection) = connection else {
            services.bulk.intake().expire(KEEP_INCOMING);
            listener.turned_away_to_tell().iter().for_each(services.turned_away);
            while calls.try_join_next().is_some() {}
            continue;
        };
        match connection.purpose() {
            // A connection that cannot be served is closed, which its client sees.
            Purpose::Bulk => drop(services.bulk.serve(connection)),
            Purpose::Control => drop(calls.spawn(Arc::clone(&services.control).serve(connection))),
            _ => drop(connection), // those are of the runtime and of launches, which are somewhere else
        }
    }
    drop(listener);
    calls.shutdown().await;
    let bulk = Arc::clone(&services.bulk);
    // Its threads end at once, but a slot that is about to be sealed is sealed first.
    drop(tokio::task::spawn_blocking(move || bulk.stop()).await);
}
