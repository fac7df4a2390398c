//! How a run is founded: once, by all its agents, of which none remembers anything.
//!
//! An agent whose directory is new does not know whether there is nothing to remember yet, or whether it has lost what
//! it remembered. Each start without memory is an *incarnation*. Agents that are blank tell each other which incarnations
//! of all agents they know of, their *view*; when all have the same view, that is who founds the run. Who was there hears
//! of it later, too; whoever comes with another incarnation has lost its memory.
//!
//! Invariants: views only grow, also over restarts; who has founded a run tells no view any more. So of two sets of
//! founders one has an agent that was not blank when the other was complete, and that never helped to complete it: a
//! second founding takes the loss of all who took part in the first.

use serde::{Deserialize, Serialize};

/// What an agent tells others as long as there are blank ones.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Announcement {
    /// The digest of the names of all hosts: others are not spoken to.
    pub hosts: u64,
    /// For each agent the newest incarnation that the sender knows of, 0 if none; its own among them.
    pub view: Vec<u64>,
    /// Whether the sender is blank. Else the view is that of the founders.
    pub is_blank: bool,
}

/// An agent that does not know yet what it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Blank {
    /// The number of the agent.
    id: u16,
    /// See [`Announcement`].
    view: Vec<u64>,
    /// The newest view of each other agent.
    #[serde(skip)]
    others: Vec<Vec<u64>>,
}

/// What a blank agent turns out to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A founder, with these.
    Founder(Vec<u64>),
    /// One that has lost its memory since these have founded the run.
    Lost(Vec<u64>),
}

impl Blank {
    /// An agent of so many, in a new incarnation.
    pub fn new(id: u16, agents: usize, incarnation: u64) -> Self {
        let mut view = vec![0; agents];
        view[usize::from(id)] = incarnation;
        Self { id, view, others: Vec::new() }
    }

    /// Its incarnation.
    pub fn incarnation(&self) -> u64 {
        self.view.get(usize::from(self.id)).copied().unwrap_or_default()
    }

    /// See [`Announcement`].
    pub fn view(&self) -> &[u64] {
        &self.view
    }

    /// Takes note of what another agent tells.
    pub fn hear(&mut self, from: u16, told: &Announcement) -> Option<Outcome> {
        let (own, count) = (usize::from(self.id), self.view.len());
        if from == self.id || usize::from(from) >= count || told.view.len() != count {
            return None;
        }
        if !told.is_blank {
            let founders = told.view.clone();
            let is_founder = founders[own] == self.incarnation();
            return Some(if is_founder { Outcome::Founder(founders) } else { Outcome::Lost(founders) });
        }
        for (agent, (known, told)) in self.view.iter_mut().zip(&told.view).enumerate() {
            // Of itself it knows best.
            if agent != own {
                *known = (*told).max(*known);
            }
        }
        self.others.resize(count, Vec::new());
        self.others[usize::from(from)].clone_from(&told.view);
        self.complete()
    }

    /// Whether all have the same view, of all.
    pub fn complete(&self) -> Option<Outcome> {
        let is_same = |agent: usize| {
            agent == usize::from(self.id) || self.others.get(agent).is_some_and(|view| *view == self.view)
        };
        let is_complete =
            self.view.iter().all(|&incarnation| incarnation != 0) && (0..self.view.len()).all(is_same);
        is_complete.then(|| Outcome::Founder(self.view.clone()))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn blank(view: &[u64]) -> Announcement {
        Announcement { hosts: 0, view: view.to_vec(), is_blank: true }
    }

    #[test]
    fn one_alone_founds_at_once_and_two_once_both_know() {
        assert_eq!(Blank::new(0, 1, 7).complete(), Some(Outcome::Founder(vec![7])));
        let mut first = Blank::new(0, 2, 7);
        assert_eq!(first.hear(1, &blank(&[0, 9])), None, "the other does not know of this one yet");
        assert_eq!(first.hear(1, &blank(&[6, 9])), None, "it knows of an earlier start");
        assert_eq!(first.hear(1, &blank(&[7, 9])), Some(Outcome::Founder(vec![7, 9])));
        assert_eq!(first.incarnation(), 7);
    }

    #[test]
    fn who_was_not_there_has_lost_its_memory() {
        let founders = Announcement { is_blank: false, ..blank(&[7, 9]) };
        assert_eq!(Blank::new(1, 2, 9).hear(0, &founders), Some(Outcome::Founder(vec![7, 9])));
        assert_eq!(Blank::new(1, 2, 10).hear(0, &founders), Some(Outcome::Lost(vec![7, 9])));
        for odd in [blank(&[7]), blank(&[7, 9, 8])] {
            assert_eq!(Blank::new(1, 2, 10).hear(0, &odd), None);
        }
    }

    #[derive(Clone)]
    enum Stage {
        Blank(Blank),
        Told { view: Vec<u64>, is_founder: bool },
    }

    fn announcement(stage: &Stage) -> Announcement {
        match stage {
            Stage::Blank(blank) => self::blank(blank.view()),
            Stage::Told { view, .. } => Announcement { is_blank: false, ..self::blank(view) },
        }
    }

    proptest! {
        /// Agents hear each other in any order, old messages too, forget and are started again: as long as a founder
        /// is left, all that are founders are of one founding.
        #[test]
        fn there_is_one_founding(steps in proptest::collection::vec((0u16..3, 0u16..3, 0u8..10, any::<usize>()), 0..200)) {
            let mut agents: Vec<Stage> = (0..3).map(|id| Stage::Blank(Blank::new(id, 3, u64::from(id) + 1))).collect();
            let mut sent: Vec<(u16, Announcement)> = Vec::new();
            let mut next = 10;
            for (id, from, what, pick) in steps {
                let place = usize::from(id);
                match what {
                    0 => {
                        let others = (0..3).filter(|&other| other != place);
                        let is_founder = |stage: &Stage| matches!(stage, Stage::Told { is_founder: true, .. });
                        let founders = agents.iter().filter(|stage| is_founder(stage)).count();
                        let left = others.filter(|&other| is_founder(&agents[other])).count();
                        if founders == 0 || left >= 1 {
                            agents[place] = Stage::Blank(Blank::new(id, 3, next));
                            next += 1;
                        }
                    }
                    1..6 => sent.push((from, announcement(&agents[usize::from(from)]))),
                    _ if sent.is_empty() => {}
                    _ => {
                        let (from, told) = sent[pick % sent.len()].clone();
                        let Stage::Blank(blank) = &mut agents[place] else { continue };
                        match blank.hear(from, &told) {
                            Some(Outcome::Founder(view)) => agents[place] = Stage::Told { view, is_founder: true },
                            Some(Outcome::Lost(view)) => agents[place] = Stage::Told { view, is_founder: false },
                            None => {}
                        }
                    }
                }
                let founders: Vec<&Vec<u64>> = agents.iter().filter_map(|stage| match stage {
                    Stage::Told { view, is_founder: true } => Some(view),
                    _ => None,
                }).collect();
                prop_assert!(founders.windows(2).all(|pair| pair[0] == pair[1]));
            }
        }
    }
}
