//! From what the machines of an agent want to what is done: here, by the other machine, or by another agent.

use super::super::mail::Letter;
use super::{Driver, Effect, Work};
use crate::protocol::controller;
use crate::protocol::events::Output;
use crate::protocol::message::ToPeer;
use crate::protocol::names::AgentId;
use crate::protocol::wire::Envelope;

impl Driver {
    /// Turns an output of the agent's machine into an effect, or into work for the controller beside it.
    pub(super) fn put(&mut self, output: Output) {
        let effect = match output {
            Output::ToController(number, message) if self.controller_number() == Some(number) => {
                let input = controller::Input::Message(self.role.id, message);
                return self.work.push_back(Work::Controller(input));
            }
            Output::ToController(controller, message) => {
                // Who has not been heard since this agent was started will be: it repeats itself.
                let place = self.controllers.iter().position(|&known| known == Some(controller));
                let Some(place) = place else { return };
                let envelope = Envelope::ToController { controller, message };
                Effect::Tell(AgentId(place as u16), Letter::Envelope(envelope))
            }
            Output::ToPeer(to, message) => {
                if let ToPeer::Fetch { attempt, key, .. } = message {
                    self.asked.insert(key, (to, attempt));
                }
                Effect::Tell(to, Letter::Envelope(Envelope::ToPeer(message)))
            }
            // What a copy is sent for is known to who has asked for it, or has not.
            Output::Bytes { to, key, copy, .. } => Effect::Send { to, key, copy },
            Output::Free(key) => Effect::Free(key),
            Output::Verify => Effect::Verify,
            Output::Load { attempt, key } => {
                self.asked.remove(&key);
                Effect::Load { attempt, key }
            }
            Output::Fence(program) => {
                self.effects.push(Effect::Log("program", vec![("program", program.to_string())]));
                Effect::Fence
            }
            Output::Train(epoch) => {
                self.effects.push(Effect::Log("epoch", vec![("epoch", epoch.packed().to_string())]));
                Effect::Raise(epoch.packed())
            }
            Output::Refuse(key, refusal) => Effect::Refuse(key, refusal),
        };
        self.effects.push(effect);
    }

    pub(super) fn run_controller(&mut self, input: controller::Input) {
        let Some(controller) = &mut self.controller else { return };
        for output in controller.handle(input) {
            match output {
                controller::Output::ToAgent(agent, message) if agent == self.role.id => {
                    self.work.push_back(Work::Heard(message));
                }
                controller::Output::ToAgent(agent, message) => {
                    let letter = Letter::Envelope(Envelope::ToAgent(message));
                    self.effects.push(Effect::Tell(agent, letter));
                }
                controller::Output::Ended(epoch) => {
                    self.controller = None;
                    self.tell_of("controller_ended", vec![("epoch", epoch.packed().to_string())]);
                }
                controller::Output::LeftAlone => {
                    self.controller = None;
                    self.tell_of("controller_left_alone", Vec::new());
                }
                controller::Output::Decided(decision) => {
                    let step = decision
                        .version
                        .map_or_else(|| "none".to_owned(), |version| version.step.to_string());
                    self.tell_of(
                        "decided",
                        vec![("program", decision.program.token.to_string()), ("step", step)],
                    );
                }
                controller::Output::Committed(commit) => {
                    self.tell_of("committed", vec![("step", commit.version.step.to_string())]);
                }
                controller::Output::GivenUp(version) => {
                    self.tell_of("given_up", vec![("step", version.step.to_string())]);
                }
                controller::Output::Doubted(version) => {
                    self.tell_of("doubted", vec![("step", version.step.to_string())]);
                }
                controller::Output::Stuck => self.tell_of("nothing_can_be_restored", Vec::new()),
            }
        }
    }

    pub(super) fn tell_of(&mut self, event: &'static str, pairs: Vec<(&'static str, String)>) {
        self.effects.push(Effect::Log(event, pairs));
    }
}
