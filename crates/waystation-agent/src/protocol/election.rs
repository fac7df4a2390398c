//! Who is the controller: any agent's process may run one, and whichever a majority follows is in charge.
//!
//! Epochs keep controllers apart, so nothing depends on there being one only; that there soon is one, and mostly not
//! two, is what a [`Candidate`] is for. Each agent has one. It hears whenever a controller has spoken to the agent in an
//! epoch that the agent may follow; after too long a silence it has the process start a controller. Each waits for
//! longer than the one before it, so that the first of those who are left mostly is one for all; and a controller whose own
//! agent hears of a higher epoch ends ([`Input::Heard`](super::controller::Input::Heard)).
//!
//! Where a network carries in one direction only, who speaks may not hear the answers. A controller that has heard no
//! majority for too long ends ([`Output::LeftAlone`](super::controller::Output::LeftAlone)), so that others, who do hear
//! each other, miss it; and a candidate starts none while its agent hears no majority, so that it does not raise epochs
//! again and again over those who get on without it.

use super::names::{AgentId, Epoch};

/// How long an agent waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Patience {
    /// The first of all agents, for a controller; and each for any other agent, before it does not count on that one.
    pub least_ms: u64,
    /// By how much longer each does than the one before it; longer than it takes to begin an epoch.
    pub stagger_ms: u64,
}

/// The machine.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Candidate {
    id: AgentId,
    patience: Patience,
    /// When a controller was heard, or waiting began for another reason.
    heard_ms: u64,
    /// When each agent was heard last.
    agents_ms: Vec<Option<u64>>,
}

impl Candidate {
    /// Of an agent, one of so many, that has just begun to listen.
    pub fn new(id: AgentId, agents: usize, patience: Patience, now_ms: u64) -> Self {
        Self { id, patience, heard_ms: now_ms, agents_ms: vec![None; agents] }
    }

    /// From now on it waits for a controller.
    pub fn wait(&mut self, now_ms: u64) {
        self.heard_ms = now_ms;
    }

    /// Another agent has said something, whatever it was.
    pub fn hear_agent(&mut self, now_ms: u64, agent: AgentId) {
        if let Some(heard_ms) = self.agents_ms.get_mut(usize::from(agent.0)) {
            *heard_ms = Some(now_ms);
        }
    }

    /// Whether an agent was heard lately, or is its own.
    pub fn is_heard(&self, now_ms: u64, agent: AgentId) -> bool {
        let heard_ms = self.agents_ms.get(usize::from(agent.0)).copied().flatten();
        agent == self.id || heard_ms.is_some_and(|heard_ms| now_ms <= heard_ms + self.patience.least_ms)
    }

    /// A controller has told the agent something, which has promised (None if it remembers nothing) as much.
    pub fn hear(&mut self, now_ms: u64, epoch: Epoch, promised: Option<Epoch>) {
        if promised <= Some(epoch) {
            self.heard_ms = now_ms;
        }
    }

    /// Whether to start a controller now, in place of any that the process still has. If so, it is waited for from now on.
    pub fn is_due(&mut self, now_ms: u64) -> bool {
        let Patience { least_ms, stagger_ms } = self.patience;
        let turn_ms = u64::from(self.id.0) * stagger_ms;
        if !self.hears_majority(now_ms) {
            // Once it does, it waits for its turn again, and that long for the controller that the others may follow.
            self.heard_ms = self.heard_ms.max((now_ms + stagger_ms).saturating_sub(least_ms));
            return false;
        }
        let is_due = now_ms >= self.heard_ms + least_ms + turn_ms;
        if is_due {
            self.heard_ms = now_ms;
        }
        is_due
    }

    fn hears_majority(&self, now_ms: u64) -> bool {
        let count = self.agents_ms.len();
        let heard = (0..count).filter(|&agent| self.is_heard(now_ms, AgentId(agent as u16))).count();
        heard > count / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Patience = Patience { least_ms: 1000, stagger_ms: 300 };

    fn epoch(number: u32) -> Epoch {
        Epoch { number, controller: 1 }
    }

    #[test]
    fn the_first_that_is_left_is_the_first_to_be_due() {
        let mut candidates = [0, 1, 2].map(|id| {
            let mut candidate = Candidate::new(AgentId(id), 3, PATIENCE, 50);
            candidate.hear_agent(1000, AgentId((id + 1) % 3));
            candidate
        });
        assert!(candidates.iter_mut().all(|candidate| !candidate.is_due(1049)));
        assert_eq!(candidates.each_mut().map(|candidate| candidate.is_due(1050)), [true, false, false]);
        assert_eq!(candidates.each_mut().map(|candidate| candidate.is_due(1350)), [false, true, false]);
    }

    /// One of two agents; the other one is heard.
    fn candidate(now_ms: u64) -> Candidate {
        let mut candidate = Candidate::new(AgentId(0), 2, PATIENCE, 0);
        candidate.hear_agent(now_ms, AgentId(1));
        candidate
    }

    #[test]
    fn who_hears_a_controller_waits() {
        let mut candidate = candidate(2900);
        candidate.hear(900, epoch(3), Some(epoch(3)));
        assert!(!candidate.is_due(1899));
        candidate.hear(1899, epoch(4), Some(epoch(3)));
        candidate.hear(1950, epoch(1), None);
        assert!(!candidate.is_due(2949));
        assert!(candidate.is_due(2950));
    }

    #[test]
    fn a_controller_of_an_epoch_that_is_over_is_not_heard() {
        let mut candidate = candidate(900);
        candidate.hear(900, epoch(2), Some(epoch(3)));
        assert!(candidate.is_due(1000));
    }

    #[test]
    fn who_has_started_a_controller_gives_it_time() {
        let mut candidate = candidate(1000);
        assert!(candidate.is_due(1000));
        assert!(!candidate.is_due(1999));
        assert!(candidate.is_due(2000), "it was not heard either");
    }

    #[test]
    fn who_hears_no_majority_starts_no_controller_and_then_waits_for_its_turn() {
        let mut candidate = Candidate::new(AgentId(1), 3, PATIENCE, 0);
        assert!(!candidate.is_due(9000), "it is one of three");
        candidate.hear_agent(9000, AgentId(2));
        assert!(!candidate.is_due(9000));
        assert!(!candidate.is_due(9599));
        assert!(candidate.is_due(9600));
        assert!(!candidate.is_due(10_901), "the other one is silent again");
        assert!(Candidate::new(AgentId(0), 1, PATIENCE, 0).is_due(1000), "one alone is a majority");
    }
}
