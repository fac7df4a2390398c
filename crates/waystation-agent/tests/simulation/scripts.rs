//! Faults one at a time, at the worst moment, in an otherwise calm world; and a law that forgot too early.

use std::collections::BTreeSet;

use waystation_agent::protocol::controller::{Controller, Settings};
use waystation_agent::protocol::memory::{Limits, Memory};
use waystation_agent::protocol::names::{AgentId, Commit, Epoch, Key, SealedCopy, Version, manifest_digest};
use waystation_agent::protocol::placement;

use super::host::{Host, digest_of};
use super::laws::{Laws, Truth};
use super::world::World;

fn settings() -> Settings {
    Settings {
        domains: vec![0, 1, 2],
        copies: 2,
        dead_after_ms: 1000,
        gather_ms: 1500,
        stuck_ms: 4000,
        give_up_ms: 1600,
        versions: 2,
        fruitless_limit: 2,
    }
}

/// Three hosts whose program has trained for a while.
fn calm() -> World {
    let mut world = World::new(1, settings(), 3);
    pass(&mut world, 8_000);
    assert!(world.committed.is_some());
    world
}

/// Lets so much time pass.
fn pass(world: &mut World, time_ms: u64) {
    let until_ms = world.now_ms + time_ms;
    while world.now_ms < until_ms
        && let Some(event) = world.next_event()
    {
        world.happen(event);
    }
}

/// The epoch of the orders of a host.
fn trained(world: &World, host: u16) -> Option<Epoch> {
    Some(world.hosts[usize::from(host)].agent.as_ref()?.orders()?.epoch)
}

/// Whoever had once said that it kept a copy was never brought it again: with another loss in the same epoch a commit
/// was gone, though only one copy at a time had been.
#[test]
fn a_copy_that_is_found_damaged_is_brought_again_in_the_same_epoch() {
    let mut world = calm();
    world.is_paused = true;
    pass(&mut world, 2_000);
    let (epoch, version) = (trained(&world, 0), world.committed.expect("it is calm"));
    let key = Key { version, shard: 0 };
    let holders: Vec<u16> = (0..3).filter(|&host| world.hosts[usize::from(host)].holds(key)).collect();
    assert_eq!(holders.len(), 2);
    // The owner's, which it brought to the other one, and the other one's.
    for host in holders {
        world.damage(host, key);
        world.find_damage(host, key);
        pass(&mut world, 1_000);
        assert!(world.hosts[usize::from(host)].holds(key), "host {host} lacks it");
    }
    assert_eq!(trained(&world, 0), epoch);
}

/// An agent that is killed finds damage as it starts again, and forgets what it had.
#[test]
fn what_is_damaged_while_an_agent_is_dead_is_brought_again() {
    let mut world = calm();
    world.is_paused = true;
    pass(&mut world, 2_000);
    let key = Key { version: world.committed.expect("it is calm"), shard: 1 };
    // One that has no controller, so the epoch stays.
    let is_quiet = |host: &&Host| host.controller.is_none() && host.holds(key);
    let host = world.hosts.iter().find(is_quiet).expect("two have it").id.0;
    let epoch = trained(&world, host);
    world.damage(host, key);
    let found = &mut world.hosts[usize::from(host)];
    found.kill_agent();
    let process = found.process;
    world.after(50, super::world::Event::StartAgent { host, process });
    pass(&mut world, 1_500);
    assert!(world.hosts[usize::from(host)].holds(key));
    assert_eq!(trained(&world, host), epoch);
}

/// It went on telling the others what to do, so nobody started another one; and heard nothing of what they did.
#[test]
fn a_controller_that_hears_nobody_is_replaced() {
    let mut world = calm();
    let (&number, &deaf) =
        world.controllers.keys().map(|number| (number, &world.places[number])).next().expect("one");
    let epoch = trained(&world, deaf);
    let others: Vec<u16> = (0..3).filter(|&host| host != deaf).collect();
    others.iter().for_each(|&from| world.network.cut(from, deaf));
    pass(&mut world, 8_000);
    assert!(!world.controllers.contains_key(&number));
    let epochs: BTreeSet<Option<Epoch>> = others.iter().map(|&host| trained(&world, host)).collect();
    assert!(epochs.len() == 1 && epochs.iter().all(|&newer| newer > epoch), "{epochs:?} after {epoch:?}");
    // The deaf host does not disturb them: it starts no controller as long as it hears nobody.
    pass(&mut world, 8_000);
    assert_eq!(others.iter().map(|&host| trained(&world, host)).collect::<BTreeSet<_>>(), epochs);
}

