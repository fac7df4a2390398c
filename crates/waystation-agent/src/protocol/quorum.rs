//! Which promises count: an epoch is established by a majority of agents that remember them.
//!
//! An agent that lost its memory has forgotten what it promised; if it voted again at once, the majorities of two
//! epochs might share nobody who knows of both. So it first has to be admitted. There are two ways.
//!
//! - **By a majority.** A majority of *other* agents still follows the epoch after they took note of the new start. And a
//!   promise that the agent gave before, but that arrives later, is recognised: whoever completes a majority with it has
//!   taken note of the new start, and says so in its own report (the crash vectors of Michael et al., DISC 2017).
//! - **By all.** Where no majority remembers, *every* agent is bound to the epoch: it has promised it, or has forgotten and
//!   pledged to be admitted to no older one. And every agent, being bound, knows of all that forgot. Then there is nobody
//!   left with whom an older epoch could commit anything, and what all of them report is all that is left. Whoever is
//!   admitted is told the commits that any of them noted, and of what is complete in their memory that which may have been
//!   committed by those that forgot (see [`complete`](super::decision::Findings::complete)).
//!
//! Invariants: of two epochs that were ever established, the members of one's majority include one that refuses the other,
//! or all of them were bound to the later one before any of its members was admitted; an established epoch has a member
//! that knows of each earlier commit that is not lost. Design 10 has the proof.

use std::collections::{BTreeMap, BTreeSet};

use super::decision::Findings;
use super::message::{Inventory, Report, ToAgent};
use super::names::{AgentId, Commit, Epoch, Program};

/// The newest report of each agent, and the starts without memory that any of them knows of.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Quorum {
    agents: usize,
    reports: BTreeMap<AgentId, Report>,
    incarnations: BTreeMap<AgentId, u64>,
}

impl Quorum {
    /// Of so many agents, none of which has reported.
    pub fn of(agents: usize) -> Self {
        Self { agents, ..Self::default() }
    }

    /// How many make a majority.
    pub fn majority(&self) -> usize {
        self.agents / 2 + 1
    }

    /// Notes a report, unless it is older than one of the same agent that was noted. Returns whether it was noted.
    pub fn note(&mut self, agent: AgentId, report: Report) -> bool {
        for (&of, &incarnation) in &report.incarnations {
            self.learn(of, incarnation);
        }
        self.learn(agent, report.incarnation);
        if self.is_outdated(agent, &report) {
            return false;
        }
        self.reports.insert(agent, report);
        true
    }

    fn learn(&mut self, agent: AgentId, incarnation: u64) {
        let known = self.incarnations.entry(agent).or_insert(incarnation);
        *known = incarnation.max(*known);
        let newest = *known;
        if self.reports.get(&agent).is_some_and(|report| report.incarnation < newest) {
            self.reports.remove(&agent);
        }
    }

    fn is_outdated(&self, agent: AgentId, report: &Report) -> bool {
        // Promises only grow. Among reports of one promise the order does not matter: copies are freed only if they are not
        // counted any more, others have them, or they are damaged, and one that is missing is there in the next report.
        self.has_forgotten(agent, report.incarnation)
            || self
                .reports
                .get(&agent)
                .is_some_and(|noted| (noted.promised, noted.pledged) > (report.promised, report.pledged))
    }

    /// The newest report of an agent's present start.
    pub fn report(&self, agent: AgentId) -> Option<&Report> {
        self.reports.get(&agent)
    }

    /// Agents whose promise of `epoch` counts, with their reports.
    pub fn followers(&self, epoch: Epoch) -> impl Iterator<Item = (AgentId, &Report)> {
        self.reports
            .iter()
            .filter(move |(_, report)| report.promised == Some(epoch))
            .map(|(&agent, report)| (agent, report))
    }

    /// Whether an agent is known to have started without memory since it was this incarnation.
    pub fn has_forgotten(&self, agent: AgentId, incarnation: u64) -> bool {
        self.incarnations.get(&agent).is_some_and(|&newest| incarnation < newest)
    }

    /// Whether a majority follows the epoch.
    pub fn is_established(&self, epoch: Epoch) -> bool {
        self.followers(epoch).count() >= self.majority()
    }

