//! Planned reads: boxes of stored chunks to chosen addresses, verified on the way.
//!
//! The plan is turned into spans of file bytes (`spans`). How the largest files are best read
//! (`source`) says how many workers there are (`choice`); they take the spans in stripes, and each file
//! is closed after its last (`files`). It is read unit by unit in the way that suits it: many in flight
//! (`flight`) or one after another (`portion`). Invariants: no byte reaches the caller unverified
//! without the job failing; a job that has finished, well or not, uses the caller's memory no more; memory
//! beside the destinations is bounded by `SCRATCH_BYTES`. Destinations may be on devices ([`device`]).

pub mod device;
pub mod gpu_direct;
pub mod plan;

mod arrivals;
mod choice;
mod files;
mod flight;
mod frames;
mod layout;
mod portion;
mod source;
mod spans;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

use std::fs::File;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use waystation_format::Result;
use waystation_format::checksum::BLOCK_BYTES;

use self::arrivals::Arrivals;
use self::choice::{choose_way, count_workers, depth_of_ring, stage};
use self::device::{Delivery, Devices};
use self::files::Files;
use self::flight::Flight;
pub use self::frames::{decode_chunks, decompress_one};
use self::gpu_direct::{DirectReader, Directly, GpuDirect};
use self::plan::{FilePlan, Plan};
use self::portion::Reader;
pub use self::source::Opening;
use self::source::Source;
use self::spans::{Stripe, portions, span_bytes, spans_of, stripes_of};
use crate::job::{Handle, Shared, panicked};
use crate::mode::{Mode, Way};
use crate::throttle::Throttle;

/// Scratch memory of all workers together.
const SCRATCH_BYTES: usize = 128 << 20;
/// Stripes are long, so that each worker has a read-ahead of its own, …
const STRIPE_MOST_BYTES: u64 = 32 << 20;
/// … but not so long that one worker is left with the last, and never a matter of single requests.
const STRIPE_LEAST_BYTES: u64 = 2 << 20;
/// Where somebody waits for the first bytes, all workers should be near these.
const STRIPE_ANNOUNCED_BYTES: u64 = 8 << 20;
/// Stripes that every worker should have.
const STRIPES_PER_WORKER: u64 = 4;
/// Buffered reads are taken so far that the bytes are still in the core's cache when verified.
const BUFFERED_UNIT_BYTES: usize = 2 * BLOCK_BYTES;

/// What the caller prescribes; the engine chooses the rest.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The mode for every file.
    pub mode: Option<Mode>,
    /// Bytes of one request.
    pub block_bytes: Option<usize>,
    /// Requests in flight.
    pub depth: Option<usize>,
    /// Worker threads.
    pub threads: Option<usize>,
    /// What every read waits for.
    pub throttle: Option<Arc<Throttle>>,
    /// Devices that destinations are on.
    pub devices: Option<Devices>,
    /// Most staging memory for these.
    pub staging_bytes: Option<usize>,
    /// Whether files are read straight to these.
    pub gpu_direct: GpuDirect,
    /// Whether to tell how many of the plan's first records are in place ([`Shared::front`]).
    pub announce: bool,
    /// Of so many processes that read the same through the page cache, which this is, counted from 0: each
    /// begins with another part, so that all of them together read everything from storage once.
    pub among: Option<(usize, usize)>,
    /// How files are opened.
    pub opening: Opening,
}

/// What a finished job has done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Statistics {
    /// Bytes read from files.
    pub bytes_read: u64,
    /// Bytes delivered to destinations.
    pub bytes_needed: u64,
    /// How each file was read; `None` where nothing was needed of it.
    pub modes: Vec<Option<Mode>>,
    /// Bytes that were read straight to a device.
    pub gpu_direct_bytes: u64,
    /// Why some were not, where it was wanted.
    pub gpu_direct_reason: Option<String>,
}

/// Starts reading in the background.
///
/// # Safety
/// Until the job has finished (its handle's drop waits for that), every destination of the plan must be
/// writable memory that nobody else uses: in regions of the options' devices theirs, anywhere else the
/// host's. No two pieces may have a destination byte in common.
pub unsafe fn start(mut plan: Plan, options: Options) -> Result<Handle<Statistics>> {
    if let Some(devices) = &options.devices {
        plan.place(devices.regions())?;
    }
    // SAFETY: the caller vouches for destinations as long as the job runs.
    Handle::spawn("waystation-read", plan.needed_bytes(), move |shared| unsafe {
        run(&plan, &options, shared)
    })
}

