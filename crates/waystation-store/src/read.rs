//! Reads of a batch: ranged requests, many at a time, straight to their destinations.
//!
//! Spans that lie near each other are one request, long ones several. Threads of the job wait for the requests, copy
//! what arrives to where it belongs, and conclude units; the threads of the runtime do the rest. A request that is
//! dropped touches no memory, because only the threads of the job copy. So a request that takes far longer than others
//! (`pace`) gets a second one beside it, and the one that ends later is dropped.
//!
//! With a cache units do not go beyond its blocks. A unit whose block is in the cache comes from there; else whole blocks
//! are fetched, and kept. What no cache takes is read as if there was none.

use std::cell::{Cell, RefCell};
use std::num::NonZeroUsize;
use std::ops::Range;
use std::path::Path;
use std::pin::pin;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{Either, select};
use futures_util::stream::{FuturesUnordered, iter};
use futures_util::{StreamExt, TryStreamExt};
use object_store::{GetOptions, GetResult, ObjectMeta, ObjectStoreExt};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{Instant, sleep, timeout_at};
use waystation_format::{Error, Kind, Result};
use waystation_io::first_touch;
use waystation_io::job::in_parallel;
use waystation_io::read::device::Scratch;
use waystation_io::read::gpu_direct::GpuDirect;
use waystation_io::read::layout::{Layout, Rules};
use waystation_io::read::plan::{FilePlan, ReadFile};
use waystation_io::read::spans::portions;
use waystation_io::read::{Batch, Statistics, Stripes, check_length, conclude, truncated};

use crate::cache::{CACHED_BYTES, Claim, Entry, Memory};
use crate::client::Client;
use crate::errors::{late, told};
use crate::pace::Pace;
use crate::{ObjectStorage, STEP_BYTES, process};

/// Requests in flight.
const DEPTH: usize = 16;
/// Bytes of a request.
const UNIT_BYTES: usize = 8 << 20;
/// Reading so many bytes that nobody needs takes no longer than another request.
const GAP_BYTES: u64 = 1 << 20;
/// More threads copy and verify no faster.
const MOST_THREADS: usize = 4;
/// How often a job looks whether it is to stop while it waits.
pub const TICK: Duration = Duration::from_millis(20);
/// How long a job waits for another process that fetches the same block, before it fetches that itself.
const PATIENCE: Duration = Duration::from_secs(15);
/// Nothing has to be aligned, and a part costs no more than a call of `memcpy`.
const RULES: Rules = Rules {
    offset_alignment: 1,
    memory_alignment: 1,
    least_bytes: 4096,
    most_parts: NonZeroUsize::new(4096).unwrap(),
};
const ACTION: &str = "read the object";

/// Takes bytes of an object that have arrived, with their offset there.
type Sink<'a> = &'a dyn Fn(u64, &[u8]);

