//! A store in which agents of several hosts have a say.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;

use crate::support::*;
use waystation_agent::store::{SlotFile, Store, discard};
use waystation_agent::writer::SlotWriter;
use waystation_agent::{Kind, process};
use waystation_format::slot::Writer;

#[test]
fn nothing_gives_way_by_itself_and_what_is_released_does() {
    let directory = memory_directory();
    let store = open(directory.path());
    store.share();
    store.raise_epoch(9).unwrap();
    // Versions of earlier epochs come from elsewhere, in any order.
    let slots: Vec<u32> = [30, 20, 10].into_iter().map(|step| seal(&store, "a", step)).collect();
    store.note_commit(version(1, 30)).unwrap();
    assert_eq!(states(&store), ["committed", "sealed", "sealed", "free"]);
    let last = begin(&store, "a", 40).unwrap();
    assert_eq!(begin(&store, "a", 50).unwrap_err().kind(), Kind::Unavailable);
    let headers = store.inventory();
    store.release(&headers[last.slot as usize]).unwrap();
    assert_eq!(states(&store)[3], "writing", "it is its writer's");
    let reading = store.read(&key("a", 30)).unwrap();
    assert_eq!(store.release(&headers[slots[0] as usize]).unwrap_err().kind(), Kind::Unavailable);
    drop(reading);
    for slot in [slots[0], slots[1], slots[1]] {
        store.release(&headers[slot as usize]).unwrap();
    }
    assert_eq!(states(&store), ["free", "free", "sealed", "writing"]);
    assert_whole(&store, "a", 10);
}

#[test]
fn a_slot_that_another_version_has_got_meanwhile_is_not_its_who_was_there_before() {
    let directory = memory_directory();
    let store = open(directory.path());
    store.share();
    let place = seal(&store, "a", 10) as usize;
    let before = store.inventory()[place].clone();
    store.note_commit(version(1, 10)).unwrap();
    store.release(&before).unwrap();
    assert_eq!(states(&store)[place], "free", "a commit is no other version");
    assert_eq!(seal(&store, "b", 20) as usize, place);
    store.release(&before).unwrap();
    assert!(!store.quarantine(&before).unwrap());
    assert_whole(&store, "b", 20);
}

#[test]
fn what_others_have_not_sealed_is_taken_from_them() {
    let directory = memory_directory();
    let store = open(directory.path());
    store.share();
    let own = begin(&store, "a", 1).unwrap();
    let other = Writer { process: 1, ..process::current().unwrap() };
    let theirs =
        store.begin(&waystation_format::slot::Tenant { writer: other, ..tenant(key("b", 1)) }).unwrap();
    store.abort_others(&process::current().unwrap()).unwrap();
    assert_eq!(states(&store), ["writing", "free", "free", "free"]);
    assert_eq!(store.seal(theirs.slot, theirs.ticket).unwrap_err().kind(), Kind::Fenced);
    fill(&own);
    store.seal(own.slot, own.ticket).unwrap();
}

#[test]
fn a_writer_is_given_again_what_it_may_still_map() {
    let directory = memory_directory();
    let store = open(directory.path());
    store.share();
    let first = seal(&store, "a", 1);
    let grant = begin(&store, "a", 2).unwrap();
    let mut writer = SlotWriter::open(&grant).unwrap();
    refill(&mut writer);
    store.seal(grant.slot, grant.ticket).unwrap();
    store.release(&store.inventory()[first as usize]).unwrap();
    store.release(&store.inventory()[grant.slot as usize]).unwrap();
    let other = Writer { process: 1, ..process::current().unwrap() };
    let theirs =
        store.begin(&waystation_format::slot::Tenant { writer: other, ..tenant(key("b", 1)) }).unwrap();
    assert!(![first, grant.slot].contains(&theirs.slot));
    let again = begin(&store, "a", 3).unwrap();
    assert!([first, grant.slot].contains(&again.slot));
}

#[test]
fn damage_is_found_where_it_lies() {
    let directory = memory_directory();
    let store = open(directory.path());
    let slots: Vec<u32> = (1..4).map(|step| seal(&store, &format!("shard {step}"), step)).collect();
    assert!(store.verify_all().unwrap().damaged.is_empty());
    let file = OpenOptions::new().write(true).open(directory.path().join(SlotFile::name(slots[1]))).unwrap();
    let end = file.metadata().unwrap().len();
    file.write_all_at(&[0xa5; 4096], end - 8192).unwrap();
    let damaged = store.verify_all().unwrap().damaged;
    assert_eq!(
        damaged.iter().map(|(header, error)| (header.slot, error.kind())).collect::<Vec<_>>(),
        [(slots[1], Kind::Corrupt)]
    );
    store.release(&store.inventory()[slots[1] as usize]).unwrap();
    assert!(store.verify_all().unwrap().damaged.is_empty());
}

#[test]
fn notes_are_kept_with_the_store_and_go_with_it() {
    let directory = memory_directory();
    let store = open(directory.path());
    assert_eq!(store.notes().unwrap(), None);
    for notes in [&b"first"[..], b"", b"third"] {
        store.write_notes(notes).unwrap();
        assert_eq!(store.notes().unwrap().unwrap(), notes);
    }
    // Killed before the new notes had their name.
    fs::write(directory.path().join("notes.new"), "half").unwrap();
    drop(store);
    let store = open(directory.path());
    assert_eq!(store.notes().unwrap().unwrap(), b"third");
    store.write_notes(b"fourth").unwrap();
    let path = directory.path().join("notes");
    let mut content = fs::read(&path).unwrap();
    content[9] ^= 1;
    fs::write(&path, content).unwrap();
    assert_eq!(store.notes().unwrap_err().kind(), Kind::Corrupt);
    drop(store);
    discard(directory.path(), false).unwrap();
    let (store, adoption) = Store::open(&config(directory.path())).unwrap();
    assert!(adoption.is_new && store.notes().unwrap().is_none());
}
