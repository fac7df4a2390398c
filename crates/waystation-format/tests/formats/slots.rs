//! Slots: what is written is read again, and whatever else stands there is refused.

use proptest::collection::vec;
use proptest::prelude::*;
use waystation_format::checksum::{BLOCK_BYTES, crc64};
use waystation_format::page::{PAGE_BYTES, PAYLOAD_BYTES};
use waystation_format::slot::{
    Entry, Header, Id, ItemBox, Key, Record, Regions, State, StoreRecord, Sums, Tenant, Version, Writer,
    decode_contents, digest, encode_contents, newest, place,
};
use waystation_format::{Error, Kind};

const SLOT_BYTES: u64 = 64 << 20;

fn tenant(shard: &str, contents_bytes: u64, data_bytes: u64) -> Tenant {
    Tenant {
        key: Key { run: Id([7; 16]), shard: shard.to_owned(), version: Version { epoch: 3, step: 1200 } },
        contents_bytes,
        data_bytes,
        writer: Writer { boot: Id([9; 16]), namespace: 4_026_531_836, process: 77, start_ticks: 123_456 },
    }
}

fn header(sequence: u64, state: State) -> Header {
    Header { store: Id([5; 16]), slot: 2, slot_bytes: SLOT_BYTES, sequence, state }
}

fn states() -> Vec<State> {
    let sums = Sums { contents: 0x0123, digest: 0x4567 };
    vec![
        State::Free,
        State::Writing(tenant("0/4", 800, 5 << 20)),
        State::Sealed(tenant("0/4", 800, 5 << 20), sums),
        State::Committed(tenant("0/4", 800, 5 << 20), sums),
        State::Quarantined(Some(tenant("0/4", 800, 5 << 20))),
        State::Quarantined(None),
    ]
}

fn record(sequence: u64) -> StoreRecord {
    StoreRecord {
        store: Id([5; 16]),
        run: Id([7; 16]),
        topology: Id([1; 16]),
        epoch: 3,
        slot_bytes: SLOT_BYTES,
        slot_count: 4,
        versions_per_shard: 2,
        sequence,
    }
}

/// The page with its checksum made right again.
fn resealed(mut page: Vec<u8>, number: u64) -> Vec<u8> {
    let sum = crc64(&[&page[..PAYLOAD_BYTES], &number.to_le_bytes()].concat());
    page[PAYLOAD_BYTES..].copy_from_slice(&sum.to_le_bytes());
    page
}

fn pages(copies: [&Header; 2]) -> Vec<u8> {
    let mut pages = vec![0; 2 * PAGE_BYTES];
    for copy in copies {
        let (number, page) = copy.encode().unwrap();
        pages[number as usize * PAGE_BYTES..][..PAGE_BYTES].copy_from_slice(&page);
    }
    pages
}

#[test]
fn headers_have_the_specified_bytes() {
    let sums = Sums { contents: 0x0123, digest: 0x4567 };
    let (number, page) = header(9, State::Committed(tenant("0/4", 800, 5 << 20), sums)).encode().unwrap();
    assert_eq!((number, page.len()), (1, PAGE_BYTES));
    let long = |at: usize| u64::from_le_bytes(page[at..at + 8].try_into().unwrap());
    let word = |at: usize| u32::from_le_bytes(page[at..at + 4].try_into().unwrap());
    assert_eq!(&page[..8], b"WSTMSLOT");
    assert_eq!((word(8), word(12), long(16)), (1, 3, 9));
    assert_eq!((&page[24..40], long(40), word(48), word(52)), (&[5; 16][..], SLOT_BYTES, 2, 3));
    assert_eq!((&page[56..72], long(72), long(80)), (&[7; 16][..], 3, 1200));
    assert_eq!((long(88), long(96), long(104), long(112)), (800, 5 << 20, 0x0123, 0x4567));
    assert_eq!((&page[120..136], long(136), long(144)), (&[9; 16][..], 4_026_531_836, 123_456));
    assert_eq!((word(152), word(156), &page[160..163]), (77, 0, &b"0/4"[..]));
    assert!(page[163..PAYLOAD_BYTES].iter().all(|&byte| byte == 0));
}

#[test]
fn every_state_comes_back_and_every_changed_bit_is_noticed() {
    for state in states() {
        let written = header(4, state);
        let (number, page) = written.encode().unwrap();
        assert_eq!(Header::decode(&page, number).unwrap(), written);
        assert!(Header::decode(&page, 1 - number).is_err(), "in the place of the other copy");
        for index in 0..PAGE_BYTES {
            let mut changed = page.clone();
            changed[index] ^= 1 << (index % 8);
            assert_eq!(Header::decode(&changed, number).unwrap_err().kind(), Kind::Corrupt, "byte {index}");
        }
        for length in [0, 1, 52, PAGE_BYTES - 1] {
            assert_eq!(Header::decode(&page[..length], number).unwrap_err().kind(), Kind::Corrupt);
        }
    }
}

