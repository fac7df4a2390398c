//! Blocks of arrays between the hosts of a runtime.
//!
//! A producer *offers* blocks, which are known by keys, and holds them; a consumer *fetches* them, straight
//! to where they go. Bytes are pulled, and a request may come before the offer: it stands at the producer,
//! and the offer goes out the moment it is made. So nothing is buffered for who has not asked, whoever is
//! slow holds up only itself, and a consumer that asks early waits as short as if it were pushed to.
//!
//! `key` and `message` are what is said, `offers` is what a producer has and who waits for it, `held` the
//! memory of it; `fetch` is what a consumer waits for. `serving` and `asking` are the two ends of a
//! connection, `memory` the way past it between processes of one machine; `transport` is all of it, with one
//! address. `docs/protocol-transport.md` specifies the wire.

mod asking;
mod connection;
mod fetch;
mod held;
mod key;
mod memory;
pub mod message;
mod offers;
mod outbox;
mod serving;
mod transport;

pub use fetch::Target;
pub use held::Block;
pub use key::{Key, Scope};
pub use transport::{Transport, Waiting};
pub use waystation_peers::{Error, Kind, Result};
