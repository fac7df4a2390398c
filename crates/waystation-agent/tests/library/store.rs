//! What a store gives, keeps and refuses.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::support::*;
use waystation_agent::store::{Config, Store, discard};
use waystation_agent::writer::SlotWriter;
use waystation_agent::{Error, Kind};
use waystation_format::checksum::{BLOCK_BYTES, crc64};
use waystation_format::slot::{Id, Writer};
use waystation_io::filesystem::FileSystem;

fn refusal(config: &Config) -> (Kind, String) {
    let error = Store::open(config).unwrap_err();
    (error.kind(), error.to_string())
}

fn kind<T: std::fmt::Debug>(outcome: Result<T, Error>) -> Kind {
    outcome.unwrap_err().kind()
}

#[test]
fn a_version_goes_through_its_states_and_the_newest_committed_one_stays() {
    let directory = memory_directory();
    let store = open(directory.path());
    assert_eq!(states(&store), ["free"; 4]);
    let first = begin(&store, "a", 10).unwrap();
    assert_eq!(kind(begin(&store, "a", 10)), Kind::Conflict);
    fill(&first);
    assert_eq!(kind(store.seal(first.slot, first.ticket + 1)), Kind::Fenced);
    store.seal(first.slot, first.ticket).unwrap();
    assert_whole(&store, "a", 10);
    assert_eq!(store.commit(version(1, 10)).unwrap(), [0]);
    assert_eq!(store.commit(version(1, 10)).unwrap(), [0], "again");
    assert_eq!(store.commit(version(1, 99)).unwrap(), [0; 0]);
    assert_eq!(seal(&store, "a", 20), 1);
    // Neither the newest committed version nor one whose commit may be on its way makes room.
    assert_eq!(kind(begin(&store, "a", 30)), Kind::Unavailable);
    store.commit(version(1, 20)).unwrap();
    assert_eq!(commit(&store, "a", 30), 0);
    assert_eq!(kind(read(&store, &key("a", 10))), Kind::NotFound);
    assert_whole(&store, "a", 20);
    assert_whole(&store, "a", 30);
    assert_eq!(kind(begin(&store, "a", 25)), Kind::Conflict);
    assert_eq!(states(&store), ["committed", "committed", "free", "free"]);
}

#[test]
fn versions_are_given_up_and_retired_explicitly() {
    let directory = memory_directory();
    let store = open(directory.path());
    commit(&store, "a", 10);
    seal(&store, "a", 20);
    seal(&store, "b", 20);
    assert_eq!(store.give_up(version(1, 20)).unwrap(), [1, 2]);
    assert_eq!(store.retire_before(version(1, 10)).unwrap(), [0; 0]);
    assert_eq!(store.retire_before(version(1, 20)).unwrap(), [0]);
    assert_eq!(states(&store), ["free"; 4]);
    let grant = begin(&store, "a", 30).unwrap();
    assert_eq!(kind(store.abort(grant.slot, grant.ticket - 1)), Kind::Fenced);
    store.abort(grant.slot, grant.ticket).unwrap();
    assert_eq!(kind(store.seal(grant.slot, grant.ticket)), Kind::Fenced);
    assert_eq!(kind(SlotWriter::open(&grant)), Kind::Fenced);
    assert_eq!(kind(store.abort(99, 0)), Kind::NotFound);
}

#[test]
fn what_is_read_is_not_overwritten() {
    let directory = memory_directory();
    let store = open(directory.path());
    commit(&store, "a", 10);
    commit(&store, "a", 20);
    let reading = store.read(&key("a", 10)).unwrap();
    assert_eq!(kind(begin(&store, "a", 30)), Kind::Unavailable);
    assert_eq!(kind(store.retire_before(version(1, 20))), Kind::Unavailable);
    assert_whole(&store, "a", 10);
    drop(reading);
    assert_eq!(begin(&store, "a", 30).unwrap().slot, 0);
}

