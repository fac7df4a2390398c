//! What an agent makes of a store that another one has left, whole or damaged.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};

use crate::support::*;
use waystation_agent::Kind;
use waystation_agent::store::{Adoption, Config, Found, Store};
use waystation_agent::writer::SlotWriter;
use waystation_format::page::PAGE_BYTES;
use waystation_format::slot::{CONTENTS_OFFSET, Id, PROGRESS_OFFSET, Regions, StoreRecord, Writer};

fn adopt(directory: &Path) -> (Store, Adoption) {
    let (store, adoption) = Store::open(&config(directory)).unwrap();
    assert!(!adoption.is_new);
    (store, adoption)
}

fn regions() -> Regions {
    let (contents, data_bytes) = layout();
    Regions::new(contents.len() as u64, data_bytes).unwrap()
}

fn slot_path(directory: &Path, slot: u32) -> PathBuf {
    directory.join(format!("slot-{slot:05}"))
}

fn flip(path: &Path, offset: u64) {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ 0x20], offset).unwrap();
}

/// A store with a committed version in slot 0 and a newer one, sealed, in slot 1.
fn two_versions(directory: &Path) -> Store {
    let store = open(directory);
    assert_eq!((commit(&store, "a", 10), seal(&store, "a", 20)), (0, 1));
    store
}

#[test]
fn what_was_whole_comes_back_as_it_was() {
    let directory = memory_directory();
    drop(two_versions(directory.path()));
    let (store, adoption) = adopt(directory.path());
    assert!(matches!(adoption.slots[..], [Found::Whole, Found::Whole, Found::Free, Found::Free]));
    assert_eq!(states(&store), ["committed", "sealed", "free", "free"]);
    assert_whole(&store, "a", 10);
    assert_whole(&store, "a", 20);
    store.commit(version(1, 20)).unwrap();
    assert_eq!(commit(&store, "a", 30), 0);
}

#[test]
fn a_living_writer_keeps_its_slot_and_a_dead_one_does_not() {
    let directory = memory_directory();
    let store = open(directory.path());
    let kept = begin(&store, "a", 10).unwrap();
    let mut writer = SlotWriter::open(&kept).unwrap();
    let mut dead = tenant(key("b", 10));
    dead.writer = Writer { start_ticks: 1, ..dead.writer };
    let freed = store.begin(&dead).unwrap();
    let mut unseen = tenant(key("c", 10));
    unseen.writer = Writer { namespace: 1, ..unseen.writer };
    store.begin(&unseen).unwrap();
    drop(store);
    let (store, adoption) = adopt(directory.path());
    assert!(matches!(
        adoption.slots[..],
        [Found::InWriting, Found::Abandoned, Found::InWriting, Found::Free]
    ));
    assert_eq!(states(&store), ["writing", "free", "writing", "free"]);
    assert_eq!(store.seal(freed.slot, freed.ticket).unwrap_err().kind(), Kind::Fenced);
    refill(&mut writer);
    store.seal(kept.slot, kept.ticket).unwrap();
    assert_whole(&store, "a", 10);
}

#[test]
fn a_slot_that_somebody_still_maps_is_freed_for_nobody_else() {
    let directory = memory_directory();
    let store = open(directory.path());
    let mut dead = tenant(key("a", 10));
    dead.writer = Writer { start_ticks: 1, ..dead.writer };
    let grant = store.begin(&dead).unwrap();
    // Its process is gone, but something of it still maps the slot.
    let writer = SlotWriter::open(&grant).unwrap();
    assert_eq!(store.reap().unwrap(), [0]);
    for (step, slot) in [(20, 1), (30, 2)] {
        assert_eq!(begin(&store, "b", step).unwrap().slot, slot);
    }
    assert_eq!(begin(&store, "c", 10).unwrap().slot, 3);
    assert_eq!(begin(&store, "c", 20).unwrap_err().kind(), Kind::Unavailable);
    drop(writer);
    assert_eq!(begin(&store, "c", 20).unwrap().slot, 0);
}