/// # Safety
/// As for [`waystation_io::storage::Storage::read`].
pub unsafe fn read(storage: &ObjectStorage, batch: &Batch<'_>) -> Result<Statistics> {
    let unit_bytes = batch.options.block_bytes.unwrap_or(UNIT_BYTES);
    let mut spans = batch.spans();
    spans.iter_mut().for_each(join_near);
    let wanted = batch.options.depth.unwrap_or(DEPTH);
    let stripes = batch.stripes(&spans, wanted);
    let units = match storage.cache {
        None => units_of(&stripes, unit_bytes as u64),
        Some(_) => units_of_blocks(&spans, unit_bytes as u64),
    };
    let depth = wanted.min(units.len()).max(1);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = batch.options.threads.unwrap_or(cores.min(MOST_THREADS)).clamp(1, depth);
    let reader = Reader {
        storage,
        client: storage.client()?,
        batch,
        units,
        next_unit: AtomicUsize::new(0),
        scratch: Scratch::new(depth, unit_bytes, batch.delivery.devices)?,
        versions: batch.plan.files.iter().map(|plan| known_version(&plan.file)).collect(),
        pace: Pace::default(),
        bytes_read: AtomicU64::new(0),
        cached_bytes: AtomicU64::new(0),
        cache_problem: OnceLock::new(),
        first_touch_ns: AtomicU64::new(0),
    };
    let next_worker = AtomicUsize::new(0);
    let runtime = process::runtime()?;
    if let Some(cache) = &storage.cache {
        cache.prepare();
        runtime.block_on(async {
            tokio::select! {
                () = reader.ask_versions(depth) => {},
                () = reader.stopped() => {},
            }
        });
    }
    in_parallel(threads, "waystation-read", &|| {
        let worker = next_worker.fetch_add(1, Ordering::Relaxed);
        let slots = depth * worker / threads..depth * (worker + 1) / threads;
        let outcome = runtime.block_on(reader.work(slots));
        reader.first_touch_ns.fetch_add(first_touch::take_cost().as_nanos() as u64, Ordering::Relaxed);
        outcome.map_err(|error| batch.fail(error)).or(Ok(()))
    })?;
    Ok(Statistics {
        bytes_read: reader.bytes_read.into_inner(),
        bytes_needed: batch.plan.needed_bytes(),
        modes: vec![None; batch.plan.files.len()],
        first_touch: Duration::from_nanos(reader.first_touch_ns.into_inner()),
        gpu_direct_bytes: 0,
        gpu_direct_reason: match batch.options.gpu_direct {
            GpuDirect::Unwanted => None,
            _ => Some("what is in an object store comes through the network".to_owned()),
        },
        cached_bytes: reader.cached_bytes.into_inner(),
        cache_problem: reader.cache_problem.into_inner(),
        repeated_requests: reader.pace.repeated() as u64,
    })
}

/// The tag that every answer must have, where it is known.
fn known_version(file: &ReadFile) -> OnceLock<Option<String>> {
    file.version.clone().map_or_else(OnceLock::new, |tag| OnceLock::from(Some(tag)))
}

/// Joins spans of one file between which little lies.
fn join_near(spans: &mut Vec<Range<u64>>) {
    spans.dedup_by(|next, span| {
        let is_near = next.start <= span.end.saturating_add(GAP_BYTES);
        if is_near {
            span.end = span.end.max(next.end);
        }
        is_near
    });
}

/// The units of stripes: whatever spans they have, cut into so many bytes.
fn units_of(stripes: &Stripes, unit_bytes: u64) -> Vec<(usize, Range<u64>)> {
    let spans =
        stripes.all().iter().flat_map(|stripe| stripe.spans.iter().map(|span| (stripe.file, span.clone())));
    spans.flat_map(|(file, span)| portions(span, unit_bytes).map(move |unit| (file, unit))).collect()
}

/// The units of spans, none of which goes beyond a block of the cache. Processes that load the same at the same time
/// begin at different ones, and so fetch for each other.
fn units_of_blocks(spans: &[Vec<Range<u64>>], unit_bytes: u64) -> Vec<(usize, Range<u64>)> {
    let mut units = Vec::new();
    for (file, span) in
        spans.iter().enumerate().flat_map(|(file, spans)| spans.iter().map(move |span| (file, span)))
    {
        for block in span.start / CACHED_BYTES..span.end.div_ceil(CACHED_BYTES) {
            let start = span.start.max(block * CACHED_BYTES);
            let end = span.end.min((block + 1) * CACHED_BYTES);
            units.extend(portions(start..end, unit_bytes).map(|unit| (file, unit)));
        }
    }
    let turn = (u64::from(std::process::id().wrapping_mul(0x9e37_79b1)) * units.len() as u64) >> 32;
    units.rotate_left(turn as usize);
    units
}

/// What the workers of a job share.
struct Reader<'a> {
    storage: &'a ObjectStorage,
    client: &'a Client,
    batch: &'a Batch<'a>,
    units: Vec<(usize, Range<u64>)>,
    next_unit: AtomicUsize,
    scratch: Scratch,
    /// The tag of each file, as the plan has it, or else the first answer.
    versions: Vec<OnceLock<Option<String>>>,
    pace: Pace,
    bytes_read: AtomicU64,
    cached_bytes: AtomicU64,
    cache_problem: OnceLock<String>,
    first_touch_ns: AtomicU64,
}

