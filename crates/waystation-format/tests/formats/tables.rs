//! Tables: round trips, random access, and every rule broken once.

use crate::table_support::{Chunks, mend, partition};
use proptest::prelude::*;
use waystation_format::Kind;
use waystation_format::checksum::{BLOCK_BYTES, crc64};
use waystation_format::table::{
    ChunkEntry, Entry, FileEntry, Layout, PAGE_BYTES, TableKind, block_count, decode, encode, pack, unpack,
    validate_together,
};

fn example() -> Chunks {
    let mut table = Chunks::default();
    table.grid(&[5, 7], &[2, 3]);
    table.grid(&[], &[]);
    table.grid(&[0, 3], &[1, 3]);
    table.boxes(&[4, 4], &[(vec![0, 0], vec![4, 1]), (vec![0, 1], vec![2, 3]), (vec![2, 1], vec![2, 3])]);
    table.boxes(&[], &[(vec![], vec![])]);
    table.boxes(&[3, 0], &[]);
    table
}

fn example_files() -> Vec<FileEntry> {
    let file = |process, sequence, file_bytes, first_block| FileEntry {
        process,
        sequence,
        location: 0,
        file_bytes,
        data_start: 4096,
        first_block,
    };
    let long = 2 * BLOCK_BYTES as u64 + 1;
    vec![file(0, 0, long, 0), file(0, 1, 4096, 3), file(7, 0, 8192, 4)]
}

#[test]
fn round_trip() {
    let table = example();
    let file = table.encode().unwrap();
    assert_eq!(decode(TableKind::Chunks, &file).unwrap(), table.sections());
    let files = pack(&example_files());
    let encoded = encode(TableKind::Files, &[&files]).unwrap();
    assert_eq!(decode(TableKind::Files, &encoded).unwrap(), std::slice::from_ref(&files));
    assert_eq!(unpack(&files).collect::<Result<Vec<FileEntry>, _>>().unwrap(), example_files());
    assert_eq!(example_files()[2].name(), "p00007-000.safetensors");
    for kind in TableKind::ALL {
        let empty = vec![&[][..]; kind.entry_bytes().len()];
        let file = encode(kind, &empty).unwrap();
        assert_eq!(file.len(), PAGE_BYTES);
        assert_eq!(decode(kind, &file).unwrap(), empty);
        assert_eq!(TableKind::from_name(kind.name()), Some(kind));
    }
}

