//! Planned reads against a naive reference, in every mode, with and without checksums.

use proptest::prelude::*;
use waystation_io::mode::Mode;
use waystation_io::read::Options;

use crate::read_support::{BLOCK, Case, FileSpec, PieceSpec, SPACES, directory_in, read_columns, run};

fn options() -> impl Strategy<Value = Options> {
    let modes = prop::option::of(prop::sample::select(Mode::ALL.to_vec()));
    (modes, prop::option::of(1usize..3), prop::option::of(1usize..9), prop::option::of(1usize..4)).prop_map(
        |(mode, blocks, depth, threads)| Options {
            mode,
            block_bytes: blocks.map(|blocks| blocks * BLOCK),
            depth,
            threads,
            ..Options::default()
        },
    )
}

/// Any box of any chunk, small or of many blocks, aligned or not.
fn piece(files: usize) -> impl Strategy<Value = PieceSpec> {
    let shape = prop_oneof![
        Just(vec![]),
        prop::collection::vec(0u64..12, 1..4),
        (1u64..300_000).prop_map(|length| vec![length]),
        (1u64..40, 1u64..20_000).prop_map(|(rows, columns)| vec![rows, columns]),
    ];
    let numbers = (
        any::<prop::sample::Index>(),
        any::<prop::sample::Index>(),
        prop::collection::vec(any::<(u32, u32)>(), 3),
    );
    (0..files, shape, prop::sample::select(vec![1u64, 2, 4, 8, 12]), numbers, any::<[bool; 3]>(), 0u64..5)
        .prop_map(|(file, chunk_shape, item_bytes, (offset, place, cuts), flags, style)| PieceSpec {
            file,
            chunk_shape,
            item_bytes,
            offset,
            aligned: flags[0],
            place,
            cuts,
            whole: flags[1],
            page_aligned: flags[2],
            style,
        })
}

/// Some pieces of some files.
pub fn case() -> impl Strategy<Value = Case> {
    let sizes = prop_oneof![Just(0), 1usize..5000, 1..9 * BLOCK / 2, Just(2 * BLOCK), Just(2 * BLOCK + 1)];
    let file = (sizes, any::<bool>(), any::<u64>()).prop_map(|(nbytes, verified, seed)| FileSpec {
        nbytes,
        verified,
        seed,
    });
    prop::collection::vec(file, 1..4).prop_flat_map(|files| {
        let count = files.len();
        (Just(files), prop::collection::vec(piece(count), 0..14))
            .prop_map(|(files, pieces)| Case { files, pieces })
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(160))]

    #[test]
    fn every_byte_goes_where_the_plan_says(case in case(), options in options(), space in 0..SPACES.len()) {
        let Some(directory) = directory_in(SPACES[space]) else { return Ok(()) };
        let read = run(&case, &options, directory.path(), |_| {});
        let statistics = read.outcome.unwrap();
        prop_assert_eq!(statistics.bytes_needed, read.needed_bytes);
        prop_assert!(read.memory == read.expected, "memory differs from the reference");
        prop_assert_eq!(read.progress, (read.needed_bytes, read.needed_bytes));
        for (file, mode) in statistics.modes.iter().enumerate() {
            prop_assert_eq!(mode.is_some(), read.files_needed[file]);
        }
    }
}

/// Thousands of small arrays, one after another, each to a place of its own.
#[test]
fn many_small_pieces() {
    let pieces: Vec<(u64, u64)> = (0..4000u64).map(|index| (index * 1500, 1000 + index % 500)).collect();
    for mode in Mode::ALL {
        let read = crate::read_support::read_runs(
            4000 * 1500,
            &pieces,
            &Options { mode: Some(mode), ..Options::default() },
        );
        assert!(read.memory == read.expected, "{mode}");
    }
}

#[test]
fn the_same_bytes_may_go_to_several_places() {
    let nbytes = 3 * BLOCK as u64;
    let pieces = [(0, nbytes), (0, nbytes), (4096, nbytes - 8192), (BLOCK as u64 - 10, 20)];
    for mode in Mode::ALL {
        let read = crate::read_support::read_runs(
            nbytes,
            &pieces,
            &Options { mode: Some(mode), ..Options::default() },
        );
        assert!(read.memory == read.expected, "{mode}");
    }
}

#[test]
fn unverified_reads_leave_out_what_nobody_needs() {
    let directory = directory_in(SPACES[0]).unwrap();
    let read = crate::read_support::read_two_ends(directory.path(), false);
    assert!(read.bytes_read <= 16 << 10, "{read:?}");
    let read = crate::read_support::read_two_ends(directory.path(), true);
    assert_eq!(read.bytes_read, 2 * BLOCK as u64);
}

#[test]
fn nothing_to_do_is_done() {
    let directory = directory_in(SPACES[0]).unwrap();
    let case = Case { files: vec![], pieces: vec![] };
    let read = run(&case, &Options::default(), directory.path(), |_| {});
    assert_eq!(read.outcome.unwrap().modes, []);
}

/// Columns of large arrays, as loads with another sharding read them: runs that are long enough to be read in
/// place, with gaps before and after them in every unit.
#[test]
fn columns_of_large_rows_are_read_in_every_mode() {
    const KIB: usize = 1 << 10;
    let shapes = [
        (64, 256 * KIB, 128 * KIB..256 * KIB),
        (64, 256 * KIB, 0..128 * KIB),
        (64, 256 * KIB, 4 * KIB..204 * KIB),
        (40, 256 * KIB + 4 * KIB, 4 * KIB..140 * KIB),
        (20, 512 * KIB - 2 * KIB, 1000..300 * KIB),
    ];
    for (rows, row_bytes, columns) in shapes {
        for mode in Mode::ALL.map(Some).into_iter().chain([None]) {
            for options in [
                Options { mode, ..Options::default() },
                Options { mode, depth: Some(16), threads: Some(1), ..Options::default() },
            ] {
                let read = read_columns(rows, row_bytes, columns.clone(), &options);
                assert_eq!(read.outcome.unwrap().bytes_needed, read.needed_bytes);
                assert!(read.memory == read.expected, "{rows} rows of {row_bytes}, {columns:?}, {mode:?}");
            }
        }
    }
}
