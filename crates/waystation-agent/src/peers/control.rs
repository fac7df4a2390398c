//! Calls between agents, over connections that have proven themselves.
//!
//! A call is one message and its answer another. A connection carries one call at a time, and is made anew by the call after
//! one that has failed. Failures: the other agent is slow, gone, or refuses (each call has a deadline, and the connection of a
//! call that has failed ends). Invariants: no message is longer than [`MESSAGE_LIMIT_BYTES`]; no call is made twice by itself;
//! who calls is known from the handshake, so no call says it. An answer takes no longer than a look at what is known, so calls
//! are answered where they are read.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::timeout;
use waystation_format::slot::Key;
use waystation_format::{Error, Kind, Result};

use super::bulk::{Fetch, decode_exactly, encode_longs};
use super::{Connection, Credentials, Name, Peer, Purpose, decode_failure, encode_failure};
use crate::store::Store;

/// A message has at most so many bytes: the longest that the agents' own protocol knows, and what stands before it.
pub const MESSAGE_LIMIT_BYTES: usize = (4 << 20) + 16;

/// The first byte of a call: something that only the agents' own protocol understands follows.
const DELIVER: u8 = 1;
/// A key follows, as in a fetch: the digest that the agent's copy of it has is wanted.
const FIND: u8 = 2;
/// The first byte of an answer: what was asked for follows.
const DONE: u8 = 0;
/// A failure follows.
const FAILED: u8 = 1;

/// Takes what other agents tell this one, and by whom it was told. It must not wait.
pub type Deliver = dyn Fn(&Name, &[u8]) -> Result<()> + Send + Sync;

/// Calls one agent.
#[derive(Clone, Debug)]
pub struct ControlClient {
    peer: Peer,
    credentials: Credentials,
    within: Duration,
    /// The connection, unless there is none or a call has it.
    link: Arc<Mutex<Option<Connection>>>,
}

impl ControlClient {
    /// Calls an agent; each call may take so long, the connection included.
    pub fn new(peer: Peer, credentials: Credentials, within: Duration) -> Self {
        Self { peer, credentials, within, link: Arc::default() }
    }

    /// Tells the agent something that only its protocol understands.
    pub async fn deliver(&self, message: &[u8]) -> Result<()> {
        self.call("deliver", &[&[DELIVER], message].concat()).await.map(drop)
    }

    /// The digest of a version that the agent has, sealed; nothing if it has none.
    pub async fn find(&self, key: &Key) -> Result<Option<u64>> {
        let wanted = Fetch { key: key.clone(), digest: None };
        let answer = self.call("find", &[&[FIND], &*wanted.encode()].concat()).await?;
        if answer.is_empty() {
            return Ok(None);
        }
        decode_exactly(&answer).map(|[digest]| Some(digest))
    }

    async fn call(&self, name: &'static str, message: &[u8]) -> Result<Vec<u8>> {
        let called = if message.len() > MESSAGE_LIMIT_BYTES {
            let error = Error::new(Kind::InvalidInput, "the message is longer than any may be");
            Err(error.with("bytes", message.len().to_string()))
        } else {
            timeout(self.within, self.call_in_time(message)).await.unwrap_or_else(|_| {
                let message = format!("the agent did not answer within {} s", self.within.as_secs_f64());
                Err(Error::new(Kind::Unavailable, message))
            })
        };
        called.map_err(|error| error.with("peer", self.peer.name.as_str()).with("call", name))
    }

    async fn call_in_time(&self, message: &[u8]) -> Result<Vec<u8>> {
        let mut link = self.link.lock().await;
        // It is put back only once the call is over: what a call has left in the middle carries no other.
        let mut connection = match link.take().and_then(Connection::unless_over) {
            Some(connection) => connection,
            None => Connection::connect(&self.peer, &self.credentials, Purpose::Control, self.within).await?,
        };
        connection.send(message).await?;
        let answer = connection.receive(MESSAGE_LIMIT_BYTES).await?;
        *link = Some(connection);
        match answer.split_first() {
            Some((&DONE, content)) => Ok(content.to_vec()),
            Some((&FAILED, failure)) => Err(decode_failure(failure)),
            _ => Err(Error::new(Kind::Corrupt, "the answer of another agent means nothing")),
        }
    }
}

/// What answers calls.
pub struct ControlService {
    store: Arc<Store>,
    deliver: Box<Deliver>,
}

impl fmt::Debug for ControlService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ControlService").finish_non_exhaustive()
    }
}

impl ControlService {
    /// Answers for a store, and passes on what is delivered.
    pub fn new(store: Arc<Store>, deliver: Box<Deliver>) -> Arc<Self> {
        Arc::new(Self { store, deliver })
    }

    /// Answers the calls of one connection, until it ends.
    pub async fn serve(self: Arc<Self>, mut connection: Connection) -> Result<()> {
        loop {
            let call = connection.receive(MESSAGE_LIMIT_BYTES).await?;
            let answer = match self.answer(connection.peer(), &call) {
                Ok(content) => [&[DONE], &*content].concat(),
                Err(error) => [&[FAILED], &*encode_failure(&error)].concat(),
            };
            connection.send(&answer).await?;
        }
    }

    fn answer(&self, from: &Name, call: &[u8]) -> Result<Vec<u8>> {
        match call.split_first() {
            Some((&DELIVER, message)) => (self.deliver)(from, message).map(|()| Vec::new()),
            Some((&FIND, wanted)) => {
                let wanted = Fetch::decode(wanted, self.store.record().run)?;
                match self.store.read(&wanted.key) {
                    Ok(reading) => {
                        Ok(reading.sums().map_or_else(Vec::new, |sums| encode_longs(&[sums.digest])))
                    }
                    Err(error) if error.kind() == Kind::NotFound => Ok(Vec::new()),
                    Err(error) => Err(error),
                }
            }
            _ => Err(Error::new(Kind::Unsupported, "there is no such call")),
        }
    }
}
