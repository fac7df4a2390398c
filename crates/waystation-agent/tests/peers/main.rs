//! What agents say and send to each other over real sockets, in one program: to link one for every file takes longer
//! than to run them.
#![allow(clippy::unwrap_used)]

#[path = "../support/bulk.rs"]
mod bulk;
#[path = "../support/certificates.rs"]
mod certificates;
mod control;
mod copies;
mod handshake;
#[path = "../support/peers.rs"]
mod peers;
#[path = "../support/mod.rs"]
mod support;
mod tls;
