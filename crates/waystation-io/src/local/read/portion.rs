//! One unit from the file to its destinations, one request at a time.
//!
//! Invariants: a unit counts as done only when all of it was read, verified and delivered, to devices too;
//! a file that ends early is Corrupt, a device that fails is Unavailable.

use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::fd::AsRawFd;

use waystation_format::{Error, Result};

use super::source::Source;
use crate::read::device::{Delivery, Landing, Scratch};
use crate::read::layout::{Layout, Part};
use crate::read::plan::FilePlan;
use crate::read::{conclude, truncated};

/// What a worker needs to read units one after another.
pub struct Reader<'a> {
    layout: Layout,
    // Dropped before scratch: waits for copies out of it.
    landing: Vec<Option<Landing<'a>>>, // of each slot, what was read to it last
    scratch: Scratch,
    delivery: Delivery<'a>,
    next: usize,
    vector: Vec<libc::iovec>,
}

impl<'a> Reader<'a> {
    /// A reader of units of up to `unit_bytes`. Where there are devices, one unit is read while `slots - 1`
    /// are copied.
    pub fn new(slots: usize, unit_bytes: usize, delivery: Delivery<'a>) -> Result<Self> {
        let slots = if delivery.devices.is_some() { slots.max(2) } else { 1 };
        Ok(Self {
            layout: Layout::default(),
            landing: (0..slots).map(|_| None).collect(),
            scratch: Scratch::new(slots, unit_bytes, delivery.devices)?,
            delivery,
            next: 0,
            vector: Vec::new(),
        })
    }

    /// Waits for everything that is still being copied, the oldest first. Returns the bytes of that.
    pub fn land(&mut self) -> Result<u64> {
        self.landing.rotate_left(self.next);
        self.landing.iter_mut().filter_map(Option::take).try_fold(0, |sum, unit| Ok(sum + unit.land()?))
    }

    /// Lands what somebody waits for and is there. Returns the bytes of that.
    fn land_expected(&mut self) -> Result<u64> {
        let are_there =
            self.landing.iter_mut().filter(|unit| unit.as_ref().is_some_and(Landing::is_expected));
        are_there.filter_map(Option::take).try_fold(0, |sum, unit| Ok(sum + unit.land()?))
    }

    /// Reads, verifies and delivers one unit; `stream` is used instead of the source's own descriptor
    /// where the page cache is. Returns the bytes that have been delivered since.
    ///
    /// # Safety
    /// Until [`Reader::land`] returned or the reader is dropped, destinations of the plan must be writable
    /// and used by nobody else.
    pub unsafe fn read(
        &mut self,
        plan: &FilePlan,
        source: &Source,
        stream: Option<&File>,
        unit: Range<u64>,
    ) -> Result<u64> {
        let (file, rules) = source.access();
        let is_direct = !std::ptr::eq(file, source.buffered());
        let file = if is_direct { file } else { stream.unwrap_or(file) };
        let slot = self.next;
        let mut delivered = self.landing[slot].take().map_or(Ok(0), Landing::land)?;
        delivered += self.land_expected()?;
        // One request fills any number of parts.
        self.layout.divide(plan, unit, rules, NonZeroUsize::MAX, self.scratch.address(slot));
        self.layout.prepare();
        // SAFETY: parts are scratch of this reader or destinations.
        let outcome = unsafe { read_parts(file, &self.layout, &mut self.vector) };
        if let Err(error) = outcome {
            // SAFETY: as above.
            unsafe { repeat(error, is_direct, plan, source, &self.layout, &mut self.vector) }?;
        }
        // SAFETY: every part was filled just now; the slot is left alone until the unit has landed.
        let landing = unsafe { conclude(plan, &self.layout, self.delivery) }?;
        if landing.is_over() {
            delivered += landing.land()?;
        } else {
            self.landing[slot] = Some(landing);
            self.next = (slot + 1) % self.landing.len();
        }
        Ok(delivered)
    }
}

/// Repeats a unit through the page cache if a direct transfer was refused or came back short; else
/// turns the error into the engine's.
///
/// # Safety
/// As for [`read_parts`].
pub unsafe fn repeat(
    error: io::Error,
    was_direct: bool,
    plan: &FilePlan,
    source: &Source,
    layout: &Layout,
    vector: &mut Vec<libc::iovec>,
) -> Result<()> {
    let refused = matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP | libc::ENOSYS));
    let short = error.kind() == io::ErrorKind::UnexpectedEof;
    if !was_direct || !(refused || short) {
        return Err(describe(error, plan, source, layout.unit()));
    }
    if refused {
        source.refuse();
    }
    // SAFETY: as the caller promises.
    unsafe { read_parts(source.buffered(), layout, vector) }
        .map_err(|error| describe(error, plan, source, layout.unit()))
}

fn describe(error: io::Error, plan: &FilePlan, source: &Source, unit: &Range<u64>) -> Error {
    let path = &plan.file.path;
    if error.kind() == io::ErrorKind::UnexpectedEof {
        let left = source.buffered().metadata().map_or(0, |metadata| metadata.len());
        return truncated(path, left, plan.file.file_bytes);
    }
    Error::from_io(error, "read the file", path).with("offset", unit.start.to_string())
}

/// Fills the parts of a layout.
///
/// # Safety
/// The memory of every part must be writable and used by nobody else.
pub unsafe fn read_parts(file: &File, layout: &Layout, vector: &mut Vec<libc::iovec>) -> io::Result<()> {
    let to_vector = |part: &Part| libc::iovec { iov_base: part.address.cast(), iov_len: part.nbytes };
    vector.clear();
    vector.extend(layout.parts().iter().map(to_vector));
    let mut rest = vector.as_mut_slice();
    let mut position = layout.unit().start;
    while position < layout.unit().end {
        let count = rest.len().min(libc::UIO_MAXIOV as usize) as i32;
        // SAFETY: the vector describes memory that the caller vouches for.
        let filled = unsafe { libc::preadv64(file.as_raw_fd(), rest.as_ptr(), count, position as i64) };
        match usize::try_from(filled) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(filled) => {
                position += filled as u64;
                rest = advance(rest, filled);
            }
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
    Ok(())
}

/// Drops the first `filled` bytes of a vector.
fn advance(vector: &mut [libc::iovec], mut filled: usize) -> &mut [libc::iovec] {
    let mut whole = 0;
    while whole < vector.len() && vector[whole].iov_len <= filled {
        filled -= vector[whole].iov_len;
        whole += 1;
    }
    let rest = &mut vector[whole..];
    if let Some(first) = rest.first_mut() {
        first.iov_base = first.iov_base.wrapping_byte_add(filled);
        first.iov_len -= filled;
    }
    rest
}
