//! Loading from slots by the engine's planned reads: boxes, strides, checksums.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;

use crate::support::*;
use waystation_agent::Kind;
use waystation_agent::reader::SlotReader;
use waystation_agent::store::Store;
use waystation_io::local::Local;
use waystation_io::read::plan::Plan;
use waystation_io::read::{self, Options};

/// Rows and columns that the array of 200,000 bytes is taken for.
const ROWS: usize = 400;
const COLUMNS: usize = 500;

fn reader(store: &Store, step: u64) -> SlotReader {
    let reading = store.read(&key("a", step)).unwrap();
    SlotReader::open(reading.file().path(), &key("a", step)).unwrap()
}

/// Loads a box of the last array to every second place of a matrix, column by column.
fn load(reader: &SlotReader) -> waystation_agent::Result<Vec<u8>> {
    let (first_row, rows, first_column, columns) = (17, 300, 3, 450);
    let mut target = vec![0; 2 * rows * columns];
    let entry = &reader.entries()[3];
    let words: Vec<i64> = [
        0,
        reader.chunk_offset(entry) as usize,
        1,
        2,
        ROWS,
        COLUMNS,
        first_row,
        first_column,
        rows,
        columns,
        target.as_mut_ptr() as usize,
        2,
        2 * rows,
    ]
    .map(|word| word as i64)
    .to_vec();
    let plan = Plan::new(vec![reader.read_file()], &words)?;
    // The file of a slot goes on after the data.
    let options = Options { may_be_longer: true, ..Options::default() };
    // SAFETY: the target outlives the job, which is joined here.
    let job = unsafe { read::start(Local::by_path(), plan, options) }?;
    job.join();
    job.shared().take_outcome().unwrap()?;
    Ok(target)
}

#[test]
fn the_engine_loads_boxes_to_strided_memory() {
    let directory = memory_directory();
    let store = open(directory.path());
    commit(&store, "a", 10);
    let target = load(&reader(&store, 10)).unwrap();
    let source = &arrays("a", 10)[3];
    for (index, &byte) in target.iter().enumerate() {
        let (column, row) = (index / 2 / 300, index / 2 % 300);
        let expected = if index % 2 == 0 { source[(17 + row) * COLUMNS + 3 + column] } else { 0 };
        assert_eq!(byte, expected, "row {row}, column {column}");
    }
}

#[test]
fn the_last_block_is_verified_like_the_others() {
    let directory = memory_directory();
    let store = open(directory.path());
    commit(&store, "a", 10);
    let reader = reader(&store, 10);
    let path = store.read(&key("a", 10)).unwrap().file().path().to_owned();
    let file = OpenOptions::new().write(true).open(path).unwrap();
    let read_file = reader.read_file();
    file.write_all_at(&[!arrays("a", 10)[3][199_999]], read_file.file_bytes - 1).unwrap();
    assert_eq!(load(&reader).unwrap_err().kind(), Kind::Corrupt);
}

#[test]
fn a_reader_in_another_process_keeps_its_slot_and_finds_only_what_it_asks_for() {
    let directory = memory_directory();
    let store = open(directory.path());
    commit(&store, "a", 10);
    let reader = reader(&store, 10);
    let path = directory.path().join("slot-00000");
    assert_eq!(SlotReader::open(&path, &key("a", 11)).unwrap_err().kind(), Kind::NotFound);
    assert_eq!(
        SlotReader::open(&directory.path().join("slot-00002"), &key("a", 10)).unwrap_err().kind(),
        Kind::NotFound
    );
    commit(&store, "a", 20);
    // The reader's lock keeps the only slot that may be overwritten; it is not known to the agent otherwise.
    assert_eq!(begin(&store, "a", 30).unwrap_err().kind(), Kind::Unavailable);
    assert_whole(&store, "a", 10);
    drop(reader);
    let grant = begin(&store, "a", 30).unwrap();
    assert_eq!(grant.slot, 0);
    assert_eq!(SlotReader::open(&path, &key("a", 30)).unwrap_err().kind(), Kind::NotFound, "not sealed yet");
}
