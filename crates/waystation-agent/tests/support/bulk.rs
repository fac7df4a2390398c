//! Agents that take and give versions, with stores in memory, for the tests.
#![allow(clippy::unwrap_used, dead_code)] // each test uses a part of it

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use waystation_agent::peers::bulk::{
    Admission, BulkService, Intake, LEAST_CHUNK_BYTES, Order, Pacer, Route, fetch_past_store,
};
use waystation_agent::peers::{Credentials, Peer};
use waystation_agent::process;
use waystation_agent::store::{Config, Grant, Store, slot_bytes};
use waystation_agent::writer::SlotWriter;
use waystation_format::checksum::{BLOCK_BYTES, crc64};
use waystation_format::slot::{Entry, Id, ItemBox, Key, State, Sums, Tenant, Version, encode_contents};

use crate::peers::{Fate, LONG, RUN, Way, credentials, limits, listen_as, proxy};
use crate::support::{memory_directory, read};

/// Blocks of a version here; the last one is not whole.
pub const BLOCKS: u64 = 40;
pub const DATA_BYTES: u64 = BLOCKS * BLOCK_BYTES as u64 - 100_000;
const HANG: Duration = Duration::from_secs(120); // far beyond what anything here takes

/// An agent that listens.
pub struct Agent {
    pub store: Arc<Store>,
    pub intake: Arc<Intake>,
    pub service: Arc<BulkService>,
    pub peer: Peer,
    pub directory: TempDir,
    accepting: tokio::task::JoinHandle<()>,
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.accepting.abort();
        self.service.stop();
    }
}

pub fn key(shard: &str, step: u64) -> Key {
    Key { run: RUN, shard: shard.to_owned(), version: Version { epoch: 1, step } }
}

pub fn contents() -> Vec<u8> {
    let item_box = ItemBox { array_shape: vec![DATA_BYTES], offset: vec![0], shape: vec![DATA_BYTES] };
    let (path, dtype) = ("state".to_owned(), "uint8".to_owned());
    encode_contents(&[Entry { path, dtype, item_box, offset: 0, length: DATA_BYTES }], DATA_BYTES).unwrap()
}

/// The data of a step: no two are alike.
pub fn data(step: u64) -> Vec<u8> {
    let long = |index: u64| (index ^ step.rotate_left(40)).wrapping_mul(0xd134_2543_de82_ef95).to_le_bytes();
    let mut data: Vec<u8> = (0..DATA_BYTES.div_ceil(8)).flat_map(long).collect();
    data.truncate(DATA_BYTES as usize);
    data
}

pub fn open(directory: &Path) -> Arc<Store> {
    let slot_bytes = slot_bytes(contents().len() as u64, DATA_BYTES).unwrap();
    let config = Config {
        directory: directory.to_owned(),
        run: RUN,
        topology: Id([2; 16]),
        slot_count: 3,
        slot_bytes,
        versions_per_shard: 2,
        cap_bytes: u64::MAX,
        allow_disk: false,
        threads: 1,
    };
    Arc::new(Store::open(&config).unwrap().0)
}

pub fn begin(store: &Store, key: Key) -> Grant {
    let contents_bytes = contents().len() as u64;
    let writer = process::current().unwrap();
    store.begin(&Tenant { key, contents_bytes, data_bytes: DATA_BYTES, writer }).unwrap()
}

/// Brings some blocks of a step into a slot.
pub fn put_blocks(writer: &mut SlotWriter, step: u64, blocks: std::ops::Range<u64>) {
    writer.put_contents(&contents()).unwrap();
    let data = data(step);
    for index in blocks {
        let block = data.chunks(BLOCK_BYTES).nth(index as usize).unwrap();
        writer.put_block(index, block, crc64(block)).unwrap();
    }
}

/// Brings a version into a store, sealed.
pub fn seal(store: &Store, key: &Key) -> Sums {
    let grant = begin(store, key.clone());
    let mut writer = SlotWriter::open(&grant).unwrap();
    put_blocks(&mut writer, key.version.step, 0..BLOCKS);
    drop(writer);
    store.seal(grant.slot, grant.ticket).unwrap()
}