#[test]
fn a_writer_keeps_its_mapping_from_version_to_version_and_nobody_else_is_given_it() {
    let directory = memory_directory();
    let store = open(directory.path());
    let grant = begin(&store, "a", 10).unwrap();
    let mut writer = SlotWriter::open(&grant).unwrap();
    assert_eq!(kind(SlotWriter::open(&grant)), Kind::Conflict);
    refill(&mut writer);
    store.seal(grant.slot, grant.ticket).unwrap();
    store.commit(version(1, 10)).unwrap();
    commit(&store, "a", 20);
    let of_another = Writer { process: 1, ..grant.tenant.writer };
    let mut foreign = tenant(key("a", 30));
    foreign.writer = of_another;
    assert_eq!(kind(store.begin(&foreign)), Kind::Unavailable);
    let again = begin(&store, "a", 30).unwrap();
    assert_eq!(again.slot, grant.slot);
    assert_eq!(kind(writer.renew(&grant)), Kind::Fenced);
    writer.renew(&again).unwrap();
    refill(&mut writer);
    store.seal(again.slot, again.ticket).unwrap();
    assert_whole(&store, "a", 30);
    store.commit(version(1, 30)).unwrap();
    commit(&store, "a", 40);
    drop(writer);
    foreign.key = key("a", 50);
    assert_eq!(store.begin(&foreign).unwrap().slot, grant.slot);
}

#[test]
fn blocks_can_be_read_before_the_seal_and_writing_goes_on_where_it_stopped() {
    let directory = memory_directory();
    let store = open(directory.path());
    let grant = begin(&store, "a", 10).unwrap();
    let mut writer = SlotWriter::open(&grant).unwrap();
    let arrays = arrays("a", 10);
    let data = data_of(&arrays);
    let asked = AtomicUsize::new(0);
    let stop = || asked.fetch_add(1, Ordering::Relaxed) > 0;
    // SAFETY: the arrays outlive the call.
    let stopped = unsafe { writer.fill(&layout().0, &parts(&arrays), 1, &stop) };
    assert_eq!(kind(stopped), Kind::Cancelled);
    let reading = store.read(&key("a", 10)).unwrap();
    assert_eq!((reading.blocks_in_place().unwrap(), writer.blocks_in_place()), (1, 1));
    assert_eq!((reading.sums(), kind(reading.tables())), (None, Kind::Conflict));
    let sums = reading.block_sums(1).unwrap();
    let mut block = vec![0; BLOCK_BYTES];
    let buffer: &mut [u8; BLOCK_BYTES] = block.as_mut_slice().try_into().unwrap();
    assert_eq!(reading.read_block(0, sums[0], buffer).unwrap(), BLOCK_BYTES);
    assert!(buffer[..] == data[..BLOCK_BYTES]);
    assert_eq!(kind(reading.read_block(1, 0, buffer)), Kind::InvalidInput);
    assert_eq!(kind(reading.block_sums(2)), Kind::InvalidInput);
    assert_eq!(kind(store.seal(grant.slot, grant.ticket)), Kind::Corrupt);
    drop(reading);
    // SAFETY: as above.
    unsafe { writer.fill(&layout().0, &parts(&arrays), 1, &|| false) }.unwrap();
    store.seal(grant.slot, grant.ticket).unwrap();
    assert_whole(&store, "a", 10);
}

