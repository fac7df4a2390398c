//! What an agent answers to calls.
//!
//! Invariants: an answer takes no longer than a look at what is known, so calls are answered where they are
//! read; no message is longer than [`MESSAGE_LIMIT_BYTES`].

use std::convert::Infallible;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming as IncomingBody;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tonic::body::Body;
use tonic_prost::ProstCodec;
use waystation_format::slot::Header;
use waystation_format::{Error, Kind, Result};

use super::message::{
    Incoming, Inventory, MESSAGE_LIMIT_BYTES, Message, Nothing, Slot, Stats, Status, status_of,
};
use crate::peers::Connection;
use crate::peers::Name;
use crate::peers::bulk::{Intake, Pacer};

/// How many calls of one connection may be open.
const CALLS_PER_CONNECTION: u32 = 64;
/// How often a connection is asked whether it is still there, and how long it may take to answer.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// Takes what other agents tell this one, and by whom it was told. It must not wait.
pub type Deliver = dyn Fn(&Name, Vec<u8>) -> Result<()> + Send + Sync;

/// What answers calls.
pub struct ControlService {
    host: Name,
    intake: Arc<Intake>,
    pacer: Arc<Pacer>,
    deliver: Box<Deliver>,
    delivered: AtomicU64,
    turned_away: AtomicU64,
}

impl fmt::Debug for ControlService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ControlService").field("host", &self.host).finish_non_exhaustive()
    }
}

impl ControlService {
    /// Answers for a host: of its store, of what comes in to that, of what goes out.
    pub fn new(host: Name, intake: Arc<Intake>, pacer: Arc<Pacer>, deliver: Box<Deliver>) -> Arc<Self> {
        let (delivered, turned_away) = (AtomicU64::new(0), AtomicU64::new(0));
        Arc::new(Self { host, intake, pacer, deliver, delivered, turned_away })
    }

    /// Counts clients that the listener has turned away.
    pub fn note_turned_away(&self, count: u64) {
        self.turned_away.fetch_add(count, Ordering::Relaxed);
    }

    /// Answers the calls of one connection, until it ends.
    pub async fn serve(self: Arc<Self>, connection: Connection) -> Result<()> {
        let peer = connection.peer().clone();
        let calls = TowerToHyperService::new(Calls { service: self, peer: peer.clone() });
        let served = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .max_concurrent_streams(CALLS_PER_CONNECTION)
            .keep_alive_interval(Some(KEEP_ALIVE))
            .keep_alive_timeout(KEEP_ALIVE)
            .serve_connection(TokioIo::new(connection), calls)
            .await;
        served.map_err(|error| {
            Error::new(Kind::Unavailable, format!("a connection for calls was lost: {error}"))
                .with("peer", peer.as_str())
        })
    }

    /// What this agent is.
    pub fn status(&self) -> Status {
        let record = self.intake.store().record();
        Status {
            host: self.host.to_string(),
            release: env!("CARGO_PKG_VERSION").to_owned(),
            run: record.run.to_string(),
            store: record.store.to_string(),
            topology: record.topology.to_string(),
            epoch: record.epoch,
            slot_count: record.slot_count,
            slot_bytes: record.slot_bytes,
            versions_per_shard: record.versions_per_shard,
        }
    }

    /// What is in its slots.
    pub fn inventory(&self) -> Inventory {
        Inventory { slots: self.intake.store().inventory().iter().map(slot_of).collect() }
    }

    /// How it is doing.
    pub fn stats(&self) -> Stats {
        let incoming = self.intake.progress().into_iter().map(|(key, blocks_in_place)| Incoming {
            shard: key.shard,
            epoch: key.version.epoch,
            step: key.version.step,
            blocks_in_place,
        });
        Stats {
            incoming: incoming.collect(),
            limit_bytes_per_s: self.pacer.bytes_per_s(),
            is_paused: self.pacer.is_paused(),
            delivered: self.delivered.load(Ordering::Relaxed),
            turned_away: self.turned_away.load(Ordering::Relaxed),
        }
    }

    fn deliver(&self, from: &Name, message: Message) -> Result<Nothing> {
        (self.deliver)(from, message.body)?;
        self.delivered.fetch_add(1, Ordering::Relaxed);
        Ok(Nothing {})
    }
}

fn slot_of(header: &Header) -> Slot {
    let mut slot = Slot { slot: header.slot, state: header.state.name().to_owned(), ..Slot::default() };
    if let Some(tenant) = header.state.tenant() {
        slot.shard.clone_from(&tenant.key.shard);
        (slot.epoch, slot.step) = (tenant.key.version.epoch, tenant.key.version.step);
        (slot.contents_bytes, slot.data_bytes) = (tenant.contents_bytes, tenant.data_bytes);
    }
    slot.digest = header.state.sums().map(|sums| sums.digest);
    slot
}

/// The calls of one connection.
#[derive(Clone, Debug)]
struct Calls {
    service: Arc<ControlService>,
    peer: Name,
}

impl tower::Service<Request<IncomingBody>> for Calls {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<IncomingBody>) -> Self::Future {
        let Self { service, peer } = self.clone();
        Box::pin(async move {
            let answer = match request.uri().path() {
                "/waystation.Agent/Deliver" => {
                    unary(request, move |message| service.deliver(&peer, message)).await
                }
                "/waystation.Agent/GetStatus" => unary(request, move |Nothing {}| Ok(service.status())).await,
                "/waystation.Agent/GetInventory" => {
                    unary(request, move |Nothing {}| Ok(service.inventory())).await
                }
                "/waystation.Agent/GetStats" => unary(request, move |Nothing {}| Ok(service.stats())).await,
                path => tonic::Status::unimplemented(format!("there is no call '{path}'")).into_http(),
            };
            Ok(answer)
        })
    }
}

/// Answers a call of one message with one message.
async fn unary<Q, A>(
    request: Request<IncomingBody>,
    answer: impl Fn(Q) -> Result<A> + Send + Sync + 'static,
) -> Response<Body>
where
    Q: prost::Message + Default + 'static,
    A: prost::Message + Default + 'static,
{
    let answer = Arc::new(answer);
    let respond = tower::service_fn(move |request: tonic::Request<Q>| {
        let answer = Arc::clone(&answer);
        async move {
            let answered = answer(request.into_inner()).map_err(|error| status_of(&error))?;
            if answered.encoded_len() > MESSAGE_LIMIT_BYTES {
                return Err(tonic::Status::internal("the answer is longer than any may be"));
            }
            Ok(tonic::Response::new(answered))
        }
    });
    let mut grpc = tonic::server::Grpc::new(ProstCodec::<A, Q>::default())
        .max_decoding_message_size(MESSAGE_LIMIT_BYTES);
    grpc.unary(respond, request).await
}
