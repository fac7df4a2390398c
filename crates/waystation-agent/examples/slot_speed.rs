//! Filling, verifying and loading a slot beside plain copies of the same bytes, in turns.
//!
//! `cargo run --release -p waystation-agent --example slot_speed -- [DIRECTORY] [MIB] [ROUNDS] [THREADS]`
//! prints the median of each in GB/s, and its ratio to a copy into memory that has been used before.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::time::{Duration, Instant};

use waystation_agent::process;
use waystation_agent::reader::SlotReader;
use waystation_agent::store::{Config, Store, discard, slot_bytes};
use waystation_agent::writer::{Placed, SlotWriter};
use waystation_format::plan::HostCopy;
use waystation_format::slot::{Entry, Id, ItemBox, Key, Tenant, Version, encode_contents};
use waystation_io::aligned::AlignedBlock;
use waystation_io::batch::copy_all;
use waystation_io::copy::BoxCopy;
use waystation_io::local::Local;
use waystation_io::read::plan::Plan;
use waystation_io::read::{self, Options};
use waystation_io::segment::Segment;

/// One array that is the whole shard.
struct Shard {
    source: AlignedBlock,
    contents: Vec<u8>,
    nbytes: u64,
}

impl Shard {
    fn new(nbytes: u64, threads: usize) -> Self {
        let source = AlignedBlock::map(nbytes as usize).unwrap();
        source.populate(nbytes as usize, threads);
        for offset in (0..nbytes as usize).step_by(8) {
            let value = (offset as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17);
            // SAFETY: within the block, which is page-aligned.
            unsafe { source.address().as_ptr().add(offset).cast::<u64>().write(value) };
        }
        let item_box = ItemBox { array_shape: vec![nbytes], offset: vec![0], shape: vec![nbytes] };
        let (path, dtype) = ("state".to_owned(), "uint8".to_owned());
        let contents = encode_contents(&[Entry { path, dtype, item_box, offset: 0, length: nbytes }], nbytes);
        Self { source, contents: contents.unwrap(), nbytes }
    }

    fn tenant(&self, step: u64) -> Tenant {
        let key = Key { run: Id([1; 16]), shard: "0/1".to_owned(), version: Version { epoch: 0, step } };
        let contents_bytes = self.contents.len() as u64;
        Tenant { key, contents_bytes, data_bytes: self.nbytes, writer: process::current().unwrap() }
    }

    fn fill(&self, writer: &mut SlotWriter, threads: usize) {
        let address = self.source.address().as_ptr() as usize;
        let whole = BoxCopy::new(&[self.nbytes], 1, &[0], &[self.nbytes], address, &[1]).unwrap();
        let part = Placed { offset: 0, segment: Segment::new(self.nbytes, vec![whole]) };
        // SAFETY: the source outlives the call, and nobody writes to it.
        unsafe { writer.fill(&self.contents, &[part], threads, &|| false) }.unwrap();
    }

    fn copy(&self, target: &AlignedBlock, threads: usize) {
        let copy = HostCopy {
            destination: target.address().as_ptr() as usize,
            source: self.source.address().as_ptr() as usize,
            nbytes: self.nbytes as usize,
        };
        // SAFETY: both blocks are as long, and the target is nobody else's.
        unsafe { copy_all(&[copy], Some(threads)) }.unwrap();
    }

    fn load(&self, reader: &SlotReader, target: &AlignedBlock) {
        let (address, nbytes) = (target.address().as_ptr() as i64, self.nbytes as i64);
        let offset = reader.chunk_offset(&reader.entries()[0]) as i64;
        let words = [0, offset, 1, 1, nbytes, 0, nbytes, address, 1];
        let plan = Plan::new(vec![reader.read_file()], &words).unwrap();
        // The file of a slot goes on after the data.
        let options = Options { may_be_longer: true, ..Options::default() };
        // SAFETY: the target outlives the job, which is joined here.
        let job = unsafe { read::start(Local::by_path(), plan, options) }.unwrap();
        job.join();
        job.shared().take_outcome().unwrap().unwrap();
    }

    fn assert_equals(&self, target: &AlignedBlock) {
        // SAFETY: both blocks are mapped and nobody writes to them.
        let bytes = |block: &AlignedBlock| unsafe {
            std::slice::from_raw_parts(block.address().as_ptr(), self.nbytes as usize)
        };
        assert!(bytes(&self.source) == bytes(target));
    }
}

