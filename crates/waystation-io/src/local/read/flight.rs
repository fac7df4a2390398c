//! Many units in flight from one thread, through io_uring.
//!
//! Invariants: a unit's memory and file stay until the kernel has answered every request of it, also
//! when the worker gives up (dropping the ring waits), and until its bytes have been copied to devices;
//! units are concluded one at a time, in the order in which they arrive. Where there are devices, half of
//! the slots are for reads and half for copies, so that neither waits for the other. A unit is divided into no
//! more requests than the ring has room for. A ring that the system refuses in the middle of a job is given up:
//! this thread reads again what was in flight, and the worker reads the rest without a ring.

use std::collections::VecDeque;
use std::io;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use waystation_format::Result;

use super::portion::{read_parts, repeat};
use super::source::{DIRECT_MOST_PARTS, Source};
use crate::read::conclude;
use crate::read::device::{Delivery, Landing, Scratch};
use crate::read::layout::Layout;
use crate::read::plan::FilePlan;
use crate::ring::Ring;

/// What the kernel gives back of a request: its slot, and the number of its part.
#[derive(Clone, Copy)]
struct Token {
    slot: u32,
    part: u32,
}

impl Token {
    /// None where a number is too large to come back as it was.
    fn new(slot: usize, part: usize) -> Option<Self> {
        Some(Self { slot: u32::try_from(slot).ok()?, part: u32::try_from(part).ok()? })
    }

    fn pack(self) -> u64 {
        u64::from(self.slot) << u32::BITS | u64::from(self.part)
    }

    fn unpack(word: u64) -> Self {
        Self { slot: (word >> u32::BITS) as u32, part: word as u32 }
    }
}

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
    // Dropped first: waits for requests that use slots and scratch. None once it was given up.
    ring: Option<Ring>,
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
        let Ok(ring) = Ring::new(depth * DIRECT_MOST_PARTS.get()) else { return Ok(None) };
        Ok(Some(Self {
            ring: Some(ring),
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
        let room = self.room()?;
        let scratch = self.scratch.address(index);
        let slot = &mut self.slots[index];
        slot.layout.divide(plan, unit, source.access().1, room, scratch);
        slot.layout.prepare();
        slot.from = Some((plan, Arc::clone(source)));
        // SAFETY: as the caller promises; the slot's layout and file stay until the answer.
        if unsafe { self.queue(index) }.is_err() {
            self.give_up()?;
        }
        Ok(())
    }

    /// Hands the parts of a slot to the kernel.
    ///
    /// # Safety
    /// As for [`Flight::send`].
    unsafe fn queue(&mut self, index: usize) -> io::Result<()> {
        let slot = &mut self.slots[index];
        let (Some(ring), Some((_, source))) = (&mut self.ring, &slot.from) else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        let descriptor = source.access().0.as_raw_fd();
        for (number, part) in slot.layout.parts().iter().enumerate() {
            let token = Token::new(index, number).ok_or(io::ErrorKind::InvalidInput)?.pack();
            // SAFETY: the slot keeps scratch and file, the caller destinations, until the answer.
            unsafe { ring.push_read(descriptor, part.address, part.nbytes, part.begin, token) }?;
            slot.pending += 1;
        }
        ring.submit()
    }

    /// Whether the system has taken the ring away: what else there is to read must be read without one.
    pub fn has_given_up(&self) -> bool {
        self.ring.is_none()
    }

    /// Does without the ring from now on. Reads again what was in flight.
    fn give_up(&mut self) -> Result<()> {
        self.ring = None; // waits until the kernel has let go of all memory
        for index in 0..self.slots.len() {
            let slot = &mut self.slots[index];
            let Some((plan, source)) = slot.from.take() else { continue };
            (slot.pending, slot.failure) = (0, None);
            // SAFETY: no request of the unit is in flight; `send`'s caller vouches for destinations.
            if let Err(error) = unsafe { read_parts(source.access().0, &slot.layout, &mut self.vector) } {
                // SAFETY: as above.
                unsafe { repeat(error, true, plan, &source, &slot.layout, &mut self.vector) }?;
            }
            self.conclude(index, plan)?;
        }
        Ok(())
    }

    /// Requests that the ring takes now, after waiting for at least one.
    fn room(&mut self) -> Result<NonZeroUsize> {
        while let Some(ring) = &self.ring {
            if let Some(room) = NonZeroUsize::new(ring.room()) {
                return Ok(room);
            }
            self.receive()?;
        }
        Ok(NonZeroUsize::MAX)
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
                self.slots.push(Slot { layout: Layout::default(), from: None, pending: 0, failure: None });
                return Ok(self.slots.len() - 1);
            } else if self.delivery.arrivals.is_some() && self.reading() > 0 {
                // What somebody waits for may be among what is still read, so no copy is waited for before that.
                self.receive()?;
            } else {
                // Half of the slots or more: the oldest has most likely landed.
                self.await_copies()?;
            }
        }
    }

    /// Waits for copies, and frees their slot: for the oldest, which are over first, as a rule. Where somebody
    /// waits for what is in place, for those that he waits for first, as reads end in any order, and copies to
    /// several devices do.
    fn await_copies(&mut self) -> Result<()> {
        if self.delivery.arrivals.is_none() {
            return self.land_one(0);
        }
        let wanted = |&(index, ref landing): &(usize, Landing)| {
            (landing.first_record(), self.slots[index].layout.unit().start)
        };
        let places = self.landing.iter().enumerate();
        let first = places.min_by_key(|&(_, unit)| (!unit.1.is_expected(), wanted(unit)));
        let place = first.map_or(0, |(place, _)| place);
        self.land_one(place)
    }

    /// Waits for the copies at a place among those that are on their way, and frees their slot.
    fn land_one(&mut self, place: usize) -> Result<()> {
        if let Some((index, landing)) = self.landing.remove(place) {
            self.delivered_bytes += landing.land()?;
            self.free.push(index);
        }
        Ok(())
    }

    /// Takes one answer, and concludes its unit if it was the last of it.
    fn receive(&mut self) -> Result<()> {
        let Some(ring) = &mut self.ring else { return self.give_up() };
        let completion = loop {
            if let Some(completion) = ring.next_completion() {
                break completion;
            }
            if ring.wait(1).is_err() {
                return self.give_up();
            }
        };
        let token = Token::unpack(completion.token);
        let index = token.slot as usize;
        let slot = &mut self.slots[index];
        let part = slot.layout.parts()[token.part as usize];
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
        self.conclude(index, plan)
    }

    /// Verifies and delivers a slot's unit, all parts of which are filled.
    fn conclude(&mut self, index: usize, plan: &FilePlan) -> Result<()> {
        // SAFETY: all parts are filled; `send`'s caller vouches for destinations, and the slot keeps its
        // scratch as it is until the unit has landed.
        let landing = unsafe { conclude(plan, &self.slots[index].layout, self.delivery) }?;
        self.landing.push_back((index, landing));
        if self.delivery.devices.is_none() {
            return self.await_copies();
        }
        while let Some(place) = self.landing.iter().position(|(_, landing)| landing.is_expected()) {
            self.land_one(place)?;
        }
        Ok(())
    }
}