/// # Safety
/// As for [`start`].
unsafe fn run(plan: &Plan, options: &Options, shared: &Shared<Statistics>) -> Result<Statistics> {
    if let Some(devices) = &options.devices {
        devices.stay_near(); // inherited by the helpers
    }
    let spans: Vec<Vec<Range<u64>>> = plan.files.iter().map(spans_of).collect();
    let total = spans.iter().map(|spans| span_bytes(spans)).sum();
    let mut way = choose_way(plan, options, total);
    let opening = options.opening.clone();
    let files = Files::new(plan, &spans, options.mode.map(|_| way.mode), way.mode, opening);
    way.threads = count_workers(&way, options, total, plan, &files)?;
    let directly = Directly::new(&options.gpu_direct, options.devices.as_ref());
    if let (Some(directly), None) = (&directly, options.threads) {
        way.threads = way.threads.max(directly.least_workers(total));
    }
    let slots = if options.devices.is_some() { stage(&mut way, options.staging_bytes) } else { 1 };
    let arrivals = options.announce.then(|| Arrivals::new(plan, shared));
    let delivery = Delivery { devices: options.devices.as_ref(), arrivals: arrivals.as_ref() };
    let shared_by_all = (shared, delivery, directly.as_ref());
    let work = Work::new(plan, &files, &spans, (way, slots), total, shared_by_all, options);
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
                shared.fail(panicked());
            }
        }
    });
    Ok(work.statistics(plan.needed_bytes()))
}

/// What the workers of a job share.
struct Work<'a> {
    plan: &'a Plan,
    files: &'a Files<'a>,
    way: Way,
    /// Units that the ring of a worker has in flight.
    ring_depth: usize,
    /// Units that a worker without a ring reads or copies at a time.
    slots: usize,
    stripes: Vec<Stripe>,
    next: AtomicUsize,
    bytes_read: AtomicU64,
    no_ring: AtomicBool,
    shared: &'a Shared<Statistics>,
    throttle: Option<&'a Throttle>,
    delivery: Delivery<'a>,
    directly: Option<&'a Directly<'a>>,
}

impl<'a> Work<'a> {
    fn new(
        plan: &'a Plan,
        files: &'a Files<'a>,
        spans: &[Vec<Range<u64>>],
        (way, slots): (Way, usize),
        total: u64,
        (shared, delivery, directly): (&'a Shared<Statistics>, Delivery<'a>, Option<&'a Directly<'a>>),
        options: &'a Options,
    ) -> Self {
        let most_bytes = if options.announce { STRIPE_ANNOUNCED_BYTES } else { STRIPE_MOST_BYTES };
        let share = total / (way.threads as u64 * STRIPES_PER_WORKER);
        let stripe_bytes = share.clamp(STRIPE_LEAST_BYTES, most_bytes);
        let mut stripes: Vec<Stripe> = spans
            .iter()
            .enumerate()
            .flat_map(|(file, spans)| stripes_of(file, spans, stripe_bytes))
            .collect();
        if let Some((index, count)) = options.among.filter(|_| !stripes.is_empty()) {
            let first = stripes.len() * (index % count.max(1)) / count.max(1);
            stripes.rotate_left(first);
        }
        for stripe in &stripes {
            files.expect_stripe(stripe.file);
        }
        Self {
            plan,
            files,
            way,
            ring_depth: depth_of_ring(&way, options),
            slots,
            stripes,
            next: AtomicUsize::new(0),
            bytes_read: AtomicU64::new(0),
            no_ring: AtomicBool::new(false),
            shared,
            throttle: options.throttle.as_deref(),
            delivery,
            directly,
        }
    }

    /// Runs one worker until there is nothing left or the job has failed.
    ///
    /// # Safety
    /// As for [`start`].
    unsafe fn run(&self) {
        let mut worker = Worker { work: self, reader: None, flight: None, direct: None };
        // SAFETY: as the caller promises.
        if let Err(error) = unsafe { worker.run() } {
            self.shared.fail(error);
        }
    }

    fn next_stripe(&self) -> Option<&Stripe> {
        if self.shared.should_stop() {
            return None;
        }
        self.stripes.get(self.next.fetch_add(1, Ordering::Relaxed))
    }