#[test]
fn what_a_checksum_vouches_for_but_no_writer_writes_is_refused() {
    let kind_of = |at: usize, bytes: &[u8]| {
        let (number, mut page) = header(4, states().remove(1)).encode().unwrap();
        page[at..at + bytes.len()].copy_from_slice(bytes);
        Header::decode(&resealed(page, number), number).unwrap_err().kind()
    };
    assert_eq!(kind_of(0, b"WSTFILES"), Kind::Corrupt);
    assert_eq!(kind_of(8, &2u32.to_le_bytes()), Kind::Unsupported);
    assert_eq!(kind_of(12, &5u32.to_le_bytes()), Kind::Corrupt); // no such state
    assert_eq!(kind_of(12, &0u32.to_le_bytes()), Kind::Corrupt); // free, but with a tenant
    assert_eq!(kind_of(16, &5u64.to_le_bytes()), Kind::Corrupt); // the other copy's sequence
    assert_eq!(kind_of(52, &0u32.to_le_bytes()), Kind::Corrupt); // a shard without a name
    assert_eq!(kind_of(52, &u32::MAX.to_le_bytes()), Kind::Corrupt);
    assert_eq!(kind_of(88, &u64::MAX.to_le_bytes()), Kind::Corrupt); // contents beyond the slot
    assert_eq!(kind_of(96, &SLOT_BYTES.to_le_bytes()), Kind::Corrupt); // data beyond it
    assert_eq!(kind_of(104, &1u64.to_le_bytes()), Kind::Corrupt); // sums of what is still written
    assert_eq!(kind_of(156, &1u32.to_le_bytes()), Kind::Corrupt);
    assert_eq!(kind_of(160, b"\xff\xff\xff"), Kind::Corrupt);
    assert_eq!(kind_of(PAYLOAD_BYTES - 1, b"\x01"), Kind::Corrupt);
    for shard in [String::new(), "x".repeat(1025)] {
        let refused = header(0, State::Writing(tenant(&shard, 8, 8))).encode().unwrap_err();
        assert_eq!(refused.kind(), Kind::InvalidInput);
    }
    assert!(header(u64::MAX, State::Free).followed_by(State::Free).is_err());
}

#[test]
fn a_header_torn_at_any_byte_leaves_the_one_before() {
    let all = states();
    for (before, after) in all.iter().zip(all.iter().skip(1)) {
        let (older, first) = (header(7, State::Free), header(8, before.clone()));
        let second = first.followed_by(after.clone()).unwrap();
        let (whole, replaced) = (pages([&first, &older]), pages([&first, &second]));
        assert_eq!(newest::<Header>(&replaced).unwrap().record, second);
        for written in 0..PAGE_BYTES {
            let torn = [&replaced[..PAGE_BYTES + written], &whole[PAGE_BYTES + written..]].concat();
            let found = newest::<Header>(&torn).unwrap();
            let is_second = torn == replaced;
            assert_eq!(found.record, if is_second { second.clone() } else { first.clone() });
            assert_eq!(found.other_is_damaged, !is_second && torn != whole, "{written} bytes written");
        }
    }
}

#[test]
fn without_a_whole_copy_there_is_no_header() {
    let (first, second) = (header(0, State::Free), header(1, State::Free));
    let mut both = pages([&first, &second]);
    both[20] ^= 1;
    both[PAGE_BYTES + 20] ^= 1;
    let error = newest::<Header>(&both).unwrap_err();
    assert_eq!(error.kind(), Kind::Corrupt);
    assert!(error.message().contains("both copies of the header of a slot"));
    assert_eq!(newest::<Header>(&[]).unwrap_err().kind(), Kind::Corrupt);

    // A newer release has been here: what it wrote before must not be taken for what holds.
    let mut newer = pages([&first, &second]);
    newer[PAGE_BYTES + 8] = 2;
    let page = resealed(newer.split_off(PAGE_BYTES), 1);
    assert_eq!(newest::<Header>(&[newer, page].concat()).unwrap_err().kind(), Kind::Unsupported);
}

