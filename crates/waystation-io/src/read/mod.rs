//! Planned reads: boxes of stored chunks to chosen addresses, verified on the way.
//!
//! The plan is turned into spans of file bytes ([`spans`]), which workers take in stripes; each file is
//! opened when its first stripe is taken and closed after its last ([`source`]), and read unit by unit
//! in the way that suits it: many in flight ([`flight`]) or one after another ([`portion`]). Invariants:
//! no byte reaches the caller unverified without the job failing; a job that has finished, well or not,
//! uses the caller's memory no more; memory beside the destinations is bounded by [`SCRATCH_BYTES`].

pub mod plan;

mod flight;
mod layout;
mod portion;
mod source;
mod spans;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

use std::fs::File;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use waystation_format::Result;
use waystation_format::checksum::BLOCK_BYTES;

use self::flight::Flight;
use self::plan::{FilePlan, Plan};
use self::portion::Reader;
use self::source::{Source, Wanted};
use self::spans::{Stripe, portions, span_bytes, spans_of, stripes_of};
use crate::calibrate;
use crate::job::{Handle, Shared, panicked};
use crate::mode::{Mode, Way};
use crate::ring::Ring;

/// Scratch memory of all workers together.
const SCRATCH_BYTES: usize = 128 << 20;
/// Stripes are long, so that each worker has a read-ahead of its own, …
const STRIPE_MOST_BYTES: u64 = 32 << 20;
/// … but not so long that one worker is left with the last, and never a matter of single requests.
const STRIPE_LEAST_BYTES: u64 = 2 << 20;
/// Stripes that every worker should have.
const STRIPES_PER_WORKER: u64 = 4;
/// Work below which another thread does not pay.
const LEAST_BYTES_PER_WORKER: u64 = 4 << 20;
/// Workers that the engine starts of its own accord.
const MOST_WORKERS: usize = 8;
/// Threads that keep a device busy with one request each.
const LEAST_DIRECT_THREADS: usize = 4;
/// Buffered reads are taken so far that the bytes are still in the core's cache when verified.
const BUFFERED_UNIT_BYTES: usize = 2 * BLOCK_BYTES;

/// What the caller prescribes; the engine chooses the rest.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// The mode for every file.
    pub mode: Option<Mode>,
    /// Bytes of one request.
    pub block_bytes: Option<usize>,
    /// Requests in flight.
    pub depth: Option<usize>,
    /// Worker threads.
    pub threads: Option<usize>,
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
}

/// Starts reading in the background.
///
/// # Safety
/// Until the job has finished (its handle's drop waits for that), every destination of the plan must be
/// writable memory that nobody else uses. No two pieces may have a destination byte in common.
pub unsafe fn start(plan: Plan, options: Options) -> Result<Handle<Statistics>> {
    // SAFETY: the caller vouches for destinations as long as the job runs.
    Handle::spawn("waystation-read", plan.needed_bytes(), move |shared| unsafe {
        run(&plan, &options, shared)
    })
}

/// # Safety
/// As for [`start`].
unsafe fn run(plan: &Plan, options: &Options, shared: &Shared<Statistics>) -> Result<Statistics> {
    let spans: Vec<Vec<Range<u64>>> = plan.files.iter().map(spans_of).collect();
    let total = spans.iter().map(|spans| span_bytes(spans)).sum();
    let way = choose_way(plan, options, total);
    let prescribed = options.mode.map(|_| way.mode);
    let work = Work::new(plan, prescribed, &spans, way, total, shared);
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

/// The caller's prescriptions, else what was measured for the file system, else what suits most.
fn choose_way(plan: &Plan, options: &Options, total: u64) -> Way {
    let cores = std::thread::available_parallelism().map_or(1, usize::from).min(MOST_WORKERS);
    let largest = plan.files.iter().max_by_key(|file| file.needed_bytes());
    let remembered =
        largest.and_then(|file| calibrate::remembered(&file.file.path)).map(|choice| choice.read);
    let mode = options.mode.or(remembered.map(|way| way.mode)).unwrap_or(Mode::DirectRing);
    let mode = if mode == Mode::DirectRing && !has_ring() { Mode::DirectThreads } else { mode };
    let way = remembered.filter(|way| way.mode == mode).unwrap_or(Way {
        mode,
        block_bytes: 1 << 20,
        depth: 16,
        threads: if mode == Mode::DirectThreads { LEAST_DIRECT_THREADS } else { 1 },
    });
    let block_bytes = options.block_bytes.unwrap_or(way.block_bytes).clamp(BLOCK_BYTES, 64 << 20);
    let block_bytes = block_bytes.next_multiple_of(BLOCK_BYTES);
    // Verifying and copying want cores, whatever the disk wants.
    let useful = (total / LEAST_BYTES_PER_WORKER).clamp(1, 64) as usize;
    let threads = options.threads.map_or(way.threads.max(cores).min(useful), |threads| threads.clamp(1, 64));
    let most_units = (SCRATCH_BYTES / block_bytes).min(total.div_ceil(block_bytes as u64) as usize).max(1);
    Way { mode, block_bytes, depth: options.depth.unwrap_or(way.depth).clamp(1, most_units), threads }
}

/// Whether the system grants this process io_uring. Remembered without a lock, which a forked child
/// could find held for ever.
fn has_ring() -> bool {
    const UNKNOWN: u8 = 0;
    const GRANTED: u8 = 1;
    const REFUSED: u8 = 2;
    static ANSWER: AtomicU8 = AtomicU8::new(UNKNOWN);
    if ANSWER.load(Ordering::Relaxed) == UNKNOWN {
        let answer = if Ring::new(1).is_ok() { GRANTED } else { REFUSED };
        ANSWER.store(answer, Ordering::Relaxed);
    }
    ANSWER.load(Ordering::Relaxed) == GRANTED
}

/// What the workers of a job share.
struct Work<'a> {
    plan: &'a Plan,
    mode: Option<Mode>,
    way: Way,
    spans: &'a [Vec<Range<u64>>],
    stripes: Vec<Stripe>,
    next: AtomicUsize,
    files: Vec<FileState>,
    bytes_read: AtomicU64,
    no_ring: AtomicBool,
    shared: &'a Shared<Statistics>,
}

