//! Which promises count: an epoch is established by a majority of agents that remember them.
//!
//! An agent that lost its memory has forgotten what it promised; if it voted again at once, the majorities of two
//! epochs might share nobody who knows of both. So it first has to be admitted, and only by an epoch that a majority of
//! *other* agents still follows after they took note of its new start. And a promise that it gave before, but that
//! arrives later, is recognised: whoever completes a majority with it has taken note of the new start, and says so in
//! its own report (the crash vectors of Michael et al., DISC 2017). Invariant: of two epochs that were ever established,
//! the members of one's majority include one that refuses the other.

use std::collections::{BTreeMap, BTreeSet};

use super::message::{Report, ToAgent};
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
            || self.reports.get(&agent).is_some_and(|noted| noted.promised > report.promised)
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

    /// The greatest epoch that anybody has promised.
    pub fn greatest_promise(&self) -> Option<Epoch> {
        self.reports.values().filter_map(|report| report.promised).max()
    }

    /// What an established epoch tells agents so that those that remember nothing may vote again: first others are to
    /// take note of their new start; once a majority has, they are admitted, and told which commits that knows of, and the
    /// newest program: or of the majority that has noted one nobody might be left.
    pub fn admissions(&self, epoch: Epoch, program: Option<&Program>) -> Vec<(AgentId, ToAgent)> {
        let mut messages = Vec::new();
        for (&agent, report) in self.reports.iter().filter(|(_, report)| report.promised.is_none()) {
            let incarnation = report.incarnation;
            let (informed, others): (Vec<_>, Vec<_>) = self.followers(epoch).partition(|(_, report)| {
                report.incarnations.get(&agent).is_some_and(|&known| known >= incarnation)
            });
            if informed.len() >= self.majority() {
                let incarnations = self.incarnations.clone();
                let noted: BTreeSet<Commit> =
                    self.followers(epoch).flat_map(|(_, report)| report.noted.iter().copied()).collect();
                let program = program.cloned();
                let admit = ToAgent::Admit { epoch, incarnation, incarnations, noted, program };
                messages.push((agent, admit));
            } else {
                let learn = ToAgent::Learn { epoch, agent, incarnation };
                messages.extend(others.into_iter().map(|(other, _)| (other, learn.clone())));
            }
        }
        messages
    }
}
