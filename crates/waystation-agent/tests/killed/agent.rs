//! The agent's binary and processes that use it: killed, stopped, replaced, lied to.

use std::env;
use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::sleep;
use std::time::Duration;

use crate::agent_support::*;
use crate::support::*;
use crate::{DIRECTORY, ROLE, Test, next_order, wait_after_one};
use waystation_agent::Kind;
use waystation_agent::local::message::{Refusal, Reply, Request, Ticket, Wanted};
use waystation_agent::store::{Grant, SlotFile};
use waystation_agent::writer::SlotWriter;

pub const TESTS: &[Test] = &[
    ("a_version_is_saved_committed_and_loaded", a_version_is_saved_committed_and_loaded),
    ("an_agent_killed_again_and_again_is_not_noticed", an_agent_killed_again_and_again_is_not_noticed),
    ("a_slot_is_filled_while_its_agent_is_replaced", a_slot_is_filled_while_its_agent_is_replaced),
    ("the_slot_of_a_killed_trainer_is_freed_at_once", the_slot_of_a_killed_trainer_is_freed_at_once),
    ("trainer_and_agent_are_killed", trainer_and_agent_are_killed),
    ("a_stopped_trainer_is_fenced_and_does_no_harm", a_stopped_trainer_is_fenced_and_does_no_harm),
    ("an_agent_that_is_told_to_end_leaves_its_slots", an_agent_that_is_told_to_end_leaves_its_slots),
    ("what_cannot_be_a_store_is_refused", what_cannot_be_a_store_is_refused),
    ("a_slot_that_is_asked_for_again_is_granted_anew", a_slot_that_is_asked_for_again_is_granted_anew),
];

/// Does what a role is there for; returns whether it is one of these tests.
pub fn play(role: &str, directory: &Path) -> bool {
    match role {
        "trainer" => run_trainer(directory),
        _ => return false,
    }
    true
}

fn a_version_is_saved_committed_and_loaded() {
    let directory = memory_directory();
    let agent = Agent::start(directory.path());
    let client = client(directory.path());
    let status = client.status(&never()).unwrap();
    assert_eq!((status.process, status.process_count), (agent.process(), 1));
    assert!(status.adoption.is_new);
    for step in 1..=5 {
        let saved = save(&client, "a", version(1, step)).unwrap();
        assert_eq!(slot_states(&client)[saved.slot as usize], "sealed");
        let commit = Request::Commit(version(1, step).into());
        assert_eq!(client.change(&commit, &never()).unwrap(), [saved.slot]);
        assert_eq!(client.change(&commit, &never()).unwrap(), [saved.slot], "asked again");
        assert_readable(&client, "a", version(1, step));
    }
    assert_readable(&client, "a", version(1, 4));
    assert_eq!(client.hold("a", version(1, 3), &never()).unwrap_err().kind(), Kind::NotFound);
    assert_eq!(save(&client, "a", version(1, 5)).unwrap_err().kind(), Kind::Conflict);
    // Apart from whoever started it.
    let stat = fs::read_to_string(format!("/proc/{}/stat", agent.process())).unwrap();
    let session = stat.rsplit_once(')').unwrap().1.split_ascii_whitespace().nth(3).unwrap();
    assert_eq!(session, agent.process().to_string());
}

fn an_agent_killed_again_and_again_is_not_noticed() {
    const KILLS: u64 = 20;
    let directory = memory_directory();
    let is_done = AtomicBool::new(false);
    let kills = AtomicU64::new(0);
    let mut last = 0;
    std::thread::scope(|scope| {
        let first = Agent::start(directory.path());
        let client = client(directory.path());
        scope.spawn(|| {
            let mut agent = first;
            for pause_ms in (0u64..).map(|round| round * 7919 % 23) {
                if is_done.load(Ordering::Relaxed) {
                    return;
                }
                sleep(Duration::from_millis(pause_ms));
                agent.kill();
                kills.fetch_add(1, Ordering::Relaxed);
                agent = Agent::start(directory.path());
            }
        });
        // The other thread must hear of it even if an assertion fails here.
        let done = Done(&is_done);
        let mut step = 0;
        while kills.load(Ordering::Relaxed) < KILLS {
            step += 1;
            save(&client, "a", version(1, step)).unwrap();
            let committed = client.change(&Request::Commit(version(1, step).into()), &never()).unwrap();
            assert_eq!(committed.len(), 1, "step {step}");
            assert_readable(&client, "a", version(1, step));
        }
        drop(done);
        last = step;
    });
    assert_eq!(newest_committed(directory.path(), "a"), Some(last));
}

/// Says that a test is done, also when it panics.
struct Done<'a>(&'a AtomicBool);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A process of its own, which asks for a slot, fills a block of it, and waits to be told to go on.
struct Trainer {
    child: Child,
    orders: ChildStdin,
    news: BufReader<ChildStdout>,
}