/// A file is open from its first stripe to its last.
#[derive(Default)]
struct FileState {
    source: Mutex<Option<Arc<Source>>>,
    stripes_left: AtomicUsize,
    mode: Mutex<Option<Mode>>,
}

impl<'a> Work<'a> {
    fn new(
        plan: &'a Plan,
        mode: Option<Mode>,
        spans: &'a [Vec<Range<u64>>],
        way: Way,
        total: u64,
        shared: &'a Shared<Statistics>,
    ) -> Self {
        let share = total / (way.threads as u64 * STRIPES_PER_WORKER);
        let stripe_bytes = share.clamp(STRIPE_LEAST_BYTES, STRIPE_MOST_BYTES);
        let stripes: Vec<Stripe> = spans
            .iter()
            .enumerate()
            .flat_map(|(file, spans)| stripes_of(file, spans, stripe_bytes))
            .collect();
        let files: Vec<FileState> = spans.iter().map(|_| FileState::default()).collect();
        for stripe in &stripes {
            files[stripe.file].stripes_left.fetch_add(1, Ordering::Relaxed);
        }
        Self {
            plan,
            mode,
            way,
            spans,
            stripes,
            next: AtomicUsize::new(0),
            files,
            bytes_read: AtomicU64::new(0),
            no_ring: AtomicBool::new(false),
            shared,
        }
    }

    /// Runs one worker until there is nothing left or the job has failed.
    ///
    /// # Safety
    /// As for [`start`].
    unsafe fn run(&self) {
        let mut worker = Worker { work: self, reader: None, flight: None };
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

    fn open(&self, file: usize) -> Result<Arc<Source>> {
        let mut source = self.files[file].source.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(source) = source.as_ref() {
            return Ok(Arc::clone(source));
        }
        let opened = Arc::new(Source::open(&Wanted {
            plan: &self.plan.files[file],
            spans: &self.spans[file],
            mode: self.mode,
            cold_mode: self.way.mode,
        })?);
        *source = Some(Arc::clone(&opened));
        Ok(opened)
    }

    /// Counts a stripe as taken care of; the last one closes the file.
    fn close(&self, file: usize) {
        let state = &self.files[file];
        if state.stripes_left.fetch_sub(1, Ordering::AcqRel) == 1 {
            let source = state.source.lock().unwrap_or_else(PoisonError::into_inner).take();
            let mode = source.map(|source| self.effective_mode(&source));
            *state.mode.lock().unwrap_or_else(PoisonError::into_inner) = mode;
        }
    }

    fn effective_mode(&self, source: &Source) -> Mode {
        match source.mode() {
            Mode::DirectRing if self.no_ring.load(Ordering::Relaxed) => Mode::DirectThreads,
            mode => mode,
        }
    }

    fn statistics(&self, bytes_needed: u64) -> Statistics {
        let mode = |state: &FileState| *state.mode.lock().unwrap_or_else(PoisonError::into_inner);
        Statistics {
            bytes_read: self.bytes_read.load(Ordering::Relaxed),
            bytes_needed,
            modes: self.files.iter().map(mode).collect(),
        }
    }
}

/// One thread of a job.
struct Worker<'a> {
    work: &'a Work<'a>,
    reader: Option<Reader>,
    flight: Option<Flight<'a>>,
}

impl<'a> Worker<'a> {
    /// # Safety
    /// As for [`start`].
    unsafe fn run(&mut self) -> Result<()> {
        while let Some(stripe) = self.work.next_stripe() {
            let source = self.work.open(stripe.file)?;
            // SAFETY: as the caller promises.
            unsafe { self.read_stripe(stripe, &source) }?;
            self.work.close(stripe.file);
        }
        if let Some(flight) = &mut self.flight {
            self.work.shared.add_done(flight.land()?);
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
            Mode::Buffered => self.work.way.block_bytes.min(BUFFERED_UNIT_BYTES),
            _ => self.work.way.block_bytes,
        };
        let units = stripe.spans.iter().flat_map(|span| portions(span.clone(), unit_bytes as u64));
        for unit in units {
            if self.work.shared.should_stop() {
                break;
            }
            self.work.bytes_read.fetch_add(unit.end - unit.start, Ordering::Relaxed);
            // SAFETY: as the caller promises.
            let delivered = unsafe { self.read_unit(plan, source, stream.as_ref(), unit) }?;
            self.work.shared.add_done(delivered);
        }
        Ok(())
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
            none => none.insert(Reader::new(self.work.way.block_bytes)?),
        };
        // SAFETY: as the caller promises.
        unsafe { reader.read(plan, source, stream, unit) }
    }

    /// This worker's ring, unless the system refuses one.
    fn flight(&mut self) -> Result<Option<&mut Flight<'a>>> {
        if self.flight.is_none() && !self.work.no_ring.load(Ordering::Relaxed) {
            let depth = self.work.way.depth.div_ceil(self.work.way.threads);
            self.flight = Flight::new(depth, self.work.way.block_bytes)?;
            self.work.no_ring.fetch_or(self.flight.is_none(), Ordering::Relaxed);
        }
        Ok(self.flight.as_mut())
    }
}
