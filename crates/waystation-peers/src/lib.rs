//! How two sides of a job come to speak to each other: who may connect, and how what they say is kept from others.
//!
//! `tls` is what a side shows and believes, made from the `secret` by `keys` or read from certificates. `session` is one side of
//! a connection without its socket: TLS, and inside it `hello`, who is there and wants what. `connection` puts it on a socket,
//! `gate` and `listener` keep strangers from taking anything. Then `connection` carries messages, or is split into `halves`,
//! which carry a `frame` after another, with bulk; `failure` is how an error is told. `channel` is for those who have sockets of
//! their own. What is said is for others: the agents of the memory tier, the transport and the controller of the runtime, and
//! launches. `docs/protocol-peers.md` specifies the wire, and
//! `docs/design/0008-connections.md` says why it is so.

mod channel;
mod connection;
mod failure;
mod frame;
mod gate;
mod halves;
mod hello;
mod keys;
mod listener;
mod secret;
mod session;
mod tls;

pub use channel::Channel;
pub use connection::{Connection, Credentials, Encryption, Identity, Peer};
pub use failure::{decode_failure, encode_failure};
pub use frame::{BULK_BYTES, Frame, FrameReader, FrameWriter, HEADER_BYTES, Kinds, MESSAGE_BYTES, lost};
pub use gate::{Limits, Proven};
pub use halves::{End, Incoming, Outgoing};
pub use hello::{Name, Purpose, VERSION};
pub use keys::{SEED_BYTES, Seed, derive, issued, issuer};
pub use listener::Listener;
pub use secret::{LEAST_BYTES as LEAST_SECRET_BYTES, MOST_BYTES as MOST_SECRET_BYTES, Secret};
pub use tls::Tls;
pub use waystation_format::{Error, Kind, Result};
