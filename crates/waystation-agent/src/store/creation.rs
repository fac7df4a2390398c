//! Making a store, and taking one away.
//!
//! All memory is taken before the record is named, which is what makes it a store: a run of out of memory, or
//! a death, on the way leaves no store, and the next agent removes what is left and begins anew.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use waystation_format::page::PAGE_BYTES;
use waystation_format::slot::{COPIES, Id, State, StoreRecord};
use waystation_format::{Error, Kind, Result};
use waystation_io::arena::memory_bytes;
use waystation_io::job::in_parallel;

use super::directory::Directory;
use super::file::{SlotFile, first_headers};
use super::mending::aside;
use super::notes::{NOTES, NOTES_ASIDE};
use super::{Config, Store};
use crate::local::place::SOCKET;
use crate::locks::{self, Part};

/// The file that says that a directory is a store.
pub(super) const RECORD: &str = "store";
/// Its name until all slots are there.
const RECORD_ASIDE: &str = "store.new";
/// Bytes that one thread touches at a time.
const TOUCH_BYTES: u64 = 16 << 20;
/// Bytes of one write: they stay in the core's cache.
const WRITE_BYTES: u64 = 128 << 10;

/// Makes a store in a directory that holds none.
pub(super) fn create(directory: Directory, config: &Config) -> Result<Store> {
    check(config)?;
    clear(&directory)?;
    fill(&directory, config)
        .inspect_err(|_| {
            // The first error is the one to report; what cannot be removed now, the next agent removes.
            drop(clear(&directory));
        })
        .map(|(record, slots)| Store::new(directory, record, slots, config))
}

type Made = ((SlotFile, StoreRecord), Vec<(SlotFile, waystation_format::slot::Header)>);

fn fill(directory: &Directory, config: &Config) -> Result<Made> {
    let store = random_id()?;
    let files = (0..config.slot_count)
        .map(|slot| make_slot(directory, slot, config.slot_bytes, config.threads))
        .collect::<Result<Vec<_>>>()?;
    touch(&files, config.slot_bytes, config.threads)?;
    let mut slots = Vec::with_capacity(files.len());
    for (file, slot) in files.into_iter().zip(0u32..) {
        let [first, second] = first_headers(store, slot, config.slot_bytes, State::Free);
        file.write_record(&first)?;
        file.write_record(&second)?;
        slots.push((file, second));
    }
    let record = StoreRecord {
        store,
        run: config.run,
        topology: config.topology,
        epoch: 0,
        slot_bytes: config.slot_bytes,
        slot_count: config.slot_count,
        versions_per_shard: config.versions_per_shard,
        sequence: 0,
    };
    let file = SlotFile::new(directory.create_file(RECORD_ASIDE)?, directory.path_of(RECORD));
    file.write_record(&record)?;
    let record = StoreRecord { sequence: 1, ..record };
    file.write_record(&record)?;
    directory.rename_new(RECORD_ASIDE, RECORD)?;
    Ok(((file, record), slots))
}

/// A file of zeros, whose memory is taken, in huge pages as far as the system gives them.
pub(super) fn make_slot(
    directory: &Directory,
    slot: u32,
    slot_bytes: u64,
    threads: usize,
) -> Result<SlotFile> {
    let name = SlotFile::name(slot);
    make_file(directory, &name, &name, slot_bytes, threads)
}

/// The same, under the first name until it is given the second.
pub(super) fn make_file(
    directory: &Directory,
    now: &str,
    later: &str,
    slot_bytes: u64,
    threads: usize,
) -> Result<SlotFile> {
    let file = SlotFile::new(directory.create_file(now)?, directory.path_of(later));
    file.make_huge(slot_bytes, threads)?;
    file.allocate(slot_bytes)?;
    Ok(file)
}

/// Writes zeros everywhere, so that no writer has to wait for the system to clear pages.
pub(super) fn touch(files: &[SlotFile], slot_bytes: u64, threads: usize) -> Result<()> {
    let per_file = slot_bytes.div_ceil(TOUCH_BYTES) as usize;
    let next = AtomicUsize::new(0);
    let zeros = vec![0; WRITE_BYTES.min(slot_bytes) as usize];
    in_parallel(threads.clamp(1, (files.len() * per_file).max(1)), "waystation-touch", &|| {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(file) = files.get(index / per_file.max(1)) else { return Ok(()) };
            let begin = (index % per_file.max(1)) as u64 * TOUCH_BYTES;
            let end = slot_bytes.min(begin + TOUCH_BYTES);
            for offset in (begin..end).step_by(WRITE_BYTES as usize) {
                file.write_at(&zeros[..WRITE_BYTES.min(end - offset) as usize], offset)?;
            }
        }
    })
}

