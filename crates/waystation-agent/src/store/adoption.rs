//! Taking over a store that an earlier agent has left, by its death or by its end.
//!
//! What is sealed or committed is verified at once, before anybody can ask for it: a recovery has to know
//! which versions are whole before it decides, so to verify later would only make it wait there. What is
//! being written stays its writer's if that may live, and is freed if it is dead beyond doubt; what another agent was
//! sending goes on from there (`resuming`). What is
//! damaged is quarantined: kept as it is, counted as nothing, until somebody discards it.

use waystation_format::slot::{Header, Newest, State, StoreRecord};
use waystation_format::{Error, Kind, Result};

use super::creation::{RECORD, make_slot, touch};
use super::directory::Directory;
use super::file::{SlotFile, first_headers};
use super::mending::remove_asides;
use super::notes::noted;
use super::resuming::Left;
use super::verify::verify_sealed;
use super::{Config, Store};
use crate::locks::{self, Part};
use crate::process::{Life, life_of};
use crate::slots::{Event, next};

/// What an agent found when it opened its store.
#[derive(Debug)]
pub struct Adoption {
    /// Whether the store was made just now.
    pub is_new: bool,
    /// What was found in each slot.
    pub slots: Vec<Found>,
}

/// What was found in a slot.
#[derive(Debug)]
pub enum Found {
    /// Nothing.
    Free,
    /// A version, verified.
    Whole,
    /// Its writer may go on.
    InWriting,
    /// Its writer is dead; it is free now.
    Abandoned,
    /// It is not what it should be, and quarantined for that reason.
    Damaged(Error),
    /// It was quarantined before.
    Quarantined,
    /// Its file was gone; there is an empty one now.
    Gone,
}

impl Adoption {
    pub(super) fn of_new_store() -> Self {
        Self { is_new: true, slots: Vec::new() }
    }
}

/// Takes over the store of a directory.
pub(super) fn adopt(directory: Directory, config: &Config) -> Result<(Store, Adoption)> {
    let file = directory.open_file(RECORD)?;
    let file = file.ok_or_else(|| Error::new(Kind::NotFound, "there is no store in this directory"))?;
    let record_file = SlotFile::new(file, directory.path_of(RECORD));
    let record = match record_file.record::<StoreRecord>() {
        Ok(Newest { record, .. }) => record,
        Err(error) if error.kind() == Kind::Corrupt => {
            let rebuilt = rebuilt(&directory, config)?.ok_or_else(|| unreadable(&directory, &error))?;
            record_file.write_record(&rebuilt)?;
            let record = StoreRecord { sequence: 1, ..rebuilt };
            record_file.write_record(&record)?;
            record
        }
        Err(error) => return Err(error),
    };
    check(&record, config).map_err(|error| error.with("path", directory.path().display().to_string()))?;
    remove_asides(&directory, record.slot_count)?;
    let mut slots = Vec::with_capacity(record.slot_count as usize);
    let mut found = Vec::with_capacity(record.slot_count as usize);
    let mut left = Vec::new();
    for slot in 0..record.slot_count {
        let (file, header, what) = open_slot(&directory, &record, slot, config.threads, &mut left)?;
        slots.push((file, header));
        found.push(what);
    }
    verify(&mut slots, &mut found, config.threads)?;
    name_lost(&directory, &record, &mut slots, &found)?;
    let store = Store::new(directory, (record_file, record), slots, config);
    store.remember_left(left);
    Ok((store, Adoption { is_new: false, slots: found }))
}

/// The error of a store of which neither the record nor the slots can be used.
fn unreadable(directory: &Directory, error: &Error) -> Error {
    let message = format!(
        "the record of the store cannot be read ({}), and its slots do not say what it was. Start the agent with the run \
         and the sizes that the store was made with. If that fails too, remove the directory: the agent then begins with \
         an empty store, and gets from other hosts what they have copies of",
        error.message()
    );
    Error::new(Kind::Corrupt, message).with("path", directory.path().display().to_string())
}

