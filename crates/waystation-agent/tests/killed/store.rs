//! Real processes that share a store, and are killed: the agent before each of its changes, writers in the
//! middle of theirs.

use std::env;
use std::fs::{self, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use crate::support::*;
use crate::trace::{self, End};
use crate::{DIRECTORY, ROLE, Test, next_order, wait_after_one};
use waystation_agent::store::{Config, Found, Grant, Store};
use waystation_agent::writer::SlotWriter;
use waystation_agent::{Kind, process};
use waystation_format::slot::{State, Writer};

/// How many versions the agent that is killed commits.
const VERSIONS: u64 = 4;

pub const TESTS: &[Test] = &[
    ("an_agent_killed_before_any_change_loses_nothing", an_agent_killed_before_any_change_loses_nothing),
    ("an_agent_killed_while_it_takes_over_loses_nothing", an_agent_killed_while_it_takes_over_loses_nothing),
    ("the_slot_of_a_killed_writer_is_given_to_others", the_slot_of_a_killed_writer_is_given_to_others),
    ("a_writer_outlives_the_agent", a_writer_outlives_the_agent),
    ("a_child_does_not_keep_the_slot", a_child_does_not_keep_the_slot),
    ("a_full_file_system_is_an_error", a_full_file_system_is_an_error),
];

/// Does what a role is there for; returns whether it is one of these tests.
pub fn play(role: &str, directory: &Path) -> bool {
    match role {
        "agent" => run_agent(directory),
        "adopt" => drop(open(directory)),
        "writer" => run_writer(false),
        "forking writer" => run_writer(true),
        "full" => run_on_full_file_system(directory),
        _ => return false,
    }
    true
}

fn as_role(role: &str, directory: &Path) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command.env(ROLE, role).env(DIRECTORY, directory).stdin(Stdio::null()).stdout(Stdio::null());
    command
}

/// Makes a store and commits versions to it, telling of each.
fn run_agent(directory: &Path) {
    let store = open(directory);
    let mut told = OpenOptions::new().append(true).open(directory.with_extension("told")).unwrap();
    for step in 1..=VERSIONS {
        let grant = begin(&store, "a", step).unwrap();
        let mut writer = SlotWriter::open(&grant).unwrap();
        let arrays = arrays("a", step);
        // SAFETY: the arrays outlive the call. One thread, for the tracer.
        unsafe { writer.fill(&layout().0, &parts(&arrays), 1, &|| false) }.unwrap();
        drop(writer);
        store.seal(grant.slot, grant.ticket).unwrap();
        store.commit(version(1, step)).unwrap();
        told.write_all(&[step as u8]).unwrap();
    }
}

/// Asserts the law: what was told to be committed is there, what is there is whole, and saving goes on.
fn assert_nothing_lost(directory: &Path, told: Option<u64>) {
    let (store, _) = Store::open(&config(directory)).unwrap();
    let newest = store.newest_committed(&key("a", 0)).map(|version| version.step);
    assert!(newest >= told, "{told:?} was committed, but {newest:?} is there");
    for header in store.inventory() {
        match &header.state {
            State::Sealed(tenant, _) | State::Committed(tenant, _) => {
                assert_whole(&store, &tenant.key.shard, tenant.key.version.step);
            }
            State::Writing(_) => unreachable!("its writer is dead"),
            State::Free | State::Quarantined(_) => {}
        }
    }
    // The version before the newest may be sealed only, if the agent died before it was committed.
    for header in store.inventory() {
        if let State::Sealed(tenant, _) = &header.state {
            store.commit(tenant.key.version).unwrap();
        }
    }
    commit(&store, "a", 100);
    commit(&store, "a", 101);
    assert_whole(&store, "a", 101);
}