fn timed(body: impl FnOnce()) -> Duration {
    let start = Instant::now();
    body();
    start.elapsed()
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |index: usize| arguments.get(index).map(|text| text.parse::<usize>().unwrap());
    let parent = Path::new(arguments.first().map_or("/dev/shm", String::as_str));
    let nbytes = (number(1).unwrap_or(1024) as u64) << 20;
    let threads = number(3).unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let shard = Shard::new(nbytes, threads);
    let target = AlignedBlock::map(nbytes as usize).unwrap();
    target.populate(nbytes as usize, threads);

    let directory = parent.join("waystation-slot-speed");
    let bytes = slot_bytes(shard.contents.len() as u64, nbytes).unwrap();
    let config = Config {
        directory: directory.clone(),
        run: Id([1; 16]),
        topology: Id([0; 16]),
        slot_count: 2,
        slot_bytes: bytes,
        versions_per_shard: 2,
        cap_bytes: u64::MAX,
        allow_disk: false,
        threads,
    };
    let mut names: Vec<(&str, Vec<f64>)> = Vec::new();
    let mut note = |name: &'static str, bytes: u64, time: Duration| {
        let speed = bytes as f64 / 1e9 / time.as_secs_f64();
        match names.iter_mut().find(|(known, _)| *known == name) {
            Some((_, speeds)) => speeds.push(speed),
            None => names.push((name, vec![speed])),
        }
    };
    let mut opened = None;
    let making = timed(|| opened = Some(Store::open(&config).unwrap().0));
    let store = opened.unwrap();
    note("store made: all memory touched", 2 * bytes, making);
    let mut step = 0;
    let mut writers: [Option<SlotWriter>; 2] = [None, None];
    for round in 0..number(2).unwrap_or(5) {
        note("copy, memory used before", nbytes, timed(|| shard.copy(&target, threads)));
        let untouched = AlignedBlock::map(nbytes as usize).unwrap();
        note("copy, memory never touched", nbytes, timed(|| shard.copy(&untouched, threads)));
        drop(untouched);
        for is_mapped in [false, true, true] {
            step += 1;
            let grant = store.begin(&shard.tenant(step)).unwrap();
            let place = grant.slot as usize;
            let kept = writers[place].take().filter(|_| is_mapped);
            let is_kept = kept.is_some();
            let mut writer = match kept {
                Some(mut writer) => {
                    writer.renew(&grant).unwrap();
                    writer
                }
                None => SlotWriter::open(&grant).unwrap(),
            };
            let name = if is_kept { "slot filled, mapping kept" } else { "slot filled, mapped anew" };
            note(name, nbytes, timed(|| shard.fill(&mut writer, threads)));
            writers[place] = Some(writer);
            let seal = || assert!(store.seal(grant.slot, grant.ticket).is_ok());
            note("slot verified and sealed", nbytes, timed(seal));
            store.commit(Version { epoch: 0, step }).unwrap();
            let reader = SlotReader::open(&grant.path, &shard.tenant(step).key).unwrap();
            note("slot loaded and verified", nbytes, timed(|| shard.load(&reader, &target)));
            if round == 0 {
                shard.assert_equals(&target);
            }
        }
    }
    drop(writers);
    drop(store);
    let adopting = timed(|| drop(Store::open(&config).unwrap()));
    note("store taken over: two slots verified", 2 * nbytes, adopting);
    discard(&directory, false).unwrap();
    std::fs::remove_file(directory.join("lock")).unwrap();
    std::fs::remove_dir(&directory).unwrap();
    report(&mut names, nbytes, threads);
}

fn report(names: &mut [(&str, Vec<f64>)], nbytes: u64, threads: usize) {
    for (_, speeds) in names.iter_mut() {
        speeds.sort_by(f64::total_cmp);
    }
    let median = |speeds: &[f64]| speeds[speeds.len() / 2];
    let limit = names.iter().find(|(name, _)| *name == "copy, memory used before").map(|(_, of)| median(of));
    println!("{} MiB on {threads} threads: median (worst) in GB/s, and the ratio of medians", nbytes >> 20);
    for (name, speeds) in names.iter() {
        let ratio = median(speeds) / limit.unwrap_or(f64::NAN);
        println!("{name:38} {:6.2} ({:6.2})  {ratio:5.2}", median(speeds), speeds[0]);
    }
}