impl Reader<'_> {
    /// Keeps a request in flight for each slot until no unit is left, or the job is to stop.
    async fn work(&self, slots: Range<usize>) -> Result<()> {
        let mut free: Vec<usize> = slots.collect();
        let mut in_flight = FuturesUnordered::new();
        let mut tick = tokio::time::interval(TICK);
        loop {
            while !self.batch.should_stop()
                && let Some(&slot) = free.last()
                && let Some((file, unit)) = self.units.get(self.next_unit.fetch_add(1, Ordering::Relaxed))
            {
                free.pop();
                in_flight.push(self.fetch(*file, unit.clone(), slot));
            }
            tokio::select! {
                fetched = in_flight.next() => match fetched {
                    Some(outcome) => free.push(outcome?),
                    None => return Ok(()),
                },
                _ = tick.tick() => if self.batch.should_stop() {
                    return Ok(());
                },
            }
        }
    }

    /// Reads a unit, verifies and delivers it; returns its slot.
    async fn fetch(&self, file: usize, unit: Range<u64>, slot: usize) -> Result<usize> {
        let plan = &self.batch.plan.files[file];
        let mut layout = Layout::default();
        layout.divide(plan, unit.clone(), &RULES, NonZeroUsize::MAX, self.scratch.address(slot));
        let in_place = |error: Error| match error.kind() {
            Kind::Unavailable => error.with("offset", unit.start.to_string()),
            _ => error,
        };
        let is_prepared = Cell::new(false);
        let to_parts = |position: u64, bytes: &[u8]| {
            if !is_prepared.replace(true) {
                layout.prepare();
            }
            // SAFETY: nobody else has the memory of the parts: `read`'s caller vouches for destinations.
            unsafe { copy_to_parts(&layout, position, bytes) };
        };
        let kept = match self.through_cache(file, &unit, &to_parts).await.map_err(in_place)? {
            Some(kept) => kept,
            None => {
                self.bring(file, unit.clone(), &to_parts).await.map_err(in_place)?;
                None
            }
        };
        // SAFETY: every part is filled; `read`'s caller vouches for destinations, and nobody else has the slot.
        let nbytes = unsafe { conclude(plan, &layout, self.batch.delivery) }?.land()?;
        self.batch.add_done(nbytes);
        if let Some(kept) = kept
            && let Ok(outcome) = kept.await
        {
            self.tell(outcome.err());
        }
        Ok(slot)
    }

    // ---- the cache ---------------------------------------------------------------------------------

    /// Asks which versions there are, of files of which that is not known: what is cached is that of a version. Where
    /// this fails, the request for the data says why.
    async fn ask_versions(&self, depth: usize) {
        let mut files: Vec<usize> = self.units.iter().map(|(file, _)| *file).collect();
        files.sort_unstable();
        files.dedup();
        let ask = |file: usize| async move {
            let plan = &self.batch.plan.files[file].file;
            if self.versions[file].get().is_none()
                && let Ok(key) = self.storage.key(&plan.path)
                && let Ok(Ok(found)) =
                    tokio::time::timeout(self.storage.settings.deadline, self.client.objects.head(&key)).await
                && check_length(&plan.path, found.size, plan.file_bytes, self.batch.options.may_be_longer)
                    .is_ok()
            {
                self.versions[file].get_or_init(|| found.e_tag);
            }
        };
        iter(files).map(ask).buffer_unordered(depth).collect::<Vec<()>>().await;
    }

    async fn stopped(&self) {
        while !self.batch.should_stop() {
            sleep(TICK).await;
        }
    }

    /// The block of the cache that a unit is in, if the cache can have it: versions are told apart by their tags.
    fn entry(&self, file: usize, unit: &Range<u64>) -> Option<Entry> {
        let plan = &self.batch.plan.files[file].file;
        let tag = self.versions[file].get()?.as_deref().filter(|tag| !tag.starts_with("W/"))?;
        self.storage.cache.as_ref()?.entry(&self.storage.name_of(&plan.path), tag, plan.file_bytes, unit)
    }

    /// Reads a unit from the cache, or fetches its block, which is kept there. `None` where the cache does not take it;
    /// else what is still being written to the cache.
    async fn through_cache(
        &self,
        file: usize,
        unit: &Range<u64>,
        sink: Sink<'_>,
    ) -> Result<Option<Option<Keeping>>> {
        let Some(entry) = self.entry(file, unit) else { return Ok(None) };
        let until = Instant::now() + PATIENCE;
        while !self.batch.should_stop() {
            if self.kept_already(&entry, unit, sink).await {
                return Ok(Some(None));
            }
            match entry.claim() {
                Claim::Impossible(problem) => {
                    self.tell(problem);
                    return Ok(None);
                }
                Claim::Another if Instant::now() < until => sleep(TICK).await,
                Claim::Another => return Ok(None),
                Claim::Own(claimed) => {
                    if self.kept_already(&entry, unit, sink).await {
                        return Ok(Some(None)); // written by the last who had claimed it
                    }
                    let block = entry.block.clone();
                    let Ok(memory) = Memory::new((block.end - block.start) as usize) else { return Ok(None) };
                    let memory = RefCell::new(memory);
                    let to_memory = |position: u64, bytes: &[u8]| {
                        let begin = (position - block.start) as usize;
                        memory.borrow_mut().bytes()[begin..begin + bytes.len()].copy_from_slice(bytes);
                    };
                    self.bring(file, block.clone(), &to_memory).await?;
                    let content = Bytes::from_owner(memory.into_inner());
                    sink(
                        unit.start,
                        &content[(unit.start - block.start) as usize..(unit.end - block.start) as usize],
                    );
                    return Ok(Some(Some(spawn_blocking(move || claimed.publish(&content)))));
                }
            }
        }
        Ok(None)
    }

    /// Keeps the first problem of the cache.
    fn tell(&self, problem: Option<String>) {
        if let Some(problem) = problem {
            self.cache_problem.get_or_init(|| problem);
        }
    }

    async fn kept_already(&self, entry: &Entry, unit: &Range<u64>, sink: Sink<'_>) -> bool {
        let (entry, range) = (entry.clone(), unit.clone());
        let Ok(Some(bytes)) = spawn_blocking(move || entry.read(&range)).await else { return false };
        sink(unit.start, &bytes);
        self.cached_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        true
    }

    // ---- requests ----------------------------------------------------------------------------------

    /// Brings a range of a file, by a second request as well where the first one takes far longer than others.
    async fn bring(&self, file: usize, range: Range<u64>, sink: Sink<'_>) -> Result<()> {
        let nbytes = range.end - range.start;
        self.batch.wait_for_store(nbytes);
        let position = Cell::new(range.start);
        let mut first = Box::pin(self.request(file, range.clone(), &position, sink));
        let outcome = match self.pace.in_usual_time(&mut first, nbytes).await {
            Some(outcome) => outcome,
            None => {
                let (from, rest) = (position.get(), RefCell::new(Vec::new()));
                let keep = |_: u64, bytes: &[u8]| rest.borrow_mut().extend_from_slice(bytes);
                let reached = Cell::new(from);
                let second = pin!(self.request(file, from..range.end, &reached, &keep));
                let is_first = match select(first, second).await {
                    Either::Left((Ok(()), _)) => true,
                    Either::Left((Err(error), second)) => second.await.map(|()| false).map_err(|_| error)?,
                    Either::Right((Ok(()), _)) => false, // the first one is dropped, and copies nothing more
                    Either::Right((Err(_), first)) => first.await.map(|()| true)?,
                };
                let rest = rest.take();
                if !is_first {
                    sink(from, &rest);
                }
                self.bytes_read.fetch_add(rest.len() as u64, Ordering::Relaxed);
                Ok(())
            }
        };
        self.bytes_read.fetch_add(nbytes, Ordering::Relaxed);
        outcome
    }

    /// Brings a range of a file by one request; `position` tells how far it is.
    async fn request(
        &self,
        file: usize,
        range: Range<u64>,
        position: &Cell<u64>,
        sink: Sink<'_>,
    ) -> Result<()> {
        let plan = &self.batch.plan.files[file];
        let path = &plan.file.path;
        let deadline = self.storage.settings.deadline;
        let answer = timeout_at(Instant::now() + deadline, self.get(plan, range.clone())).await;
        let found = answer.map_err(|_| late(deadline, ACTION, path))??;
        self.check_version(file, &found.meta)?;
        check_length(path, found.meta.size, plan.file.file_bytes, self.batch.options.may_be_longer)?;
        let end = pour(self.storage, path, found, range.end - range.start, |done, bytes| {
            sink(range.start + done, bytes);
            position.set(range.start + done + bytes.len() as u64);
        });
        match end.await? {
            done if done == range.end - range.start => Ok(()),
            done => {
                let message = format!("the store's answer ended after {done} bytes");
                Err(Error::new(Kind::Unavailable, message).with("path", path.display().to_string()))
            }
        }
    }

    async fn get(&self, plan: &FilePlan, unit: Range<u64>) -> Result<GetResult> {
        let path = &plan.file.path;
        let key = self.storage.key(path)?;
        let options = GetOptions { range: Some(unit.clone().into()), ..GetOptions::default() };
        let error = match self.client.objects.get_opts(&key, options).await {
            Ok(found) => return Ok(found),
            Err(error) => told(&error, "read the object", path),
        };
        // A range that begins after the end is refused by a status of each store's own.
        if matches!(error.kind(), Kind::InvalidInput | Kind::Unavailable)
            && let Ok(found) = self.client.objects.head(&key).await
            && found.size < plan.file.file_bytes
        {
            return Err(truncated(path, found.size, plan.file.file_bytes));
        }
        Err(error)
    }

    /// Refuses to mix two versions of an object.
    fn check_version(&self, file: usize, found: &ObjectMeta) -> Result<()> {
        if *self.versions[file].get_or_init(|| found.e_tag.clone()) == found.e_tag {
            return Ok(());
        }
        let message = "the object was replaced while it was read; read it again";
        let path = &self.batch.plan.files[file].file.path;
        Err(Error::new(Kind::Conflict, message).with("path", path.display().to_string()))
    }
}

