//! Reads of a batch: ranged requests, many at a time, straight to their destinations.
//!
//! Spans that lie near each other are one request, long ones several. Threads of the job wait for the requests, copy
//! what arrives to where it belongs, and conclude units; the threads of the runtime do the rest. A request that is
//! dropped touches no memory, because only the threads of the job copy.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::stream::FuturesUnordered;
use futures_util::{StreamExt, TryStreamExt};
use object_store::{GetOptions, GetResult, ObjectMeta, ObjectStoreExt};
use tokio::time::{Instant, timeout_at};
use waystation_format::{Error, Kind, Result};
use waystation_io::first_touch;
use waystation_io::job::in_parallel;
use waystation_io::read::device::Scratch;
use waystation_io::read::gpu_direct::GpuDirect;
use waystation_io::read::layout::{Layout, Rules};
use waystation_io::read::plan::{FilePlan, ReadFile};
use waystation_io::read::spans::portions;
use waystation_io::read::{Batch, Statistics, check_length, conclude, truncated};

use crate::client::Client;
use crate::errors::{late, told};
use crate::{ObjectStorage, process};

/// Requests in flight.
const DEPTH: usize = 16;
/// Bytes of a request.
const UNIT_BYTES: usize = 8 << 20;
/// Bytes of an answer that come within the deadline.
const STEP_BYTES: u64 = 1 << 20;
/// Reading so many bytes that nobody needs takes no longer than another request.
const GAP_BYTES: u64 = 1 << 20;
/// More threads copy and verify no faster.
const MOST_THREADS: usize = 4;
/// How often a job looks whether it is to stop while it waits.
pub const TICK: Duration = Duration::from_millis(20);
/// Nothing has to be aligned, and a part costs no more than a call of `memcpy`.
const RULES: Rules = Rules {
    offset_alignment: 1,
    memory_alignment: 1,
    least_bytes: 4096,
    most_parts: NonZeroUsize::new(4096).unwrap(),
};

/// # Safety
/// As for [`waystation_io::storage::Storage::read`].
pub unsafe fn read(storage: &ObjectStorage, batch: &Batch<'_>) -> Result<Statistics> {
    let unit_bytes = batch.options.block_bytes.unwrap_or(UNIT_BYTES);
    let mut spans = batch.spans();
    spans.iter_mut().for_each(join_near);
    let wanted = batch.options.depth.unwrap_or(DEPTH);
    let stripes = batch.stripes(&spans, wanted);
    let units: Vec<(usize, Range<u64>)> = stripes
        .all()
        .iter()
        .flat_map(|stripe| stripe.spans.iter().map(|span| (stripe.file, span.clone())))
        .flat_map(|(file, span)| portions(span, unit_bytes as u64).map(move |unit| (file, unit)))
        .collect();
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
        bytes_read: AtomicU64::new(0),
        first_touch_ns: AtomicU64::new(0),
    };
    let next_worker = AtomicUsize::new(0);
    let runtime = process::runtime()?;
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
    bytes_read: AtomicU64,
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
        self.batch.wait_for_store(unit.end - unit.start);
        let in_place = |error: Error| match error.kind() {
            Kind::Unavailable => error.with("offset", unit.start.to_string()),
            _ => error,
        };
        self.fill(file, &layout).await.map_err(in_place)?;
        self.bytes_read.fetch_add(unit.end - unit.start, Ordering::Relaxed);
        // SAFETY: every part is filled; `read`'s caller vouches for destinations, and nobody else has the slot.
        let nbytes = unsafe { conclude(plan, &layout, self.batch.delivery) }?.land()?;
        self.batch.add_done(nbytes);
        Ok(slot)
    }

    /// Fills the parts of a unit as the bytes arrive. Each `STEP_BYTES` of the answer have the deadline of the store:
    /// what comes slowly comes.
    async fn fill(&self, file: usize, layout: &Layout) -> Result<()> {
        let plan = &self.batch.plan.files[file];
        let path = &plan.file.path;
        let failed = |error: object_store::Error| told(&error, "read the object", path);
        let unit = layout.unit();
        let deadline = self.storage.settings.deadline;
        let too_late = |_| late(deadline, "read the object", path);
        let mut step_ends = Instant::now() + deadline;
        let found = timeout_at(step_ends, self.get(plan, unit.clone())).await.map_err(too_late)??;
        self.check_version(file, &found.meta)?;
        check_length(path, found.meta.size, plan.file.file_bytes, self.batch.options.may_be_longer)?;
        layout.prepare();
        let (mut position, mut step) = (unit.start, unit.start + STEP_BYTES);
        let mut chunks = found.into_stream();
        while let Some(bytes) =
            timeout_at(step_ends, chunks.try_next()).await.map_err(too_late)?.map_err(failed)?
        {
            if bytes.len() as u64 > unit.end - position {
                break; // more than was asked for
            }
            // SAFETY: nobody else has the memory of the parts: `read`'s caller vouches for destinations.
            unsafe { copy_to_parts(layout, position, &bytes) };
            position += bytes.len() as u64;
            if position >= step {
                (step, step_ends) = (position + STEP_BYTES, Instant::now() + deadline);
            }
        }
        if position == unit.end {
            return Ok(());
        }
        let message = format!("the store's answer ended after {} bytes", position - unit.start);
        Err(Error::new(Kind::Unavailable, message).with("path", path.display().to_string()))
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
