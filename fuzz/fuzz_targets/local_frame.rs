//! Whatever a process says to its agent is a request that can be said again in the same words, or is refused;
//! the same of what an agent answers.

#![no_main]

use libfuzzer_sys::fuzz_target;
use serde::Serialize;
use serde::de::DeserializeOwned;
use waystation_agent::local::frame::{self, REPLY_LIMIT_BYTES, REQUEST_LIMIT_BYTES};
use waystation_agent::local::message::{Reply, Request};

fuzz_target!(|input: &[u8]| {
    check::<Request>(input, REQUEST_LIMIT_BYTES);
    check::<Reply>(input, REPLY_LIMIT_BYTES);
});

fn check<M: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(mut input: &[u8], limit_bytes: u32) {
    while let Ok(Some(body)) = frame::read(&mut input, limit_bytes) {
        let Ok(message) = frame::parse::<M>(&body) else { continue };
        let mut again = Vec::new();
        frame::write(&mut again, &message, REPLY_LIMIT_BYTES).expect("what was read cannot be written");
        let body = frame::read(&mut &again[..], REPLY_LIMIT_BYTES).expect("it is a frame");
        assert_eq!(frame::parse::<M>(&body.expect("there is one")).expect("it has a meaning"), message);
    }
}