#[test]
fn blocks_from_a_peer_are_verified_before_they_count() {
    let directory = memory_directory();
    let store = open(directory.path());
    let grant = begin(&store, "a", 10).unwrap();
    let mut writer = SlotWriter::open(&grant).unwrap();
    let data = data_of(&arrays("a", 10));
    writer.put_contents(&layout().0).unwrap();
    assert_eq!(kind(writer.put_contents(&[0; 3])), Kind::InvalidInput);
    let blocks: Vec<&[u8]> = data.chunks(BLOCK_BYTES).collect();
    assert_eq!(kind(writer.put_block(1, blocks[1], crc64(blocks[1]) ^ 1)), Kind::Corrupt);
    assert_eq!(kind(writer.put_block(0, blocks[1], crc64(blocks[1]))), Kind::InvalidInput);
    assert_eq!(kind(writer.put_block(blocks.len() as u64, b"", crc64(b""))), Kind::InvalidInput);
    for (index, block) in blocks.iter().enumerate().rev() {
        assert_eq!(writer.blocks_in_place(), 0);
        writer.put_block(index as u64, block, crc64(block)).unwrap();
    }
    assert_eq!(writer.blocks_in_place(), blocks.len() as u64);
    store.seal(grant.slot, grant.ticket).unwrap();
    assert_whole(&store, "a", 10);
}

#[test]
fn plans_that_do_not_fit_are_refused() {
    let directory = memory_directory();
    let store = open(directory.path());
    let mut large = tenant(key("a", 10));
    large.data_bytes = config(directory.path()).slot_bytes;
    assert_eq!(kind(store.begin(&large)), Kind::InvalidInput);
    let mut other = tenant(key("a", 10));
    other.key.run = Id([8; 16]);
    assert_eq!(kind(store.begin(&other)), Kind::Conflict);
    let grant = begin(&store, "a", 10).unwrap();
    let mut writer = SlotWriter::open(&grant).unwrap();
    let arrays = arrays("a", 10);
    let mut placed = parts(&arrays);
    placed.swap(0, 3);
    // SAFETY: the arrays outlive the calls.
    let mut fill = |contents: &[u8], parts: &[_]| kind(unsafe { writer.fill(contents, parts, 1, &|| false) });
    assert_eq!(fill(&layout().0, &placed), Kind::InvalidInput);
    placed.swap(0, 3);
    placed[3].offset += 4096;
    assert_eq!(fill(&layout().0, &placed), Kind::InvalidInput);
    assert_eq!(fill(b"short", &[]), Kind::InvalidInput);
}

#[test]
fn an_epoch_that_is_over_is_fenced_out_also_after_a_restart() {
    let directory = memory_directory();
    let store = open(directory.path());
    seal(&store, "a", 10);
    store.raise_epoch(2).unwrap();
    store.raise_epoch(1).unwrap();
    assert_eq!(store.record().epoch, 2);
    drop(store);
    let store = open(directory.path());
    assert_eq!(store.record().epoch, 2);
    assert_eq!(kind(begin(&store, "a", 20)), Kind::Fenced);
    assert_eq!(kind(store.commit(version(1, 10))), Kind::Fenced);
    let mut tenant = tenant(key("a", 20));
    tenant.key.version.epoch = 2;
    store.begin(&tenant).unwrap();
}

#[test]
fn one_agent_has_a_store_at_a_time() {
    let directory = memory_directory();
    let store = open(directory.path());
    let (kind, message) = refusal(&config(directory.path()));
    assert_eq!(kind, Kind::Conflict);
    assert!(message.contains(&format!("process: {}", std::process::id())), "{message}");
    assert_eq!(discard(directory.path(), false).unwrap_err().kind(), Kind::Conflict);
    drop(store);
    open(directory.path());
}

#[test]
fn another_run_topology_or_size_is_refused_until_somebody_acts() {
    let directory = memory_directory();
    commit(&open(directory.path()), "a", 10);
    let ours = config(directory.path());
    let of_other_run = Config { run: Id([9; 16]), ..ours.clone() };
    assert_eq!(refusal(&of_other_run).0, Kind::Conflict);
    assert_eq!(refusal(&Config { slot_count: 3, ..ours.clone() }).0, Kind::Conflict);
    let elsewhere = Config { topology: Id([3; 16]), ..ours.clone() };
    assert_eq!(refusal(&elsewhere).0, Kind::Conflict);
    open(directory.path()).rebind(elsewhere.topology).unwrap();
    let (store, _) = Store::open(&elsewhere).unwrap();
    assert_whole(&store, "a", 10);
    let grant = begin(&store, "a", 20).unwrap();
    let writer = SlotWriter::open(&grant).unwrap();
    drop(store);
    assert_eq!(discard(directory.path(), false).unwrap_err().kind(), Kind::Conflict, "a slot is mapped");
    drop(writer);
    discard(directory.path(), false).unwrap();
    let (store, adoption) = Store::open(&of_other_run).unwrap();
    assert!(adoption.is_new);
    assert_eq!(states(&store), ["free"; 4]);
}