    /// Whether every agent is bound to the epoch, and knows of each that forgot and was asked in it.
    pub fn is_unanimous(&self, epoch: Epoch) -> bool {
        let bound = || self.bound(epoch);
        let knows_all = |(agent, report): (AgentId, &Report)| {
            self.forgetful().all(|(other, forgot)| other == agent || knows(report, other, forgot))
        };
        bound().count() == self.agents && bound().all(knows_all)
    }

    /// The greatest epoch that anybody has promised, or pledged to.
    pub fn greatest_promise(&self) -> Option<Epoch> {
        self.reports.values().filter_map(Report::bound).max()
    }

    /// What an epoch tells agents so that those that remember nothing may vote again: first others are to take note of
    /// their new start; once a majority has, or all have and nobody can do anything in an older epoch any more, they are
    /// admitted, and told which commits those know of, and the newest program: or of the majority that has noted one nobody
    /// might be left. `needed` is the number of copies that a commit has of each shard.
    pub fn admissions(
        &self,
        epoch: Epoch,
        program: Option<&Program>,
        needed: usize,
    ) -> Vec<(AgentId, ToAgent)> {
        let is_unanimous = self.is_unanimous(epoch);
        let noted = if is_unanimous { self.left(epoch, needed) } else { noted_by(self.followers(epoch)) };
        let mut messages = Vec::new();
        for (agent, report) in self.forgetful() {
            let (informed, others): (Vec<_>, Vec<_>) =
                self.bound(epoch).partition(|(_, other)| knows(other, agent, report));
            let incarnation = report.incarnation;
            let followers = informed.iter().filter(|(_, report)| report.promised.is_some()).count();
            if is_unanimous || followers >= self.majority() {
                let (incarnations, noted) = (self.incarnations.clone(), noted.clone());
                let program = program.cloned();
                let admit = ToAgent::Admit { epoch, incarnation, incarnations, noted, program };
                messages.push((agent, admit));
                continue;
            }
            // What an agent that forgot too is told counts only if this one is bound already.
            let is_bound = report.bound() == Some(epoch);
            let learn = ToAgent::Learn { epoch, agent, incarnation };
            let others = others
                .into_iter()
                .filter(|&(other, report)| other != agent && (is_bound || report.promised.is_some()));
            messages.extend(others.map(|(other, _)| (other, learn.clone())));
        }
        messages
    }

    /// The agents that remember nothing.
    fn forgetful(&self) -> impl Iterator<Item = (AgentId, &Report)> {
        self.reports
            .iter()
            .filter(|(_, report)| report.promised.is_none())
            .map(|(&agent, report)| (agent, report))
    }

    /// The agents that do nothing any more in an older epoch.
    fn bound(&self, epoch: Epoch) -> impl Iterator<Item = (AgentId, &Report)> {
        self.reports
            .iter()
            .filter(move |(_, report)| report.bound() == Some(epoch))
            .map(|(&agent, report)| (agent, report))
    }

    /// What counts as committed where all are bound to the epoch: what anybody has noted. Where no majority remembers, a
    /// majority that has noted something may be gone: then what is complete counts, too, since it proves itself.
    fn left(&self, epoch: Epoch, needed: usize) -> BTreeSet<Commit> {
        let mut noted = noted_by(self.bound(epoch));
        if !self.is_established(epoch) {
            let inventories = self.bound(epoch).map(|(agent, report)| (agent, inventory_of(epoch, report)));
            noted.extend(Findings { inventories: inventories.collect() }.complete(needed));
        }
        noted
    }
}

/// Whether an agent knows of the present start of one that forgot.
fn knows(report: &Report, forgetful: AgentId, forgot: &Report) -> bool {
    report.incarnations.get(&forgetful).is_some_and(|&known| known >= forgot.incarnation)
}

fn noted_by<'a>(reports: impl Iterator<Item = (AgentId, &'a Report)>) -> BTreeSet<Commit> {
    reports.flat_map(|(_, report)| report.noted.iter().copied()).collect()
}

/// What a report says of what there is.
fn inventory_of(epoch: Epoch, report: &Report) -> Inventory {
    Inventory {
        epoch,
        incarnation: report.incarnation,
        copies: report.copies.clone(),
        noted: report.noted.clone(),
        fruitless: BTreeMap::new(),
        program: report.program.clone(),
        begun: None,
    }
}
