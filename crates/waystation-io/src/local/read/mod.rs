//! Reads of batches from files: the way in which the largest files are best read (`source`) says how many workers
//! there are (`choice`); they take the spans in stripes, and each file is closed after its last (`files`). It is
//! read unit by unit in the way that suits it: many in flight (`flight`), one after another (`portion`), or
//! straight to a device ([`gpu_direct`]).

pub mod gpu_direct;

mod choice;
mod files;
mod flight;
mod portion;
mod source;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

use std::fs::File;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use waystation_format::Result;
use waystation_format::checksum::BLOCK_BYTES;

use self::choice::{choose_way, count_workers, depth_of_ring, stage};
use self::files::Files;
use self::flight::Flight;
use self::gpu_direct::{DirectReader, Directly};
use self::portion::Reader;
#[cfg(test)]
pub(crate) use self::source::DIRECT_MOST_PARTS;
use self::source::{Opening, Source};
use crate::directory::Directory;
use crate::first_touch;
use crate::job::panicked;
use crate::mode::{Mode, Way};
use crate::read::plan::FilePlan;
use crate::read::spans::{Stripe, portions, span_bytes};
use crate::read::{Batch, Statistics, Stripes};

/// Buffered reads are taken so far that the bytes are still in the core's cache when verified.
const BUFFERED_UNIT_BYTES: usize = 2 * BLOCK_BYTES;

/// Reads a batch from files beneath `root`, or, without one, by their paths.
///
/// # Safety
/// As for [`Storage::read`](crate::storage::Storage::read).
pub(super) unsafe fn read(root: Option<&Arc<Directory>>, batch: &Batch<'_>) -> Result<Statistics> {
    let Batch { plan, options, .. } = *batch;
    let spans = batch.spans();
    let total = spans.iter().map(|spans| span_bytes(spans)).sum();
    let mut way = choose_way(plan, options, total);
    let opening = Opening { root: root.cloned(), may_be_longer: options.may_be_longer };
    let files = Files::new(plan, &spans, options.mode.map(|_| way.mode), way.mode, opening);
    way.threads = count_workers(&way, options, total, plan, &files)?;
    let directly = Directly::new(&options.gpu_direct, options.devices.as_ref());
    if let (Some(directly), None) = (&directly, options.threads) {
        way.threads = way.threads.max(directly.least_workers(total));
    }
    let slots = if options.devices.is_some() { stage(&mut way, options.staging_bytes) } else { 1 };
    let work = Work::new(*batch, &files, &spans, (way, slots), directly.as_ref());
    std::thread::scope(|scope| {
        let helpers: Vec<_> = (1..way.threads)
            // Where the system grants no thread, those there are do all the work.
            .map_while(|_| {
                let builder = std::thread::Builder::new().name("waystation-read".to_owned());
                // SAFETY: as the caller promises; the scope ends before this function.
                builder.spawn_scoped(scope, || unsafe { work.run() }).ok()
            })
            .collect();
        // SAFETY: as the caller promises.
        unsafe { work.run() };
        for helper in helpers {
            if helper.join().is_err() {
                batch.fail(panicked());
            }
        }
    });
    Ok(work.statistics())
}

/// What the workers of a job share.
struct Work<'a> {
    batch: Batch<'a>,
    files: &'a Files<'a>,
    way: Way,
    /// Units that the ring of a worker has in flight.
    ring_depth: usize,
    /// Units that a worker without a ring reads or copies at a time.
    slots: usize,
    stripes: Stripes,
    bytes_read: AtomicU64,
    first_touch_ns: AtomicU64,
    no_ring: AtomicBool,
    directly: Option<&'a Directly<'a>>,
}

