//! What a process says that means harm or nonsense: it is told so, and nobody else notices.

use std::io::Write;
use std::net::Shutdown;

use crate::agent_support::*;
use crate::support::*;
use waystation_agent::client::Client;
use waystation_agent::local::frame::{self, MAGIC, REQUEST_LIMIT_BYTES};
use waystation_agent::local::message::{Hello, HexId, PROTOCOL, Process, Reply, Request};
use waystation_agent::{Kind, process};
use waystation_format::slot::Id;

fn hello(change: impl FnOnce(&mut Hello)) -> Request {
    let process = Process::from(process::current().unwrap());
    let mut hello = Hello { protocol: PROTOCOL, process, run: None };
    change(&mut hello);
    Request::Hello(hello)
}

fn framed(body: &[u8]) -> Vec<u8> {
    [&MAGIC, &(body.len() as u32).to_le_bytes(), body].concat()
}

/// The kind of the refusal that ends a connection on which these bytes were sent.
fn answer_to(directory: &std::path::Path, bytes: &[u8], is_greeted: bool) -> Option<String> {
    let open = if is_greeted { Conversation::greeted } else { Conversation::open };
    let mut conversation = open(directory);
    conversation.0.write_all(bytes).unwrap();
    conversation.0.shutdown(Shutdown::Write).unwrap();
    let kind = match conversation.hear()? {
        Reply::Refused(refusal) => refusal.kind,
        other => unreachable!("{other:?}"),
    };
    assert_eq!(conversation.hear(), None, "the connection has ended");
    Some(kind)
}

#[test]
fn nonsense_ends_the_connection_and_nothing_else() {
    let directory = memory_directory();
    let _agent = Agent::start(directory.path());
    let client = client(directory.path());
    let too_long = [&MAGIC[..], &(REQUEST_LIMIT_BYTES + 1).to_le_bytes()].concat();
    let cut_off = &framed(br#"{"status":{}}"#)[..12];
    let hostile: [(&[u8], Option<&str>); 9] = [
        (b"GET / HTTP/1.1\r\n\r\n", Some("InvalidInput")),
        (&too_long, Some("InvalidInput")),
        (&framed(b""), Some("InvalidInput")),
        (&framed(b"\xff\xfe"), Some("InvalidInput")),
        (&framed(br#"{"format":{"disk":true}}"#), Some("InvalidInput")),
        (&framed(&b"[".repeat(60_000)), Some("InvalidInput")),
        (cut_off, Some("Unavailable")),
        (&MAGIC, Some("Unavailable")),
        (b"", None),
    ];
    for (bytes, expected) in hostile {
        for is_greeted in [false, true] {
            assert_eq!(answer_to(directory.path(), bytes, is_greeted).as_deref(), expected, "{bytes:?}");
        }
    }
    assert_eq!(save(&client, "a", version(1, 1)).unwrap().slot, 0);
    assert_readable(&client, "a", version(1, 1));
}

#[test]
fn whoever_is_not_what_they_say_is_not_served() {
    let directory = memory_directory();
    let agent = Agent::start(directory.path());
    let greetings: [(Request, &str); 6] = [
        (Request::Status {}, "InvalidInput"),
        (hello(|hello| hello.protocol = PROTOCOL + 1), "Unsupported"),
        (hello(|hello| hello.run = Some(HexId(Id([9; 16])))), "Conflict"),
        (hello(|hello| hello.process.process = agent.process()), "InvalidInput"),
        (hello(|hello| hello.process.start_ticks += 1), "NotFound"),
        (hello(|hello| hello.process.process = u32::MAX), "InvalidInput"),
    ];
    for (greeting, expected) in greetings {
        let mut conversation = Conversation::open(directory.path());
        let Reply::Refused(refusal) = conversation.ask(&greeting) else { unreachable!("{greeting:?}") };
        assert_eq!(refusal.kind, expected, "{greeting:?}");
        assert_eq!(conversation.hear(), None);
    }
    // A second greeting is refused, and the connection goes on.
    let mut conversation = Conversation::greeted(directory.path());
    assert!(matches!(conversation.ask(&hello(|_| ())), Reply::Refused(_)));
    assert!(matches!(conversation.ask(&Request::Status {}), Reply::Status(_)));
    let other_run = Client::connect(directory.path(), Some(Id([9; 16])), PATIENCE, &never());
    assert_eq!(other_run.unwrap_err().kind(), Kind::Conflict);
}

#[test]
fn a_process_has_no_right_to_the_slot_of_another() {
    let directory = memory_directory();
    let _agent = Agent::start(directory.path());
    let mut elsewhere = Conversation::open(directory.path());
    // A process that cannot be seen from here is believed, whatever its id.
    let foreign = hello(|hello| {
        hello.process.namespace += 1;
        hello.process.process = 7;
    });
    assert!(matches!(elsewhere.ask(&foreign), Reply::Welcome(_)));
    let wanted = waystation_agent::local::message::Wanted {
        shard: "a".to_owned(),
        epoch: 1,
        step: 1,
        contents_bytes: 8,
        data_bytes: 0,
    };
    let Reply::Granted(ticket) = elsewhere.ask(&Request::Grant(wanted.clone())) else { unreachable!() };
    let mut here = Conversation::greeted(directory.path());
    let Reply::Refused(refusal) = here.ask(&Request::Seal(ticket)) else { unreachable!() };
    assert_eq!(refusal.kind, "Fenced");
    assert_eq!(here.ask(&Request::Abandon(ticket)), Reply::Done {});
    let Reply::Refused(refusal) = here.ask(&Request::Grant(wanted)) else { unreachable!() };
    assert_eq!(refusal.kind, "Conflict");
    assert_eq!(slot_states(&client(directory.path()))[0], "writing");
}

#[test]
fn a_flood_of_connections_is_bounded_and_passes() {
    let directory = memory_directory();
    let _agent = Agent::start(directory.path());
    let mut flood: Vec<Conversation> = (0..600).map(|_| Conversation::open(directory.path())).collect();
    let mut last = flood.pop().unwrap();
    let Some(Reply::Refused(refusal)) = last.hear() else { unreachable!("it is not refused") };
    assert_eq!(refusal.kind, "Unavailable");
    drop((flood, last));
    wait_until("somebody is served again", || {
        let mut conversation = Conversation::open(directory.path());
        // Whether it is refused before or after it speaks, it hears of it.
        frame::write(&mut conversation.0, &hello(|_| ()), REQUEST_LIMIT_BYTES).is_ok()
            && matches!(conversation.hear(), Some(Reply::Welcome(_)))
    });
}