#[test]
fn the_bytes_are_the_specified_ones() {
    let file = encode(TableKind::Files, &[&pack(&example_files())]).unwrap();
    assert_eq!(file.len(), 2 * PAGE_BYTES);
    assert_eq!(&file[..8], b"WSTFILES");
    let words =
        |bytes: &[u8]| bytes.chunks(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect();
    let header: Vec<u32> = words(&file[8..40]);
    assert_eq!(header, [1, 1, 64, 0, 3, 0, 1, 0]);
    let last: Vec<u32> = words(&file[PAGE_BYTES + 128..PAGE_BYTES + 192]);
    assert_eq!(last, [7, 0, 0, 0, 8192, 0, 4096, 0, 4, 0, 0, 0, 0, 0, 0, 0]);
    let page_one = [&file[PAGE_BYTES..2 * PAGE_BYTES - 8], &1u64.to_le_bytes()].concat();
    assert_eq!(file[2 * PAGE_BYTES - 8..], crc64(&page_one).to_le_bytes());
}

#[test]
fn any_damage_is_noticed() {
    let file = example().encode().unwrap();
    let refused = |file: &[u8]| {
        assert_eq!(decode(TableKind::Chunks, file).unwrap_err().kind(), Kind::Corrupt);
    };
    for at in 0..file.len() {
        let mut damaged = file.clone();
        damaged[at] ^= 1 << (at % 8);
        refused(&damaged);
    }
    for length in [0, 1, PAGE_BYTES - 1, PAGE_BYTES, 2 * PAGE_BYTES, file.len() - 1] {
        refused(&file[..length]);
    }
    refused(&[&file[..], &[0; PAGE_BYTES]].concat());
    let mut swapped = file.clone();
    swapped[PAGE_BYTES..3 * PAGE_BYTES].rotate_left(PAGE_BYTES);
    refused(&swapped);
    assert_eq!(decode(TableKind::Files, &file).unwrap_err().kind(), Kind::Corrupt);
}

#[test]
fn forged_headers() {
    let file = example().encode().unwrap();
    let forged = |at: usize, value: u32| {
        let mut file = file.clone();
        file[at..at + 4].copy_from_slice(&value.to_le_bytes());
        mend(&mut file);
        decode(TableKind::Chunks, &file).unwrap_err().kind()
    };
    assert_eq!(forged(8, 2), Kind::Unsupported, "a newer version");
    assert_eq!(forged(8, 0), Kind::Corrupt);
    for at in [12, 16, 20, 24, 28, 32, 36, 44, 48, 52, 88, 200, PAGE_BYTES - 12] {
        for value in [0x80, 0xFFFF_FFFF] {
            assert_eq!(forged(at, value), Kind::Corrupt, "offset {at}");
        }
    }
    let after_last_entry = PAGE_BYTES + 48 * example().arrays.len();
    assert_eq!(forged(after_last_entry, 1), Kind::Corrupt);
}

#[test]
fn entries_can_be_read_by_range() {
    let checksums: Vec<u64> = (0..2000).collect();
    let file = encode(TableKind::Checksums, &[&pack(&checksums)]).unwrap();
    let layout = Layout::parse(TableKind::Checksums, &file[..PAGE_BYTES]).unwrap();
    assert_eq!(layout.file_bytes(), file.len() as u64);
    let section = layout.sections[0];
    assert_eq!((section.page_of(510), section.page_of(511)), (1, 2));
    for range in [0..1, 510..512, 511..511, 0..2000, 1999..2000, 700..1533, 0..0, 2000..2000] {
        let bytes = section.bytes_of(range.clone()).unwrap();
        let pages = &file[bytes.start as usize..bytes.end as usize];
        assert!(pages.len() <= 4096 * (2 + (range.end - range.start) as usize / 511));
        let read = section.read(range.clone(), pages).unwrap();
        assert_eq!(read, pack(&checksums[range.start as usize..range.end as usize]));
    }
    assert_eq!(section.bytes_of(0..2001).unwrap_err().kind(), Kind::InvalidInput);
    assert_eq!(section.read(0..1, &file).unwrap_err().kind(), Kind::InvalidInput);
    let mut damaged = file[PAGE_BYTES..2 * PAGE_BYTES].to_vec();
    damaged[9] ^= 1;
    assert_eq!(section.read(0..1, &damaged).unwrap_err().kind(), Kind::Corrupt);
}

#[track_caller]
fn refused(change: impl Fn(&mut Chunks), reason: &str) {
    let mut table = example();
    change(&mut table);
    let error = table.encode().err().unwrap();
    assert_eq!(error.kind(), Kind::InvalidInput);
    assert!(error.to_string().contains(reason), "{error}");
}

#[test]
fn rules_of_the_chunks() {
    refused(|table| table.arrays[0].ndim = 66, "66 dimensions");
    refused(|table| table.arrays[0].ndim = 1, "number of extents");
    refused(|table| table.arrays[0].item_bits = 17, "no element type has 17 bits");
    refused(|table| table.arrays[0].item_bits = 32, "cannot have 12 bytes (array: 0)");
    refused(|table| table.arrays[1].first_chunk += 1, "do not follow");
    refused(|table| table.arrays[1].first_dim += 1, "do not follow");
    refused(|table| table.arrays[3].chunk_count = u64::MAX, "number of extents");
    refused(|table| table.arrays[0].chunk_count = u64::MAX, "claims more");
    refused(|table| table.arrays.truncate(5), "belong to no array");
    refused(|table| table.dims.push(0), "belong to no array");
    refused(|table| table.chunks.truncate(13), "claims more");
    refused(|table| table.dims[2] = 0, "an extent of 0");
    refused(|table| table.dims[2] = 5, "a grid of [1, 3] chunks has 9 entries");
    refused(|table| (table.dims[0], table.dims[1]) = (1 << 40, 1 << 40), "overflows");
    refused(|table| table.chunks[8].length -= 2, "cannot have 0 bytes");
    refused(|table| table.chunks[0].offset = u64::MAX, "overflows");
    let first_empty = 4;
    refused(|table| table.dims[first_empty] = 1, "has 0 entries");
}

#[test]
fn rules_of_boxes() {
    let first = example().arrays[3].first_dim as usize;
    let (group, boxes) = (first + 2, first + 6);
    refused(|table| table.dims[group + 2] = 5, "not the smallest");
    refused(|table| table.dims[group] = 1, "not the smallest");
    refused(|table| table.dims[boxes] = 1, "outside of its array");
    refused(|table| table.dims[boxes + 2] = 0, "is empty");
    refused(|table| table.dims[boxes + 2] = u64::MAX, "outside of its array");
    refused(|table| table.dims[boxes + 4] = 3, "outside of its array");
    refused(|table| table.dims[boxes + 5] = 0, "not sorted");
    refused(|table| table.dims[boxes + 8] = 0, "not sorted");
    refused(|table| table.dims[boxes + 8] = 1, "overlap");
    // The same volume twice over one place and not at all in another.
    let mut table = Chunks::default();
    table.boxes(&[4], &[(vec![0], vec![2]), (vec![1], vec![2])]);
    assert!(table.encode().unwrap_err().message().contains("overlap"));
    let mut table = Chunks::default();
    table.boxes(&[4], &[]);
    assert!(table.encode().unwrap_err().message().contains("leave a part"));
}

#[test]
fn a_file_may_be_in_another_place() {
    let mut files = example_files();
    files[1].location = 2;
    let table = encode(TableKind::Files, &[&pack(&files)]).unwrap();
    let sections = decode(TableKind::Files, &table).unwrap();
    assert_eq!(unpack(&sections[0]).collect::<Result<Vec<FileEntry>, _>>().unwrap(), files);
}

#[test]
fn rules_of_the_files() {
    let refused = |change: fn(&mut Vec<FileEntry>), reason: &str| {
        let mut files = example_files();
        change(&mut files);
        let error = encode(TableKind::Files, &[&pack(&files)]).unwrap_err();
        assert_eq!(error.kind(), Kind::InvalidInput);
        assert!(error.message().contains(reason), "{error}");
    };
    refused(|files| files[0].process = 8, "not sorted");
    refused(|files| files[1].sequence = 0, "not sorted");
    refused(|files| files[0].data_start = 0, "multiple of 4096");
    refused(|files| files[0].data_start = 100, "multiple of 4096");
    refused(|files| files[1].data_start = 8192, "longer than the file");
    refused(|files| files[0].first_block = 1, "do not follow");
    refused(|files| files[2].first_block = 3, "do not follow");
}

#[test]
fn fields_of_newer_releases_are_unsupported() {
    let forged = |kind: TableKind, mut file: Vec<u8>, at: usize| {
        file[at] = 9;
        mend(&mut file);
        decode(kind, &file).unwrap_err()
    };
    let files = encode(TableKind::Files, &[&pack(&example_files())]).unwrap();
    for at in [12, 40, 48, 56, 63] {
        let error = forged(TableKind::Files, files.clone(), PAGE_BYTES + 64 + at);
        assert_eq!((error.kind(), error.context("entry")), (Kind::Unsupported, Some("1")), "{error}");
    }
    let chunks = example().encode().unwrap();
    for at in [PAGE_BYTES, PAGE_BYTES + 12, 2 * PAGE_BYTES + 4] {
        assert_eq!(forged(TableKind::Chunks, chunks.clone(), at).kind(), Kind::Unsupported);
    }
}

#[test]
fn tables_that_do_not_fit_each_other() {
    let files = example_files();
    let chunk = ChunkEntry { file: 2, offset: 4096, length: 4096 };
    let checksums = vec![0u64; 5];
    let check = |files: &[FileEntry], chunk: ChunkEntry, checksums: &[u64]| {
        validate_together(&pack(files), &pack(&[chunk]), &pack(checksums))
    };
    check(&files, chunk, &checksums).unwrap();
    assert_eq!(files.iter().map(|file| block_count(file.file_bytes)).sum::<u64>(), 5);
    let wrong = [
        (ChunkEntry { file: 3, ..chunk }, "data file 3, of 3"),
        (ChunkEntry { file: 1, ..chunk }, "inside the data"),
        (ChunkEntry { offset: 4095, ..chunk }, "inside the data"),
        (ChunkEntry { length: 4097, ..chunk }, "inside the data"),
        (ChunkEntry { offset: u64::MAX, ..chunk }, "inside the data"),
    ];
    for (chunk, reason) in wrong {
        let error = check(&files, chunk, &checksums).unwrap_err();
        assert_eq!(error.kind(), Kind::Corrupt);
        assert!(error.to_string().contains(reason), "{error}");
    }
    assert!(check(&files, chunk, &checksums[..4]).is_err());
    assert!(check(&[], chunk, &[]).is_err());
    let unsorted = [files[1], files[0]];
    assert_eq!(check(&unsorted, chunk, &checksums).unwrap_err().kind(), Kind::Corrupt);
}

#[test]
fn sections_of_the_wrong_size() {
    for sections in [&[][..], &[&[0; 63][..]], &[&[][..], &[]]] {
        assert_eq!(encode(TableKind::Files, sections).unwrap_err().kind(), Kind::InvalidInput);
    }
    assert_eq!(<u64 as Entry>::BYTES, 8);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) })]

    #[test]
    fn any_grids_and_partitions_round_trip(
        grids in prop::collection::vec(prop::collection::vec((0u64..9, 1u64..5), 0..4), 0..20),
        shape in prop::collection::vec(1u64..200, 1..4),
        cuts in prop::collection::vec((any::<usize>(), any::<u64>()), 0..300),
    ) {
        let mut table = Chunks::default();
        for grid in &grids {
            let (shape, chunk_shape): (Vec<u64>, Vec<u64>) = grid.iter().copied().unzip();
            table.grid(&shape, &chunk_shape);
        }
        let boxes = partition(shape.clone(), &cuts);
        table.boxes(&shape, &boxes);
        let file = table.encode().unwrap();
        prop_assert_eq!(decode(TableKind::Chunks, &file).unwrap(), table.sections());

        // A box moved by one, or missing, is no partition any more.
        let mut moved = boxes.clone();
        let which = cuts.len() % moved.len();
        if moved[which].0[0] > 0 {
            moved[which].0[0] -= 1;
            moved.sort();
        } else {
            moved.remove(which);
        }
        let mut table = Chunks::default();
        table.boxes(&shape, &moved);
        prop_assert!(table.encode().is_err());
    }
}
