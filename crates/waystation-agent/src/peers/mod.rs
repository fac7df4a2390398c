//! Agents among each other: who may connect, what they tell each other, how the bytes of slots travel.
//!
//! `secret`, `keys`, `hello` and `handshake` are how two sides prove to each other that they belong to one
//! job, over what `carrier` carries, which may be `tls`; `gate` and `listener` keep strangers from taking anything; `stream` carries what is said between those
//! who have proven themselves, `bulk` the bytes of slots, `control` calls; `server` is all of it behind one
//! address. `docs/protocol-peers.md` specifies the wire.

pub mod bulk;
mod carrier;
mod connection;
mod control;
mod gate;
mod handshake;
mod hello;
mod keys;
mod listener;
mod secret;
mod server;
mod stream;
mod tls;

pub use connection::{Connection, Credentials, Peer};
pub use control::{
    ControlClient, ControlService, Deliver, Incoming, Inventory, MESSAGE_LIMIT_BYTES, Slot, Stats, Status,
};
pub use gate::Limits;
pub use handshake::Identity;
pub use hello::{Name, Purpose, VERSION};
pub use listener::Listener;
pub use secret::{LEAST_BYTES as LEAST_SECRET_BYTES, MOST_BYTES as MOST_SECRET_BYTES, Secret};
pub use server::{Server, Services, serve};
pub use tls::Tls;
