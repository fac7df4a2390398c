//! By what blocks are known.

/// A block: which run, of which epoch, and which transfer of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// The run.
    pub run: u64,
    /// The epoch of its island.
    pub epoch: u64,
    /// The number of the transfer within the run.
    pub transfer: u64,
}

/// All blocks of a run, or those of one epoch of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scope {
    /// The run.
    pub run: u64,
    /// The epoch; all if there is none.
    pub epoch: Option<u64>,
}

impl Scope {
    /// Whether a block is among them.
    pub fn contains(&self, key: &Key) -> bool {
        key.run == self.run && self.epoch.is_none_or(|epoch| epoch == key.epoch)
    }
}

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "transfer {} of run {} in epoch {}", self.transfer, self.run, self.epoch)
    }
}
