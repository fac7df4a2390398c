//! How messages between agents are written: as JSON, each in an [`Envelope`] that says for whom it is.
//!
//! Who has sent a message is not in it: the connection knows. Invariants: what was written reads as the same; whatever is
//! read takes memory in proportion to its length, names agents that there are, and its parts fit each other, so the machines
//! need not look again; a field that is unknown is refused.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use waystation_format::{Error, Kind, Result};

use super::message::{Decision, Orders, ToAgent, ToController, ToPeer};
use super::names::{AgentId, Key, Program, SealedCopy};

/// No message is longer.
pub const LIMIT_BYTES: usize = 4 << 20;

/// One message, and who on the other host is to hear it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Envelope {
    /// The agent, from a controller in the sender's process.
    ToAgent(ToAgent),
    /// A controller that runs there, from the sender's agent.
    ToController {
        /// Its number.
        controller: u32,
        /// For it.
        message: ToController,
    },
    /// The agent, from the sender's agent.
    ToPeer(ToPeer),
}

/// The message in writing.
pub fn encode(envelope: &Envelope) -> Result<Vec<u8>> {
    let written = serde_json::to_vec(envelope).map_err(|error| {
        Error::new(Kind::Internal, format!("a message to another agent cannot be written: {error}"))
    })?;
    within_limit(written.len())?;
    Ok(written)
}

/// The message that was written, among so many agents.
pub fn decode(written: &[u8], agents: usize) -> Result<Envelope> {
    within_limit(written.len())?;
    let envelope: Envelope = serde_json::from_slice(written)
        .map_err(|error| invalid(format!("a message of another agent has no meaning: {error}")))?;
    if !is_sound(&envelope, agents) {
        return Err(invalid(
            "a message of another agent contradicts itself, or names agents that there are not",
        )
        .with("agent_count", agents.to_string()));
    }
    Ok(envelope)
}

fn invalid(message: impl Into<Cow<'static, str>>) -> Error {
    Error::new(Kind::InvalidInput, message)
}

fn within_limit(nbytes: usize) -> Result<()> {
    if nbytes <= LIMIT_BYTES {
        return Ok(());
    }
    Err(invalid(
        "a message between agents is too long; keep fewer versions in memory, or have fewer processes",
    )
    .with("message_bytes", nbytes.to_string())
    .with("limit_bytes", LIMIT_BYTES.to_string()))
}

fn is_sound(envelope: &Envelope, agents: usize) -> bool {
    let is_there = |agent: &AgentId| usize::from(agent.0) < agents;
    let fits = |program: &Option<Program>| program.as_ref().is_none_or(|program| program.fits(agents));
    match envelope {
        Envelope::ToAgent(message) => match message {
            ToAgent::Prepare { .. } | ToAgent::Gather { .. } | ToAgent::Commit { .. } => true,
            ToAgent::Admit { incarnations, program, .. } => {
                incarnations.keys().all(is_there) && fits(program)
            }
            ToAgent::Learn { agent, .. } | ToAgent::Bring { to: agent, .. } => is_there(agent),
            ToAgent::Restore(decision) => is_sound_decision(decision, agents),
            ToAgent::Train(orders) => are_sound_orders(orders, agents),
        },
        Envelope::ToController { message, .. } => match message {
            ToController::Report(report) => {
                let is_known = report.incarnations.keys().all(is_there);
                is_known && fits(&report.program) && are_shards(&report.copies)
            }
            ToController::Inventory(found) => fits(&found.program) && are_shards(&found.copies),
            ToController::Restored { .. } => true,
        },
        Envelope::ToPeer(_) => true,
    }
}

fn are_shards(copies: &BTreeMap<Key, SealedCopy>) -> bool {
    copies.iter().all(|(key, copy)| key.shard < copy.shard_count)
}

fn is_sound_decision(decision: &Decision, agents: usize) -> bool {
    decision.program.fits(agents)
        && decision.version.is_some() != decision.shards.is_empty()
        && decision.shards.iter().all(|shard| {
            let mut named = shard.sources.iter().chain([&shard.reader]);
            shard.copy.shard_count as usize == decision.shards.len()
                && named.all(|agent| usize::from(agent.0) < agents)
        })
}

fn are_sound_orders(orders: &Orders, agents: usize) -> bool {
    orders.program.fits(agents)
        && orders.holders.len() == orders.program.owners.len()
        && orders.holders.iter().flatten().all(|holder| usize::from(holder.0) < agents)
}
