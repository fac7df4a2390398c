//! What a producer has, and who waits for what it has not yet.
//!
//! Invariants: a key is offered once at a time; whoever asks is answered once, when the block is there or
//! will never be; what belongs to a scope that has ended is neither held nor waited for. How a scope has
//! ended is remembered for the newest [`REMEMBERED`], which is for those who ask late.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use waystation_format::{Error, Kind, Result};

use crate::fetch::again;
use crate::held::{Block, Held, Ledger};
use crate::key::{Key, Scope};
use crate::message::Ask;
use crate::outbox::Outbox;

/// How many ends of scopes are remembered.
const REMEMBERED: usize = 4096;

/// The blocks of this host.
#[derive(Debug)]
pub struct Offers {
    ledger: Arc<Ledger>,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    held: BTreeMap<Key, Arc<Held>>,
    standing: BTreeMap<Key, (Arc<Outbox>, Ask)>,
    ended: HashMap<u64, Vec<(Option<u64>, Error)>>,
    ended_order: VecDeque<u64>,
}

impl Offers {
    /// No blocks yet.
    pub fn new(ledger: Arc<Ledger>) -> Self {
        Self { ledger, table: Mutex::default() }
    }

    /// Offers blocks, all of them or, if one of the keys is offered already, none.
    ///
    /// # Safety
    ///
    /// The memory of each block is readable, and does not change, until its number is released.
    pub unsafe fn offer(&self, blocks: Vec<(Key, Block)>) -> Result<()> {
        let mut table = self.lock();
        if let Some((key, _)) = blocks.iter().find(|(key, _)| table.held.contains_key(key)) {
            let message = format!("a block is offered twice: {key}; each transfer of a run is offered once");
            return Err(Error::new(Kind::Conflict, message));
        }
        let mut unwanted = Vec::new();
        for (key, block) in blocks {
            // SAFETY: the caller's promise.
            let held = Arc::new(unsafe { Held::new(block, &self.ledger) });
            if table.end_of(&key).is_some() {
                unwanted.push(held);
                continue;
            }
            match table.standing.remove(&key) {
                Some((outbox, ask)) => {
                    answer(&outbox, &ask, Arc::clone(&held));
                    table.held.insert(key, held);
                }
                None => drop(table.held.insert(key, held)),
            }
        }
        drop(table);
        drop(unwanted);
        Ok(())
    }

    /// Somebody wants a block: it is sent now, or once it is there.
    pub fn ask(&self, outbox: &Arc<Outbox>, ask: Ask) {
        let mut table = self.lock();
        if let Some(error) = table.end_of(&ask.key) {
            outbox.fail(ask.number, error);
        } else if let Some(held) = table.held.get(&ask.key) {
            answer(outbox, &ask, Arc::clone(held));
        } else if let Some((other, earlier)) = table.standing.insert(ask.key, (Arc::clone(outbox), ask)) {
            let message = format!("another host has asked for the same block: {}", ask.key);
            other.fail(earlier.number, &Error::new(Kind::Conflict, message));
        }
    }

    /// A consumer has a block.
    pub fn take(&self, key: &Key) {
        let taken = self.lock().held.remove(key);
        drop(taken); // without the lock, for it tells that it is released
    }

    /// A consumer gives up one request for a block.
    pub fn give_up(&self, outbox: &Outbox, number: u64, key: &Key) {
        let mut table = self.lock();
        let is_it = |(waiting, ask): &(Arc<Outbox>, Ask)| waiting.id == outbox.id && ask.number == number;
        if table.standing.get(key).is_some_and(is_it) {
            table.standing.remove(key);
        }
    }

    /// A consumer is gone.
    pub fn forget(&self, outbox: &Outbox) {
        self.lock().standing.retain(|_, (waiting, _)| waiting.id != outbox.id);
    }

    /// A scope has ended: nothing of it is held any more, and whoever asks for it is told why.
    pub fn end(&self, scope: Scope, error: &Error) {
        let mut table = self.lock();
        let whole = Key { run: scope.run, ..Key::default() }..=Key {
            run: scope.run,
            epoch: u64::MAX,
            transfer: u64::MAX,
        };
        let is_in = |key: &&Key| scope.contains(key);
        let keys: Vec<Key> =
            table.held.range(whole.clone()).map(|(key, _)| key).filter(is_in).copied().collect();
        let released: Vec<_> = keys.iter().filter_map(|key| table.held.remove(key)).collect();
        let keys: Vec<Key> = table.standing.range(whole).map(|(key, _)| key).filter(is_in).copied().collect();
        for (outbox, ask) in keys.iter().filter_map(|key| table.standing.remove(key)) {
            outbox.fail(ask.number, error);
        }
        table.remember(scope, error);
        drop(table);
        drop(released);
    }

    /// How the scope of a block has ended, if it has.
    pub fn end_of(&self, key: &Key) -> Option<Error> {
        self.lock().end_of(key).map(again)
    }

    /// Lets go of everything.
    pub fn clear(&self) {
        let mut table = self.lock();
        let left = (std::mem::take(&mut table.held), std::mem::take(&mut table.standing));
        drop(table);
        drop(left);
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        // Each change is whole, so the table of a poisoned lock is right.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    fn end_of(&self, key: &Key) -> Option<&Error> {
        let ends = self.ended.get(&key.run)?;
        ends.iter().find(|(epoch, _)| epoch.is_none_or(|epoch| epoch == key.epoch)).map(|(_, error)| error)
    }

