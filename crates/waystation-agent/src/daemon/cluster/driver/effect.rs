//! What a driver wants done, for whoever has the slots and the network.

use super::super::mail::Letter;
use super::super::notes::Notes;
use crate::protocol::events::Refusal;
use crate::protocol::names::{AgentId, Commit, Key, SealedCopy};

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Write this down before going on.
    Remember(Notes),
    /// Tell another agent.
    Tell(AgentId, Letter),
    /// Bring a copy to another agent.
    Send {
        /// To whom.
        to: AgentId,
        /// What.
        key: Key,
        /// What it is.
        copy: SealedCopy,
    },
    /// Free the slot of a copy.
    Free(Key),
    /// Verify all slots.
    Verify,
    /// See whether a copy is here.
    Load {
        /// Of the decision.
        attempt: u32,
        /// Which.
        key: Key,
    },
    /// A newer program has begun: take from trainers what they have not sealed.
    Fence,
    /// Refuse writers of epochs before this one.
    Raise(u64),
    /// What a trainer has sealed is not kept.
    Refuse(Key, Refusal),
    /// A majority has noted that a version is committed.
    Committed(Commit),
    /// Tell people.
    Log(&'static str, Vec<(&'static str, String)>),
}
