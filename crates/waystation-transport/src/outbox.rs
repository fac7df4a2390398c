//! What goes to one consumer, in the order in which it goes.
//!
//! What is short goes before what is long, so that a large block keeps no small one waiting for longer than a
//! piece of it takes. Failures: the consumer gives requests up (what was not begun is left out, what is being
//! sent stops at the next piece); the connection ends (what is queued is let go).

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use waystation_format::Error;
use waystation_peers::encode_failure;

use crate::held::Held;

/// What goes before longer blocks.
const SHORT_BYTES: usize = 256 << 10;
/// What is placed, where that can be, is at least so long: shorter blocks are sooner sent.
const PLACED_BYTES: usize = 64 << 10;

/// An answer.
#[derive(Debug)]
pub enum Reply {
    /// The bytes of a block.
    Block(Arc<Held>),
    /// Where a block lies.
    Place(Arc<Held>),
    /// There will be none; the message says why.
    Failed(Vec<u8>),
}

/// The answers to one consumer.
#[derive(Debug)]
pub struct Outbox {
    /// What tells it from others.
    pub id: u64,
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    short: VecDeque<(u64, Reply)>,
    long: VecDeque<(u64, Reply)>,
    /// The request whose block is being sent, unless it was given up.
    current: Option<u64>,
    is_closed: bool,
}

impl Outbox {
    /// An empty one.
    pub fn new(id: u64) -> Self {
        Self { id, queue: Mutex::default(), changed: Condvar::new() }
    }

    /// Sends a block as an answer to a request.
    pub fn send(&self, number: u64, held: Arc<Held>, can_read: bool) {
        let nbytes = held.bytes().len();
        let is_placed = can_read && nbytes >= PLACED_BYTES;
        let reply = if is_placed { Reply::Place(held) } else { Reply::Block(held) };
        self.push(number, reply, is_placed || nbytes <= SHORT_BYTES);
    }

    /// Tells that a request fails.
    pub fn fail(&self, number: u64, error: &Error) {
        self.push(number, Reply::Failed(encode_failure(error)), true);
    }

    /// The next short answer, if there is one.
    pub fn take_short(&self) -> Option<(u64, Reply)> {
        self.lock().short.pop_front()
    }

    /// Waits for the next answer; nothing once it is closed.
    pub fn take(&self) -> Option<(u64, Reply)> {
        let waits = |queue: &mut Queue| queue.short.is_empty() && queue.long.is_empty() && !queue.is_closed;
        let mut queue = self.changed.wait_while(self.lock(), waits).unwrap_or_else(PoisonError::into_inner);
        if queue.is_closed {
            return None;
        }
        let taken = queue.short.pop_front();
        let taken = taken.or_else(|| queue.long.pop_front());
        queue.current = taken.as_ref().map(|(number, _)| *number);
        taken
    }

    /// Whether the block that was taken is still wanted.
    pub fn is_wanted(&self, number: u64) -> bool {
        let queue = self.lock();
        queue.current == Some(number) && !queue.is_closed
    }

    /// A request is given up.
    pub fn cancel(&self, number: u64) {
        let mut queue = self.lock();
        let queue = &mut *queue;
        queue.short.retain(|(queued, _)| *queued != number);
        queue.long.retain(|(queued, _)| *queued != number);
        queue.current = queue.current.filter(|&current| current != number);
    }

    /// Nothing goes any more.
    pub fn close(&self) {
        let mut queue = self.lock();
        queue.is_closed = true;
        let left = (std::mem::take(&mut queue.short), std::mem::take(&mut queue.long));
        drop(queue);
        drop(left);
        self.changed.notify_all();
    }

    fn push(&self, number: u64, reply: Reply, is_short: bool) {
        let mut queue = self.lock();
        if !queue.is_closed {
            let end = if is_short { &mut queue.short } else { &mut queue.long };
            end.push_back((number, reply));
        }
        drop(queue);
        self.changed.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        // Each change is whole, so the queue of a poisoned lock is right.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