/// The one copy of a shard that was left was sent to where the lost host had been. That it did not come counted as if
/// nobody had it, and with every agent heard nobody waited: the commit was given up.
#[test]
fn a_commit_outlasts_a_copy_that_does_not_get_through() {
    let mut world = World::new(1, Settings { stuck_ms: 60_000, ..settings() }, 3);
    pass(&mut world, 8_000);
    world.is_paused = true;
    pass(&mut world, 2_000);
    let (epoch, version) = (trained(&world, 0), world.committed.expect("it is calm"));
    let lost = world.hosts.iter().find(|host| host.controller.is_none()).expect("there is one").id.0;
    (0..3).filter(|&from| from != lost).for_each(|from| world.network.block_copies(from, lost));
    world.lose(lost, 1, 500);
    // Longer than the agent itself goes on asking.
    pass(&mut world, 12_000);
    assert!(!world.controllers.values().any(Controller::is_training), "it waits for the copy");
    world.network.heal();
    pass(&mut world, 4_000);
    let orders = world.hosts[usize::from(lost)].agent.as_ref().and_then(|agent| agent.orders());
    let orders = orders.expect("it trains");
    assert!(Some(orders.epoch) > epoch);
    assert_eq!(orders.base.map(|base| base.version), Some(version));
    assert!(world.hosts[usize::from(lost)].holds(Key { version, shard: lost.into() }));
}

/// Trainers read from the disk only what is missing: so what is left of a commit stays, and nobody waits for a shard that
/// no agent has.
#[test]
fn what_is_left_of_a_commit_is_kept_when_a_shard_is_lost() {
    let settings = Settings { copies: 1, stuck_ms: 60_000, ..settings() };
    let mut world = World::new(1, settings, 3);
    pass(&mut world, 8_000);
    world.is_paused = true;
    pass(&mut world, 2_000);
    let (epoch, version) = (trained(&world, 0), world.committed.expect("it is calm"));
    let own = |host: u16| Key { version, shard: host.into() };
    assert!((0..3).all(|host| world.hosts[usize::from(host)].holds(own(host))));
    world.lose(1, 1, 500);
    pass(&mut world, 10_000);
    assert!(trained(&world, 0) > epoch, "it goes on");
    let orders = world.hosts[0].agent.as_ref().and_then(|agent| agent.orders()).expect("it trains");
    assert_eq!(orders.base, None, "memory alone does not have the version");
    assert!([0, 2].into_iter().all(|host| world.hosts[usize::from(host)].holds(own(host))));
    // It gives way to what is committed next.
    world.is_paused = false;
    pass(&mut world, 8_000);
    assert!(world.committed > Some(version));
    assert!([0, 2].into_iter().all(|host| !world.hosts[usize::from(host)].holds(own(host))));
}

