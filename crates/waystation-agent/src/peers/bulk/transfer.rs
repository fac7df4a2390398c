//! Bringing a version to another agent, or from it, whatever happens on the way.
//!
//! Failures: a connection that is lost or changed by somebody is made anew, and the transfer goes on with what
//! the receiver has not verified yet; after [`Route::attempts`] in a row that bring nothing further it fails,
//! with the last error. Dropping the future ends the connections, and with them the transfer. Invariants: the
//! outcome is one that the receiver has verified.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::spawn_blocking;
use tokio::time::sleep;
use waystation_format::slot::{Key, Sums};
use waystation_format::{Error, Kind, Result};

use super::channel::{Channel, unexpected};
use super::consumer::{Consumer, Fetched};
use super::frame::FrameKind;
use super::intake::Intake;
use super::message::{Fetch, Offer, decode_exactly, decode_sums, encode_longs, transfer_of};
use super::receive::receive;
use super::send::{Order, Work};
use super::service::take_offer;
use super::traffic::Traffic;
use crate::peers::Purpose;
use crate::peers::{Connection, Credentials, End, Peer};
use crate::store::Store;

/// What the first attempt after a failure waits; each further one twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// What an attempt waits at most.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Whom bytes go to or come from, and how.
#[derive(Clone, Debug)]
pub struct Route {
    /// The other agent.
    pub peer: Peer,
    /// What this side proves itself with.
    pub credentials: Credentials,
    /// How what is sent goes.
    pub order: Order,
    /// Over how many connections at once.
    pub streams: usize,
    /// How often in a row it is tried without getting any further.
    pub attempts: u32,
    /// How long a connection may take to be made.
    pub connect_within: Duration,
}

/// How an attempt ended that did not succeed.
struct Setback {
    error: Error,
    /// How many blocks the receiver had before it.
    blocks: u64,
}

impl From<Error> for Setback {
    fn from(error: Error) -> Self {
        Self { error, blocks: 0 }
    }
}

/// Sends a version to another agent; done once that has verified and sealed it.
///
/// NotFound if it is not in the store. What the other agent refuses it with otherwise; Corrupt or Unavailable
/// if it did not get through.
pub async fn replicate(store: &Arc<Store>, key: &Key, route: &Route) -> Result<Sums> {
    let mut patience = Patience::new(route, Some(route.order.pacer.traffic()));
    loop {
        let (store, key, order) = (Arc::clone(store), key.clone(), route.order.clone());
        let work = move |channels: &mut [Channel]| send(&store, &key, &order, channels);
        match attempt(route, route.streams.max(1), work).await {
            Ok(sums) => return Ok(sums),
            Err(setback) => patience.after(setback).await?,
        }
    }
}

/// Receives a version from another agent into a slot of this one, verified and sealed.
///
/// NotFound if it is not there, with that digest if one is given.
pub async fn fetch(intake: &Arc<Intake>, key: &Key, digest: Option<u64>, route: &Route) -> Result<Sums> {
    let mut patience = Patience::new(route, Some(intake.traffic()));
    loop {
        let (intake, wanted) = (Arc::clone(intake), Fetch { key: key.clone(), digest });
        let work = move |channels: &mut [Channel]| {
            let channel = &mut channels[0];
            let offer = ask(channel, &wanted)?;
            let received = take_offer(&intake, channel, &offer, &|_| Ok(()));
            let received = received.inspect_err(|error| channel.tell_failure(error));
            whole(received, || intake.blocks_in_place(&wanted.key))
        };
        match attempt(route, 1, work).await {
            Ok(sums) => return Ok(sums),
            Err(setback) => patience.after(setback).await?,
        }
    }
}

/// Receives a version from another agent past the store: each verified block is given to `consumer`, with
/// where its bytes belong, once, in any order.
pub async fn fetch_past_store<F>(
    key: &Key,
    digest: Option<u64>,
    route: &Route,
    consumer: F,
) -> Result<Fetched>
where
    F: FnMut(u64, &[u8]) -> Result<()> + Send + 'static,
{
    let consumer = Arc::new(Consumer::new(consumer));
    let mut patience = Patience::new(route, None);
    loop {
        let (consumer, wanted) = (Arc::clone(&consumer), Fetch { key: key.clone(), digest });
        let work = move |channels: &mut [Channel]| {
            let channel = &mut channels[0];
            let offer = ask(channel, &wanted)?;
            let received = consumer.expect(&offer).and_then(|()| {
                channel.send(FrameKind::Ready, encode_longs(&[consumer.blocks_in_place()]))?;
                receive(channel, &offer, &*consumer)
            });
            let received = received.inspect_err(|error| channel.tell_failure(error));
            let sums = whole(received, || consumer.blocks_in_place())?;
            Ok(consumer.fetched(sums))
        };
        match attempt(route, 1, work).await {
            Ok(fetched) => return Ok(fetched),
            Err(setback) => patience.after(setback).await?,
        }
    }
}

