//! Which hosts keep copies of whose shards: GEMINI's groups and rings, with failure domains.
//!
//! `waystation.memory.placement` says what is promised and why, and `tests/memory/test_placement.py` proves it. A group of as many members as there are copies keeps all of its shards everywhere; in a larger one, a ring, a shard
//! is kept by its owner and the next members. Invariant: every host is in one group, none is smaller than the copies.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use super::names::AgentId;

/// For each shard who keeps it, of the agents that are there: its owner first, then others by placement. Where the owner
/// is not there, those that keep the shards of another.
pub fn holders_of(
    owners: &[AgentId],
    live: &BTreeSet<AgentId>,
    domains: &[u32],
    copies: usize,
) -> Vec<Vec<AgentId>> {
    let agents: Vec<AgentId> = live.iter().copied().collect();
    let domain_of = |agent: &AgentId| domains.get(usize::from(agent.0));
    let groups = place(&agents.iter().map(domain_of).collect::<Vec<_>>(), copies.min(agents.len()));
    let holders: BTreeMap<AgentId, Vec<AgentId>> = groups
        .iter()
        .flat_map(|group| (0..group.len()).map(move |position| holders_in(group, position, copies)))
        .map(|hosts| hosts.into_iter().map(|host| agents[host]).collect::<Vec<_>>())
        .map(|holders| (holders[0], holders))
        .collect();
    let stand_in = |owner: &AgentId| agents.get(usize::from(owner.0) % agents.len().max(1));
    owners
        .iter()
        .map(|owner| holders.get(owner).or_else(|| holders.get(stand_in(owner)?)))
        .map(|found| found.cloned().unwrap_or_default())
        .collect()
}

/// The groups of hosts, of which the domains are given, that keep so many copies; none if there are fewer hosts.
pub fn place<D: Ord>(domains: &[D], copies: usize) -> Vec<Vec<usize>> {
    if copies == 0 || domains.len() < copies {
        return Vec::new();
    }
    let in_order = consecutive_groups(domains.len(), copies);
    let mut best = (spread(&in_order, domains, copies), in_order);
    if best.0.0 == copies {
        return best.1;
    }
    for sizes in group_sizes(domains.len(), copies) {
        let groups = deal(domains, &sizes, copies);
        let found = spread(&groups, domains, copies);
        // The first of the best: they begin with those that have the fewest different sets of holders.
        if found > best.0 {
            best = (found, groups);
        }
    }
    best.1
}

/// Who keeps the shard of the member at a position of a group.
fn holders_in(group: &[usize], position: usize, copies: usize) -> Vec<usize> {
    (0..copies.min(group.len())).map(|step| group[(position + step) % group.len()]).collect()
}

/// In how many domains each shard is: that of the fewest, and the sum.
fn spread<D: Ord>(groups: &[Vec<usize>], domains: &[D], copies: usize) -> (usize, usize) {
    let (mut least, mut total) = (usize::MAX, 0);
    for group in groups {
        for position in 0..group.len() {
            let holders = holders_in(group, position, copies);
            let count = holders.iter().map(|&host| &domains[host]).collect::<BTreeSet<_>>().len();
            least = least.min(count);
            total += count;
        }
    }
    (least, total)
}

fn consecutive_groups(hosts: usize, copies: usize) -> Vec<Vec<usize>> {
    let last = (hosts / copies - 1) * copies;
    let first_groups = (0..last).step_by(copies).map(|first| (first..first + copies).collect());
    first_groups.chain([(last..hosts).collect()]).collect()
}

/// Sizes of groups, rings last: what is left over is in one ring at first, then in more and more.
fn group_sizes(hosts: usize, copies: usize) -> Vec<Vec<usize>> {
    let (count, left_over) = (hosts / copies, hosts % copies);
    let mut choices = Vec::new();
    for most in (1..=left_over.max(1)).rev() {
        let rest = Some(left_over % most).filter(|&rest| rest > 0);
        let extras: Vec<usize> = rest.into_iter().chain(vec![most; left_over / most]).collect();
        if extras.len() <= count {
            let groups = vec![copies; count - extras.len()];
            choices.push(groups.into_iter().chain(extras.iter().map(|extra| copies + extra)).collect());
        }
    }
    choices
}

