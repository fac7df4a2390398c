//! Stores, and states to put into them, for the tests.
#![allow(clippy::unwrap_used, dead_code)] // each test uses a part of it

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use tempfile::TempDir;
use waystation_agent::process;
use waystation_agent::store::{Config, Grant, Store, slot_bytes};
use waystation_agent::writer::{Placed, SlotWriter};
use waystation_format::checksum::BLOCK_BYTES;
use waystation_format::slot::{Entry, Id, ItemBox, Key, Tenant, Version, encode_contents, place};
use waystation_io::copy::BoxCopy;
use waystation_io::segment::Segment;

pub const RUN: Id = Id([1; 16]);
/// Bytes of the arrays of a state: one is larger than a block, one has no bytes, one is odd.
pub const LENGTHS: [u64; 4] = [BLOCK_BYTES as u64 + 12_345, 0, 77, 200_000];

/// A directory in memory for a store of its own.
pub fn memory_directory() -> TempDir {
    private_directory_in(Path::new("/dev/shm"))
}

/// A directory that nobody else can enter.
pub fn private_directory_in(parent: &Path) -> TempDir {
    tempfile::Builder::new().permissions(Permissions::from_mode(0o700)).tempdir_in(parent).unwrap()
}

pub fn config(directory: &Path) -> Config {
    let (contents, data_bytes) = layout();
    let slot_bytes = slot_bytes(contents.len() as u64, data_bytes).unwrap();
    Config {
        directory: directory.to_owned(),
        run: RUN,
        topology: Id([2; 16]),
        slot_count: 4,
        slot_bytes,
        versions_per_shard: 2,
        cap_bytes: 4 * slot_bytes + 3 * 4096,
        allow_disk: false,
        threads: 1,
    }
}

pub fn open(directory: &Path) -> Store {
    Store::open(&config(directory)).unwrap().0
}

pub fn version(epoch: u64, step: u64) -> Version {
    Version { epoch, step }
}

pub fn key(shard: &str, step: u64) -> Key {
    Key { run: RUN, shard: shard.to_owned(), version: version(1, step) }
}

/// The table of contents of every state here, and how many bytes its data have.
pub fn layout() -> (Vec<u8>, u64) {
    let (offsets, data_bytes) = place(LENGTHS).unwrap();
    let entry = |(index, (&length, &offset)): (usize, (&u64, &u64))| Entry {
        path: format!("layer/{index}"),
        dtype: "uint8".to_owned(),
        item_box: ItemBox { array_shape: vec![length], offset: vec![0], shape: vec![length] },
        offset,
        length,
    };
    let entries: Vec<Entry> = LENGTHS.iter().zip(&offsets).enumerate().map(entry).collect();
    (encode_contents(&entries, data_bytes).unwrap(), data_bytes)
}

/// The arrays of a shard at a step: no two are alike.
pub fn arrays(shard: &str, step: u64) -> Vec<Vec<u8>> {
    let salt = shard
        .bytes()
        .fold(step.wrapping_mul(0x9e37_79b9_7f4a_7c15), |salt, byte| salt.rotate_left(9) ^ u64::from(byte));
    let byte = |array: usize, index: u64| {
        (index.wrapping_mul(0xd134_2543_de82_ef95) ^ salt).rotate_left(array as u32 + 23) as u8
    };
    LENGTHS
        .iter()
        .enumerate()
        .map(|(array, &length)| (0..length).map(|index| byte(array, index)).collect())
        .collect()
}

/// The arrays where they go in a slot.
pub fn parts(arrays: &[Vec<u8>]) -> Vec<Placed> {
    let (offsets, _) = place(LENGTHS).unwrap();
    let placed = |(array, &offset): (&Vec<u8>, &u64)| {
        let length = array.len() as u64;
        let whole = BoxCopy::new(&[length], 1, &[0], &[length], array.as_ptr() as usize, &[1]).unwrap();
        Placed { offset, segment: Segment::new(length, vec![whole]) }
    };
    arrays.iter().zip(&offsets).map(placed).collect()
}

/// What the data of a slot are with these arrays in them.
pub fn data_of(arrays: &[Vec<u8>]) -> Vec<u8> {
    let (offsets, data_bytes) = place(LENGTHS).unwrap();
    let mut data = vec![0; data_bytes as usize];
    for (array, offset) in arrays.iter().zip(offsets) {
        data[offset as usize..][..array.len()].copy_from_slice(array);
    }
    data
}

pub fn tenant(key: Key) -> Tenant {
    let (contents, data_bytes) = layout();
    Tenant { key, contents_bytes: contents.len() as u64, data_bytes, writer: process::current().unwrap() }
}

pub fn begin(store: &Store, shard: &str, step: u64) -> waystation_agent::Result<Grant> {
    store.begin(&tenant(key(shard, step)))
}

/// Fills the slot of a grant with the arrays of its shard and step.
pub fn fill(grant: &Grant) {
    let mut writer = SlotWriter::open(grant).unwrap();
    refill(&mut writer);
}

/// The same, by a writer that is there already.
pub fn refill(writer: &mut SlotWriter) {
    let key = writer.grant().tenant.key.clone();
    let arrays = arrays(&key.shard, key.version.step);
    // SAFETY: the arrays live until the slot is filled.
    unsafe { writer.fill(&layout().0, &parts(&arrays), 2, &|| false) }.unwrap();
}

/// Brings a version of a shard into the store, sealed; returns its slot.
pub fn seal(store: &Store, shard: &str, step: u64) -> u32 {
    let grant = begin(store, shard, step).unwrap();
    fill(&grant);
    store.seal(grant.slot, grant.ticket).unwrap();
    grant.slot
}

/// The same, committed.
pub fn commit(store: &Store, shard: &str, step: u64) -> u32 {
    let slot = seal(store, shard, step);
    assert_eq!(store.commit(version(1, step)).unwrap(), [slot]);
    slot
}

/// The data of a version, read through the store and verified.
pub fn read(store: &Store, key: &Key) -> waystation_agent::Result<Vec<u8>> {
    let reading = store.read(key)?;
    let (_, sums) = reading.tables()?;
    let mut data = Vec::new();
    let mut buffer = vec![0; BLOCK_BYTES];
    for (index, sum) in sums.into_iter().enumerate() {
        let block: &mut [u8; BLOCK_BYTES] = buffer.as_mut_slice().try_into().unwrap();
        let nbytes = reading.read_block(index as u64, sum, block)?;
        data.extend_from_slice(&block[..nbytes]);
    }
    Ok(data)
}

/// Asserts that a version is there, to the last bit.
pub fn assert_whole(store: &Store, shard: &str, step: u64) {
    assert!(read(store, &key(shard, step)).unwrap() == data_of(&arrays(shard, step)), "{shard} at {step}");
}

/// The states of all slots.
pub fn states(store: &Store) -> Vec<&'static str> {
    store.inventory().iter().map(|header| header.state.name()).collect()
}
