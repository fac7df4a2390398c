//! Many units in flight from one thread, through io_uring.
//!
//! Invariants: a unit's memory and file stay until the kernel has answered every request of it, also
//! when the worker gives up (dropping the ring waits), and until its bytes have been copied to devices;
//! units are concluded one at a time, in the order in which they arrive. Where there are devices, half of
//! the slots are for reads and half for copies, so that neither waits for the other.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use waystation_format::{Error, Kind, Result};

use super::device::{Delivery, Landing, Scratch};
use super::layout::Layout;
use super::plan::FilePlan;
use super::portion::{conclude, repeat};
use super::source::{DIRECT_MOST_PARTS, Source};
use crate::ring::Ring;

/// Tokens are a slot's index and, in the low bits, a part's.
const PART_BITS: u32 = 8;

/// A unit on its way.
struct Slot<'a> {
    layout: Layout,
    /// The file and its plan, while the unit is in flight.
    from: Option<(&'a FilePlan, Arc<Source>)>,
    pending: usize,
    failure: Option<io::Error>,
}

/// One ring and the units in flight on it.
pub struct Flight<'a> {
    // Dropped first: waits for requests that use slots and scratch.
    ring: Ring,
    // Dropped before scratch: waits for copies out of it.
    landing: VecDeque<(usize, Landing<'a>)>,
    slots: Vec<Slot<'a>>,
    scratch: Scratch,
    free: Vec<usize>,
    delivery: Delivery<'a>,
    depth: usize,
    most_slots: usize,
    vector: Vec<libc::iovec>,
    delivered_bytes: u64,
}

impl<'a> Flight<'a> {
    /// A flight of up to `depth` units of up to `unit_bytes`; `None` means that there is no io_uring.
    pub fn new(depth: usize, unit_bytes: usize, delivery: Delivery<'a>) -> Result<Option<Self>> {
        let depth = depth.clamp(1, 256);
        let most_slots = if delivery.devices.is_some() { 2 * depth } else { depth };
        let Ok(ring) = Ring::new((depth * DIRECT_MOST_PARTS) as u32) else { return Ok(None) };
        Ok(Some(Self {
            ring,
            landing: VecDeque::new(),
            slots: Vec::new(),
            scratch: Scratch::new(most_slots, unit_bytes, delivery.devices)?,
            free: Vec::new(),
            delivery,
            depth,
            most_slots,
            vector: Vec::new(),
            delivered_bytes: 0,
        }))
    }

    /// Sends a unit off, after waiting for room.
    ///
    /// # Safety
    /// Until [`Flight::land`] returned or the flight is dropped, destinations of the plan must be
    /// writable and used by nobody else.
    pub unsafe fn send(&mut self, plan: &'a FilePlan, source: &Arc<Source>, unit: Range<u64>) -> Result<()> {
        let index = self.free_slot()?;
        let scratch = self.scratch.address(index);
        let slot = &mut self.slots[index];
        let (file, rules) = source.access();
        slot.layout.divide(plan, unit, rules, scratch);
        slot.from = Some((plan, Arc::clone(source)));
        for (number, part) in slot.layout.parts().iter().enumerate() {
            let token = (index as u64) << PART_BITS | number as u64;
            let (descriptor, nbytes) = (file.as_raw_fd(), part.nbytes as u32);
            // SAFETY: the slot keeps scratch and file, the caller destinations, until the answer.
            unsafe { self.ring.push_read(descriptor, part.address, nbytes, part.begin, token) }
                .map_err(|error| Error::from_io(error, "queue a read of the file", &plan.file.path))?;
            slot.pending += 1;
        }
        self.ring.submit().map_err(|error| Error::from_io(error, "read the file", &plan.file.path))
    }

    /// Waits for all units. Returns the bytes delivered since the last call of this or
    /// [`Flight::take_delivered`].
    pub fn land(&mut self) -> Result<u64> {
        while self.reading() > 0 {
            self.receive()?;
        }
        while !self.landing.is_empty() {
            self.await_copies()?;
        }
        Ok(self.take_delivered())
    }

    /// Bytes delivered since the last call.
    pub fn take_delivered(&mut self) -> u64 {
        std::mem::take(&mut self.delivered_bytes)
    }

    /// Units that are being read.
    fn reading(&self) -> usize {
        self.slots.len() - self.free.len() - self.landing.len()
    }

    fn free_slot(&mut self) -> Result<usize> {
        loop {
            if self.reading() >= self.depth {
                self.receive()?;
            } else if let Some(index) = self.free.pop() {
                return Ok(index);
            } else if self.slots.len() < self.most_slots {
                self.slots.push(Slot { layout: Layout::new(), from: None, pending: 0, failure: None });
                return Ok(self.slots.len() - 1);
            } else {
                // Half of the slots or more: the oldest has most likely landed.
                self.await_copies()?;
            }
        }
    }

    /// Waits for the oldest copies, and frees their slot.
    fn await_copies(&mut self) -> Result<()> {
        if let Some((index, landing)) = self.landing.pop_front() {
            self.delivered_bytes += landing.land()?;
            self.free.push(index);
        }
        Ok(())
    }

    /// Takes one answer, and concludes its unit if it was the last of it.
    fn receive(&mut self) -> Result<()> {
        let completion = loop {
            if let Some(completion) = self.ring.next_completion() {
                break completion;
            }
            self.ring
                .wait(1)
                .map_err(|error| Error::new(Kind::Unavailable, format!("io_uring failed: {error}")))?;
        };
        let index = (completion.token >> PART_BITS) as usize;
        let number = (completion.token & ((1 << PART_BITS) - 1)) as usize;
        let slot = &mut self.slots[index];
        let part = slot.layout.parts()[number];
        let expected = (slot.layout.unit().end - part.begin).min(part.nbytes as u64);
        slot.pending -= 1;
        match completion.result {
            Ok(filled) if filled as u64 >= expected => {}
            Ok(_) => slot.failure = slot.failure.take().or(Some(io::ErrorKind::UnexpectedEof.into())),
            Err(error) => slot.failure = Some(error),
        }
        if slot.pending > 0 {
            return Ok(());
        }
        let Some((plan, source)) = slot.from.take() else { return Ok(()) };
        if let Some(error) = slot.failure.take() {
            // SAFETY: all requests of the unit have been answered; its memory is as it was.
            unsafe { repeat(error, true, plan, &source, &slot.layout, &mut self.vector) }?;
        }
        // SAFETY: all parts are filled; `send`'s caller vouches for destinations, and the slot keeps its
        // scratch as it is until the unit has landed.
        let landing = unsafe { conclude(plan, &slot.layout, self.delivery) }?;
        self.landing.push_back((index, landing));
        if self.delivery.devices.is_none() {
            return self.await_copies();
        }
        while self.landing.front().is_some_and(|(_, landing)| landing.is_expected()) {
            self.await_copies()?;
        }
        Ok(())
    }
}
