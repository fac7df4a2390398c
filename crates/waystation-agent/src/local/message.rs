//! What can be asked of an agent, and what it answers.
//!
//! Invariants: every request may be sent again when its answer was lost, with the same effect, so that a
//! process goes on when its agent is replaced; an error arrives as the error that it was. A field that is
//! unknown is refused: whoever sends it expects something of it.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use waystation_format::Error;
use waystation_format::slot::{Header, Id, State, Version, Writer};

pub use super::refusal::Refusal;
pub use super::standing::{Base, Beginning, HexNumber, HostStanding, Standing};

/// The version of what is said here. Frames, [`Request::Hello`] and [`Reply::Refused`] are the same in all.
pub const PROTOCOL: u32 = 2;

/// What a process asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Who is there: first on every connection.
    Hello(Hello),
    /// The store, and how its agent found it.
    Status {},
    /// Numbers for those who watch.
    Metrics {},
    /// All slots.
    Inventory {},
    /// A slot for a version of a shard.
    Grant(Wanted),
    /// To verify and seal a slot that is filled.
    Seal(Ticket),
    /// To take back a slot that will not be filled.
    Abandon(Ticket),
    /// Where a version of a shard is that is sealed or committed.
    Find(Wish),
    /// To commit what is sealed of a version.
    Commit(At),
    /// To free what is sealed of a version.
    GiveUp(At),
    /// To free what is sealed or committed of all versions before one.
    RetireBefore(At),
    /// To keep a version from use.
    Quarantine(At),
    /// To free a slot that is quarantined.
    DiscardQuarantined {
        /// Which.
        slot: u32,
    },
    /// To refuse writers of lower epochs from now on.
    RaiseEpoch {
        /// The lowest that is not refused.
        epoch: u64,
    },
    /// How things stand between the agents of several hosts.
    Standing {},
    /// To begin a program whose state they keep.
    Begin(Beginning),
    /// As [`Request::Find`], and to have it brought from another host if it is not here.
    Bring(Wish),
    /// To verify all slots, to mend what can be mended here, and to let go of what is damaged: other hosts may have copies
    /// of it.
    Verify {},
}

/// What an agent answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Reply {
    /// To [`Request::Hello`].
    Welcome(Welcome),
    /// To [`Request::Status`].
    Status(Status),
    /// To [`Request::Metrics`]: in Prometheus' exposition format, version 0.0.4.
    Metrics(String),
    /// To [`Request::Inventory`].
    Inventory(Vec<SlotReport>),
    /// To [`Request::Grant`].
    Granted(Ticket),
    /// To [`Request::Seal`]: the digest of what was sealed.
    Sealed {
        /// Equal for equal shards.
        digest: u64,
    },
    /// To [`Request::Find`] and [`Request::Bring`].
    Found {
        /// The number of the slot.
        slot: u32,
    },
    /// To [`Request::Bring`]: it is on its way, ask again.
    Coming {},
    /// To [`Request::Standing`] and [`Request::Begin`].
    Standing(Standing),
    /// To requests that concern slots: which they were.
    Slots(Vec<u32>),
    /// To [`Request::RaiseEpoch`]: the epoch that holds.
    Epoch(u64),
    /// To what there is no more to say about.
    Done {},
    /// To whatever could not be done.
    Refused(Refusal),
}

/// Who a process is, and what it expects.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hello {
    /// [`PROTOCOL`].
    pub protocol: u32,
    /// The process, as it will be the writer of its slots.
    pub process: Process,
    /// The run that it takes part in, if it knows.
    pub run: Option<HexId>,
}

/// Who the agent is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Welcome {
    /// [`PROTOCOL`].
    pub protocol: u32,
    /// The run of its store.
    pub run: HexId,
    /// How many versions of a shard there may be at a time.
    pub versions_per_shard: u32,
}

/// A process; see [`Writer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Process {
    /// The boot of the machine.
    pub boot: HexId,
    /// The namespace of its process id.
    pub namespace: u64,
    /// The process id.
    pub process: u32,
    /// When it began.
    pub start_ticks: u64,
}

/// A version of a shard that is to be written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Wanted {
    /// The shard.
    pub shard: String,
    /// The epoch of the version.
    pub epoch: u64,
    /// The step of the version.
    pub step: u64,
    /// Length of the table of contents.
    pub contents_bytes: u64,
    /// Length of the data.
    pub data_bytes: u64,
}

/// A version of a shard that is to be read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Wish {
    /// The shard.
    pub shard: String,
    /// The epoch of the version.
    pub epoch: u64,
    /// The step of the version.
    pub step: u64,
}

/// A version of all shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct At {
    /// Its epoch.
    pub epoch: u64,
    /// Its step.
    pub step: u64,
}

/// The right to write a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ticket {
    /// The number of the slot.
    pub slot: u32,
    /// Tells this right from earlier and later ones.
    pub ticket: u64,
}

