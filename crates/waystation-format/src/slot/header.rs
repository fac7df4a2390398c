//! The header of a slot: what it holds, for whom, and how far that has come.
//!
//! Invariants: a slot that is free has no tenant; one that is sealed or committed has the checksum of its
//! contents and the digest of its shard; a tenant fits into its slot. What no field is made for is zero.

use std::cmp::Ordering;

use super::copies::{COPIES, Record, body_of};
use super::fields::Fields;
use super::{Id, Regions, VERSION};
use crate::page::{self, PAYLOAD_BYTES};
use crate::{Error, Kind, Result};

const MAGIC: &[u8; 8] = b"WSTMSLOT";
/// A shard's name is at most so long.
const SHARD_LIMIT_BYTES: usize = 1024;

/// Which of two versions is the newer one: that of the greater epoch, then that of the greater step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Version {
    /// Grows with every recovery, and fences out the writers from before it.
    pub epoch: u64,
    /// The step of the program.
    pub step: u64,
}

/// What a slot holds a version of.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// The run of the program.
    pub run: Id,
    /// The shard: a name that means the same on all hosts.
    pub shard: String,
    /// The version of it.
    pub version: Version,
}

/// A process, such that no other ever is taken for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Writer {
    /// The boot of the machine.
    pub boot: Id,
    /// The namespace (its inode number) in which the process id means the process.
    pub namespace: u64,
    /// The process id.
    pub process: u32,
    /// When it began, in clock ticks since the boot.
    pub start_ticks: u64,
}

/// Whom a slot has been given to, and how much of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tenant {
    /// What it is.
    pub key: Key,
    /// Length of the table of contents.
    pub contents_bytes: u64,
    /// Length of the data.
    pub data_bytes: u64,
    /// The process that writes or has written it.
    pub writer: Writer,
}

impl Tenant {
    /// Where its parts lie; they were checked to fit when the header was read or made.
    pub fn regions(&self) -> Option<Regions> {
        Regions::new(self.contents_bytes, self.data_bytes)
    }
}

/// What vouches for the bytes of a sealed slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sums {
    /// Checksum of the table of contents.
    pub contents: u64,
    /// The shard's digest, see [`super::digest`].
    pub digest: u64,
}

/// How far a slot has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// Nobody's.
    Free,
    /// Being filled by its tenant's writer.
    Writing(Tenant),
    /// Whole and verified, but not known to be part of a version that is whole everywhere.
    Sealed(Tenant, Sums),
    /// Part of a version that is whole everywhere.
    Committed(Tenant, Sums),
    /// Found damaged, and kept from use until somebody says otherwise.
    Quarantined(Option<Tenant>),
}

impl State {
    /// The tenant, if there is one.
    pub fn tenant(&self) -> Option<&Tenant> {
        match self {
            State::Free | State::Quarantined(None) => None,
            State::Writing(tenant)
            | State::Sealed(tenant, _)
            | State::Committed(tenant, _)
            | State::Quarantined(Some(tenant)) => Some(tenant),
        }
    }

    /// The sums of a slot that is whole.
    pub fn sums(&self) -> Option<Sums> {
        match self {
            State::Sealed(_, sums) | State::Committed(_, sums) => Some(*sums),
            _ => None,
        }
    }

    /// The name, as messages and metrics have it.
    pub fn name(&self) -> &'static str {
        match self {
            State::Free => "free",
            State::Writing(_) => "writing",
            State::Sealed(..) => "sealed",
            State::Committed(..) => "committed",
            State::Quarantined(_) => "quarantined",
        }
    }

    fn number(&self) -> u32 {
        match self {
            State::Free => 0,
            State::Writing(_) => 1,
            State::Sealed(..) => 2,
            State::Committed(..) => 3,
            State::Quarantined(_) => 4,
        }
    }
}

/// The header of a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The store that the slot belongs to.
    pub store: Id,
    /// Its number there.
    pub slot: u32,
    /// The length of its file.
    pub slot_bytes: u64,
    /// How many headers there were before.
    pub sequence: u64,
    /// What it holds.
    pub state: State,
}

impl Header {
    /// The header that comes after this one.
    pub fn followed_by(&self, state: State) -> Result<Self> {
        let sequence = self.sequence.checked_add(1);
        let sequence =
            sequence.ok_or_else(|| corrupt("the header of a slot has the last sequence there is"))?;
        Ok(Self { sequence, state, ..self.clone() })
    }

