//! Calls between agents, and from tools: gRPC over connections that have proven themselves.
//!
//! `message` is what is said, `service` answers, `client` calls. Who calls is known from the handshake, so no
//! call says it; what is sent is signed by the stream beneath.

mod client;
mod message;
mod service;

pub use client::ControlClient;
pub use message::{Incoming, Inventory, MESSAGE_LIMIT_BYTES, Slot, Stats, Status};
pub use service::{ControlService, Deliver};
