//! Calling another agent.
//!
//! One connection carries all calls to one agent; it is made when it is needed, and made anew by the call
//! after one that has failed. Invariants: each call has a deadline; no call is made twice by itself.

use std::sync::Arc;
use std::time::Duration;

use http::Uri;
use http::uri::PathAndQuery;
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::sync::Mutex;
use tokio::task::AbortHandle;
use tokio::time::timeout;
use tonic::body::Body;
use tonic_prost::ProstCodec;
use waystation_format::{Error, Kind, Result};

use super::message::{Inventory, MESSAGE_LIMIT_BYTES, Message, Nothing, Stats, Status, error_of};
use crate::peers::Purpose;
use crate::peers::{Connection, Credentials, Peer};

/// How often a connection is asked whether it is still there, and how long it may take to answer.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// Calls one agent.
#[derive(Clone, Debug)]
pub struct ControlClient {
    peer: Peer,
    credentials: Credentials,
    within: Duration,
    link: Arc<Mutex<Option<Link>>>,
}

/// A connection for calls; it ends with this.
#[derive(Debug)]
struct Link {
    requests: SendRequest<Body>,
    driver: AbortHandle,
}

impl Drop for Link {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl ControlClient {
    /// Calls an agent; each call may take so long, the connection included.
    pub fn new(peer: Peer, credentials: Credentials, within: Duration) -> Self {
        Self { peer, credentials, within, link: Arc::default() }
    }

    /// Tells the agent something that only its protocol understands.
    pub async fn deliver(&self, message: Vec<u8>) -> Result<()> {
        if message.len() > MESSAGE_LIMIT_BYTES - 16 {
            return Err(Error::new(Kind::InvalidInput, "the message is longer than any may be")
                .with("bytes", message.len().to_string()));
        }
        let Nothing {} = self.call("/waystation.Agent/Deliver", Message { body: message }).await?;
        Ok(())
    }

    /// What the agent is.
    pub async fn status(&self) -> Result<Status> {
        self.call("/waystation.Agent/GetStatus", Nothing {}).await
    }

    /// What is in its slots.
    pub async fn inventory(&self) -> Result<Inventory> {
        self.call("/waystation.Agent/GetInventory", Nothing {}).await
    }

    /// How it is doing.
    pub async fn stats(&self) -> Result<Stats> {
        self.call("/waystation.Agent/GetStats", Nothing {}).await
    }

    async fn call<Q, A>(&self, path: &'static str, message: Q) -> Result<A>
    where
        Q: prost::Message + Default + 'static,
        A: prost::Message + Default + 'static,
    {
        let called = timeout(self.within, self.call_in_time(path, message)).await;
        let called = called.unwrap_or_else(|_| {
            let message = format!("the agent did not answer within {} s", self.within.as_secs_f64());
            Err(Error::new(Kind::Unavailable, message))
        });
        called.map_err(|error| {
            error.with("peer", self.peer.name.as_str()).with("call", path.trim_start_matches("/waystation."))
        })
    }

    async fn call_in_time<Q, A>(&self, path: &'static str, message: Q) -> Result<A>
    where
        Q: prost::Message + Default + 'static,
        A: prost::Message + Default + 'static,
    {
        let requests = self.requests().await?;
        let send = tower::service_fn(move |request: http::Request<Body>| {
            let mut requests = requests.clone();
            async move { requests.send_request(request).await }
        });
        let mut grpc = tonic::client::Grpc::with_origin(send, Uri::from_static("http://agent"))
            .max_decoding_message_size(MESSAGE_LIMIT_BYTES);
        let path = PathAndQuery::from_static(path);
        let answer = grpc.unary(tonic::Request::new(message), path, ProstCodec::<Q, A>::default()).await;
        answer.map(tonic::Response::into_inner).map_err(|status| error_of(&status))
    }

    /// The connection, if it is still there, or a new one.
    async fn requests(&self) -> Result<SendRequest<Body>> {
        let mut link = self.link.lock().await;
        if let Some(link) = link.as_ref().filter(|link| !link.requests.is_closed()) {
            return Ok(link.requests.clone());
        }
        let made = Connection::connect(&self.peer, &self.credentials, Purpose::Control, self.within).await?;
        let (requests, driver) = Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .keep_alive_interval(Some(KEEP_ALIVE))
            .keep_alive_timeout(KEEP_ALIVE)
            .handshake(TokioIo::new(made))
            .await
            .map_err(|error| Error::new(Kind::Unavailable, format!("the agent takes no calls: {error}")))?;
        let driver = tokio::spawn(driver).abort_handle();
        *link = Some(Link { requests: requests.clone(), driver });
        Ok(requests)
    }
}
