//! What happens to an agent, and what it wants done.

use super::message::{Purpose, ToAgent, ToController, ToPeer};
use super::names::{AgentId, Epoch, Key, SealedCopy};

/// What happens to an agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// A controller says something.
    Controller(ToAgent),
    /// Another agent says something.
    Peer(AgentId, ToPeer),
    /// Bytes have arrived, were written to a slot of their own and verified; they are gone unless they are kept.
    Bytes {
        /// From whom.
        from: AgentId,
        /// Of the sender.
        epoch: Epoch,
        /// Of which shard.
        key: Key,
        /// What they were said to be.
        copy: SealedCopy,
        /// What for.
        purpose: Purpose,
        /// Whether they are that.
        is_intact: bool,
    },
    /// A trainer of `key.version.epoch` has filled and sealed a slot here.
    Sealed(Key, SealedCopy),
    /// All copies were verified, as [`Output::Verify`] asked; these are not what they should be.
    Verified(Vec<Key>),
    /// What [`Output::Load`] asked for was done, or failed.
    Loaded {
        /// Of the decision.
        attempt: u32,
        /// Of which shard.
        shard: u32,
        /// Whether the trainer has it.
        is_loaded: bool,
    },
    /// Some time has passed.
    Tick,
}

/// Why a trainer's shard is not kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Refusal {
    /// Another epoch has taken over: the trainer must end.
    Fenced,
    /// There is no room until an older version is committed or given up. The next save may fit.
    Full,
    /// The version was given up.
    Late,
    /// This shard of this version is there, with other bytes: the trainer is not deterministic, or two are at work.
    Conflict,
}

/// What an agent wants done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Tell the controller of this number.
    ToController(u64, ToController),
    /// Tell an agent.
    ToPeer(AgentId, ToPeer),
    /// Offer a copy, and send its bytes unless they are there or on their way. It is said again until the receiver has
    /// said that it keeps them.
    Bytes {
        /// To whom.
        to: AgentId,
        /// In which.
        epoch: Epoch,
        /// Of which shard.
        key: Key,
        /// What they are.
        copy: SealedCopy,
        /// What for.
        purpose: Purpose,
    },
    /// Free a slot: the bytes are of no use any more.
    Free(Key),
    /// Verify every copy, then say [`Input::Verified`].
    Verify,
    /// Give the trainer a shard, from a slot (or the bytes that have just arrived) or from the disk, then say
    /// [`Input::Loaded`].
    Load {
        /// Of the decision.
        attempt: u32,
        /// Of which shard.
        key: Key,
        /// Whether it is on the disk tier.
        from_disk: bool,
    },
    /// End trainers of epochs before this one.
    Fence(Epoch),
    /// Let trainers of this epoch go on from what they have loaded.
    Train(Epoch),
    /// Do not keep what the trainer has sealed; its save fails, training goes on.
    Refuse(Key, Refusal),
}