    fn remember(&mut self, scope: Scope, error: &Error) {
        let ends = self.ended.entry(scope.run).or_default();
        if ends.iter().any(|(epoch, _)| epoch.is_none() || *epoch == scope.epoch) {
            return; // the first reason counts
        }
        ends.push((scope.epoch, again(error)));
        self.ended_order.push_back(scope.run);
        if self.ended_order.len() > REMEMBERED {
            let oldest = self.ended_order.pop_front();
            oldest.map(|run| self.ended.remove(&run));
        }
    }
}

/// Answers a request for a block that is here.
fn answer(outbox: &Outbox, ask: &Ask, held: Arc<Held>) {
    let nbytes = held.bytes().len() as u64;
    if nbytes == ask.nbytes {
        return outbox.send(ask.number, held, ask.can_read);
    }
    let message =
        format!("a block of {nbytes} bytes is offered where one of {} is asked for: {}", ask.nbytes, ask.key);
    outbox.fail(ask.number, &Error::new(Kind::InvalidInput, message));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outbox::Reply;

    fn key(run: u64, epoch: u64, transfer: u64) -> Key {
        Key { run, epoch, transfer }
    }

    fn offers() -> (Offers, Arc<Ledger>) {
        let ledger = Arc::new(Ledger::default());
        (Offers::new(Arc::clone(&ledger)), ledger)
    }

    fn offer(offers: &Offers, key: Key) -> Result<()> {
        static BYTES: [u8; 8] = [7; 8];
        let block = Block { address: BYTES.as_ptr().addr(), nbytes: 8, number: key.transfer };
        // SAFETY: the bytes live for ever.
        unsafe { offers.offer(vec![(key, block)]) }
    }

    fn ask(offers: &Offers, outbox: &Arc<Outbox>, number: u64, key: Key, nbytes: u64) {
        offers.ask(outbox, Ask { number, key, nbytes, can_read: false });
    }

    #[test]
    fn who_asks_is_answered_once_whoever_comes_first() {
        let (offers, ledger) = offers();
        let outbox = Arc::new(Outbox::new(1));
        offer(&offers, key(1, 0, 10)).unwrap();
        ask(&offers, &outbox, 1, key(1, 0, 10), 8);
        ask(&offers, &outbox, 2, key(1, 0, 11), 8);
        offer(&offers, key(1, 0, 11)).unwrap();
        ask(&offers, &outbox, 3, key(1, 0, 11), 9);
        for number in [1, 2] {
            assert!(matches!(outbox.take_short(), Some((found, Reply::Block(_))) if found == number));
        }
        assert!(matches!(outbox.take_short(), Some((3, Reply::Failed(_)))));
        ask(&offers, &outbox, 4, key(1, 0, 12), 8);
        ask(&offers, &outbox, 5, key(1, 0, 12), 8);
        assert!(matches!(outbox.take_short(), Some((4, Reply::Failed(_)))));
        offers.give_up(&outbox, 4, &key(1, 0, 12));
        offer(&offers, key(1, 0, 12)).unwrap();
        assert!(matches!(outbox.take_short(), Some((5, Reply::Block(_)))));
        offers.take(&key(1, 0, 12));
        assert!(outbox.take_short().is_none());
        assert_eq!(offer(&offers, key(1, 0, 10)).unwrap_err().kind(), Kind::Conflict);
        offers.take(&key(1, 0, 10));
        assert_eq!((ledger.held(), ledger.released()), ((8, 1), Some(vec![12, 10])));
    }

    #[test]
    fn what_has_ended_is_let_go_and_not_waited_for() {
        let (offers, ledger) = offers();
        let outbox = Arc::new(Outbox::new(1));
        offer(&offers, key(1, 4, 10)).unwrap();
        offer(&offers, key(1, 5, 11)).unwrap();
        ask(&offers, &outbox, 1, key(1, 4, 12), 8);
        ask(&offers, &outbox, 2, key(1, 5, 13), 8);
        offers.end(Scope { run: 1, epoch: Some(4) }, &Error::new(Kind::Cancelled, "over"));
        assert_eq!((ledger.held(), ledger.released()), ((8, 1), Some(vec![10])));
        ask(&offers, &outbox, 3, key(1, 4, 14), 8);
        offer(&offers, key(1, 4, 15)).unwrap();
        assert_eq!(ledger.released(), Some(vec![15]));
        for number in [1, 3] {
            assert!(matches!(outbox.take_short(), Some((found, Reply::Failed(_))) if found == number));
        }
        offers.forget(&outbox);
        offer(&offers, key(1, 5, 13)).unwrap();
        assert!(outbox.take_short().is_none());
        offers.end(Scope { run: 1, epoch: None }, &Error::new(Kind::Cancelled, "over"));
        assert_eq!(ledger.held(), (0, 0));
        for run in 2..REMEMBERED as u64 + 10 {
            offers.end(Scope { run, epoch: None }, &Error::new(Kind::Cancelled, "over"));
        }
        assert!(offers.lock().ended.len() <= REMEMBERED && offers.end_of(&key(1, 4, 1)).is_none());
    }
}
