//! Whatever another agent says has a form in which it can be said again, or is refused; and an agent and a controller that
//! hear it all, message after message, go on. The input is messages, one in each line.

#![no_main]

use libfuzzer_sys::fuzz_target;
use waystation_agent::protocol::Agent;
use waystation_agent::protocol::controller::{self, Controller, Settings};
use waystation_agent::protocol::events::Input;
use waystation_agent::protocol::memory::{Limits, Memory};
use waystation_agent::protocol::names::AgentId;
use waystation_agent::protocol::wire::{Envelope, decode, encode};

const AGENTS: usize = 3;
const LIMITS: Limits = Limits { copies: 4, versions_of_shard: 2 };

fuzz_target!(|input: &[u8]| {
    let mut agent = Agent::new(AgentId(0), LIMITS, Memory::of_founder());
    let mut controller = Controller::new(1, settings(), 0);
    for (written, now_ms) in input.split(|&byte| byte == b'\n').zip((0..).step_by(300)) {
        let Ok(envelope) = decode(written, AGENTS) else { continue };
        let again = encode(&envelope).expect("what was read cannot be written");
        assert_eq!(decode(&again, AGENTS).expect("it has a meaning"), envelope);
        match envelope {
            Envelope::ToAgent(message) => drop(agent.handle(Input::Controller(message))),
            Envelope::ToPeer(message) => drop(agent.handle(Input::Peer(AgentId(1), message))),
            Envelope::ToController { message, .. } => {
                drop(controller.handle(controller::Input::Message(AgentId(1), message)));
            }
        }
        agent.handle(Input::Tick);
        controller.handle(controller::Input::Tick(now_ms));
        assert!(agent.memory().copies.len() <= LIMITS.copies);
    }
});

fn settings() -> Settings {
    Settings {
        domains: vec![0; AGENTS],
        copies: 2,
        dead_after_ms: 1000,
        gather_ms: 100,
        stuck_ms: 500,
        give_up_ms: 1000,
        fruitless_limit: 2,
    }
}
