//! How agents and a controller agree: membership, epochs, commits, recovery. No clock, no threads, no I/O.
//!
//! [`Agent`] and [`Controller`] are machines that take inputs (messages, ticks, what happened to slots) and return
//! outputs (messages, effects). Whoever drives them carries messages, moves bytes and keeps time; the tests do so in a
//! simulation that loses, delays, repeats and reorders messages, kills and partitions hosts, and damages copies.
//!
//! | file | what it holds |
//! |---|---|
//! | `names` | programs, epochs, versions, keys, digests |
//! | `message`, `wire`, `pairs` | what is said, and how it is written |
//! | `quorum` | which promises count, also of agents that have lost their memory |
//! | `memory`, `events` | what an agent keeps; what happens to it, and what it wants done |
//! | `agent`, `replication`, `restoring` | the agent's machine |
//! | `controller`, `recovery`, `training` | the controller's machine |
//! | `decision` | which version a recovery goes back to, and where each shard comes from |
//! | `placement` | who keeps copies of whose shards |
//! | `election` | who is the controller |
//!
//! A majority of agents must remember what they promised, or all must be there: if more lose their memory at once, an
//! epoch begins once every agent is heard, those that replace the lost ones included, with whatever is complete in their
//! memory.

pub mod agent;
pub mod controller;
pub mod decision;
pub mod election;
pub mod events;
pub mod memory;
pub mod message;
pub mod names;
mod pairs;
pub mod placement;
pub mod quorum;
mod recovery;
mod replication;
mod restoring;
mod training;
pub mod wire;

pub use agent::Agent;
pub use controller::Controller;