/// The store, and how its agent found it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Status {
    /// The release of the agent.
    pub agent_version: String,
    /// The process id of the agent.
    pub process: u32,
    /// How many processes have greeted it and still run.
    pub process_count: u32,
    /// Where the store is, as the agent sees it.
    pub directory: String,
    /// The run.
    pub run: HexId,
    /// The topology.
    pub topology: HexId,
    /// The store.
    pub store: HexId,
    /// The epoch that holds.
    pub epoch: u64,
    /// The length of each slot's file.
    pub slot_bytes: u64,
    /// How many slots.
    pub slot_count: u32,
    /// How many versions of a shard there may be at a time.
    pub versions_per_shard: u32,
    /// The name of the host among those whose agents keep a state together; empty if there are no others.
    pub host: String,
    /// How many agents those are, this one included; 1 if there are no others.
    pub agent_count: u32,
    /// What the agent found when it began.
    pub adoption: AdoptionReport,
}

/// What an agent found when it began: how many slots of each kind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdoptionReport {
    /// Whether there was no store before.
    pub is_new: bool,
    /// Nothing in them.
    pub free: u32,
    /// Verified.
    pub whole: u32,
    /// Their writers may go on.
    pub in_writing: u32,
    /// Their writers are dead; they are free now.
    pub abandoned: u32,
    /// Quarantined before.
    pub quarantined: u32,
    /// Their files were gone; they are empty now.
    pub gone: u32,
    /// What is wrong with those that were found damaged.
    pub damaged: Vec<String>,
}

/// A slot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SlotReport {
    /// Its number.
    pub slot: u32,
    /// The name of its state.
    pub state: String,
    /// How often its header has changed.
    pub sequence: u64,
    /// What it holds.
    pub tenant: Option<TenantReport>,
    /// What vouches for it, if it is sealed or committed.
    pub digest: Option<u64>,
}

/// What a slot holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TenantReport {
    /// The shard.
    pub shard: String,
    /// The epoch of the version.
    pub epoch: u64,
    /// The step of the version.
    pub step: u64,
    /// Length of the table of contents.
    pub contents_bytes: u64,
    /// Length of the data.
    pub data_bytes: u64,
    /// The process id of its writer.
    pub process: u32,
}

/// An [`Id`] as 32 hex digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HexId(pub Id);

impl Serialize for HexId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for HexId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map(Self).map_err(|error: Error| serde::de::Error::custom(error.message()))
    }
}

impl From<Writer> for Process {
    fn from(writer: Writer) -> Self {
        let Writer { boot, namespace, process, start_ticks } = writer;
        Self { boot: HexId(boot), namespace, process, start_ticks }
    }
}

impl From<Process> for Writer {
    fn from(process: Process) -> Self {
        let Process { boot, namespace, process, start_ticks } = process;
        Self { boot: boot.0, namespace, process, start_ticks }
    }
}

impl From<Version> for At {
    fn from(Version { epoch, step }: Version) -> Self {
        Self { epoch, step }
    }
}

impl From<At> for Version {
    fn from(At { epoch, step }: At) -> Self {
        Self { epoch, step }
    }
}

impl From<&Header> for SlotReport {
    fn from(header: &Header) -> Self {
        let state = &header.state;
        let tenant = state.tenant().map(|tenant| TenantReport {
            shard: tenant.key.shard.clone(),
            epoch: tenant.key.version.epoch,
            step: tenant.key.version.step,
            contents_bytes: tenant.contents_bytes,
            data_bytes: tenant.data_bytes,
            process: tenant.writer.process,
        });
        Self {
            slot: header.slot,
            state: State::name(state).to_owned(),
            sequence: header.sequence,
            tenant,
            digest: state.sums().map(|sums| sums.digest),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_have_the_form_that_is_specified_and_unknown_fields_are_refused() {
        let text = r#"{"grant":{"shard":"0/2","epoch":1,"step":7,"contents_bytes":8,"data_bytes":18446744073709551615}}"#;
        let wanted =
            Wanted { shard: "0/2".to_owned(), epoch: 1, step: 7, contents_bytes: 8, data_bytes: u64::MAX };
        let request = Request::Grant(wanted);
        assert_eq!(serde_json::to_string(&request).unwrap(), text);
        assert_eq!(serde_json::from_str::<Request>(text).unwrap(), request);
        assert_eq!(serde_json::from_str::<Request>(r#"{"status":{}}"#).unwrap(), Request::Status {});
        for hostile in [
            r#"{"commit":{"epoch":1,"step":2,"force":true}}"#,
            r#"{"commit":{"epoch":-1,"step":2}}"#,
            r#"{"status":{},"inventory":{}}"#,
            r#"{"status":{"now":1}}"#,
            r#"{"remove":{}}"#,
            r#"{"hello":{"protocol":1,"process":{"boot":"00","namespace":1,"process":1,"start_ticks":1},"run":null}}"#,
        ] {
            assert!(serde_json::from_str::<Request>(hostile).is_err(), "{hostile}");
        }
    }
}
