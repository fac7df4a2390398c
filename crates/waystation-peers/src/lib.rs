//! How two sides of one job come to speak to each other: who may connect, and how what they say is signed.
//!
//! `secret`, `keys`, `hello` and `handshake` are how two sides prove to each other that they belong to one
//! job, over what `carrier` carries, which may be `tls` (a feature: who does without has `no_tls` in its place); `gate`
//! and `listener` keep strangers from taking anything; `stream` and `frame` carry what is said between those who have
//! proven themselves: a stream of bytes, or frames with bulk after them; `failure` is how an error is told. What is said
//! is for others: the agents of the memory tier, and the transport of the runtime. `docs/protocol-peers.md` specifies
//! the wire.

mod carrier;
mod connection;
mod failure;
mod frame;
mod gate;
mod handshake;
mod hello;
mod keys;
mod listener;
mod secret;
mod stream;
#[cfg(feature = "tls")]
mod tls;
#[cfg(not(feature = "tls"))]
#[path = "no_tls.rs"]
mod tls;

pub use carrier::Carrier;
pub use connection::{Connection, Credentials, Peer};
pub use failure::{decode_failure, encode_failure};
pub use frame::{
    BULK_BYTES, Frame, FrameReader, FrameWriter, HEADER_BYTES, Kinds, MESSAGE_BYTES, Opener, Sealer, lost,
};
pub use gate::{Limits, Proven};
pub use handshake::Identity;
pub use hello::{Name, Purpose, VERSION};
pub use keys::{Keys, Signer, TAG_BYTES};
pub use listener::Listener;
pub use secret::{LEAST_BYTES as LEAST_SECRET_BYTES, MOST_BYTES as MOST_SECRET_BYTES, Secret};
pub use tls::{Session, Tls};
pub use waystation_format::{Error, Kind, Result};
