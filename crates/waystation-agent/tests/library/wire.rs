//! Messages between agents come back as they were sent; whatever else comes is refused, and hurts nobody.

use proptest::prelude::*;
use waystation_agent::protocol::controller::{self, Controller, Settings};
use waystation_agent::protocol::events::Input;
use waystation_agent::protocol::memory::{Limits, Memory};
use waystation_agent::protocol::names::{AgentId, Epoch};
use waystation_agent::protocol::wire::{Envelope, LIMIT_BYTES, decode, encode};
use waystation_agent::protocol::{Agent, placement};
use waystation_format::Kind;

use crate::messages::{AGENTS, envelopes};

fn settings() -> Settings {
    Settings {
        domains: vec![0; AGENTS],
        copies: 2,
        dead_after_ms: 1000,
        gather_ms: 100,
        stuck_ms: 500,
        give_up_ms: 1000,
        versions: 1,
        fruitless_limit: 2,
    }
}

/// Lets both machines hear a message.
fn hear(agent: &mut Agent, controller: &mut Controller, envelope: Envelope) {
    match envelope {
        Envelope::ToAgent(message) => drop(agent.handle(Input::Controller(message))),
        Envelope::ToPeer(message) => drop(agent.handle(Input::Peer(AgentId(1), message))),
        Envelope::ToController { message, .. } => {
            drop(controller.handle(controller::Input::Message(AgentId(1), message)));
        }
    }
}

proptest! {
    #[test]
    fn messages_come_back_as_they_were_sent(envelope in envelopes()) {
        let written = encode(&envelope).expect("it is short");
        prop_assert_eq!(decode(&written, AGENTS).expect("it is sound"), envelope);
    }

    /// Most of these still are JSON, many of them messages.
    #[test]
    fn damaged_messages_are_refused_or_mean_something(
        envelope in envelopes(),
        at in any::<prop::sample::Index>(),
        byte in any::<u8>(),
    ) {
        let mut written = encode(&envelope).expect("it is short");
        let at = at.index(written.len());
        written[at] = byte;
        match decode(&written, AGENTS) {
            Ok(read) => {
                let again = decode(&encode(&read).expect("it is short"), AGENTS);
                prop_assert_eq!(again.expect("it is sound"), read);
            }
            Err(refused) => prop_assert_eq!(refused.kind(), Kind::InvalidInput),
        }
    }

    /// Whatever an agent or a controller is told in any order, as long as it can be read, it goes on.
    #[test]
    fn machines_bear_any_message(envelopes in prop::collection::vec(envelopes(), 0..40)) {
        let limits = Limits { copies: 4, versions_of_shard: 2 };
        let mut agent = Agent::new(AgentId(0), limits, Memory::of_founder());
        let mut controller = Controller::new(1, settings(), 0);
        for (envelope, now_ms) in envelopes.into_iter().zip((0..).step_by(300)) {
            hear(&mut agent, &mut controller, envelope);
            agent.handle(Input::Tick);
            controller.handle(controller::Input::Tick(now_ms));
            prop_assert!(agent.memory().copies.len() <= limits.copies);
        }
    }

    /// What an agent keeps beyond its process is written in the same words.
    #[test]
    fn memory_comes_back_as_it_was_kept(memory in crate::messages::memories()) {
        let written = serde_json::to_vec(&memory).expect("it has a form");
        prop_assert_eq!(serde_json::from_slice::<Memory>(&written).expect("it is one"), memory);
    }

    #[test]
    fn epochs_are_packed_in_their_order(one in crate::messages::epochs(), other in crate::messages::epochs()) {
        prop_assert_eq!(Epoch::of_packed(one.packed()), one);
        prop_assert_eq!(one.packed().cmp(&other.packed()), one.cmp(&other));
    }
}

#[test]
fn messages_have_the_form_that_is_written_down() {
    let page = include_str!("../../../../docs/protocol-peers.md");
    let shown = page.lines().filter(|line| line.starts_with(r#"{"to_"#));
    let written = crate::messages::golden::envelopes().into_iter().map(|envelope| {
        let written = encode(&envelope).expect("it is short");
        assert_eq!(decode(&written, 3).expect("it is sound"), envelope);
        String::from_utf8(written).expect("it is text")
    });
    let (shown, written): (Vec<&str>, Vec<String>) = (shown.collect(), written.collect());
    assert_eq!(shown, written, "the page is to show:\n{}", written.join("\n"));
}

#[test]
fn what_is_not_sound_is_refused() {
    let epoch = r#"{"number":1,"controller":1}"#;
    let program = r#"{"token":1,"sequence":1,"owners":[0]}"#;
    let report = |program: &str, copies: &str, incarnations: &str| {
        format!(
            r#"{{"to_controller":{{"controller":1,"message":{{"report":{{"incarnation":0,"promised":{epoch},
            "program":{program},"incarnations":[{incarnations}],"copies":[{copies}],"noted":[],"trained":null}}}}}}}}"#
        )
    };
    let copy = |shard: u32, count: u32| {
        format!(
            r#"[{{"version":{{"epoch":{epoch},"step":1}},"shard":{shard}}},
            {{"digest":1,"shard_count":{count},"sequence":1}}]"#
        )
    };
    let is_read = |written: &str| decode(written.as_bytes(), 3).is_ok();
    assert!(is_read(&report(program, &copy(0, 1), "[2,7]")));

    let refused = [
        ("an agent that there is not", report(program, "", "[3,7]")),
        ("an owner that there is not", report(&program.replace("[0]", "[3]"), "", "")),
        ("a program without processes", report(&program.replace("[0]", "[]"), "", "")),
        ("a shard that the version has not", report(program, &copy(1, 1), "")),
        ("a shard twice", report(program, &format!("{0},{0}", copy(0, 1)), "")),
        ("an agent twice", report(program, "", "[2,7],[2,8]")),
        ("a field more", report(&program.replace('}', r#","age":1}"#), "", "")),
        (
            "an epoch that is too great",
            report(program, "", "").replace(r#""number":1"#, r#""number":4294967296"#),
        ),
        (
            "orders without holders",
            format!(
                r#"{{"to_agent":{{"train":{{"epoch":{epoch},"attempt":1,"revision":0,"program":{program},
            "is_continued":false,"base":null,"is_base_kept":false,"commits":[],"is_open":true,"floor":0,"holders":[]}}}}}}"#
            ),
        ),
        (
            "a version without shards",
            format!(
                r#"{{"to_agent":{{"restore":{{"epoch":{epoch},"attempt":1,"program":{program},
            "version":{{"epoch":{epoch},"step":1}},"shards":[]}}}}}}"#
            ),
        ),
    ];
    for (why, written) in refused {
        let error = decode(written.as_bytes(), 3).expect_err(why);
        assert_eq!(error.kind(), Kind::InvalidInput, "{why}");
    }
    let long = vec![b' '; LIMIT_BYTES + 1];
    assert_eq!(decode(&long, 3).expect_err("it is too long").kind(), Kind::InvalidInput);
}

/// A place for each shard of whatever a program says it has.
#[test]
fn placement_bears_programs_of_any_owners() {
    let owners: Vec<AgentId> = (0..200).map(|owner| AgentId(owner % AGENTS as u16)).collect();
    let live = [AgentId(0)].into();
    assert_eq!(placement::holders_of(&owners, &live, &[0; AGENTS], 3).len(), 200);
}
