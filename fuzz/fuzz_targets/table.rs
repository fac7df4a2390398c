//! A table that can be decoded is encoded to the same bytes, and reading it by ranges gives the same
//! entries.
//!
//! The first byte picks the table; the rest is its pages without their checksums, which are put in,
//! or the fuzzer would never get past them.

#![no_main]

use libfuzzer_sys::fuzz_target;
use waystation_format::checksum::crc64;
use waystation_format::table::{
    Layout, PAGE_BYTES, PAYLOAD_BYTES, TableKind, decode, encode, validate_together,
};

fuzz_target!(|input: &[u8]| {
    let Some((&choice, content)) = input.split_first() else { return };
    let kind = TableKind::ALL[usize::from(choice) % TableKind::ALL.len()];
    let file = pages(content);
    let Ok(sections) = decode(kind, &file) else { return };
    let slices: Vec<&[u8]> = sections.iter().map(Vec::as_slice).collect();
    assert!(encode(kind, &slices).expect("what was decoded cannot be encoded") == file);
    read_by_ranges(kind, &file, &slices);
    // Tables that do not fit must be refused, not trusted.
    let _ = validate_together(slices[0], slices[slices.len() / 2], slices[slices.len() - 1]);
});

/// The pages that hold `content`, the last one filled up with zeros.
fn pages(content: &[u8]) -> Vec<u8> {
    let mut file = Vec::new();
    for (payload, number) in content.chunks(PAYLOAD_BYTES).zip(0u64..) {
        let start = file.len();
        file.extend_from_slice(payload);
        file.resize(start + PAYLOAD_BYTES, 0);
        let sum = crc64(&[&file[start..], &number.to_le_bytes()].concat());
        file.extend_from_slice(&sum.to_le_bytes());
    }
    file
}

fn read_by_ranges(kind: TableKind, file: &[u8], sections: &[&[u8]]) {
    let layout = Layout::parse(kind, &file[..PAGE_BYTES]).expect("a decoded table has a layout");
    for (section, whole) in layout.sections.iter().zip(sections) {
        let count = section.entry_count;
        for range in [0..count, count / 2..count, count / 3..count / 2] {
            let bytes = section.bytes_of(range.clone()).expect("the range is inside");
            let pages = &file[bytes.start as usize..bytes.end as usize];
            let read = section.read(range.clone(), pages).expect("the pages are intact");
            let width = section.entry_bytes;
            assert!(read == whole[range.start as usize * width..range.end as usize * width]);
        }
    }
}
