//! Compressed chunks: boxes of them arrive as they were, and damage is an error that leaves nothing running.

use proptest::prelude::*;
use waystation_format::checksum::crc32c;
use waystation_io::read::{decode_chunks, decompress_one};
use waystation_io::{Kind, Result};

/// The offset and shape of a box of a chunk, and where it goes.
type Part = (([i64; 2], [i64; 2]), Vec<u8>);

/// Whether a chunk is compressed, and whether it has a checksum.
type Form = (bool, bool);
const ZSTD: Form = (true, false);

/// A chunk as it is stored.
fn encoded(chunk: &[u8], (is_compressed, has_checksum): Form) -> Vec<u8> {
    let mut stored = if is_compressed { zstd::bulk::compress(chunk, 3).unwrap() } else { chunk.to_vec() };
    if has_checksum {
        stored.extend(crc32c(&stored).to_le_bytes());
    }
    stored
}

/// The words of boxes of one chunk, each to a place of its own, in C order.
fn words_of(frame: &[u8], form: Form, chunk: [i64; 2], boxes: &mut [Part]) -> Vec<i64> {
    let mut words = Vec::new();
    for ((offset, shape), place) in boxes {
        words.extend([frame.as_ptr() as i64, frame.len() as i64, i64::from(form.0), i64::from(form.1), 1, 2]);
        words.extend([chunk, *offset, *shape].concat());
        words.extend([place.as_mut_ptr() as i64, shape[1], 1]);
    }
    words
}

fn run(words: &[i64]) -> Result<()> {
    // SAFETY: callers keep frames and places alive, and use none of them meanwhile.
    unsafe { decode_chunks(words, Some(3)) }
}

proptest! {
    /// Any boxes of any chunk, whole ones among them.
    #[test]
    fn boxes_are_those_of_the_chunk(
        rows in 1i64..40,
        columns in 1i64..40,
        seed in any::<u8>(),
        cuts in prop::collection::vec((0.0..1.0f64, 0.0..1.0f64, 0.0..1.0f64, 0.0..1.0f64), 1..6),
        whole in any::<bool>(),
        form in any::<Form>(),
    ) {
        let chunk: Vec<u8> = (0..rows * columns).map(|at| (at as u8).wrapping_mul(7).wrapping_add(seed)).collect();
        let frame = encoded(&chunk, form);
        let part = |extent: i64, from: f64, length: f64| {
            let begin = (from * extent as f64) as i64;
            (begin, 1 + (length * (extent - begin - 1) as f64) as i64)
        };
        let mut boxes: Vec<_> = cuts
            .iter()
            .map(|&(row, column, height, width)| {
                let ((top, tall), (left, wide)) = (part(rows, row, height), part(columns, column, width));
                (([top, left], [tall, wide]), vec![0; (tall * wide) as usize])
            })
            .collect();
        if whole {
            boxes = vec![(([0, 0], [rows, columns]), vec![0; chunk.len()])];
        }
        run(&words_of(&frame, form, [rows, columns], &mut boxes)).unwrap();
        for (([top, left], [tall, wide]), place) in boxes {
            let expected: Vec<u8> = (top..top + tall)
                .flat_map(|row| (left..left + wide).map(move |column| (row * columns + column) as usize))
                .map(|at| chunk[at])
                .collect();
            prop_assert_eq!(place, expected);
        }
    }

    /// Any bytes in the place of a frame.
    #[test]
    fn what_is_no_frame_is_corrupt(bytes in prop::collection::vec(any::<u8>(), 0..64), most in 0usize..4096) {
        if let Err(error) = decompress_one(&bytes, most) {
            prop_assert_eq!(error.kind(), Kind::Corrupt);
        }
    }
}

#[test]
fn a_frame_of_another_length_is_corrupt() {
    for length in [15, 17, 200_000] {
        let frame = zstd::bulk::compress(&vec![1; length], 3).unwrap();
        let mut boxes = [(([0, 0], [4, 4]), vec![0; 16]), (([1, 1], [2, 2]), vec![0; 4])];
        assert_eq!(run(&words_of(&frame, ZSTD, [4, 4], &mut boxes)).unwrap_err().kind(), Kind::Corrupt);
        assert_eq!(run(&words_of(&frame, ZSTD, [4, 4], &mut boxes[..1])).unwrap_err().kind(), Kind::Corrupt);
    }
}

/// A few bytes cannot make a reader reserve memory for what they claim to hold.
#[test]
fn a_frame_is_not_believed() {
    let frame = zstd::bulk::compress(&[1; 16], 3).unwrap();
    let mut boxes = [(([0, 0], [1, 4]), vec![0; 4])];
    let error = run(&words_of(&frame, ZSTD, [1 << 40, 4], &mut boxes)).unwrap_err();
    assert_eq!(error.kind(), Kind::Corrupt);
    assert_eq!(decompress_one(&frame, 15).unwrap_err().kind(), Kind::Corrupt);
    assert_eq!(decompress_one(&frame, 16).unwrap(), [1; 16]);
}

/// Whatever bit flips and wherever a chunk is cut: with a checksum it is found, and the chunk is named.
#[test]
fn damage_under_a_checksum_is_corrupt() {
    let chunk: Vec<u8> = (0..64).map(|at: u8| at.wrapping_mul(37)).collect();
    for is_compressed in [false, true] {
        let form = (is_compressed, true);
        let stored = encoded(&chunk, form);
        let outcome = |damaged: &[u8]| {
            let mut places = [(([0, 0], [8, 8]), vec![0; 64]), (([0, 0], [8, 8]), vec![0; 64])];
            let (sound, other) = places.split_at_mut(1);
            let mut words = words_of(&stored, form, [8, 8], sound);
            words.extend(words_of(damaged, form, [8, 8], other));
            run(&words)
        };
        assert!(outcome(&stored.clone()).is_ok());
        for bit in 0..stored.len() * 8 {
            let mut damaged = stored.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            let error = outcome(&damaged).unwrap_err();
            assert_eq!(error.kind(), Kind::Corrupt);
            assert!(error.to_string().contains("chunk: 1"), "{error}");
        }
        for length in 1..stored.len() {
            assert_eq!(outcome(&stored[..length]).unwrap_err().kind(), Kind::Corrupt);
        }
    }
}

#[test]
fn a_wrong_plan_is_refused() {
    let frame = zstd::bulk::compress(&[1; 16], 3).unwrap();
    let words = words_of(&frame, ZSTD, [4, 4], &mut [(([0, 0], [4, 4]), vec![0; 16])]);
    for length in 1..words.len() {
        assert_eq!(run(&words[..length]).unwrap_err().kind(), Kind::InvalidInput);
    }
    assert!(run(&[]).is_ok());
}
