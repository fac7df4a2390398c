//! Who is the controller: any agent's process may run one, and whichever a majority follows is in charge.
//!
//! Epochs keep controllers apart, so nothing depends on there being one only; that there soon is one, and mostly not
//! two, is what a [`Candidate`] is for. Each agent has one. It hears whenever a controller has spoken to the agent in an
//! epoch that the agent may follow; after too long a silence it has the process start a controller. Each waits for
//! longer than the one before it, so that the first of those who are left mostly is one for all; and a controller whose own
//! agent hears of a higher epoch ends ([`Input::Heard`](super::controller::Input::Heard)).

use super::names::{AgentId, Epoch};

/// How long an agent waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Patience {
    /// The first of all agents.
    pub least_ms: u64,
    /// By how much longer each does than the one before it; longer than it takes to begin an epoch.
    pub stagger_ms: u64,
}

/// The machine.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Candidate {
    patience_ms: u64,
    heard_ms: u64,
}

impl Candidate {
    /// Of an agent that has just begun to listen.
    pub fn new(id: AgentId, patience: Patience, now_ms: u64) -> Self {
        let patience_ms = patience.least_ms + u64::from(id.0) * patience.stagger_ms;
        Self { patience_ms, heard_ms: now_ms }
    }

    /// A controller has told the agent something, which has promised (None if it remembers nothing) as much.
    pub fn hear(&mut self, now_ms: u64, epoch: Epoch, promised: Option<Epoch>) {
        if promised <= Some(epoch) {
            self.heard_ms = now_ms;
        }
    }

    /// Whether to start a controller now, in place of any that the process still has. If so, it is waited for from now on.
    pub fn is_due(&mut self, now_ms: u64) -> bool {
        let is_due = now_ms >= self.heard_ms + self.patience_ms;
        if is_due {
            self.heard_ms = now_ms;
        }
        is_due
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
        let mut candidates = [0, 1, 2].map(|id| Candidate::new(AgentId(id), PATIENCE, 50));
        assert!(candidates.iter_mut().all(|candidate| !candidate.is_due(1049)));
        assert_eq!(candidates.each_mut().map(|candidate| candidate.is_due(1050)), [true, false, false]);
        assert_eq!(candidates.each_mut().map(|candidate| candidate.is_due(1350)), [false, true, false]);
    }

    #[test]
    fn who_hears_a_controller_waits() {
        let mut candidate = Candidate::new(AgentId(0), PATIENCE, 0);
        candidate.hear(900, epoch(3), Some(epoch(3)));
        assert!(!candidate.is_due(1899));
        candidate.hear(1899, epoch(4), Some(epoch(3)));
        candidate.hear(1950, epoch(1), None);
        assert!(!candidate.is_due(2949));
        assert!(candidate.is_due(2950));
    }

    #[test]
    fn a_controller_of_an_epoch_that_is_over_is_not_heard() {
        let mut candidate = Candidate::new(AgentId(0), PATIENCE, 0);
        candidate.hear(900, epoch(2), Some(epoch(3)));
        assert!(candidate.is_due(1000));
    }

    #[test]
    fn who_has_started_a_controller_gives_it_time() {
        let mut candidate = Candidate::new(AgentId(0), PATIENCE, 0);
        assert!(candidate.is_due(1000));
        assert!(!candidate.is_due(1999));
        assert!(candidate.is_due(2000), "it was not heard either");
    }
}