/// How often it is tried again.
struct Patience<'a> {
    route: &'a Route,
    /// What counts setbacks.
    traffic: Option<&'a Traffic>,
    in_vain: u32,
    furthest: u64,
    pause: Duration,
}

impl<'a> Patience<'a> {
    fn new(route: &'a Route, traffic: Option<&'a Traffic>) -> Self {
        Self { route, traffic, in_vain: 0, furthest: 0, pause: FIRST_PAUSE }
    }

    /// Waits until the next attempt, if there is to be one.
    async fn after(&mut self, Setback { error, blocks }: Setback) -> Result<()> {
        if blocks > self.furthest {
            (self.furthest, self.in_vain, self.pause) = (blocks, 0, FIRST_PAUSE);
        }
        self.in_vain += 1;
        let is_worth_another = matches!(error.kind(), Kind::Unavailable | Kind::Corrupt);
        if !is_worth_another || self.in_vain >= self.route.attempts {
            self.traffic.inspect(|traffic| traffic.note_failed());
            let error = error.with("peer", self.route.peer.name.as_str());
            return Err(error.with("attempts", self.in_vain.to_string()));
        }
        self.traffic.inspect(|traffic| traffic.note_resumed());
        sleep(self.pause).await;
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        Ok(())
    }
}

/// Ends connections when it is dropped.
struct EndAll(Vec<End>);

impl Drop for EndAll {
    fn drop(&mut self) {
        self.0.iter().for_each(End::now);
    }
}

/// Makes connections and does what waits in a thread of its own; ends it if nobody waits for it any more.
async fn attempt<T: Send + 'static>(
    route: &Route,
    streams: usize,
    work: impl FnOnce(&mut [Channel]) -> Result<T, Setback> + Send + 'static,
) -> Result<T, Setback> {
    let mut channels = connect(route, streams).await?;
    let _end_all = EndAll(channels.iter().map(Channel::end).collect());
    let done = spawn_blocking(move || work(&mut channels)).await;
    done.unwrap_or_else(|_| Err(waystation_io::job::panicked().into()))
}

async fn connect(route: &Route, count: usize) -> Result<Vec<Channel>> {
    let mut channels = Vec::with_capacity(count);
    for _ in 0..count {
        let Route { peer, credentials, connect_within, .. } = route;
        let made = Connection::connect(peer, credentials, Purpose::Bulk, *connect_within).await?;
        channels.push(Channel::new(made)?);
    }
    Ok(channels)
}

/// A transfer of one connection ends on it.
fn whole(received: Result<Option<Sums>>, blocks: impl FnOnce() -> u64) -> Result<Sums, Setback> {
    match received {
        Ok(Some(sums)) => Ok(sums),
        Ok(None) => Err(unexpected(FrameKind::Leave).into()),
        Err(error) => Err(Setback { error, blocks: blocks() }),
    }
}

fn send(store: &Store, key: &Key, order: &Order, channels: &mut [Channel]) -> Result<Sums, Setback> {
    let reading = store.read(key)?;
    let tenant = reading.tenant();
    let (contents_bytes, data_bytes) = (tenant.contents_bytes, tenant.data_bytes);
    let offer = Offer { key: key.clone(), contents_bytes, data_bytes };
    let mut blocks = 0;
    for channel in &mut *channels {
        channel.carry(transfer_of(key));
        channel.send(FrameKind::Offer, offer.encode())?;
        let frame = channel.receive()?;
        match frame.kind {
            FrameKind::Ready => [blocks] = decode_exactly(&frame.message)?,
            FrameKind::Sealed => return Ok(check_equal(decode_sums(&frame.message)?, reading.sums())?),
            kind => return Err(unexpected(kind).into()),
        }
    }
    let sent = Work::new(&reading, order, blocks).and_then(|work| work.run(channels));
    sent.map_err(|error| Setback { error, blocks })
}

/// What is there already must be what was to be sent.
fn check_equal(theirs: Sums, ours: Option<Sums>) -> Result<Sums> {
    if ours.is_none_or(|ours| ours == theirs) {
        return Ok(theirs);
    }
    Err(Error::new(Kind::Conflict, "the other agent has something else under the name of this version"))
}

fn ask(channel: &mut Channel, wanted: &Fetch) -> Result<Offer> {
    channel.carry(transfer_of(&wanted.key));
    channel.send(FrameKind::Fetch, wanted.encode())?;
    let offer = Offer::decode(&channel.expect(FrameKind::Offer)?, wanted.key.run)?;
    if offer.key == wanted.key {
        return Ok(offer);
    }
    Err(Error::new(Kind::Corrupt, "the other agent offers another version than it was asked for"))
}
