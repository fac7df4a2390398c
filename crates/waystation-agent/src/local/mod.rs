//! What an agent and the processes of its host say to each other, over a Unix socket in the store's directory.
//!
//! `message` is what can be said (`standing`: among agents of several hosts; `refusal`: what went wrong), `frame` how
//! it is put on the wire, `timed` the wire itself, `place` where the socket is. Only numbers and names go this way: the bytes of arrays stay in slots, which both sides open by
//! themselves. `docs/protocol-local.md` specifies it.

pub mod frame;
pub mod message;
pub mod place;
mod refusal;
mod standing;
pub mod timed;
