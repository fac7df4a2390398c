//! Agents as processes, mostly of several hosts: what trainers save is committed on all of them, whatever is killed or
//! lost. What says harm or nonsense to one of them is beside that, since to link a program for it takes longer than to
//! run it.
#![allow(clippy::unwrap_used)]

#[path = "../support/agent.rs"]
mod agent_support;
#[path = "../support/certificates.rs"]
mod certificates;
mod fleet;
mod hostile;
#[path = "../support/mod.rs"]
mod support;

use std::time::Duration;

use agent_support::{Conversation, assert_readable, never, save, wait_until};
use certificates::Authority;
use fleet::Fleet;
use rcgen::date_time_ymd;
use support::*;
use waystation_agent::Kind;
use waystation_agent::local::frame::{self, REQUEST_LIMIT_BYTES};
use waystation_agent::local::message::{Request, Wanted};
use waystation_format::slot::Version;

#[test]
fn what_all_save_is_committed_and_the_version_before_the_last_two_goes() {
    let fleet = Fleet::started(3);
    let program = fleet.begin();
    let status = program.clients[1].status(&never()).unwrap();
    assert_eq!((status.host.as_str(), status.agent_count), ("host-1", 3));
    let first = program.commit(1);
    for process in 0..3 {
        let copies = program.copies(process, first);
        assert!(copies.len() == 2 && copies.iter().all(|(_, state)| state == "committed"), "{copies:?}");
        assert!(copies.iter().any(|&(host, _)| host == process), "its owner has one: {copies:?}");
        assert_readable(&program.clients[process], &program.shard(process), first);
    }
    let second = program.commit(2);
    assert!((0..3).all(|process| program.copies(process, first).len() == 2), "it is what to fall back to");
    program.commit(3);
    wait_until("the first version is gone", || {
        (0..3).all(|process| program.copies(process, first).is_empty())
    });
    assert_readable(&program.clients[0], &program.shard(0), second);
    let standing = program.standing(2);
    assert!(standing.hosts.iter().all(|host| host.is_heard));
    assert_eq!(
        standing.holders.iter().map(|holders| &*holders[0]).collect::<Vec<_>>(),
        ["host-0", "host-1", "host-2"]
    );
}

#[test]
fn after_a_save_that_failed_on_one_host_the_next_one_is_whole() {
    let fleet = Fleet::started(3);
    let program = fleet.begin();
    let mut step = program.commit(1).step;
    for failing in [1, 2, 0, 1] {
        // Again only where a machine is so busy that an agent counts as dead, or does not hear of it in a second.
        let is_whole = (0..5).any(|_| {
            let mut at = Version { epoch: program.await_training(), step: step + 1 };
            for process in (0..3).filter(|&process| process != failing) {
                drop(save(&program.clients[process], &program.shard(process), at));
            }
            // The others have no room left, until the agents have heard that this one has gone on.
            at.step += 1;
            step = at.step;
            let is_saved =
                |process: usize| save(&program.clients[process], &program.shard(process), at).is_ok();
            let is_saved = &is_saved;
            let are_saved = std::thread::scope(|scope| {
                let saves: Vec<_> = (0..3).map(|process| scope.spawn(move || is_saved(process))).collect();
                saves.into_iter().all(|saved| saved.join().unwrap())
            });
            let is_over = || program.standing(0).epoch != at.epoch;
            are_saved && {
                wait_until("it is committed, or its epoch is over", || program.has_commit(at) || is_over());
                program.has_commit(at)
            }
        });
        assert!(is_whole, "after a save without process {failing}");
    }
}

