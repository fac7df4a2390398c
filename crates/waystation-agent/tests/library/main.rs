//! What the library of the agent does without its daemon, in one program: to link one for every file takes
//! longer than to run them.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod adoption;
mod loading;
mod messages;
mod placement;
mod protocol;
mod sharing;
mod store;
#[path = "../support/mod.rs"]
mod support;
mod wire;