fn an_agent_killed_before_any_change_loses_nothing() {
    for limit in 0.. {
        let parent = memory_directory();
        let directory = parent.path().join("store");
        fs::create_dir(&directory).unwrap();
        fs::set_permissions(&directory, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
        let told = directory.with_extension("told");
        fs::write(&told, b"").unwrap();
        let end = trace::run(&mut as_role("agent", &directory), limit);
        let last = fs::read(&told).unwrap().last().map(|&step| u64::from(step));
        assert_nothing_lost(&directory, last);
        if let End::Exited { status, changes } = end {
            assert_eq!((status, last), (0, Some(VERSIONS)));
            assert!(changes >= 40, "a walk of {changes} steps proves little");
            return;
        }
    }
}

fn an_agent_killed_while_it_takes_over_loses_nothing() {
    for limit in 0.. {
        let parent = memory_directory();
        let directory = parent.path().join("store");
        let store = open(&directory);
        commit(&store, "a", 1);
        commit(&store, "a", 2);
        let damaged = seal(&store, "b", 1);
        let mut dead = tenant(key("c", 1));
        dead.writer = Writer { start_ticks: 1, ..dead.writer };
        store.begin(&dead).unwrap();
        drop(store);
        let path = directory.join(format!("slot-{damaged:05}"));
        let file = OpenOptions::new().write(true).open(path).unwrap();
        file.write_all_at(b"damage", config(&directory).slot_bytes - 200_000).unwrap();
        let end = trace::run(&mut as_role("adopt", &directory), limit);
        assert_nothing_lost(&directory, Some(2));
        if let End::Exited { status, changes } = end {
            assert_eq!(status, 0);
            assert!(changes >= 3, "{changes}: the lock, a slot freed, a slot quarantined");
            return;
        }
    }
}

/// A writer in a process of its own, which fills one block and waits to be told to go on.
struct Writing {
    child: Child,
    grant: Grant,
    orders: ChildStdin,
    news: BufReader<ChildStdout>,
}

fn start_writer(store: &Store, directory: &Path, role: &str, shard: &str, step: u64) -> Writing {
    let mut command = as_role(role, directory);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut orders = child.stdin.take().unwrap();
    let mut news = BufReader::new(child.stdout.take().unwrap());
    let mut tenant = tenant(key(shard, step));
    tenant.writer = process::identify(child.id()).unwrap();
    let grant = store.begin(&tenant).unwrap();
    writeln!(orders, "{shard} {step} {} {} {}", grant.slot, grant.ticket, grant.path.display()).unwrap();
    let mut line = String::new();
    news.read_line(&mut line).unwrap();
    assert_eq!(line, "one block is in place\n");
    Writing { child, grant, orders, news }
}

impl Writing {
    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn signal(&self, signal: i32) {
        // SAFETY: the child was not waited for, so the id is its own.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }
}

fn run_writer(forks: bool) {
    let line = next_order();
    let fields: Vec<&str> = line.trim_end().splitn(5, ' ').collect();
    let (shard, step) = (fields[0], fields[1].parse().unwrap());
    let grant = Grant {
        slot: fields[2].parse().unwrap(),
        ticket: fields[3].parse().unwrap(),
        path: fields[4].into(),
        tenant: tenant(key(shard, step)),
    };
    let mut writer = SlotWriter::open(&grant).unwrap();
    if forks {
        // SAFETY: the child sleeps until it is killed, in system calls alone.
        unsafe {
            if libc::fork() == 0 {
                libc::prctl(libc::PR_SET_NAME, c"left behind".as_ptr());
                libc::sleep(600);
                libc::_exit(0);
            }
        }
    }
    let arrays = arrays(shard, step);
    // SAFETY: the arrays outlive the call.
    unsafe { writer.fill(&layout().0, &parts(&arrays), 1, &wait_after_one()) }.unwrap();
    println!("filled");
}

fn the_slot_of_a_killed_writer_is_given_to_others() {
    let directory = memory_directory();
    let store = open(directory.path());
    let mut writing = start_writer(&store, directory.path(), "writer", "a", 10);
    let reading = store.read(&key("a", 10)).unwrap();
    assert_eq!(reading.blocks_in_place().unwrap(), 1);
    // Neither alive nor stopped does it lose its slot.
    writing.signal(libc::SIGSTOP);
    assert_eq!(store.reap().unwrap(), [0; 0]);
    writing.signal(libc::SIGCONT);
    writing.kill();
    assert_eq!(store.reap().unwrap(), [0; 0], "it is being read");
    drop(reading);
    assert_eq!(store.reap().unwrap(), [writing.grant.slot]);
    assert_eq!(store.seal(writing.grant.slot, writing.grant.ticket).unwrap_err().kind(), Kind::Fenced);
    assert_eq!(commit(&store, "a", 10), writing.grant.slot);
    assert_whole(&store, "a", 10);
}

fn a_writer_outlives_the_agent() {
    let directory = memory_directory();
    let store = open(directory.path());
    let mut writing = start_writer(&store, directory.path(), "writer", "a", 10);
    drop(store);
    let (store, adoption) = Store::open(&config(directory.path())).unwrap();
    assert!(matches!(adoption.slots[0], Found::InWriting));
    // Freed by order while its writer lives: nobody else is given it as long as that is so.
    let other = start_writer(&store, directory.path(), "writer", "b", 10);
    store.abort(other.grant.slot, other.grant.ticket).unwrap();
    let given = begin(&store, "b", 20).unwrap();
    assert_ne!(given.slot, other.grant.slot);
    writeln!(writing.orders, "go on").unwrap();
    let mut line = String::new();
    writing.news.read_line(&mut line).unwrap();
    assert_eq!(line, "filled\n");
    assert!(writing.child.wait().unwrap().success());
    store.seal(writing.grant.slot, writing.grant.ticket).unwrap();
    assert_whole(&store, "a", 10);
    let mut other = other;
    other.kill();
    assert_eq!(begin(&store, "c", 10).unwrap().slot, other.grant.slot);
}

fn a_child_does_not_keep_the_slot() {
    let directory = memory_directory();
    let store = open(directory.path());
    let mut writing = start_writer(&store, directory.path(), "forking writer", "a", 10);
    let left = children_of(writing.child.id());
    assert_eq!(left.len(), 1);
    writing.kill();
    assert_eq!(store.reap().unwrap(), [writing.grant.slot]);
    assert_eq!(begin(&store, "a", 20).unwrap().slot, writing.grant.slot);
    // SAFETY: our grandchild, which nobody else ends.
    assert_eq!(unsafe { libc::kill(left[0], libc::SIGKILL) }, 0);
}

fn children_of(process: u32) -> Vec<i32> {
    let path = format!("/proc/{process}/task/{process}/children");
    fs::read_to_string(path).unwrap().split_whitespace().map(|id| id.parse().unwrap()).collect()
}

fn a_full_file_system_is_an_error() {
    let place = memory_directory();
    let status = as_role("full", place.path()).stdout(Stdio::inherit()).status().unwrap();
    assert!(status.success(), "{status}");
}

/// Makes a store on a tmpfs of its own that has less room than the store needs.
fn run_on_full_file_system(place: &Path) {
    // SAFETY: names no memory.
    let (user, group) = unsafe { (libc::geteuid(), libc::getegid()) };
    // SAFETY: this process has one thread.
    if unsafe { libc::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNS) } != 0 {
        println!("a_full_file_system_is_an_error: skipped, the system grants no namespace of its own");
        return;
    }
    fs::write("/proc/self/setgroups", "deny").unwrap();
    fs::write("/proc/self/uid_map", format!("0 {user} 1")).unwrap();
    fs::write("/proc/self/gid_map", format!("0 {group} 1")).unwrap();
    let wanted = config(&place.join("store"));
    let kib = wanted.slot_bytes * 3 / 1024;
    let options = format!("size={kib}k,mode=700\0");
    let target = format!("{}\0", place.display());
    // SAFETY: all strings end with a zero and outlive the call.
    let mounted = unsafe {
        libc::mount(c"none".as_ptr(), target.as_ptr().cast(), c"tmpfs".as_ptr(), 0, options.as_ptr().cast())
    };
    assert_eq!(mounted, 0, "{}", io::Error::last_os_error());
    let refused = Store::open(&wanted).unwrap_err();
    assert_eq!((refused.kind(), refused.context("errno")), (Kind::Unavailable, Some("28")), "{refused}");
    assert_eq!(fs::read_dir(&wanted.directory).unwrap().count(), 1, "only the lock is left");
    Store::open(&Config { slot_count: 2, ..wanted }).unwrap();
}