/// Asserts that a version is in a store, sealed, to the last bit.
pub fn assert_sealed(store: &Store, key: &Key) {
    let is_it = |state: &State| matches!(state, State::Sealed(tenant, _) if tenant.key == *key);
    assert!(store.inventory().iter().any(|header| is_it(&header.state)), "{key:?} is not sealed");
    assert!(read(store, key).unwrap() == data(key.version.step), "{key:?}");
}

/// Asserts that a version of an agent comes past the store over connections that are cut and changed: each of its bytes is
/// given once, in the end.
pub async fn assert_comes_past_store(key: &Key, sums: Sums, route: &Route) {
    let harm = |number, way, at: usize| match (number, way) {
        (0, Way::ToClient) if at == 3_000_000 => Fate::Cut,
        (1, Way::ToClient) if at == 2_000_000 => Fate::Flip,
        _ => Fate::Pass,
    };
    let (address, _sent) = proxy(route.peer.address, harm).await;
    let through = Route { peer: Peer { address, ..route.peer.clone() }, ..route.clone() };
    let consumed = Arc::new(Mutex::new((vec![0; DATA_BYTES as usize], 0)));
    let target = Arc::clone(&consumed);
    let consume = move |offset: u64, bytes: &[u8]| {
        let (data, count) = &mut *target.lock().unwrap();
        data[offset as usize..][..bytes.len()].copy_from_slice(bytes);
        *count += bytes.len();
        Ok(())
    };
    let fetched = fetch_past_store(key, Some(sums.digest), &through, consume).await.unwrap();
    assert_eq!((fetched.contents, fetched.sums), (contents(), sums));
    let consumed = consumed.lock().unwrap();
    assert!(consumed.0 == data(key.version.step) && consumed.1 == DATA_BYTES as usize);
}

pub fn order() -> Order {
    Order { chunk_bytes: 3 * LEAST_CHUNK_BYTES, pacer: Pacer::new(), stall: LONG }
}

/// A way to an agent, for one who is in no hurry to give up.
pub fn route(peer: &Peer) -> Route {
    Route {
        peer: peer.clone(),
        credentials: credentials("sender"),
        order: order(),
        streams: 1,
        attempts: 5,
        connect_within: Duration::from_secs(20),
    }
}

/// An agent of that name that takes and gives.
pub async fn agent(name: &str) -> Agent {
    agent_of(name, memory_directory(), order()).await
}

pub async fn agent_of(name: &str, directory: TempDir, order: Order) -> Agent {
    agent_with(credentials(name), directory, order).await
}

pub async fn agent_with(credentials: Credentials, directory: TempDir, order: Order) -> Agent {
    let store = open(directory.path());
    let intake = Arc::new(Intake::new(Arc::clone(&store)).unwrap());
    let service = BulkService::new(Arc::clone(&intake), order);
    agent_serving(credentials, directory, store, service).await
}

/// An agent that takes what somebody admits.
pub async fn agent_admitting(
    credentials: Credentials,
    directory: TempDir,
    order: Order,
    admission: Arc<dyn Admission>,
) -> Agent {
    let store = open(directory.path());
    let intake = Arc::new(Intake::new(Arc::clone(&store)).unwrap());
    let service = BulkService::admitting(intake, order, admission);
    agent_serving(credentials, directory, store, service).await
}

async fn agent_serving(
    credentials: Credentials,
    directory: TempDir,
    store: Arc<Store>,
    service: Arc<BulkService>,
) -> Agent {
    let intake = Arc::clone(service.intake());
    let (mut listener, peer) = listen_as(credentials, limits()).await;
    let serving = Arc::clone(&service);
    let accepting = tokio::spawn(async move {
        loop {
            serving.serve(listener.accept().await).unwrap();
        }
    });
    Agent { store, intake, service, peer, directory, accepting }
}

/// Waits until something is so.
pub async fn until(mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + HANG;
    while !is_so() {
        assert!(Instant::now() < end, "in vain for {HANG:?}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