#[test]
fn damage_of_every_kind_is_noticed_and_costs_only_its_slot() {
    let parts = regions();
    let last = |range: &std::ops::Range<u64>| [range.start, (range.start + range.end) / 2, range.end - 1];
    let places: Vec<u64> = [last(&parts.contents), last(&parts.checksums), last(&parts.data)].concat();
    for offset in places {
        let directory = memory_directory();
        drop(two_versions(directory.path()));
        flip(&slot_path(directory.path(), 1), offset);
        let (store, adoption) = adopt(directory.path());
        let Found::Damaged(error) = &adoption.slots[1] else { unreachable!("{offset}: {adoption:?}") };
        assert_eq!(error.kind(), Kind::Corrupt);
        assert!(error.to_string().contains("slot-00001"), "{error}");
        assert_eq!(states(&store), ["committed", "quarantined", "free", "free"]);
        assert_eq!(read(&store, &key("a", 20)).unwrap_err().kind(), Kind::NotFound);
        assert_whole(&store, "a", 10);
        // It stays so until somebody discards it; meanwhile the shard uses another slot.
        drop(store);
        let (store, adoption) = adopt(directory.path());
        assert!(matches!(adoption.slots[1], Found::Quarantined));
        assert_eq!(commit(&store, "a", 30), 2);
        store.discard_quarantined(1).unwrap();
        assert_eq!(states(&store), ["committed", "free", "committed", "free"]);
    }
}

#[test]
fn what_means_nothing_may_change() {
    let parts = regions();
    let end = config(Path::new("")).slot_bytes;
    let unused = [PROGRESS_OFFSET, parts.contents.end, parts.checksums.end, parts.data.end];
    for offset in unused.into_iter().filter(|&offset| offset < end) {
        let directory = memory_directory();
        drop(two_versions(directory.path()));
        flip(&slot_path(directory.path(), 1), offset);
        let (store, adoption) = adopt(directory.path());
        assert!(matches!(adoption.slots[1], Found::Whole), "{offset}");
        assert_whole(&store, "a", 20);
    }
}

#[test]
fn a_damaged_header_leaves_the_one_before_and_two_leave_nothing() {
    let directory = memory_directory();
    let store = two_versions(directory.path());
    let newest = store.inventory()[0].sequence % 2;
    drop(store);
    let path = slot_path(directory.path(), 0);
    flip(&path, newest * PAGE_BYTES as u64 + 72);
    let (store, adoption) = adopt(directory.path());
    assert!(matches!(adoption.slots[0], Found::Whole));
    assert_eq!(states(&store)[..2], ["sealed", "sealed"]); // the commit is forgotten, the version is not
    assert_whole(&store, "a", 10);
    drop(store);
    flip(&path, (1 - newest) * PAGE_BYTES as u64 + 72);
    let (store, adoption) = adopt(directory.path());
    assert!(matches!(adoption.slots[0], Found::Damaged(_)));
    assert_eq!(states(&store)[..2], ["quarantined", "sealed"]);
    assert_whole(&store, "a", 20);
}

#[test]
fn a_slot_of_another_place_is_not_taken_for_this_one() {
    let directory = memory_directory();
    drop(two_versions(directory.path()));
    fs::copy(slot_path(directory.path(), 0), slot_path(directory.path(), 2)).unwrap();
    let (store, adoption) = adopt(directory.path());
    assert!(matches!(&adoption.slots[2], Found::Damaged(error) if error.message().contains("another")));
    assert_whole(&store, "a", 10);
}

#[test]
fn a_slot_whose_file_is_gone_or_cut_off_is_made_anew() {
    let directory = memory_directory();
    drop(two_versions(directory.path()));
    fs::remove_file(slot_path(directory.path(), 0)).unwrap();
    let cut = OpenOptions::new().write(true).open(slot_path(directory.path(), 2)).unwrap();
    cut.set_len(CONTENTS_OFFSET).unwrap();
    let (store, adoption) = adopt(directory.path());
    assert!(matches!(adoption.slots[..], [Found::Gone, Found::Whole, Found::Gone, Found::Free]));
    assert_whole(&store, "a", 20);
    assert_eq!(commit(&store, "b", 10), 0);
}

#[test]
fn what_was_committed_last_is_known_where_nothing_of_its_slot_can_be_read() {
    let gone: fn(&Path) = |slot| fs::remove_file(slot).unwrap();
    let headers: fn(&Path) = |slot| [0, 4096].into_iter().for_each(|page| flip(slot, page + 8));
    for damage in [gone, headers] {
        let directory = memory_directory();
        let store = open(directory.path());
        assert_eq!([commit(&store, "a", 10), commit(&store, "a", 20)], [0, 1]);
        drop(store);
        damage(&slot_path(directory.path(), 1));
        let (store, _) = adopt(directory.path());
        assert_eq!(states(&store)[..2], ["committed", "quarantined"]);
        let lost = store.inventory()[1].state.tenant().map(|tenant| tenant.key.clone());
        assert_eq!(lost, Some(key("a", 20)));
        assert_whole(&store, "a", 10);
        // What is older than something that is there is no loss that anybody has to be told of.
        store.discard_quarantined(1).unwrap();
        assert_eq!(commit(&store, "a", 30), 1);
        drop(store);
        damage(&slot_path(directory.path(), 0));
        let (store, _) = adopt(directory.path());
        assert_eq!(store.inventory()[0].state.tenant(), None);
    }
}