impl<'a> Work<'a> {
    fn new(
        batch: Batch<'a>,
        files: &'a Files<'a>,
        spans: &[Vec<Range<u64>>],
        (way, slots): (Way, usize),
        directly: Option<&'a Directly<'a>>,
    ) -> Self {
        let stripes = batch.stripes(spans, way.threads);
        for stripe in stripes.all() {
            files.expect_stripe(stripe.file);
        }
        Self {
            batch,
            files,
            way,
            ring_depth: depth_of_ring(&way, batch.options),
            slots,
            stripes,
            bytes_read: AtomicU64::new(0),
            first_touch_ns: AtomicU64::new(0),
            no_ring: AtomicBool::new(false),
            directly,
        }
    }

    /// Runs one worker until there is nothing left or the job has failed.
    ///
    /// # Safety
    /// As for [`Storage::read`](crate::storage::Storage::read).
    unsafe fn run(&self) {
        let mut worker = Worker { work: self, reader: None, flight: None, direct: None };
        // SAFETY: as the caller promises.
        if let Err(error) = unsafe { worker.run() } {
            self.batch.fail(error);
        }
        self.first_touch_ns.fetch_add(first_touch::take_cost().as_nanos() as u64, Ordering::Relaxed);
    }

    fn next_stripe(&self) -> Option<&Stripe> {
        if self.batch.should_stop() { None } else { self.stripes.take() }
    }

    fn statistics(&self) -> Statistics {
        let no_ring = self.no_ring.load(Ordering::Relaxed);
        let effective = |mode: Mode| match mode {
            Mode::DirectRing if no_ring => Mode::DirectThreads,
            mode => mode,
        };
        Statistics {
            bytes_read: self.bytes_read.load(Ordering::Relaxed),
            bytes_needed: self.batch.plan.needed_bytes(),
            modes: self.files.modes().map(|mode| mode.map(effective)).collect(),
            first_touch: Duration::from_nanos(self.first_touch_ns.load(Ordering::Relaxed)),
            gpu_direct_bytes: self.directly.map_or(0, Directly::nbytes),
            gpu_direct_reason: self.directly.and_then(Directly::reason),
            cached_bytes: 0,
            cache_problem: None,
            repeated_requests: 0,
        }
    }
}

/// One thread of a job.
struct Worker<'a> {
    work: &'a Work<'a>,
    reader: Option<Reader<'a>>,
    flight: Option<Flight<'a>>,
    /// What reads straight to a device; `Some(None)` if that was not to be had.
    direct: Option<Option<DirectReader<'a>>>,
}

impl<'a> Worker<'a> {
    /// # Safety
    /// As for [`Storage::read`](crate::storage::Storage::read).
    unsafe fn run(&mut self) -> Result<()> {
        while let Some(stripe) = self.work.next_stripe() {
            let source = self.work.files.open(stripe.file)?;
            // SAFETY: as the caller promises.
            unsafe { self.read_stripe(stripe, &source) }?;
            self.work.files.close(stripe.file);
        }
        if let Some(flight) = &mut self.flight {
            self.work.batch.add_done(flight.land()?);
            self.work.no_ring.fetch_or(flight.has_given_up(), Ordering::Relaxed);
        }
        if let Some(reader) = &mut self.reader {
            self.work.batch.add_done(reader.land()?);
        }
        if let Some(Some(direct)) = &mut self.direct {
            self.work.batch.add_done(direct.land()?);
        }
        Ok(())
    }