#[test]
fn the_record_of_a_store_comes_back_and_keeps_its_rules() {
    for sequence in [0, 1, 6] {
        let (number, page) = record(sequence).encode().unwrap();
        assert_eq!(StoreRecord::decode(&page, number).unwrap(), record(sequence));
        for index in 0..PAGE_BYTES {
            let mut changed = page.clone();
            changed[index] ^= 0x10;
            assert_eq!(StoreRecord::decode(&changed, number).unwrap_err().kind(), Kind::Corrupt);
        }
        let mut single = page.clone();
        single[92..96].copy_from_slice(&1u32.to_le_bytes());
        assert_eq!(StoreRecord::decode(&resealed(single, number), number).unwrap_err().kind(), Kind::Corrupt);
        let mut padded = page;
        padded[100] = 1;
        assert_eq!(StoreRecord::decode(&resealed(padded, number), number).unwrap_err().kind(), Kind::Corrupt);
    }
    let single = StoreRecord { versions_per_shard: 1, ..record(0) };
    assert_eq!(single.encode().unwrap_err().kind(), Kind::InvalidInput);
}

#[test]
fn regions_follow_one_another_and_data_begin_with_a_block() {
    let block = BLOCK_BYTES as u64;
    let regions = Regions::new(800, 3 * block + 1).unwrap();
    assert_eq!((regions.contents, regions.checksums), (12_288..13_088, 16_384..16_416));
    assert_eq!(regions.data, block..4 * block + 1);
    assert_eq!(Regions::new(0, 0).unwrap().data, block..block);
    let full = Regions::new(block, 0).unwrap();
    assert_eq!((full.data.start, full.block_count()), (2 * block, 0));
    assert_eq!(Regions::new(u64::MAX, 0), None);
    assert_eq!(Regions::new(0, u64::MAX), None);
}

fn entry(path: &str, offset: u64, length: u64) -> Entry {
    let item_box = ItemBox { array_shape: vec![8, 4], offset: vec![2, 0], shape: vec![2, 4] };
    Entry { path: path.to_owned(), dtype: "float32".to_owned(), item_box, offset, length }
}

fn refusal<T: std::fmt::Debug>(outcome: Result<T, Error>) -> String {
    let error = outcome.unwrap_err();
    assert_eq!(error.kind(), Kind::InvalidInput);
    error.message().to_owned()
}

#[test]
fn contents_have_the_specified_bytes() {
    let contents = encode_contents(&[entry("w/0", 64, 32)], 96).unwrap();
    let mut expected = 1u64.to_le_bytes().to_vec();
    expected.extend_from_slice(&88u32.to_le_bytes());
    expected.extend_from_slice(&[3, 0, 7, 2]);
    for long in [64u64, 32, 8, 4, 2, 0, 2, 4] {
        expected.extend_from_slice(&long.to_le_bytes());
    }
    expected.extend_from_slice(b"w/0float32\0\0\0\0\0\0");
    assert_eq!(contents, expected);
    assert_eq!(decode_contents(&contents, 96).unwrap(), [entry("w/0", 64, 32)]);
    assert!(decode_contents(&contents, 95).is_err());
}

#[test]
fn contents_keep_their_rules() {
    let two = |first, second| refusal(encode_contents(&[first, second], 1 << 20));
    assert!(two(entry("a", 0, 65), entry("b", 64, 1)).contains("overlap"));
    assert!(two(entry("a", 64, 1), entry("b", 0, 1)).contains("not in order"));
    assert!(two(entry("a", 0, 1), entry("b", 65, 1)).contains("aligned"));
    assert!(two(entry("a", 0, 1), entry("a", 64, 1)).contains("twice"));
    assert!(two(entry("a", 0, 1), entry("b", 64, u64::MAX)).contains("beyond the data"));
    let mut outside = entry("a", 0, 1);
    outside.item_box.offset[1] = 1;
    assert!(refusal(encode_contents(&[outside], 64)).contains("beyond its array"));
    let mut flat = entry("a", 0, 1);
    flat.item_box.shape.pop();
    assert!(refusal(encode_contents(&[flat], 64)).contains("axes"));
    let long = entry(&"x".repeat(65_536), 0, 1);
    assert!(refusal(encode_contents(&[long], 64)).contains("too long"));
    // Different boxes of one array are different keys.
    let mut other = entry("a", 64, 1);
    other.item_box.offset[0] = 4;
    assert!(encode_contents(&[entry("a", 0, 1), other], 128).is_ok());
}