impl Trainer {
    fn start(directory: &Path, shard: &str, step: u64) -> Self {
        let mut child = Command::new(env::current_exe().unwrap())
            .env(ROLE, "trainer")
            .env(DIRECTORY, directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut orders = child.stdin.take().unwrap();
        writeln!(orders, "{shard} {step}").unwrap();
        let news = BufReader::new(child.stdout.take().unwrap());
        let mut trainer = Self { child, orders, news };
        assert_eq!(trainer.hear(), "one block is in place");
        trainer
    }

    fn hear(&mut self) -> String {
        let mut line = String::new();
        self.news.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    /// Lets it fill the rest and have it sealed; returns what came of that.
    fn go_on(&mut self) -> String {
        writeln!(self.orders, "go on").unwrap();
        let outcome = self.hear();
        self.child.wait().unwrap();
        outcome
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Trainer {
    fn drop(&mut self) {
        // It may have been waited for.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn run_trainer(directory: &Path) {
    let line = next_order();
    let (shard, step) = line.trim_end().split_once(' ').unwrap();
    let tenant = tenant(key(shard, step.parse().unwrap()));
    let wanted = Wanted {
        shard: shard.to_owned(),
        epoch: 1,
        step: tenant.key.version.step,
        contents_bytes: tenant.contents_bytes,
        data_bytes: tenant.data_bytes,
    };
    let granted = Conversation::greeted(directory).ask(&Request::Grant(wanted));
    let Reply::Granted(ticket) = granted else { unreachable!("{granted:?}") };
    let path = directory.join(SlotFile::name(ticket.slot));
    let grant = Grant { slot: ticket.slot, path, ticket: ticket.ticket, tenant };
    let mut writer = SlotWriter::open(&grant).unwrap();
    let arrays = arrays(shard, grant.tenant.key.version.step);
    // SAFETY: the arrays outlive the call.
    unsafe { writer.fill(&layout().0, &parts(&arrays), 1, &wait_after_one()) }.unwrap();
    match Conversation::greeted(directory).ask(&Request::Seal(ticket)) {
        Reply::Sealed { .. } => println!("sealed"),
        Reply::Refused(Refusal { kind, .. }) => println!("{kind}"),
        other => unreachable!("{other:?}"),
    }
}

fn a_slot_is_filled_while_its_agent_is_replaced() {
    let directory = memory_directory();
    let agent = Agent::start(directory.path());
    let mut trainer = Trainer::start(directory.path(), "a", 1);
    agent.kill();
    let agent = Agent::start(directory.path());
    assert_eq!(agent.adoption("in_writing"), 1);
    let client = client(directory.path());
    assert_eq!(client.status(&never()).unwrap().process_count, 2, "whoever writes is watched again");
    assert_eq!(trainer.go_on(), "sealed");
    assert_readable(&client, "a", version(1, 1));
}

fn the_slot_of_a_killed_trainer_is_freed_at_once() {
    let directory = memory_directory();
    let _agent = Agent::start(directory.path());
    let client = client(directory.path());
    let mut trainer = Trainer::start(directory.path(), "a", 1);
    assert_eq!(slot_states(&client), ["writing", "free", "free", "free"]);
    assert_eq!(client.status(&never()).unwrap().process_count, 2);
    trainer.kill();
    wait_until("its slot is free", || slot_states(&client) == ["free"; 4]);
    assert_eq!(client.status(&never()).unwrap().process_count, 1);
    assert_eq!(save(&client, "a", version(1, 1)).unwrap().slot, 0);
    assert_readable(&client, "a", version(1, 1));
}

fn trainer_and_agent_are_killed() {
    let directory = memory_directory();
    let agent = Agent::start(directory.path());
    let client = client(directory.path());
    save(&client, "a", version(1, 1)).unwrap();
    let mut trainer = Trainer::start(directory.path(), "a", 2);
    agent.kill();
    trainer.kill();
    let agent = Agent::start(directory.path());
    assert_eq!((agent.adoption("whole"), agent.adoption("abandoned")), (1, 1));
    assert_readable(&client, "a", version(1, 1));
    save(&client, "a", version(1, 2)).unwrap();
    assert_readable(&client, "a", version(1, 2));
}

fn a_stopped_trainer_is_fenced_and_does_no_harm() {
    let directory = memory_directory();
    let _agent = Agent::start(directory.path());
    let client = client(directory.path());
    save(&client, "a", version(1, 1)).unwrap();
    client.change(&Request::Commit(version(1, 1).into()), &never()).unwrap();
    let mut trainer = Trainer::start(directory.path(), "a", 2);
    signal(&trainer.child, libc::SIGSTOP);
    assert_eq!(client.raise_epoch(2, &never()).unwrap(), 2);
    assert_eq!(client.raise_epoch(1, &never()).unwrap(), 2, "it never goes back");
    // Its slot is free, but its memory is still mapped: nobody else is given it.
    for step in 3..8 {
        let saved = save(&client, "a", version(2, step)).unwrap();
        assert_ne!(saved.slot, 1);
        client.change(&Request::Commit(version(2, step).into()), &never()).unwrap();
    }
    signal(&trainer.child, libc::SIGCONT);
    assert_eq!(trainer.go_on(), "Fenced");
    assert_readable(&client, "a", version(2, 7));
    assert_readable(&client, "a", version(2, 6));
    assert_eq!(save(&client, "a", version(1, 9)).unwrap_err().kind(), Kind::Fenced);
}

fn an_agent_that_is_told_to_end_leaves_its_slots() {
    let directory = memory_directory();
    let agent = Agent::start(directory.path());
    let client = client(directory.path());
    save(&client, "a", version(1, 1)).unwrap();
    assert_eq!(agent.end().code(), Some(0));
    let agent = Agent::start(directory.path());
    assert_eq!(agent.adoption("whole"), 1);
    assert_readable(&client, "a", version(1, 1));
}

fn what_cannot_be_a_store_is_refused() {
    let directory = memory_directory();
    let (code, said) = refusal(with(agent_command(directory.path()), "--memory-cap-bytes=1MiB"));
    assert_eq!((code, said.contains("given twice")), (Some(2), true), "{said}");
    let mut small = Command::new(env!("CARGO_BIN_EXE_waystation-agent"));
    small.args(["run", "--slots=4", "--data-bytes=1GiB", "--memory-cap-bytes=1GiB", "--directory"]);
    small.arg(directory.path()).arg(format!("--run-id={RUN}"));
    let (code, said) = refusal(small);
    assert_eq!((code, said.contains("raise the cap")), (Some(2), true), "{said}");
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1, "only the lock is left");

    let agent = Agent::start(directory.path());
    let (code, said) = refusal(agent_command(directory.path()));
    assert_eq!((code, said.contains("another agent uses this store")), (Some(2), true), "{said}");
    assert_eq!(agent.end().code(), Some(0));
    let text = agent_command(directory.path());
    let mut other = Command::new(text.get_program());
    let foreign = "--run-id=ffffffffffffffffffffffffffffffff";
    other.args(text.get_args().map(|argument| {
        if argument.to_string_lossy().starts_with("--run-id") { foreign.as_ref() } else { argument }
    }));
    let (code, said) = refusal(other);
    assert_eq!((code, said.contains("versions of another run")), (Some(2), true), "{said}");

    fs::set_permissions(directory.path(), Permissions::from_mode(0o750)).unwrap();
    let (code, said) = refusal(agent_command(directory.path()));
    assert_eq!((code, said.contains("can be entered by other users")), (Some(2), true), "{said}");
    fs::set_permissions(directory.path(), Permissions::from_mode(0o700)).unwrap();
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(directory.path(), Some(12_345), None).unwrap();
        let (code, said) = refusal(agent_command(directory.path()));
        assert_eq!((code, said.contains("belongs to another user")), (Some(2), true), "{said}");
    } else {
        println!("another user's directory: skipped, only root can give one away");
    }
}

fn with(mut command: Command, argument: &str) -> Command {
    command.arg(argument);
    command
}

fn a_slot_that_is_asked_for_again_is_granted_anew() {
    let directory = memory_directory();
    let _agent = Agent::start(directory.path());
    let mut conversation = Conversation::greeted(directory.path());
    let tenant = tenant(key("a", 1));
    let wanted = Wanted {
        shard: "a".to_owned(),
        epoch: 1,
        step: 1,
        contents_bytes: tenant.contents_bytes,
        data_bytes: tenant.data_bytes,
    };
    let Reply::Granted(first) = conversation.ask(&Request::Grant(wanted.clone())) else { unreachable!() };
    // Asked again, because the answer was lost: a right that is newer than the first.
    let Reply::Granted(second) = conversation.ask(&Request::Grant(wanted)) else { unreachable!() };
    assert!(first.slot == second.slot && first.ticket < second.ticket);
    for (ticket, states) in [(first, "writing"), (second, "free"), (second, "free")] {
        assert_eq!(conversation.ask(&Request::Abandon(ticket)), Reply::Done {});
        assert_eq!(slot_states(&client(directory.path()))[0], states);
    }
    let late = Ticket { slot: 0, ticket: u64::MAX };
    let Reply::Refused(refusal) = conversation.ask(&Request::Seal(late)) else { unreachable!() };
    assert_eq!(refusal.kind, "Fenced");
}
