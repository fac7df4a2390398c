//! The messages of calls, as protocol buffers, and how errors travel. `docs/protocol-peers.md` has the same as
//! a `.proto` file.

use tonic::Code;
use waystation_format::{Error, Kind};

/// A message has at most so many bytes.
pub const MESSAGE_LIMIT_BYTES: usize = 4 << 20;

/// What has no content.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct Nothing {}

/// What an agent tells another, which only their protocol understands.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Message {
    /// The bytes.
    #[prost(bytes = "vec", tag = "1")]
    pub body: Vec<u8>,
}

/// What an agent is.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Status {
    /// The name of its host.
    #[prost(string, tag = "1")]
    pub host: String,
    /// The release that it is of.
    #[prost(string, tag = "2")]
    pub release: String,
    /// The id of the run, as people read it.
    #[prost(string, tag = "3")]
    pub run: String,
    /// The id of the store.
    #[prost(string, tag = "4")]
    pub store: String,
    /// The id of the topology.
    #[prost(string, tag = "5")]
    pub topology: String,
    /// Writers of lower epochs are refused.
    #[prost(uint64, tag = "6")]
    pub epoch: u64,
    /// How many slots it has.
    #[prost(uint32, tag = "7")]
    pub slot_count: u32,
    /// How long each is.
    #[prost(uint64, tag = "8")]
    pub slot_bytes: u64,
    /// How many versions of a shard there may be.
    #[prost(uint32, tag = "9")]
    pub versions_per_shard: u32,
}

/// What is in an agent's slots.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Inventory {
    /// All of them, in order.
    #[prost(message, repeated, tag = "1")]
    pub slots: Vec<Slot>,
}

/// What is in a slot. The fields after the state are those of its tenant, if it has one.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Slot {
    /// Its number.
    #[prost(uint32, tag = "1")]
    pub slot: u32,
    /// free, writing, sealed, committed or quarantined.
    #[prost(string, tag = "2")]
    pub state: String,
    /// The shard.
    #[prost(string, tag = "3")]
    pub shard: String,
    /// The epoch of the version.
    #[prost(uint64, tag = "4")]
    pub epoch: u64,
    /// The step of the version.
    #[prost(uint64, tag = "5")]
    pub step: u64,
    /// Length of the table of contents.
    #[prost(uint64, tag = "6")]
    pub contents_bytes: u64,
    /// Length of the data.
    #[prost(uint64, tag = "7")]
    pub data_bytes: u64,
    /// The digest of the shard, once it is sealed.
    #[prost(fixed64, optional, tag = "8")]
    pub digest: Option<u64>,
}

/// How an agent is doing.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Stats {
    /// What comes in from other agents.
    #[prost(message, repeated, tag = "1")]
    pub incoming: Vec<Incoming>,
    /// Bytes that it may send in a second; none is no limit.
    #[prost(uint64, optional, tag = "2")]
    pub limit_bytes_per_s: Option<u64>,
    /// Whether nothing is sent for now.
    #[prost(bool, tag = "3")]
    pub is_paused: bool,
    /// How many messages of other agents were delivered.
    #[prost(uint64, tag = "4")]
    pub delivered: u64,
    /// How many clients were turned away: strangers, those who were too slow, and those who were too many.
    #[prost(uint64, tag = "5")]
    pub turned_away: u64,
}

/// A version that comes in.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Incoming {
    /// The shard.
    #[prost(string, tag = "1")]
    pub shard: String,
    /// The epoch of the version.
    #[prost(uint64, tag = "2")]
    pub epoch: u64,
    /// The step of the version.
    #[prost(uint64, tag = "3")]
    pub step: u64,
    /// How many blocks are in place, from the first.
    #[prost(uint64, tag = "4")]
    pub blocks_in_place: u64,
}

/// Each kind of error and the code that it has in calls.
const CODES: [(Kind, Code); 9] = [
    (Kind::InvalidInput, Code::InvalidArgument),
    (Kind::NotFound, Code::NotFound),
    (Kind::Conflict, Code::AlreadyExists),
    (Kind::Unavailable, Code::Unavailable),
    (Kind::Fenced, Code::Aborted),
    (Kind::Corrupt, Code::DataLoss),
    (Kind::Unsupported, Code::Unimplemented),
    (Kind::Cancelled, Code::Cancelled),
    (Kind::Internal, Code::Internal),
];

/// An error as a call tells it.
pub fn status_of(error: &Error) -> tonic::Status {
    let found = CODES.iter().find(|(kind, _)| *kind == error.kind());
    tonic::Status::new(found.map_or(Code::Unknown, |&(_, code)| code), error.to_string())
}

/// The error that a call has told, or that kept it from being made.
pub fn error_of(status: &tonic::Status) -> Error {
    let found = CODES.iter().find(|(_, code)| *code == status.code());
    // What has no code of ours did not come from an agent, but from what lies between.
    Error::new(found.map_or(Kind::Unavailable, |&(kind, _)| kind), status.message().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_error_comes_back() {
        for kind in Kind::ALL {
            let error = error_of(&status_of(&Error::new(kind, "why").with("slot", "3")));
            assert_eq!((error.kind(), error.message()), (kind, "why (slot: 3)"));
        }
        assert_eq!(error_of(&tonic::Status::new(Code::Unknown, "broken")).kind(), Kind::Unavailable);
    }
}