#[test]
fn who_has_left_is_not_given_the_room_that_it_asked_for() {
    let fleet = Fleet::started(3);
    let program = fleet.begin();
    // Two versions that are committed and one that is not are all that a host has room for.
    program.commit(1);
    let committed = program.commit(2);
    let at = Version { step: committed.step + 1, ..committed };
    let next = Version { step: at.step + 1, ..at };
    for process in 1..3 {
        save(&program.clients[process], &program.shard(process), at).unwrap();
    }
    let wanted = Wanted {
        shard: program.shard(1),
        epoch: next.epoch,
        step: next.step,
        contents_bytes: 0,
        data_bytes: 1,
    };
    let mut conversation = Conversation::greeted(&fleet.hosts[1].directory);
    frame::write(&mut conversation.0, &Request::Grant(wanted), REQUEST_LIMIT_BYTES).unwrap();
    drop(conversation);
    // This host goes on without the version, so that the others make room.
    save(&program.clients[0], &program.shard(0), next).unwrap();
    wait_until("the version is given up", || program.copies(1, at).is_empty());
    for _ in 0..100 {
        assert!(!program.copies(1, next).iter().any(|(_, state)| state == "writing"));
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_newer_program_begins_with_what_was_committed_and_the_older_is_fenced() {
    let fleet = Fleet::started(3);
    let older = fleet.begin();
    let at = older.commit(5);
    let newer = fleet.begin();
    let standing = newer.standing(0);
    let base = standing.base.unwrap();
    assert_eq!((base.epoch, base.step, base.shard_count), (at.epoch, at.step, 3));
    for process in 0..3 {
        assert_readable(&newer.clients[process], &newer.shard(process), at);
    }
    let refused = older.clients[1].begin(fleet.beginning(older.token), &never());
    assert_eq!(refused.unwrap_err().kind(), Kind::Fenced);
    let late = save(&older.clients[1], &older.shard(1), Version { step: 6, ..at });
    assert_eq!(late.unwrap_err().kind(), Kind::Fenced);
    drop(older); // as its processes end
    newer.commit(6);
}

#[test]
fn an_agent_is_killed_while_copies_are_on_their_way() {
    let mut fleet = Fleet::of(3);
    for host in &mut fleet.hosts {
        host.arguments.push("--link-bytes-per-s=256KiB".to_owned());
    }
    (0..3).for_each(|host| fleet.start(host));
    let program = fleet.begin();
    let at = Version { epoch: program.await_training(), step: 1 };
    for (process, client) in program.clients.iter().enumerate() {
        save(client, &program.shard(process), at).unwrap();
    }
    let is_coming =
        || (0..3).any(|process| program.copies(process, at).iter().any(|(_, state)| state == "writing"));
    wait_until("a copy is on its way", is_coming);
    fleet.kill(1);
    fleet.start(1);
    // What it had sealed and what it had promised is there again; what it was receiving comes again.
    wait_until("the version is committed", || {
        program.has_commit(at) || program.standing(0).epoch != at.epoch
    });
    if program.standing(0).epoch != at.epoch {
        program.commit(2);
    }
}

#[test]
fn a_host_that_was_lost_gets_its_shard_back() {
    let mut fleet = Fleet::started(3);
    let program = fleet.begin();
    let at = program.commit(1);
    fleet.replace(1);
    let epoch = program.await_training();
    assert!(epoch > at.epoch);
    assert_readable(&program.clients[1], &program.shard(1), at);
    wait_until("every shard has its copies", || (0..3).all(|process| program.copies(process, at).len() == 2));
    // Its program was not ended: it goes on in the new epoch.
    program.commit(2);
}

#[test]
fn without_the_agent_of_the_controller_the_others_go_on() {
    let mut fleet = Fleet::started(3);
    let program = fleet.begin();
    let at = program.commit(1);
    let controller = fleet.controller_of(at.epoch);
    fleet.kill(controller);
    let other = (controller + 1) % 3;
    wait_until("another controller has taken over", || {
        let standing = program.standing(other);
        standing.is_training && standing.epoch > at.epoch
    });
    let heard = program.standing(other).hosts;
    assert!(heard.iter().zip(0..).all(|(host, number)| host.is_heard != (number == controller)), "{heard:?}");
    fleet.start(controller);
    let second = program.commit(2);
    assert!(second.epoch > at.epoch);
}

#[test]
fn all_agents_are_killed_at_once_and_nothing_is_lost() {
    let mut fleet = Fleet::started(3);
    let at = fleet.begin().commit(1);
    (0..3).for_each(|host| fleet.kill(host));
    (0..3).for_each(|host| fleet.start(host));
    let program = fleet.begin();
    assert_eq!(program.standing(0).base.unwrap().step, at.step);
    for process in 0..3 {
        assert_readable(&program.clients[process], &program.shard(process), at);
    }
}

#[test]
fn a_version_is_brought_from_where_it_is() {
    let fleet = Fleet::started(3);
    let program = fleet.begin();
    let at = program.commit(1);
    let copies = program.copies(0, at);
    let without = (0..3).find(|host| copies.iter().all(|(holder, _)| holder != host)).unwrap();
    let client = &program.clients[without];
    assert_eq!(client.hold(&program.shard(0), at, &never()).unwrap_err().kind(), Kind::NotFound);
    drop(client.bring(&program.shard(0), at, &never()).unwrap());
    assert_readable(client, &program.shard(0), at);
    let nowhere = client.bring(&program.shard(0), Version { step: 9, ..at }, &never());
    assert_eq!(nowhere.unwrap_err().kind(), Kind::NotFound);
    program.commit(2);
    wait_until("the guest has gone", || client.hold(&program.shard(0), at, &never()).is_err());
}

#[test]
fn an_agent_with_another_secret_takes_no_part() {
    let mut fleet = Fleet::of(3);
    fleet.write_secret("other", "another secret than theirs");
    let other = format!("--secret-file={}", fleet.common.path().join("other").display());
    fleet.hosts[2].arguments.push(other);
    (0..3).for_each(|host| fleet.start(host));
    let client = fleet.client(0);
    wait_until("it is turned away", || {
        fleet.said(0).contains("event=peer_lost") && fleet.said(2).contains("event=peer_lost")
    });
    let begun = client.begin(fleet.beginning(7), &never()).unwrap();
    assert!(!begun.is_training && begun.epoch == 0);
    let refused = save(&client, "000000000000feed/0-of-3", Version { epoch: 1, step: 1 });
    assert_eq!(refused.unwrap_err().kind(), Kind::Unavailable);
    fleet.kill(2);
    fleet.hosts[2].arguments.clear();
    fleet.start(2);
    fleet.begin().commit(1);
}

#[test]
fn where_agents_show_certificates_one_without_takes_no_part() {
    let (authority, mut fleet) = (Authority::new(), Fleet::of(3));
    let files: Vec<_> = fleet.hosts.iter().map(|host| authority.files(&host.name)).collect();
    for (host, files) in fleet.hosts.iter_mut().zip(&files).take(2) {
        host.arguments.extend(files.arguments());
    }
    (0..3).for_each(|host| fleet.start(host));
    let client = fleet.client(0);
    wait_until("it is turned away", || fleet.said(2).contains("shows a certificate and the other a key"));
    let begun = client.begin(fleet.beginning(7), &never()).unwrap();
    assert!(!begun.is_training && begun.epoch == 0);
    fleet.kill(2);
    fleet.hosts[2].arguments.extend(files[2].arguments());
    fleet.start(2);
    let program = fleet.begin();
    let at = program.commit(1);
    assert_eq!(program.copies(0, at).len(), 2);
    fleet.replace(1);
    program.await_training();
    assert_readable(&program.clients[1], &program.shard(1), at);
}

#[test]
fn an_agent_whose_certificate_others_would_refuse_does_not_start() {
    let (authority, mut fleet) = (Authority::new(), Fleet::of(2));
    let old = authority.files_with("host-0", |params| params.not_after = date_time_ymd(2001, 1, 1));
    for (files, named) in [(old, "has expired"), (authority.files("host-1"), "of another host")] {
        fleet.hosts[0].arguments = files.arguments().to_vec();
        fleet.start(0);
        assert_eq!(fleet.end_of(0), Some(2));
        assert!(fleet.said(0).contains(named), "{}", fleet.said(0));
    }
}

#[test]
fn what_agents_decide_together_trainers_do_not() {
    let fleet = Fleet::started(2);
    let program = fleet.begin();
    let at = program.await_training();
    let version = Version { epoch: at, step: 1 };
    for request in [
        Request::Commit(version.into()),
        Request::GiveUp(version.into()),
        Request::RetireBefore(version.into()),
        Request::Quarantine(version.into()),
    ] {
        assert_eq!(program.clients[0].change(&request, &never()).unwrap_err().kind(), Kind::Unsupported);
    }
    assert_eq!(program.clients[0].raise_epoch(at + 1, &never()).unwrap_err().kind(), Kind::Unsupported);
    assert_eq!(save(&program.clients[0], "a", version).unwrap_err().kind(), Kind::InvalidInput);
    let early = save(&program.clients[0], &program.shard(0), Version { epoch: at + 1, step: 1 });
    assert_eq!(early.unwrap_err().kind(), Kind::Fenced);
}

#[test]
fn what_cannot_be_kept_by_these_hosts_is_refused() {
    for (count, argument, named) in [
        (1, "--copies=1", "no others"),
        (2, "--copies=3", "3 copies"),
        (2, "--host=host-9", "does not name this one"),
    ] {
        let mut fleet = Fleet::of(count);
        if argument.starts_with("--host") {
            fleet.hosts[0].name = "host-9".to_owned();
        } else {
            fleet.hosts[0].arguments.push(argument.to_owned());
        }
        fleet.start(0);
        assert_eq!(fleet.end_of(0), Some(2));
        assert!(fleet.said(0).contains(named), "{}", fleet.said(0));
    }
}