#[test]
fn damage_that_comes_later_is_found_by_whoever_reads() {
    let directory = memory_directory();
    let store = two_versions(directory.path());
    flip(&slot_path(directory.path(), 1), regions().data.start);
    assert_eq!(read(&store, &key("a", 20)).unwrap_err().kind(), Kind::Corrupt);
    let found = store.inventory()[1].clone();
    assert!(store.quarantine(&found).unwrap());
    assert!(!store.quarantine(&found).unwrap(), "it is that no more");
    assert_eq!(states(&store)[..2], ["committed", "quarantined"]);
    let short = OpenOptions::new().write(true).open(slot_path(directory.path(), 0)).unwrap();
    short.set_len(regions().data.start + 1).unwrap();
    assert_eq!(read(&store, &key("a", 10)).unwrap_err().kind(), Kind::Corrupt);
}

#[test]
fn what_is_not_a_file_of_ours_is_refused() {
    let directory = memory_directory();
    drop(two_versions(directory.path()));
    let (slot, aside) = (slot_path(directory.path(), 3), directory.path().join("aside"));
    fs::rename(&slot, &aside).unwrap();
    symlink(&aside, &slot).unwrap();
    assert_eq!(Store::open(&config(directory.path())).unwrap_err().kind(), Kind::Corrupt);
    fs::remove_file(&slot).unwrap();
    fs::hard_link(&aside, &slot).unwrap();
    assert_eq!(Store::open(&config(directory.path())).unwrap_err().kind(), Kind::Corrupt);
    fs::remove_file(&aside).unwrap();
    adopt(directory.path());
}

#[test]
fn a_record_in_one_copy_holds_and_without_any_the_slots_say_what_it_was() {
    let directory = memory_directory();
    drop(two_versions(directory.path()));
    let record = directory.path().join("store");
    flip(&record, 20);
    let (store, _) = adopt(directory.path());
    assert_whole(&store, "a", 10);
    let known = store.record();
    drop(store);
    flip(&record, PAGE_BYTES as u64 + 20);
    let (store, _) = adopt(directory.path());
    assert_eq!(StoreRecord { epoch: known.epoch, ..store.record() }, known);
    assert_eq!(store.record().epoch, 1, "that of the newest version");
    assert_whole(&store, "a", 20);
    drop(store);
    // Where the slots are of another run, or say nothing either, nobody knows what it was.
    let refused = |config: &Config| {
        flip(&record, 20);
        flip(&record, PAGE_BYTES as u64 + 20);
        let refused = Store::open(config).unwrap_err();
        flip(&record, 20);
        flip(&record, PAGE_BYTES as u64 + 20);
        refused.kind() == Kind::Corrupt && refused.message().contains("both copies")
    };
    assert!(refused(&Config { run: Id([9; 16]), ..config(directory.path()) }));
    for (slot, page) in (0..4).flat_map(|slot| [(slot, 0), (slot, PAGE_BYTES as u64)]) {
        flip(&slot_path(directory.path(), slot), page + 20);
    }
    assert!(refused(&config(directory.path())));
    // Nor where all files were cut off.
    let slots = (0..4).map(|slot| slot_path(directory.path(), slot));
    for path in slots.chain([record]) {
        OpenOptions::new().write(true).open(path).unwrap().set_len(0).unwrap();
    }
    let refused = Store::open(&config(directory.path())).unwrap_err();
    assert_eq!(refused.kind(), Kind::Corrupt);
    assert!(refused.message().contains("remove the directory: the agent then begins with an empty store"));
}

#[test]
fn what_was_appended_to_a_slot_means_nothing() {
    let directory = memory_directory();
    drop(two_versions(directory.path()));
    let longer = OpenOptions::new().append(true).open(slot_path(directory.path(), 0)).unwrap();
    longer.write_all_at(&[7; 100], config(Path::new("")).slot_bytes).unwrap();
    let (store, adoption) = adopt(directory.path());
    assert!(matches!(adoption.slots[0], Found::Whole));
    assert_whole(&store, "a", 10);
}