    fn statistics(&self, bytes_needed: u64) -> Statistics {
        let no_ring = self.no_ring.load(Ordering::Relaxed);
        let effective = |mode: Mode| match mode {
            Mode::DirectRing if no_ring => Mode::DirectThreads,
            mode => mode,
        };
        Statistics {
            bytes_read: self.bytes_read.load(Ordering::Relaxed),
            bytes_needed,
            modes: self.files.modes().map(|mode| mode.map(effective)).collect(),
            gpu_direct_bytes: self.directly.map_or(0, Directly::nbytes),
            gpu_direct_reason: self.directly.and_then(Directly::reason),
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
    /// As for [`start`].
    unsafe fn run(&mut self) -> Result<()> {
        while let Some(stripe) = self.work.next_stripe() {
            let source = self.work.files.open(stripe.file)?;
            // SAFETY: as the caller promises.
            unsafe { self.read_stripe(stripe, &source) }?;
            self.work.files.close(stripe.file);
        }
        if let Some(flight) = &mut self.flight {
            self.work.shared.add_done(flight.land()?);
            self.work.no_ring.fetch_or(flight.has_given_up(), Ordering::Relaxed);
        }
        if let Some(reader) = &mut self.reader {
            self.work.shared.add_done(reader.land()?);
        }
        if let Some(Some(direct)) = &mut self.direct {
            self.work.shared.add_done(direct.land()?);
        }
        Ok(())
    }

    /// # Safety
    /// As for [`start`].
    unsafe fn read_stripe(&mut self, stripe: &Stripe, source: &Arc<Source>) -> Result<()> {
        let plan = &self.work.plan.files[stripe.file];
        let mut stream: Option<File> = None;
        let mode = source.mode();
        if mode == Mode::Buffered && self.work.way.threads > 1 {
            stream = source.stream(&plan.file.path);
        }
        let unit_bytes = match mode {
            // Copies to devices should be long, and find the bytes in memory.
            Mode::Buffered if self.work.delivery.devices.is_none() => {
                self.work.way.block_bytes.min(BUFFERED_UNIT_BYTES)
            }
            _ => self.work.way.block_bytes,
        };
        let is_direct = self.goes_directly(plan, source)?;
        let most_bytes = if is_direct { gpu_direct::UNIT_BYTES } else { unit_bytes };
        let units = stripe.spans.iter().flat_map(|span| portions(span.clone(), most_bytes as u64));
        for unit in units {
            if self.work.shared.should_stop() {
                break;
            }
            self.work.bytes_read.fetch_add(unit.end - unit.start, Ordering::Relaxed);
            if let Some(throttle) = self.work.throttle {
                throttle.take(unit.end - unit.start, || self.work.shared.should_stop());
            }
            // SAFETY: as the caller promises.
            if is_direct && unsafe { self.read_directly(plan, source, unit.clone()) }? {
                continue;
            }
            for part in portions(unit, unit_bytes as u64) {
                // SAFETY: as the caller promises.
                let delivered = unsafe { self.read_unit(plan, source, stream.as_ref(), part) }?;
                self.work.shared.add_done(delivered);
            }
        }
        Ok(())
    }

    /// Whether a file is read straight to the device.
    fn goes_directly(&mut self, plan: &FilePlan, source: &Source) -> Result<bool> {
        let Some(directly) = self.work.directly else { return Ok(false) };
        let Work { way, delivery, .. } = self.work;
        let made = || DirectReader::new(directly, way.threads, *delivery);
        match self.direct.get_or_insert_with(made) {
            Some(direct) => Ok(direct.file(plan, source)?.is_some()),
            None => Ok(false),
        }
    }

    /// Reads a unit straight to the device; false if it must be read otherwise.
    ///
    /// # Safety
    /// As for [`start`].
    unsafe fn read_directly(&mut self, plan: &FilePlan, source: &Source, unit: Range<u64>) -> Result<bool> {
        let Some(Some(direct)) = &mut self.direct else { return Ok(false) };
        let Some(file) = direct.file(plan, source)? else { return Ok(false) };
        // SAFETY: as the caller promises; `run` lands what is on its way, or its drop waits.
        let delivered = unsafe { direct.read(plan, source, file, unit) }?;
        self.work.shared.add_done(delivered.unwrap_or(0));
        Ok(delivered.is_some())
    }

    /// Reads a unit, or sends it off; returns the bytes delivered meanwhile.
    ///
    /// # Safety
    /// As for [`start`].
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
                let Work { way, slots, delivery, .. } = self.work;
                none.insert(Reader::new(*slots, way.block_bytes, *delivery)?)
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
            let Work { ring_depth, way, delivery, .. } = self.work;
            self.flight = Flight::new(*ring_depth, way.block_bytes, *delivery)?;
            self.work.no_ring.fetch_or(self.flight.is_none(), Ordering::Relaxed);
        }
        Ok(self.flight.as_mut())
    }
}