#[test]
fn contents_that_claim_much_cost_nothing() {
    let claims = |count: u64, rest: &[u8]| decode_contents(&[&count.to_le_bytes(), rest].concat(), u64::MAX);
    assert_eq!(claims(u64::MAX, &[]).unwrap_err().kind(), Kind::Corrupt);
    assert_eq!(claims(1, &u32::MAX.to_le_bytes()).unwrap_err().kind(), Kind::Corrupt);
    assert_eq!(claims(1, &[24, 0, 0, 0, 255, 255, 255, 255]).unwrap_err().kind(), Kind::Corrupt);
    assert_eq!(claims(1, &[0; 64]).unwrap_err().kind(), Kind::Corrupt);
    assert_eq!(decode_contents(&[0; 7], 0).unwrap_err().kind(), Kind::Corrupt);
    assert!(decode_contents(&[0; 8], 0).unwrap().is_empty());
}

#[test]
fn large_data_are_placed_at_pages() {
    let (offsets, end) = place([1, 64, 0, 65_536, 65_535, 3]).unwrap();
    assert_eq!((offsets, end), (vec![0, 64, 128, 4096, 69_632, 135_168], 135_171));
    assert_eq!(place([u64::MAX, 1]), None);
}

#[test]
fn the_digest_tells_contents_blocks_and_their_order_apart() {
    let digests =
        [digest(1, [2, 3]), digest(1, [3, 2]), digest(2, [2, 3]), digest(1, [2]), digest(1, [2, 3, 0])];
    for (index, one) in digests.iter().enumerate() {
        assert!(!digests[..index].contains(one));
    }
    let bytes: Vec<u8> = [1u64, 2, 3].iter().flat_map(|sum| sum.to_le_bytes()).collect();
    assert_eq!(digests[0], crc64(&bytes));
}

fn boxes() -> impl Strategy<Value = ItemBox> {
    let axes = (0u64..9, 0u64..9, 0u64..9);
    vec(axes, 0..5).prop_map(|axes| ItemBox {
        array_shape: axes.iter().map(|(before, extent, after)| before + extent + after).collect(),
        offset: axes.iter().map(|(before, _, _)| *before).collect(),
        shape: axes.iter().map(|(_, extent, _)| *extent).collect(),
    })
}

proptest! {
    #[test]
    fn contents_come_back(parts in vec(("\\PC{0,12}", "[a-z0-9]{0,9}", boxes(), 0u64..200_000), 0..20)) {
        let (offsets, data_bytes) = place(parts.iter().map(|part| part.3)).unwrap();
        let entries: Vec<Entry> = parts
            .into_iter()
            .zip(offsets)
            .enumerate()
            .map(|(index, ((path, dtype, item_box, length), offset))| {
                Entry { path: format!("{index}{path}"), dtype, item_box, offset, length }
            })
            .collect();
        let contents = encode_contents(&entries, data_bytes).unwrap();
        prop_assert_eq!(decode_contents(&contents, data_bytes).unwrap(), entries);
        prop_assert!(decode_contents(&contents[..contents.len() - 1], data_bytes).is_err());
    }

    #[test]
    fn whatever_is_accepted_has_one_form(mut contents in vec(any::<u8>(), 0..200), data_bytes in any::<u64>()) {
        if let Some(count) = contents.first_chunk_mut::<8>() {
            *count = 1u64.to_le_bytes();
        }
        if let Ok(entries) = decode_contents(&contents, data_bytes) {
            prop_assert_eq!(encode_contents(&entries, data_bytes).unwrap(), contents);
        }
    }

    #[test]
    fn headers_come_back(
        state in 0usize..6, sequence in any::<u64>(), shard in "\\PC{1,300}",
        sizes in (0u64..1 << 20, 0u64..32 << 20), longs in any::<(u64, u64, u64, u64, u64, u64, u32)>(),
        ids in any::<([u8; 16], [u8; 16], [u8; 16], u32)>(),
    ) {
        let key = Key { run: Id(ids.0), shard, version: Version { epoch: longs.0, step: longs.1 } };
        let writer =
            Writer { boot: Id(ids.1), namespace: longs.2, process: longs.6, start_ticks: longs.3 };
        let tenant = Tenant { key, contents_bytes: sizes.0, data_bytes: sizes.1, writer };
        let sums = Sums { contents: longs.4, digest: longs.5 };
        let state = match state {
            0 => State::Free,
            1 => State::Writing(tenant),
            2 => State::Sealed(tenant, sums),
            3 => State::Committed(tenant, sums),
            4 => State::Quarantined(Some(tenant)),
            _ => State::Quarantined(None),
        };
        let written = Header { store: Id(ids.2), slot: ids.3, slot_bytes: SLOT_BYTES, sequence, state };
        let (number, page) = written.encode().unwrap();
        prop_assert_eq!(Header::decode(&page, number).unwrap(), written);
    }
}