    fn check(&self) -> Result<()> {
        let Some(tenant) = self.state.tenant() else { return Ok(()) };
        if tenant.key.shard.is_empty() || tenant.key.shard.len() > SHARD_LIMIT_BYTES {
            let message = format!("the name of a shard has 1 to {SHARD_LIMIT_BYTES} bytes");
            return Err(Error::new(Kind::Corrupt, message));
        }
        match tenant.regions().map(|regions| regions.data.end.cmp(&self.slot_bytes)) {
            Some(Ordering::Less | Ordering::Equal) => Ok(()),
            _ => Err(corrupt("a shard is larger than its slot")
                .with("shard", &*tenant.key.shard)
                .with("data_bytes", tenant.data_bytes.to_string())
                .with("contents_bytes", tenant.contents_bytes.to_string())
                .with("slot_bytes", self.slot_bytes.to_string())),
        }
    }

    fn payload(&self) -> Vec<u8> {
        let mut to = Vec::with_capacity(PAYLOAD_BYTES);
        to.extend_from_slice(MAGIC);
        to.extend_from_slice(&VERSION.to_le_bytes());
        to.extend_from_slice(&self.state.number().to_le_bytes());
        to.extend_from_slice(&self.sequence.to_le_bytes());
        to.extend_from_slice(&self.store.0);
        to.extend_from_slice(&self.slot_bytes.to_le_bytes());
        to.extend_from_slice(&self.slot.to_le_bytes());
        let Some(tenant) = self.state.tenant() else { return to };
        to.extend_from_slice(&(tenant.key.shard.len() as u32).to_le_bytes());
        to.extend_from_slice(&tenant.key.run.0);
        let sums = self.state.sums().unwrap_or_default();
        for long in [
            tenant.key.version.epoch,
            tenant.key.version.step,
            tenant.contents_bytes,
            tenant.data_bytes,
            sums.contents,
            sums.digest,
        ] {
            to.extend_from_slice(&long.to_le_bytes());
        }
        to.extend_from_slice(&tenant.writer.boot.0);
        to.extend_from_slice(&tenant.writer.namespace.to_le_bytes());
        to.extend_from_slice(&tenant.writer.start_ticks.to_le_bytes());
        to.extend_from_slice(&tenant.writer.process.to_le_bytes());
        to.extend_from_slice(&[0; 4]);
        to.extend_from_slice(tenant.key.shard.as_bytes());
        to
    }

    /// The header in fields of the right lengths; what they say is checked afterwards.
    fn read(mut fields: Fields<'_>) -> Option<Self> {
        let number = fields.word()?;
        let sequence = fields.long()?;
        let store = Id(fields.array()?);
        let slot_bytes = fields.long()?;
        let slot = fields.word()?;
        let state = read_state(number, fields)?;
        Some(Self { store, slot, slot_bytes, sequence, state })
    }
}

fn read_state(number: u32, mut fields: Fields<'_>) -> Option<State> {
    let shard_bytes = fields.word()?;
    if number == 0 || (number == 4 && shard_bytes == 0) {
        return Some(if number == 0 { State::Free } else { State::Quarantined(None) });
    }
    let run = Id(fields.array()?);
    let version = Version { epoch: fields.long()?, step: fields.long()? };
    let (contents_bytes, data_bytes) = (fields.long()?, fields.long()?);
    let sums = Sums { contents: fields.long()?, digest: fields.long()? };
    let boot = Id(fields.array()?);
    let (namespace, start_ticks, process) = (fields.long()?, fields.long()?, fields.word()?);
    fields.word()?;
    let shard = fields.text(shard_bytes as usize)?.to_owned();
    let writer = Writer { boot, namespace, process, start_ticks };
    let tenant = Tenant { key: Key { run, shard, version }, contents_bytes, data_bytes, writer };
    match number {
        1 => Some(State::Writing(tenant)),
        2 => Some(State::Sealed(tenant, sums)),
        3 => Some(State::Committed(tenant, sums)),
        4 => Some(State::Quarantined(Some(tenant))),
        _ => None,
    }
}

impl Record for Header {
    const NAME: &'static str = "the header of a slot";

    fn decode(page: &[u8], number: u64) -> Result<Self> {
        let payload = page::open(page, number, PAYLOAD_BYTES)?;
        let fields = body_of(payload, MAGIC, Self::NAME)?;
        let header = Self::read(fields).ok_or_else(|| corrupt("the header of a slot has no meaning"))?;
        header.check()?;
        // Everything that is not a field is zero, so the page must equal the one we would write.
        if header.encode()? != (number, page.to_vec()) {
            return Err(corrupt("the header of a slot contradicts itself"));
        }
        Ok(header)
    }

    fn encode(&self) -> Result<(u64, Vec<u8>)> {
        self.check().map_err(|error| error.with_kind(Kind::InvalidInput))?;
        let number = self.sequence % COPIES;
        let mut page = Vec::with_capacity(page::PAGE_BYTES);
        page::push(&mut page, number, &self.payload());
        Ok((number, page))
    }

    fn sequence(&self) -> u64 {
        self.sequence
    }
}

fn corrupt(message: &'static str) -> Error {
    Error::new(Kind::Corrupt, message)
}
