//! Whatever is accepted of a slot's header, a store's record or a table of contents is written again to the
//! same bytes, and of two copies the one that is whole is found.
//!
//! The first byte picks which; pages get their checksums here, or the fuzzer would never get past them.

#![no_main]

use libfuzzer_sys::fuzz_target;
use waystation_format::page::{self, PAYLOAD_BYTES};
use waystation_format::slot::{Header, Record, StoreRecord, decode_contents, encode_contents, newest};

const DATA_BYTES: u64 = 1 << 40;

fuzz_target!(|input: &[u8]| {
    let Some((&choice, content)) = input.split_first() else { return };
    match choice % 3 {
        0 => check_record::<Header>(content),
        1 => check_record::<StoreRecord>(content),
        _ => check_contents(content),
    }
});

fn check_record<R: Record>(content: &[u8]) {
    let mut pages = Vec::new();
    let payloads = content.chunks(PAYLOAD_BYTES).chain(std::iter::repeat(&[][..]));
    for (number, payload) in (0u64..2).zip(payloads) {
        page::push(&mut pages, number, payload);
    }
    let copies = pages.chunks(page::PAGE_BYTES).zip(0u64..);
    let whole: Vec<R> = copies
        .filter_map(|(copy, number)| {
            let record = R::decode(copy, number).ok()?;
            let again = record.encode().expect("what was read cannot be written");
            assert!(again == (number, copy.to_vec()));
            Some(record)
        })
        .collect();
    if let Ok(found) = newest::<R>(&pages) {
        assert_eq!(found.other_is_damaged, whole.len() == 1);
        let greatest = whole.iter().map(Record::sequence).max();
        assert_eq!(Some(found.record.sequence()), greatest);
    }
}

fn check_contents(contents: &[u8]) {
    let Ok(entries) = decode_contents(contents, DATA_BYTES) else { return };
    assert!(encode_contents(&entries, DATA_BYTES).expect("what was read cannot be written") == contents);
}