/// The record of a store that is damaged in both copies, as the headers of its slots and the options of this agent say;
/// None if the slots do not agree with each other and with the options. What the slots hold is verified afterwards.
fn rebuilt(directory: &Directory, config: &Config) -> Result<Option<StoreRecord>> {
    let mut found: Vec<Header> = Vec::new();
    for slot in 0..config.slot_count {
        let name = SlotFile::name(slot);
        let Some(file) = directory.open_file(&name)? else { continue };
        // One that is damaged, too, says nothing.
        found.extend(SlotFile::new(file, directory.path_of(&name)).record().ok().map(|newest| newest.record));
    }
    let Some(store) = found.first().map(|header| header.store) else { return Ok(None) };
    let is_of_run = |header: &Header| header.state.tenant().is_none_or(|tenant| tenant.key.run == config.run);
    let is_ours = |header: &Header| {
        (header.store, header.slot_bytes) == (store, config.slot_bytes) && is_of_run(header)
    };
    let epochs = found.iter().filter_map(|header| header.state.tenant());
    let epoch = epochs.map(|tenant| tenant.key.version.epoch).max().unwrap_or(0);
    Ok(found.iter().all(is_ours).then_some(StoreRecord {
        store,
        run: config.run,
        topology: config.topology,
        epoch,
        slot_bytes: config.slot_bytes,
        slot_count: config.slot_count,
        versions_per_shard: config.versions_per_shard,
        sequence: 0,
    }))
}

fn check(record: &StoreRecord, config: &Config) -> Result<()> {
    let conflict = |message: &'static str, theirs: String, ours: String| {
        Err(Error::new(Kind::Conflict, message).with("found", theirs).with("wanted", ours))
    };
    if record.run != config.run {
        let message =
            "the store holds versions of another run; discard it, or give this run another directory";
        return conflict(message, record.run.to_string(), config.run.to_string());
    }
    if record.topology != config.topology {
        let message =
            "the store was made for another topology; open it with that and rebind it, or discard it";
        return conflict(message, record.topology.to_string(), config.topology.to_string());
    }
    let sizes = |count: u32, bytes: u64, versions: u32| {
        format!("{count} slots of {bytes} bytes, {versions} versions")
    };
    let found = sizes(record.slot_count, record.slot_bytes, record.versions_per_shard);
    let wanted = sizes(config.slot_count, config.slot_bytes, config.versions_per_shard);
    if found != wanted {
        return conflict(
            "the store was made with other sizes; open it with those (--versions is one less than the versions that there \
             may be; stores of releases that kept one commit want --versions 1), or discard it",
            found,
            wanted,
        );
    }
    Ok(())
}

/// A slot of the store and what it holds, all but verified.
fn open_slot(
    directory: &Directory,
    record: &StoreRecord,
    slot: u32,
    threads: usize,
    left: &mut Vec<Left>,
) -> Result<(SlotFile, Header, Found)> {
    let name = SlotFile::name(slot);
    let opened = directory.open_file(&name)?.map(|file| SlotFile::new(file, directory.path_of(&name)));
    let file = match opened {
        Some(file) if file.nbytes()? >= record.slot_bytes => file, // what comes after a slot means nothing
        other => {
            // Nobody can be given what is not there any more. A writer of the old file does no harm to the new.
            drop(other);
            directory.remove(&name)?;
            let file = make_slot(directory, slot, record.slot_bytes, threads)?;
            touch(std::slice::from_ref(&file), record.slot_bytes, threads)?;
            let header = restart(&file, record, slot, State::Free)?;
            return Ok((file, header, Found::Gone));
        }
    };
    let read = file.record::<Header>().and_then(|found| check_place(&file, found.record, record, slot));
    let header = match read {
        Ok(header) => header,
        Err(error) if error.kind() == Kind::Corrupt => {
            let header = restart(&file, record, slot, State::Quarantined(None))?;
            return Ok((file, header, Found::Damaged(error)));
        }
        Err(error) => return Err(error),
    };
    let found = match &header.state {
        State::Free => Found::Free,
        State::Sealed(..) | State::Committed(..) => Found::Whole,
        State::Quarantined(_) => Found::Quarantined,
        State::Writing(tenant) if life_of(&tenant.writer)? == Life::Dead && is_unused(&file)? => {
            let freed = next(&header, Event::Abort { ticket: header.sequence })?;
            file.write_record(&freed)?;
            left.extend(Left::of(&file, tenant, &freed));
            return Ok((file, freed, Found::Abandoned));
        }
        State::Writing(_) => Found::InWriting,
    };
    Ok((file, header, found))
}

