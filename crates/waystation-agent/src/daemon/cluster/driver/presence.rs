//! What agents tell each other of themselves: who remembers nothing yet, until the run is founded, and who is there.

use super::super::founding::{Announcement, Outcome};
use super::super::mail::Letter;
use super::{Driver, Effect, Member};
use crate::protocol::Agent;
use crate::protocol::events::Input;
use crate::protocol::memory::Memory;
use crate::protocol::names::AgentId;

/// How often an agent shows that it is there, in the time after which it would be taken for dead.
const BEATS: u64 = 4;

impl Driver {
    pub(super) fn hear_announcement(&mut self, from: AgentId, told: &Announcement) {
        if told.hosts != self.role.hosts.digest() {
            if self.differing.insert(from) {
                let log = vec![("host", self.name_of(from))];
                self.effects.push(Effect::Log("hosts_differ", log));
            }
            return;
        }
        match &mut self.member {
            Member::Blank { blank, .. } => {
                let outcome = blank.hear(from.0, told);
                self.found(outcome);
            }
            Member::Agent { founders, .. } if told.is_blank => {
                let view = founders.clone();
                self.tell_announcement(from, Announcement { hosts: told.hosts, view, is_blank: false });
            }
            Member::Agent { .. } => {}
        }
    }

    pub(super) fn announce(&mut self) {
        let Member::Blank { blank, .. } = &self.member else { return };
        let (outcome, view) = (blank.complete(), blank.view().to_vec());
        let told = Announcement { hosts: self.role.hosts.digest(), view, is_blank: true };
        for agent in self.others() {
            self.tell_announcement(agent, told.clone());
        }
        self.found(outcome);
    }

    /// Shows the others that this agent is there: those that have nothing to agree upon say nothing else to each other.
    pub(super) fn beat(&mut self) {
        if self.agent().is_none() || self.now_ms < self.beat_ms {
            return;
        }
        self.beat_ms = self.now_ms + self.role.settings.dead_after_ms / BEATS;
        let beats = self.others().into_iter().map(|agent| Effect::Tell(agent, Letter::Beat));
        self.effects.extend(beats);
    }

    pub(super) fn tell_announcement(&mut self, to: AgentId, told: Announcement) {
        self.remember();
        self.effects.push(Effect::Tell(to, Letter::Announcement(told)));
    }

    pub(super) fn found(&mut self, outcome: Option<Outcome>) {
        let (Some(outcome), Member::Blank { blank, copies, program }) = (outcome, &mut self.member) else {
            return;
        };
        let (founders, memory, event) = match outcome {
            Outcome::Founder(founders) => (founders, Memory::of_founder(), "run_founded"),
            Outcome::Lost(founders) => (founders, Memory::lost(blank.incarnation()), "memory_lost"),
        };
        let memory = Memory { copies: std::mem::take(copies), ..memory };
        let program = program.take();
        self.effects.push(Effect::Log(event, Vec::new()));
        let agent = Box::new(Agent::new(self.role.id, self.role.limits, memory));
        self.member = Member::Agent { founders, agent };
        self.candidate.wait(self.now_ms);
        if let Some(program) = program {
            self.step(Input::Begin(program));
        }
    }
}