fn check(config: &Config) -> Result<()> {
    let invalid = |message: &'static str| Error::new(Kind::InvalidInput, message);
    let smallest = super::slot_bytes(0, 0).unwrap_or(u64::MAX);
    if config.slot_bytes < smallest || !config.slot_bytes.is_multiple_of(PAGE_BYTES as u64) {
        let message = format!("a slot has whole pages, and at least {smallest} bytes");
        return Err(Error::new(Kind::InvalidInput, message).with("slot_bytes", config.slot_bytes.to_string()));
    }
    if config.versions_per_shard < 2 {
        return Err(invalid("a store has room for at least two versions of a shard"));
    }
    if config.slot_count < config.versions_per_shard {
        let message = format!(
            "{} slots have no room for {} committed versions of a shard and the next one: that takes {} slots, {} bytes; \
             give --slots {}, or keep fewer with --versions",
            config.slot_count,
            config.versions_per_shard - 1,
            config.versions_per_shard,
            config.slot_bytes.saturating_mul(config.versions_per_shard.into()),
            config.versions_per_shard,
        );
        return Err(Error::new(Kind::InvalidInput, message));
    }
    let needed = config.slot_bytes.checked_mul(config.slot_count.into());
    let needed = needed.and_then(|bytes| bytes.checked_add((COPIES + 1) * PAGE_BYTES as u64));
    let needed = needed.ok_or_else(|| invalid("the size of a store overflows"))?;
    if needed > config.cap_bytes {
        return Err(invalid(
            "the slots need more memory than the store may take; raise the cap, or have fewer slots",
        )
        .with("needed_bytes", needed.to_string())
        .with("cap_bytes", config.cap_bytes.to_string()));
    }
    let memory = memory_bytes();
    if needed > memory && !config.allow_disk {
        return Err(Error::new(
            Kind::Unavailable,
            "the slots need more memory than this host (or control group) has",
        )
        .with("needed_bytes", needed.to_string())
        .with("memory_bytes", memory.to_string()));
    }
    Ok(())
}

/// Removes what an agent left that was killed while it made a store; refuses a directory of anything else.
fn clear(directory: &Directory) -> Result<()> {
    let names = directory.names()?;
    let known = [RECORD_ASIDE, SOCKET, NOTES, NOTES_ASIDE];
    let is_leftover = |name: &String| known.contains(&name.as_str()) || is_slot_name(name);
    if let Some(other) = names.iter().find(|name| !is_leftover(name)) {
        let message = "the directory holds other things; a store wants one of its own";
        return Err(Error::new(Kind::InvalidInput, message)
            .with("path", directory.path_of(other).display().to_string()));
    }
    names.iter().try_for_each(|name| directory.remove(name))
}

fn is_slot_name(name: &str) -> bool {
    let digits = name.strip_prefix("slot-").unwrap_or_default();
    let digits = digits.strip_suffix(".new").unwrap_or(digits);
    digits.parse().is_ok_and(|slot| [SlotFile::name(slot), aside(slot)].iter().any(|known| known == name))
}

/// Takes a store away, of whatever run, with all that its slots hold.
///
/// Conflict if an agent has it, or a process still uses one of its slots.
pub fn discard(path: &Path, allow_disk: bool) -> Result<()> {
    let directory = Directory::open(path, allow_disk)?;
    let names = directory.names()?;
    let mut locked = Vec::new();
    for name in names.iter().filter(|name| is_slot_name(name)) {
        let Some(file) = directory.open_file(name)? else { continue };
        let path = directory.path_of(name);
        let is_ours = locks::try_exclusive(&file, Part::Both);
        if !is_ours.map_err(|error| Error::from_io(error, "lock a slot", &path))? {
            return Err(Error::new(
                Kind::Conflict,
                "a process still uses a slot of the store; stop it first",
            )
            .with("path", path.display().to_string()));
        }
        locked.push(file);
    }
    directory.remove(RECORD)?; // first: without it, the rest is what a killed agent leaves
    clear(&directory)
}

fn random_id() -> Result<Id> {
    let mut bytes = [0; 16];
    let filled = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    match filled {
        Ok(16) => Ok(Id(bytes)),
        Ok(_) => Err(Error::new(Kind::Unavailable, "the system gives no random numbers")),
        Err(errno) => Err(Error::from_io(errno.into(), "draw the id of a store", Path::new("getrandom"))),
    }
}