/// A host that frees its copy of a commit since two others are to keep it, of which one is lost before that is known.
/// The first loss was forgotten since two copies were left, and the second one, of the last copy, counted alone.
#[test]
fn a_loss_counts_as_long_as_others_may_count_on_what_is_lost() {
    let epoch = Epoch { number: 1, controller: 1 };
    let key = Key { version: Version { epoch, step: 1 }, shard: 0 };
    let copy = SealedCopy { digest: digest_of(5), shard_count: 1, sequence: 7 };
    let commit = Commit { version: key.version, manifest: manifest_digest(key.version, [copy.digest]) };
    let limits = Limits { copies: 4, versions_of_shard: 2 };
    let holding = |number| {
        let mut host = Host::founder(number, 3, limits);
        host.agent = None;
        host.memory = Memory {
            promised: Some(epoch),
            trained: Some(epoch),
            copies: [(key, copy)].into(),
            noted: [commit].into(),
            ..Memory::default()
        };
        host.bytes.insert(key, 5);
        host
    };
    let mut hosts: Vec<Host> = (0..3).map(holding).collect();
    let mut laws = Laws::default();
    laws.train(epoch, 1);
    laws.seal(key, Truth { content: 5, lineage: 1, sealed_ms: 10 }, 1);
    laws.look(&hosts, 0);
    laws.issue(&hosts, epoch, commit);
    laws.check_reference(&hosts, &settings());

    let mut lose = |hosts: &mut Vec<Host>, host: usize| {
        laws.harm(20, &hosts[host], [key]);
        hosts[host].lose(1);
        laws.check_reference(hosts, &settings());
    };
    lose(&mut hosts, 0);
    // It has heard that both others keep it.
    hosts[2].memory.copies.clear();
    hosts[2].bytes.clear();
    lose(&mut hosts, 1);
    assert!(hosts.iter().all(|host| !host.holds(key)), "two losses, two copies: it may be gone");
}

/// Hosts of which each is a domain, and whose program has trained for a while and saves no more.
fn paused(hosts: u16, copies: usize) -> World {
    let settings = Settings { domains: (0..hosts.into()).collect(), copies, ..settings() };
    let mut world = World::new(1, settings, hosts.into());
    pass(&mut world, 8_000);
    world.is_paused = true;
    pass(&mut world, 2_000);
    world
}

/// What the newest orders that any agent has let a program begin with.
fn base(world: &World) -> Option<Option<Version>> {
    let agents = world.hosts.iter().filter_map(|host| host.agent.as_ref());
    let orders = agents.filter_map(|agent| agent.orders()).max_by_key(|orders| orders.epoch)?;
    Some(orders.base.map(|base| base.version))
}

/// Loses hosts at once, and has others in their places; what the newest commit has left is begun with within 10 s, and
/// commits go on.
fn survive(hosts: u16, copies: usize, lost: u16) {
    let mut world = paused(hosts, copies);
    let what = format!("of {hosts} hosts with {copies} copies {lost:b} are lost");
    let version = world.committed.unwrap_or_else(|| panic!("{what}: nothing was committed"));
    let all = (0..hosts).map(AgentId);
    let (owners, domains) = (all.clone().collect::<Vec<_>>(), world.settings.domains.clone());
    let placed = placement::holders_of(&owners, &all.collect(), &domains, copies);
    let is_lost = |host: u16| lost & 1 << host != 0;
    let is_left = placed.iter().all(|holders| holders.iter().any(|holder| !is_lost(holder.0)));
    for host in (0..hosts).filter(|&host| is_lost(host)) {
        world.lose(host, 1, 500);
    }
    assert_eq!(world.laws.fewest_copies(&world.hosts, version) > 0, is_left, "{what}: placement");
    let until_ms = world.now_ms + 10_000;
    let begins = |world: &World| match base(world) {
        Some(base) if is_left => {
            base == Some(version) && (0..hosts).all(|host| trained(world, host).is_some())
        }
        Some(base) => base < Some(version) && (0..hosts).all(|host| trained(world, host).is_some()),
        None => false,
    };
    // Those that are left follow the orders of before until they hear of the others.
    pass(&mut world, 600);
    while !begins(&world) && world.now_ms < until_ms {
        pass(&mut world, 100);
    }
    assert!(begins(&world), "{what}: after 10 s there is {:?} to begin with, not {version:?}", base(&world));
    world.is_paused = false;
    pass(&mut world, 6_000);
    assert!(world.committed.is_some_and(|newest| newest != version), "{what}: nothing is committed any more");
}

/// Of two hosts one, of four two: no majority remembered, and the tier was dead for ever, though a copy of each shard was
/// there.
#[test]
fn whichever_hosts_are_lost_what_has_a_copy_of_every_shard_is_gone_on_from() {
    let is_long = std::env::var_os("WAYSTATION_TEST_LONG").is_some();
    for hosts in 2..=if is_long { 8 } else { 4 } {
        for copies in 2..=hosts.min(3) {
            (1..1 << hosts).for_each(|lost| survive(hosts, copies.into(), lost));
        }
    }
}
