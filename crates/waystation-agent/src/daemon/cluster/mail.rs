//! What agents tell each other besides bytes of slots, and how it gets there.
//!
//! There is a queue for each agent, and a task that sends what is in it, one message after the other: who is slow or gone
//! keeps nobody else waiting. A queue that is full loses its oldest message, and one whose agent cannot be reached all of
//! them: machines repeat themselves, and what is new is worth more.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::de::DeserializeOwned;
use tokio::net::lookup_host;
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;
use tokio::time::sleep;
use waystation_format::{Error, Kind, Result};

use super::founding::Announcement;
use crate::daemon::log;
use crate::peers::{ControlClient, Credentials, Name, Peer};
use crate::protocol::wire::{self, Envelope};

/// So many messages wait for one agent at most.
const MOST_WAITING: usize = 256;
/// How long a message may take.
const WITHIN: Duration = Duration::from_secs(3);
/// How long to wait for an agent that cannot be reached.
const PAUSE: Duration = Duration::from_millis(200);

const ANNOUNCEMENT: u8 = 1;
const ENVELOPE: u8 = 2;
const BEAT: u8 = 3;

/// What one agent tells another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Letter {
    /// Before the run is founded, and to those who do not know that it is.
    Announcement(Announcement),
    /// From then on.
    Envelope(Envelope),
    /// That the sender is there, though it has nothing to say.
    Beat,
}

impl Letter {
    /// A byte that says which it is, then JSON.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let (tag, body) = match self {
            Letter::Announcement(told) => {
                let written = serde_json::to_vec(told);
                let failed =
                    |error| Error::new(Kind::Internal, format!("a message cannot be written: {error}"));
                (ANNOUNCEMENT, written.map_err(failed)?)
            }
            Letter::Envelope(envelope) => (ENVELOPE, wire::encode(envelope)?),
            Letter::Beat => (BEAT, Vec::new()),
        };
        Ok([&[tag], body.as_slice()].concat())
    }

    /// What was written, among so many agents. InvalidInput if it means nothing.
    pub fn decode(written: &[u8], agents: usize) -> Result<Self> {
        match written.split_first() {
            Some((&ANNOUNCEMENT, body)) => parse(body).map(Letter::Announcement),
            Some((&ENVELOPE, body)) => wire::decode(body, agents).map(Letter::Envelope),
            Some((&BEAT, [])) => Ok(Letter::Beat),
            _ => Err(Error::new(Kind::InvalidInput, "a message of another agent is of no known kind")),
        }
    }
}

fn parse<M: DeserializeOwned>(body: &[u8]) -> Result<M> {
    serde_json::from_slice(body).map_err(|error| {
        Error::new(Kind::InvalidInput, format!("a message of another agent has no meaning: {error}"))
    })
}

/// Where another agent is, which may change.
#[derive(Debug)]
pub struct Place {
    name: Name,
    address: Mutex<String>,
    moved: Notify,
}

impl Place {
    /// The agent of a host, at an address.
    pub fn new(name: Name, address: String) -> Arc<Self> {
        Arc::new(Self { name, address: Mutex::new(address), moved: Notify::new() })
    }

    /// It is elsewhere from now on.
    pub fn move_to(&self, address: &str) {
        let mut known = self.address.lock().unwrap_or_else(PoisonError::into_inner);
        if *known != address {
            address.clone_into(&mut known);
            self.moved.notify_waiters();
        }
    }

    /// Waits until it is elsewhere than when this was called.
    pub fn moved(&self) -> Notified<'_> {
        self.moved.notified()
    }

    /// What to call it.
    pub fn name(&self) -> &Name {
        &self.name
    }

    /// Where it is.
    pub fn address(&self) -> String {
        self.address.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Finds out where that is now. Unavailable if nobody knows.
    pub async fn peer(&self) -> Result<Peer> {
        let address = self.address();
        let unknown = |why: String| {
            let message = format!("the address of an agent cannot be found: {why}");
            Error::new(Kind::Unavailable, message).with("peer", self.name.as_str()).with("path", &*address)
        };
        let mut found = lookup_host(&address).await.map_err(|error| unknown(error.to_string()))?;
        let found = found.next().ok_or_else(|| unknown("the name has no address".to_owned()))?;
        Ok(Peer { name: self.name.clone(), address: found })
    }
}

/// The messages for one agent.
#[derive(Debug)]
pub struct Outbox {
    place: Arc<Place>,
    waiting: Mutex<VecDeque<Vec<u8>>>,
    changed: Notify,
}

impl Outbox {
    /// Sends what is put into it, as long as the runtime runs.
    pub fn open(place: Arc<Place>, credentials: Credentials, runtime: &Handle) -> Arc<Self> {
        let outbox = Arc::new(Self { place, waiting: Mutex::default(), changed: Notify::new() });
        let sending = Arc::clone(&outbox);
        runtime.spawn(async move { sending.send_all(&credentials).await });
        outbox
    }

    /// Sends a message, unless too many come after it before it is its turn.
    pub fn put(&self, message: Vec<u8>) {
        let mut waiting = self.lock();
        if waiting.len() >= MOST_WAITING {
            waiting.pop_front();
        }
        waiting.push_back(message);
        drop(waiting);
        self.changed.notify_one();
    }

    async fn send_all(&self, credentials: &Credentials) {
        let mut client: Option<(String, ControlClient)> = None;
        let mut failure: Option<Kind> = None;
        loop {
            let Some(message) = self.next() else {
                self.changed.notified().await;
                continue;
            };
            let sent = self.send(&mut client, credentials, message).await;
            let failed = sent.as_ref().err().map(Error::kind);
            match sent {
                Ok(()) if failure.is_some() => {
                    log::line("peer_reached", &[("peer", self.place.name.to_string())])
                }
                Err(error) if failed != failure => log::error("peer_lost", &error),
                _ => {}
            }
            failure = failed;
            if failure.is_some() {
                client = None;
                self.lock().clear();
                sleep(PAUSE).await;
            }
        }
    }

    async fn send(
        &self,
        client: &mut Option<(String, ControlClient)>,
        credentials: &Credentials,
        message: Vec<u8>,
    ) -> Result<()> {
        let address = self.place.address();
        let known = client.take().filter(|(of, _)| *of == address);
        let called = match known {
            Some((_, known)) => known,
            None => ControlClient::new(self.place.peer().await?, credentials.clone(), WITHIN),
        };
        let sent = called.deliver(&message).await;
        *client = Some((address, called));
        sent
    }

    fn next(&self) -> Option<Vec<u8>> {
        self.lock().pop_front()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Vec<u8>>> {
        // Messages are put in and taken out whole.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::message::ToAgent;
    use crate::protocol::names::Epoch;

    #[test]
    fn letters_read_as_they_were_written() {
        let told = Announcement { hosts: 7, view: vec![1, 0], is_blank: true };
        let message = ToAgent::Prepare { epoch: Epoch { number: 2, controller: 9 } };
        for letter in [Letter::Announcement(told), Letter::Envelope(Envelope::ToAgent(message)), Letter::Beat]
        {
            assert_eq!(Letter::decode(&letter.encode().unwrap(), 2).unwrap(), letter);
        }
        for hostile in [&b""[..], b"\x00{}", b"\x01{}", b"\x02{}", b"\x03{}", b"\x04", b"{}"] {
            assert_eq!(Letter::decode(hostile, 2).unwrap_err().kind(), Kind::InvalidInput);
        }
    }
}
