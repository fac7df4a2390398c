//! The memory tier of one host: versions of a program's state in slots on tmpfs, which outlive the program
//! that fills them and the agent that owns them.
//!
//! `store` owns the slots of a host, `writer` fills one and `reader` loads from one, in whatever process.
//! `slots` is how a slot changes and which one is given to whom: pure, but for the count of readers that
//! threads share. `daemon` is the agent as a program, `client` what a trainer does with it, `local` what the two
//! say to each other. `process` and `locks` tell who still uses one. `docs/format-slots.md` specifies the files,
//! whose bytes `waystation-format` reads and writes; bytes of arrays are moved by `waystation-io`. `peers` (a
//! feature, for those who need no network) is how agents of several hosts speak to each other, `protocol` how they and a
//! controller agree on epochs, commits and recoveries: pure machines.

pub mod client;
#[cfg(feature = "daemon")]
pub mod daemon;
pub mod local;
pub mod locks;
#[cfg(feature = "peers")]
pub mod peers;
pub mod prefix;
pub mod process;
pub mod protocol;
pub mod reader;
pub mod slots;
pub mod store;
pub mod writer;

mod mapping;

pub use waystation_format::{Error, Kind, Result};