    /// # Safety
    /// As for [`Storage::read`](crate::storage::Storage::read).
    unsafe fn read_stripe(&mut self, stripe: &Stripe, source: &Arc<Source>) -> Result<()> {
        let plan = &self.work.batch.plan.files[stripe.file];
        let mut stream: Option<File> = None;
        let mode = source.mode();
        if mode == Mode::Buffered && self.work.way.threads > 1 {
            stream = source.stream(&plan.file.path);
        }
        let unit_bytes = match mode {
            // Copies to devices should be long, and find the bytes in memory.
            Mode::Buffered if self.work.batch.delivery.devices.is_none() => {
                self.work.way.block_bytes.min(BUFFERED_UNIT_BYTES)
            }
            _ => self.work.way.block_bytes,
        };
        let is_direct = self.goes_directly(plan, source)?;
        let most_bytes = if is_direct { gpu_direct::UNIT_BYTES } else { unit_bytes };
        let units = stripe.spans.iter().flat_map(|span| portions(span.clone(), most_bytes as u64));
        for unit in units {
            if self.work.batch.should_stop() {
                break;
            }
            self.work.bytes_read.fetch_add(unit.end - unit.start, Ordering::Relaxed);
            self.work.batch.wait_for_store(unit.end - unit.start);
            // SAFETY: as the caller promises.
            if is_direct && unsafe { self.read_directly(plan, source, unit.clone()) }? {
                continue;
            }
            for part in portions(unit, unit_bytes as u64) {
                // SAFETY: as the caller promises.
                let delivered = unsafe { self.read_unit(plan, source, stream.as_ref(), part) }?;
                self.work.batch.add_done(delivered);
            }
        }
        Ok(())
    }

    /// Whether a file is read straight to the device.
    fn goes_directly(&mut self, plan: &FilePlan, source: &Source) -> Result<bool> {
        let Some(directly) = self.work.directly else { return Ok(false) };
        let Work { way, batch, .. } = self.work;
        let made = || DirectReader::new(directly, way.threads, batch.delivery);
        match self.direct.get_or_insert_with(made) {
            Some(direct) => Ok(direct.file(plan, source)?.is_some()),
            None => Ok(false),
        }
    }

    /// Reads a unit straight to the device; false if it must be read otherwise.
    ///
    /// # Safety
    /// As for [`Storage::read`](crate::storage::Storage::read).
    unsafe fn read_directly(&mut self, plan: &FilePlan, source: &Source, unit: Range<u64>) -> Result<bool> {
        let Some(Some(direct)) = &mut self.direct else { return Ok(false) };
        let Some(file) = direct.file(plan, source)? else { return Ok(false) };
        // SAFETY: as the caller promises; `run` lands what is on its way, or its drop waits.
        let delivered = unsafe { direct.read(plan, source, file, unit) }?;
        self.work.batch.add_done(delivered.unwrap_or(0));
        Ok(delivered.is_some())
    }

    /// Reads a unit, or sends it off; returns the bytes delivered meanwhile.
    ///
    /// # Safety
    /// As for [`Storage::read`](crate::storage::Storage::read).
    unsafe fn read_unit(
        &mut self,
        plan: &'a FilePlan,
        source: &Arc<Source>,
        stream: Option<&File>,
        unit: Range<u64>,
    ) -> Result<u64> {
        if source.mode() == Mode::DirectRing
            && let Some(flight) = self.flight()?
        {
            // SAFETY: as the caller promises; `run` lands the flight, or its drop waits.
            unsafe { flight.send(plan, source, unit) }?;
            return Ok(flight.take_delivered());
        }
        let reader = match &mut self.reader {
            Some(reader) => reader,
            none => {
                let Work { way, slots, batch, .. } = self.work;
                none.insert(Reader::new(*slots, way.block_bytes, batch.delivery)?)
            }
        };
        // SAFETY: as the caller promises.
        unsafe { reader.read(plan, source, stream, unit) }
    }

    /// This worker's ring, unless the system refuses one.
    fn flight(&mut self) -> Result<Option<&mut Flight<'a>>> {
        if self.flight.as_ref().is_some_and(Flight::has_given_up) {
            self.work.no_ring.store(true, Ordering::Relaxed);
            return Ok(None);
        }
        if self.flight.is_none() && !self.work.no_ring.load(Ordering::Relaxed) {
            let Work { ring_depth, way, batch, .. } = self.work;
            self.flight = Flight::new(*ring_depth, way.block_bytes, batch.delivery)?;
            self.work.no_ring.fetch_or(self.flight.is_none(), Ordering::Relaxed);
        }
        Ok(self.flight.as_mut())
    }
}
