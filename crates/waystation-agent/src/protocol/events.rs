//! What happens to an agent, and what it wants done.

use super::message::{Purpose, ToAgent, ToController, ToPeer};
use super::names::{AgentId, Epoch, Key, Program, SealedCopy};

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
    /// A program begins, with processes on this host or on others; it is the same to be told again.
    Begin(Program),
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
        /// Whether it is in memory, and was found to be what the decision says.
        is_loaded: bool,
    },
    /// Bytes of a shard that was asked for are coming in: whoever sends them is not silent.
    Coming(Key),
    /// Some time has passed.
    Tick,
}

/// Why a trainer's shard is not kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Refusal {
    /// The version's epoch is over, or a newer program has begun. A trainer whose program still is the newest goes on,
    /// and saves in the present epoch.
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
    ToController(u32, ToController),
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
    /// Have the shard ready for trainers to read: in its slot, or in that of the bytes that have just arrived. Then say
    /// [`Input::Loaded`].
    Load {
        /// Of the decision.
        attempt: u32,
        /// Of which shard.
        key: Key,
    },
    /// A program with this token has begun: trainers of all before must end, and nothing that they seal is kept.
    /// Another epoch alone ends nobody: trainers of its program go on.
    Fence(u64),
    /// Orders of this epoch are here. Trainers of their program that have not begun may load the base and begin; those
    /// that have save in this epoch from now on. It is said again after the agent was started anew.
    Train(Epoch),
    /// Do not keep what the trainer has sealed; its save fails, training goes on.
    Refuse(Key, Refusal),
}
