//! Arrays compressed before they are written: frames hold exactly the bytes of the arrays.

use proptest::prelude::*;
use waystation_format::checksum::crc32c;
use waystation_io::write::{chunk_checksums, compress};

/// Bytes that repeat in part, another sequence for each `seed`.
fn noise(nbytes: usize, seed: usize) -> Vec<u8> {
    (0..nbytes).map(|index| ((index ^ seed << 3).wrapping_mul(index | 1) >> 5) as u8).collect()
}

/// What `compress` makes of arrays given as segment records, decompressed again.
fn round_trip(words: &[i64], threads: Option<usize>) -> Vec<Vec<u8>> {
    // SAFETY: callers keep the sources until this returns.
    let compressed = unsafe { compress(words, 3, false, threads) }.unwrap();
    let memory = compressed.memory.address().as_ptr();
    compressed
        .values
        .iter()
        .map(|value| {
            // SAFETY: the value lies in the slab, which lives until the end of this function.
            let frame = unsafe { std::slice::from_raw_parts(memory.add(value.start), value.len()) };
            assert!(zstd::zstd_safe::get_frame_content_size(frame).unwrap().is_some());
            zstd::decode_all(frame).unwrap()
        })
        .collect()
}

#[test]
fn a_strided_array_is_compressed_in_c_order() {
    // The transpose of a 3 x 2 array of two-byte items, then one array without elements.
    let source = noise(12, 1);
    let address = source.as_ptr() as i64;
    let words = [0, 2, 2, 2, 3, 1, -1, address, 0, 0, 2, 3, 2, 4, 0, 4, 1, 0, 1, -1, address, 0, 0, 1];
    let expected: Vec<u8> =
        [0, 2, 4, 1, 3, 5].iter().flat_map(|&item: &usize| source[2 * item..2 * item + 2].to_vec()).collect();
    assert_eq!(round_trip(&words, None), [expected, Vec::new()]);
}

#[test]
fn arrays_of_devices_are_refused() {
    // SAFETY: refused before anything is read.
    let refusal = unsafe { compress(&[0, 4, 0, 1, 0, 4096], 3, false, None) }.err().unwrap();
    assert_eq!(refusal.kind(), waystation_io::Kind::InvalidInput);
}

/// The same arrays as segment records, and what is expected of each.
fn check_checksums(sources: &[Vec<u8>], threads: Option<usize>) {
    let words: Vec<i64> = sources
        .iter()
        .flat_map(|source| [0, source.len() as i64, 0, 1, -1, source.as_ptr() as i64])
        .collect();
    // SAFETY: the sources live until the end of this function.
    let sums = unsafe { chunk_checksums(&words, threads) }.unwrap();
    assert_eq!(sums, sources.iter().map(|source| crc32c(source)).collect::<Vec<_>>());
    // SAFETY: as above.
    let (plain, summed) = unsafe {
        (compress(&words, 3, false, threads).unwrap(), compress(&words, 3, true, threads).unwrap())
    };
    for (one, other) in plain.values.iter().zip(&summed.values) {
        // SAFETY: both values lie in slabs that live until the end of this function.
        let [frame, value] = unsafe {
            [(&plain, one), (&summed, other)].map(|(compressed, value)| {
                std::slice::from_raw_parts(compressed.memory.address().as_ptr().add(value.start), value.len())
            })
        };
        assert_eq!(value, [frame, &crc32c(frame).to_le_bytes()].concat());
    }
}

#[test]
fn a_strided_array_is_summed_in_c_order() {
    // The transpose of a 700 x 500 array of two-byte items: more than one piece.
    let source = noise(700_000, 1);
    let address = source.as_ptr() as i64;
    let words = [0, 2, 2, 500, 700, 1, -1, address, 0, 0, 500, 700, 2, 1000];
    let expected: Vec<u8> = (0..500)
        .flat_map(|row| (0..700).map(move |column| 2 * (column * 500 + row)))
        .flat_map(|at| source[at..at + 2].to_vec())
        .collect();
    // SAFETY: the source lives until the end of this function.
    assert_eq!(unsafe { chunk_checksums(&words, None) }.unwrap(), [crc32c(&expected)]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn contents_survive_whatever_the_sizes_and_threads(
        sizes in prop::collection::vec(0usize..300_000, 0..12),
        threads in prop::option::of(1usize..5),
    ) {
        let sources: Vec<Vec<u8>> = sizes.iter().enumerate().map(|(seed, &size)| noise(size, seed)).collect();
        let words: Vec<i64> = sources
            .iter()
            .flat_map(|source| [0, source.len() as i64, 0, 1, -1, source.as_ptr() as i64])
            .collect();
        prop_assert!(round_trip(&words, threads) == sources);
        check_checksums(&sources, threads);
    }
}
