//! Where an agent listens for others: on one address, for those who can prove themselves.
//!
//! Handshakes run beside each other, each with a deadline and a place at the door ([`Limits`]); a client for
//! whom there is no place is turned away at once. Invariants: nothing listens but what is configured; what a
//! stranger can make this side hold is the places at the door, and a fixed number of bytes for each; dropping
//! the listener ends all handshakes.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use waystation_format::{Error, Kind, Result};

use super::connection::{Connection, Credentials, accept};
use super::gate::{Gate, Limits};

/// How long to wait when the system cannot accept (it has no more descriptors, say).
const PAUSE: Duration = Duration::from_millis(50);
/// How often clients that were turned away are told of: so rarely that strangers cannot fill a log.
const TELL_AGAIN: Duration = Duration::from_secs(60);

/// A listening agent.
#[derive(Debug)]
pub struct Listener {
    listener: TcpListener,
    credentials: Credentials,
    limits: Limits,
    gate: Arc<Gate>,
    handshakes: JoinSet<Result<Connection>>,
    turned_away: Vec<Error>,
    turned_away_count: u64,
    told: Option<Instant>,
}

impl Listener {
    /// Listens on an address; port 0 has the system choose one.
    pub async fn bind(address: SocketAddr, credentials: Credentials, limits: Limits) -> Result<Self> {
        let bound = TcpListener::bind(address).await;
        let listener = bound.map_err(|error| {
            let kind = match error.kind() {
                std::io::ErrorKind::AddrInUse => Kind::Conflict,
                _ => Kind::InvalidInput,
            };
            Error::new(kind, format!("cannot listen for other agents: {error}"))
                .with("address", address.to_string())
        })?;
        let gate = Gate::new(limits);
        let handshakes = JoinSet::new();
        Ok(Self {
            listener,
            credentials,
            limits,
            gate,
            handshakes,
            turned_away: Vec::new(),
            turned_away_count: 0,
            told: None,
        })
    }

    /// Where it listens.
    pub fn address(&self) -> Result<SocketAddr> {
        self.listener.local_addr().map_err(|error| {
            Error::new(Kind::Unavailable, format!("the address of a listener is not known: {error}"))
        })
    }

    /// The next client that has proven itself. May be cancelled at any time; no connection is lost by that.
    pub async fn accept(&mut self) -> Connection {
        loop {
            tokio::select! {
                accepted = self.listener.accept() => match accepted {
                    Ok((stream, address)) => self.begin(stream, address),
                    Err(_) => sleep(PAUSE).await,
                },
                Some(done) = self.handshakes.join_next() => match done {
                    Ok(Ok(connection)) => return connection,
                    Ok(Err(error)) => self.note(error),
                    Err(error) => self.note(Error::new(Kind::Internal, format!("a handshake panicked: {error}"))),
                },
            }
        }
    }

    /// Takes the errors of clients that were turned away since the last time: the first ones, and how many
    /// there were.
    pub fn turned_away(&mut self) -> (Vec<Error>, u64) {
        (std::mem::take(&mut self.turned_away), std::mem::take(&mut self.turned_away_count))
    }

    /// What a log is to be told of them, once in a minute at most: why the first was, and how many were.
    pub fn turned_away_to_tell(&mut self) -> Option<Error> {
        if self.told.is_some_and(|told| told.elapsed() < TELL_AGAIN) {
            return None;
        }
        let (errors, count) = self.turned_away();
        let first = errors.into_iter().next()?;
        self.told = Some(Instant::now());
        Some(first.with("clients", count.to_string()))
    }

    /// How many clients are connected.
    pub fn connected(&self) -> usize {
        self.gate.proven()
    }

    fn note(&mut self, error: Error) {
        self.turned_away_count += 1;
        if self.turned_away.len() < 16 {
            self.turned_away.push(error);
        }
    }

    fn begin(&mut self, stream: TcpStream, address: SocketAddr) {
        let Some(place) = self.gate.enter(address.ip()) else {
            let error = Error::new(Kind::Unavailable, "too many clients have not proven themselves yet");
            return self.note(error.with("address", address.to_string()));
        };
        let (credentials, within) = (self.credentials.clone(), self.limits.handshake);
        self.handshakes.spawn(async move {
            let admitted = timeout(within, accept(stream, credentials, || place.admit())).await;
            let admitted = admitted.unwrap_or_else(|_| {
                let message = format!("a client did not prove itself within {} s", within.as_secs_f64());
                Err(Error::new(Kind::Unavailable, message))
            });
            admitted.map_err(|error| error.with("address", address.to_string()))
        });
    }
}