/// Whether no mapping of a writer is left, of whatever process.
fn is_unused(file: &SlotFile) -> Result<bool> {
    let taken = locks::try_exclusive(file.file(), Part::Writer);
    let is_unused = taken.map_err(|error| Error::from_io(error, "lock a slot", file.path()))?;
    if is_unused {
        let freed = locks::unlock(file.file(), Part::Writer);
        freed.map_err(|error| Error::from_io(error, "unlock a slot", file.path()))?;
    }
    Ok(is_unused)
}

fn check_place(file: &SlotFile, header: Header, record: &StoreRecord, slot: u32) -> Result<Header> {
    let is_ours =
        header.store == record.store && header.slot == slot && header.slot_bytes == record.slot_bytes;
    if is_ours {
        Ok(header)
    } else {
        Err(file.corrupt("the slot is that of another store, or of another place in it"))
    }
}

/// Gives a slot of which nothing is known its first headers.
fn restart(file: &SlotFile, record: &StoreRecord, slot: u32, state: State) -> Result<Header> {
    let [first, second] = first_headers(record.store, slot, record.slot_bytes, state);
    file.write_record(&first)?;
    file.write_record(&second)?;
    Ok(second)
}

/// Of slots of which nothing can be read, says in their headers what was committed in them, if that is known and the
/// store has nothing as new of that shard: a loss that nobody is told of would be taken for the newest state.
fn name_lost(
    directory: &Directory,
    record: &StoreRecord,
    slots: &mut [(SlotFile, Header)],
    found: &[Found],
) -> Result<()> {
    for place in 0..slots.len() {
        let is_unknown = slots[place].1.state.tenant().is_none();
        if !(is_unknown && matches!(found[place], Found::Gone | Found::Damaged(_))) {
            continue;
        }
        let Some(lost) = noted(directory, record.run, place as u32) else { continue };
        let is_as_new = |(_, header): &(SlotFile, Header)| {
            header.state.sums().is_some()
                && header.state.tenant().is_some_and(|tenant| {
                    tenant.key.shard == lost.key.shard && tenant.key.version >= lost.key.version
                })
        };
        if !slots.iter().any(is_as_new) {
            let (file, header) = &mut slots[place];
            *header = restart(file, record, place as u32, State::Quarantined(Some(lost)))?;
        }
    }
    Ok(())
}

/// Verifies what is to be kept, and quarantines what is damaged.
fn verify(slots: &mut [(SlotFile, Header)], found: &mut [Found], threads: usize) -> Result<()> {
    let mut places = Vec::new();
    let mut kept = Vec::new();
    for (place, (file, header)) in slots.iter().enumerate() {
        if let (Some(tenant), Some(sums)) = (header.state.tenant(), header.state.sums()) {
            places.push(place);
            kept.push((file, tenant, sums));
        }
    }
    let outcomes = verify_sealed(&kept, threads)?;
    for (place, outcome) in places.into_iter().zip(outcomes) {
        let Err(error) = outcome else { continue };
        if error.kind() != Kind::Corrupt {
            return Err(error);
        }
        let (file, header) = &mut slots[place];
        *header = next(header, Event::Quarantine)?;
        file.write_record(header)?;
        found[place] = Found::Damaged(error);
    }
    Ok(())
}
