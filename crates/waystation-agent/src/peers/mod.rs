//! Agents among each other: who may connect, what they tell each other, how the bytes of slots travel.
//!
//! How they prove themselves, and keep others from what they say, is the crate `waystation-peers`'. `bulk` carries the
//! bytes of slots, `control` calls; `server` is all of it behind one address. `docs/protocol-peers.md`
//! specifies the wire.

pub mod bulk;
mod control;
mod server;

pub use control::{ControlClient, ControlService, Deliver, MESSAGE_LIMIT_BYTES};
pub use server::{Server, Services, serve};
pub use waystation_peers::{
    BULK_BYTES, Connection, Credentials, Encryption, End, Frame, FrameReader, FrameWriter, Identity,
    Incoming, Kinds, LEAST_SECRET_BYTES, Limits, Listener, MESSAGE_BYTES, MOST_SECRET_BYTES, Name, Outgoing,
    Peer, Proven, Purpose, Secret, Tls, VERSION, decode_failure, encode_failure, lost,
};