/// What writes a block to the cache.
type Keeping = JoinHandle<std::result::Result<(), String>>;

/// Gives the bytes of an answer to a sink, as they come, with the number of those before; returns how many came. It ends
/// where more come than were asked for. Each `STEP_BYTES` have the deadline of the store: what comes slowly comes.
pub async fn pour(
    storage: &ObjectStorage,
    path: &Path,
    found: GetResult,
    most: u64,
    mut sink: impl FnMut(u64, &[u8]),
) -> Result<u64> {
    let deadline = storage.settings.deadline;
    let (mut done, mut step) = (0, STEP_BYTES as u64);
    let mut step_ends = Instant::now() + deadline;
    let mut chunks = found.into_stream();
    loop {
        let next =
            timeout_at(step_ends, chunks.try_next()).await.map_err(|_| late(deadline, ACTION, path))?;
        let Some(bytes) = next.map_err(|error| told(&error, ACTION, path))? else { return Ok(done) };
        if bytes.len() as u64 > most - done {
            return Ok(done);
        }
        sink(done, &bytes);
        done += bytes.len() as u64;
        if done >= step {
            (step, step_ends) = (done + STEP_BYTES as u64, Instant::now() + deadline);
        }
    }
}

/// Copies bytes of a unit to the parts that they belong to.
///
/// # Safety
/// The memory of the parts must be writable and used by nobody else.
unsafe fn copy_to_parts(layout: &Layout, position: u64, bytes: &[u8]) {
    let end = position + bytes.len() as u64;
    let parts = layout.parts();
    let first = parts.partition_point(|part| part.begin + part.nbytes as u64 <= position);
    for part in parts[first..].iter().take_while(|part| part.begin < end) {
        let from = position.max(part.begin);
        let to = end.min(part.begin + part.nbytes as u64);
        let taken = &bytes[(from - position) as usize..(to - position) as usize];
        let target = part.address.wrapping_add((from - part.begin) as usize);
        // SAFETY: as the caller promises; the range lies in the part.
        unsafe { std::ptr::copy_nonoverlapping(taken.as_ptr(), target, taken.len()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_joined_where_little_lies_between() {
        let far = 3 * GAP_BYTES;
        let mut spans = vec![0..10, 10 + GAP_BYTES..20 + GAP_BYTES, far..far + 1, 2 * far..2 * far + 5];
        join_near(&mut spans);
        assert_eq!(spans, [0..20 + GAP_BYTES, far..far + 1, 2 * far..2 * far + 5]);
    }
}
