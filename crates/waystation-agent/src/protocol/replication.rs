//! How copies come to be: the trainer's own, and those that holders bring to each other.
//!
//! The first holder of a shard brings every copy of a new version to the others, again at every tick until they say that
//! they keep it. A holder says so after it has verified and sealed, and again whenever it is offered what it has. Copies of
//! versions from before a recovery may lie anywhere: whoever has one brings it to the shard's holders, and who is none
//! of them frees it once all have it, or old copies would take the room of new ones for ever. Nothing is ever
//! overwritten: without room a copy is refused, and offered again later.
//!
//! A holder that has said that it keeps a copy may find it damaged later, and lets go of it. The controller, which sees
//! from reports who has what, then asks one that has the copy to bring it again.

use super::agent::Agent;
use super::events::{Output, Refusal};
use super::message::{Orders, Purpose, ToPeer};
use super::names::{AgentId, Key, SealedCopy};

impl Agent {
    pub(super) fn seal(&mut self, key: Key, copy: SealedCopy, outputs: &mut Vec<Output>) {
        let is_same = self.memory.copies.get(&key) == Some(&copy);
        let refusal = match self.refusal_of(key) {
            Some(Refusal::Conflict) if is_same => return,
            // What is said of the version is the same for all of its shards.
            None if !self.is_of_program(key, copy) => Some(Refusal::Conflict),
            refusal => refusal,
        };
        if let Some(refusal) = refusal {
            outputs.push(Output::Refuse(key, refusal));
            return;
        }
        self.memory.copies.insert(key, copy);
        self.replicate(outputs);
        self.report(outputs);
    }

    /// Whether a shard is one that the program of the orders has.
    fn is_of_program(&self, key: Key, copy: SealedCopy) -> bool {
        self.orders.as_ref().is_some_and(|orders| {
            let (count, sequence) = (orders.program.owners.len(), orders.program.sequence);
            copy.shard_count as usize == count && key.shard < copy.shard_count && copy.sequence == sequence
        })
    }

    /// Whether a copy that another agent offers would be kept, or is.
    pub fn would_keep(&self, key: Key) -> bool {
        let is_here = self.memory.copies.contains_key(&key);
        self.orders
            .as_ref()
            .is_some_and(|orders| is_here || orders.takes(key.version) && self.has_room_for(orders, key))
    }

    /// Keeps what another agent has sent, and says so; also if it was there already.
    pub(super) fn keep_replica(
        &mut self,
        from: AgentId,
        key: Key,
        copy: SealedCopy,
        outputs: &mut Vec<Output>,
    ) {
        // Before the orders are here, it cannot be told what the copy is to be kept for.
        let Some(orders) = self.orders.clone() else { return };
        let epoch = orders.epoch;
        match self.memory.copies.get(&key) {
            Some(held) if *held != copy => return,
            Some(_) => {}
            None => {
                if !orders.takes(key.version) || !self.has_room_for(&orders, key) {
                    return;
                }
                self.memory.copies.insert(key, copy);
                self.report(outputs);
            }
        }
        outputs.push(Output::ToPeer(from, ToPeer::Kept { epoch, key, digest: copy.digest }));
    }

    /// Brings copies to the holders that have not said that they keep them.
    pub(super) fn replicate(&self, outputs: &mut Vec<Output>) {
        let Some(orders) = &self.orders else { return };
        let epoch = orders.epoch;
        for (&key, &copy) in self.memory.copies.iter().filter(|(key, _)| self.brings(orders, **key)) {
            let others = orders.holders_of(key).iter().filter(|&&to| to != self.id);
            for &to in others.filter(|&&to| !self.kept.contains(&(key, to))) {
                outputs.push(Output::Bytes { to, epoch, key, copy, purpose: Purpose::Replica });
            }
        }
    }

    /// Brings a copy to a holder that was found to lack it, also if that one has said that it keeps it.
    pub(super) fn bring(&mut self, key: Key, to: AgentId, outputs: &mut Vec<Output>) {
        let Some(orders) = &self.orders else { return };
        let Some(&copy) = self.memory.copies.get(&key) else { return };
        if to != self.id && orders.keeps(key.version) && orders.holders_of(key).contains(&to) {
            self.kept.remove(&(key, to));
            let (epoch, purpose) = (orders.epoch, Purpose::Replica);
            outputs.push(Output::Bytes { to, epoch, key, copy, purpose });
        }
    }

    /// Whether it is for this agent to bring a copy to others.
    fn brings(&self, orders: &Orders, key: Key) -> bool {
        let is_new = key.version.epoch == orders.epoch;
        orders.keeps(key.version) && (!is_new || orders.holders_of(key).first() == Some(&self.id))
    }

    /// Frees a copy that is for others to keep, once all of them do.
    fn hand_over(&mut self, key: Key, outputs: &mut Vec<Output>) {
        let Some(orders) = &self.orders else { return };
        let holders = orders.holders_of(key);
        let is_handed_over = !holders.is_empty()
            && !holders.contains(&self.id)
            && holders.iter().all(|&holder| self.kept.contains(&(key, holder)));
        if is_handed_over {
            self.free(key, outputs);
            self.report(outputs);
        }
    }

    pub(super) fn hear_peer(&mut self, from: AgentId, message: ToPeer, outputs: &mut Vec<Output>) {
        match message {
            ToPeer::Kept { epoch, key, digest } => {
                let held = self.memory.copies.get(&key);
                if self.follows(epoch) && held.is_some_and(|copy| copy.digest == digest) {
                    self.kept.insert((key, from));
                    self.hand_over(key, outputs);
                }
            }
            ToPeer::Damaged { epoch, key } => {
                if self.follows(epoch) && self.memory.copies.contains_key(&key) {
                    outputs.push(Output::Verify);
                }
            }
            ToPeer::Fetch { epoch, attempt, key } => {
                if let Some(&copy) = self.memory.copies.get(&key)
                    && self.follows(epoch)
                {
                    let purpose = Purpose::Restore { attempt };
                    outputs.push(Output::Bytes { to: from, epoch, key, copy, purpose });
                }
            }
        }
    }
}