/// The header was believed without a look at it, as the agent had it in its own memory: whoever opened the slot could not
/// read it, and no copy on another host was asked for.
#[test]
fn a_header_that_is_damaged_under_a_running_agent_is_written_again() {
    let directory = memory_directory();
    let store = two_versions(directory.path());
    for (slot, pages) in [(0, vec![0]), (1, vec![1]), (1, vec![0, 1]), (2, vec![0, 1])] {
        pages
            .into_iter()
            .for_each(|page| flip(&slot_path(directory.path(), slot), page * PAGE_BYTES as u64 + 90));
        let found = store.verify_all().unwrap();
        assert!(found.damaged.is_empty(), "{found:?}");
        assert_eq!(found.mended.iter().map(|(slot, _)| *slot).collect::<Vec<_>>(), [slot]);
        assert!(store.verify_all().unwrap().mended.is_empty());
    }
    // Another header, in itself whole.
    fs::copy(slot_path(directory.path(), 1), slot_path(directory.path(), 3)).unwrap();
    assert_eq!(store.verify_all().unwrap().mended.len(), 1);
    drop(store);
    let (store, adoption) = adopt(directory.path());
    assert!(
        matches!(adoption.slots[..], [Found::Whole, Found::Whole, Found::Free, Found::Free]),
        "{adoption:?}"
    );
    assert_eq!(states(&store), ["committed", "sealed", "free", "free"]);
}

#[test]
fn a_file_that_goes_under_a_running_agent_is_made_anew() {
    let directory = memory_directory();
    let store = two_versions(directory.path());
    let path = |slot| slot_path(directory.path(), slot);
    // One lost its name, which this agent still has open; one was cut off; and so were two that are free.
    fs::remove_file(path(0)).unwrap();
    for slot in 1..4 {
        OpenOptions::new()
            .write(true)
            .open(path(slot))
            .unwrap()
            .set_len(if slot == 3 { 0 } else { 9000 })
            .unwrap();
    }
    assert!(matches!(commit(&store, "b", 11), 2 | 3), "a free slot is made anew when it is to be given away");
    let found = store.verify_all().unwrap();
    let slots: Vec<u32> = found.mended.iter().map(|(slot, _)| *slot).collect();
    assert!(slots.starts_with(&[0, 1]), "{found:?}");
    assert_eq!(found.damaged.iter().map(|(header, _)| header.slot).collect::<Vec<_>>(), [1]);
    store.release(&store.inventory()[1]).unwrap();
    drop(store);
    let (store, adoption) = adopt(directory.path());
    assert!(matches!(adoption.slots[..2], [Found::Whole, Found::Free]), "{adoption:?}");
    assert_whole(&store, "a", 10);
    assert_whole(&store, "b", 11);
    // A killed agent left a file that it had not finished.
    drop(store);
    let unfinished = directory.path().join("slot-00001.new");
    File::create(&unfinished).unwrap();
    adopt(directory.path());
    assert!(!unfinished.exists());
}

#[test]
fn a_file_that_was_replaced_under_a_running_agent_is_not_trusted() {
    let directory = memory_directory();
    let store = two_versions(directory.path());
    let (aside, path) = (directory.path().join("slot-00000.aside"), slot_path(directory.path(), 0));
    for replace in [
        |aside: &Path, path: &Path| fs::copy(aside, path).map(drop),
        |aside: &Path, path: &Path| symlink(aside, path),
    ] {
        fs::rename(&path, &aside).unwrap();
        replace(&aside, &path).unwrap();
        let found = store.verify_all().unwrap();
        assert_eq!((found.mended.len(), found.damaged.len()), (1, 0), "{found:?}");
        fs::remove_file(&aside).unwrap();
        assert!(store.verify_all().unwrap().mended.is_empty());
        assert_whole(&store, "a", 10);
    }
}

#[test]
fn what_a_killed_agent_left_of_a_store_is_made_anew() {
    let directory = memory_directory();
    drop(open(directory.path()));
    fs::rename(directory.path().join("store"), directory.path().join("store.new")).unwrap();
    File::create(slot_path(directory.path(), 77)).unwrap();
    let (store, adoption) = Store::open(&config(directory.path())).unwrap();
    assert!(adoption.is_new && !slot_path(directory.path(), 77).exists());
    commit(&store, "a", 10);
}