#[test]
fn a_directory_must_be_private_and_in_memory() {
    let parent = memory_directory();
    let place = parent.path().join("store");
    open(&place);
    assert_eq!(fs::metadata(&place).unwrap().mode() & 0o777, 0o700);
    for entry in fs::read_dir(&place).unwrap() {
        assert_eq!(entry.unwrap().metadata().unwrap().mode() & 0o777, 0o600);
    }
    let link = parent.path().join("link");
    symlink(&place, &link).unwrap();
    assert!(
        matches!(refusal(&config(&link)), (Kind::InvalidInput, message) if message.contains("is a link"))
    );
    fs::set_permissions(&place, Permissions::from_mode(0o750)).unwrap();
    assert!(
        matches!(refusal(&config(&place)), (Kind::InvalidInput, message) if message.contains("chmod 700"))
    );
    assert_eq!(refusal(&config(&parent.path().join("no/such"))).0, Kind::NotFound);
    let file = parent.path().join("file");
    fs::write(&file, b"").unwrap();
    assert_eq!(refusal(&config(&file)).0, Kind::InvalidInput);

    let other = memory_directory();
    fs::write(other.path().join("precious"), b"x").unwrap();
    assert!(
        matches!(refusal(&config(other.path())), (Kind::InvalidInput, message) if message.contains("precious"))
    );

    let disk = private_directory_in(Path::new(env!("CARGO_TARGET_TMPDIR")));
    if !FileSystem::of(disk.path()).unwrap().is_memory() {
        let on_disk = config(disk.path());
        assert!(
            matches!(refusal(&on_disk), (Kind::InvalidInput, message) if message.contains("not in memory"))
        );
        Store::open(&Config { allow_disk: true, ..on_disk }).unwrap();
    }
}

/// Bytes of memory that a directory has, but for the page of the notes, which is written with the first commit.
fn used_bytes(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).unwrap().map(Result::unwrap);
    let counted = entries.filter(|entry| entry.file_name() != "notes");
    counted.map(|entry| entry.metadata().unwrap().blocks() * 512).sum()
}

#[test]
fn memory_is_taken_at_the_start_and_never_more_than_allowed() {
    let directory = memory_directory();
    let config = config(directory.path());
    let short = Config { cap_bytes: config.cap_bytes - 1, ..config.clone() };
    assert_eq!(refusal(&short).0, Kind::InvalidInput);
    let store = Store::open(&config).unwrap().0;
    let before = used_bytes(directory.path());
    assert!(u64::from(config.slot_count) * config.slot_bytes <= before && before <= config.cap_bytes);
    for step in 1..6 {
        commit(&store, "a", step);
        commit(&store, "b", 100 + step);
        assert_eq!(used_bytes(directory.path()), before);
    }
    let single = Config { versions_per_shard: 1, ..config.clone() };
    let few = Config { slot_count: 1, ..config.clone() };
    let odd = Config { slot_bytes: config.slot_bytes + 1, cap_bytes: u64::MAX, ..config.clone() };
    let elsewhere = memory_directory();
    for wrong in [single, few, odd] {
        let wrong = Config { directory: elsewhere.path().to_owned(), ..wrong };
        assert_eq!(refusal(&wrong).0, Kind::InvalidInput);
    }
    let slot_bytes = 1 << 50;
    let huge = Config { directory: elsewhere.path().to_owned(), slot_bytes, cap_bytes: u64::MAX, ..config };
    assert_eq!(refusal(&huge).0, Kind::Unavailable);
}
