//! Bytes of slots between agents: a version of a shard goes from a slot of one to a slot of the other.
//!
//! `frame` and `message` are what goes over the wire; `channel` is one connection; `send` and `receive` are the
//! two ends of a transfer, whichever side has asked for it; `intake` and `consumer` are where a version goes
//! to; `service` answers those who connect, `transfer` is for those who do; `pacing` says how fast, `traffic` how
//! much it was.

mod channel;
mod consumer;
mod frame;
mod intake;
mod message;
mod pacing;
mod receive;
mod send;
mod service;
mod traffic;
mod transfer;

pub use consumer::Fetched;
pub use intake::Intake;
pub(super) use message::{Fetch, decode_exactly, encode_longs};
pub use pacing::{LEAST_CHUNK_BYTES, MOST_CHUNK_BYTES, Pacer, Pause, chunk_bytes};
pub use send::Order;
pub use service::{Admission, BulkService};
pub use traffic::{Traffic, TrafficCounts};
pub use transfer::{Route, fetch, fetch_past_store, replicate};