/// Deals the hosts to groups of these sizes, one domain after the other, the largest first.
fn deal<D: Ord>(domains: &[D], sizes: &[usize], copies: usize) -> Vec<Vec<usize>> {
    let mut hosts_of: BTreeMap<&D, Vec<usize>> = BTreeMap::new();
    for (host, domain) in domains.iter().enumerate() {
        hosts_of.entry(domain).or_default().push(host);
    }
    let mut in_turn: Vec<Vec<usize>> = hosts_of.into_values().collect();
    in_turn.sort_by_key(|hosts| (Reverse(hosts.len()), hosts[0]));
    let mut table = Table::new(sizes, copies);
    for hosts in &in_turn {
        table.deal(hosts);
    }
    for group in &mut table.groups {
        if group.len() == copies {
            group.sort_unstable();
        } else {
            *group = arrange(group, domains);
        }
    }
    table.groups
}

/// Groups that are being filled.
///
/// A host goes where it puts its domain into the most sets of holders that had none of it: the first of a domain into
/// every group, then a second into each ring, where one cannot be in all sets. The others have no such use and go where
/// most room is left, so that there is a place for each later domain in as many groups as can be. Among groups in which a
/// host is of the same use, most room decides too: for domains of at most as many hosts as there are groups, that is
/// Ryser's construction of a matrix of zeros and ones with given sums, which finds groups without repeated domains if
/// there are any.
struct Table {
    groups: Vec<Vec<usize>>,
    room: Vec<usize>,
    rings: Vec<usize>,
    /// Most room first, then the smallest number. An entry whose room is no longer that of its group is passed over.
    roomiest: BinaryHeap<(usize, Reverse<usize>)>,
}

impl Table {
    fn new(sizes: &[usize], copies: usize) -> Self {
        Self {
            groups: vec![Vec::new(); sizes.len()],
            room: sizes.to_vec(),
            rings: (0..sizes.len()).filter(|&number| sizes[number] > copies).collect(),
            roomiest: sizes.iter().copied().zip((0..).map(Reverse)).collect(),
        }
    }

    /// Deals the hosts of a domain.
    fn deal(&mut self, hosts: &[usize]) {
        let mut waiting = hosts.iter().copied();
        let open = self.room.iter().filter(|&&room| room > 0).count();
        let firsts: Vec<usize> = (0..hosts.len().min(open)).filter_map(|_| self.take_roomiest()).collect();
        let left = hosts.len() - firsts.len();
        for (number, host) in firsts.into_iter().zip(waiting.by_ref()) {
            self.put(host, number);
        }
        let mut rings: Vec<usize> = self.rings.iter().copied().filter(|&ring| self.room[ring] > 0).collect();
        rings.sort_by_key(|&ring| Reverse(self.room[ring]));
        rings.truncate(left);
        for (number, host) in rings.into_iter().zip(waiting.by_ref()) {
            self.put(host, number);
        }
        for host in waiting {
            if let Some(number) = self.take_roomiest() {
                self.put(host, number);
            }
        }
    }

    fn take_roomiest(&mut self) -> Option<usize> {
        loop {
            let (room, Reverse(number)) = self.roomiest.pop()?;
            if room == self.room[number] {
                return Some(number);
            }
        }
    }

    fn put(&mut self, host: usize, number: usize) {
        self.groups[number].push(host);
        self.room[number] -= 1;
        if self.room[number] > 0 {
            self.roomiest.push((self.room[number], Reverse(number)));
        }
    }
}

/// The order of a ring: members of one domain are put half a ring apart, or one place less, so never all of them among
/// those that lack a shard, who are neighbours and fewer than half.
fn arrange<D: Ord>(members: &[usize], domains: &[D]) -> Vec<usize> {
    let (size, half) = (members.len(), members.len() / 2);
    let mut counts: BTreeMap<&D, usize> = BTreeMap::new();
    for &host in members {
        *counts.entry(&domains[host]).or_default() += 1;
    }
    let mut in_turn = members.to_vec();
    // Sorting is stable, so members of one domain stay side by side.
    in_turn.sort_by_key(|&host| (Reverse(counts[&domains[host]]), &domains[host]));
    let mut ring = vec![0; size];
    for (turn, host) in in_turn.into_iter().enumerate() {
        let place = if size % 2 == 1 { turn * half % size } else { turn / 2 + turn % 2 * half };
        ring[place] = host;
    }
    ring
}
