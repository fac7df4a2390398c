//! The files of a job, each open from its first use to its last.
//!
//! Invariants: few files are open at a time, however many a plan names; whoever opens a file decides how it
//! is read, once, for all workers.

use std::cmp::Reverse;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use waystation_format::Result;

use super::source::{Opening, Source, Wanted};
use crate::job::in_parallel;
use crate::mode::Mode;
use crate::read::plan::Plan;
use crate::read::spans::span_bytes;

/// Files that tell how the rest will be read.
const MOST_EXAMINED: usize = 16;
/// Threads that open them: on a network file system each opening waits for an answer.
const OPENING_THREADS: usize = 8;

/// The files of one job.
pub struct Files<'a> {
    plan: &'a Plan,
    spans: &'a [Vec<Range<u64>>],
    /// The mode that the caller prescribes.
    prescribed: Option<Mode>,
    /// The mode that is best for files that are not cached.
    cold_mode: Mode,
    opening: Opening,
    states: Vec<State>,
}

#[derive(Default)]
struct State {
    source: Mutex<Option<Arc<Source>>>,
    stripes_left: AtomicUsize,
    mode: Mutex<Option<Mode>>,
}

impl<'a> Files<'a> {
    /// The files of a plan, of which `spans` will be read.
    pub fn new(
        plan: &'a Plan,
        spans: &'a [Vec<Range<u64>>],
        prescribed: Option<Mode>,
        cold_mode: Mode,
        opening: Opening,
    ) -> Self {
        let states = spans.iter().map(|_| State::default()).collect();
        Self { plan, spans, prescribed, cold_mode, opening, states }
    }

    /// Whether most of what is to be read comes through the page cache, as far as the largest files tell.
    /// These stay open until [`Files::close`].
    pub fn are_cached(&self) -> Result<bool> {
        if let Some(mode) = self.prescribed {
            return Ok(mode == Mode::Buffered);
        }
        let examined = self.largest();
        let next = AtomicUsize::new(0);
        in_parallel(examined.len().min(OPENING_THREADS), "waystation-read", &|| {
            while let Some(&(_, file)) = examined.get(next.fetch_add(1, Ordering::Relaxed)) {
                self.open(file)?;
            }
            Ok(())
        })?;
        let (mut cached, mut total) = (0, 0);
        for (nbytes, file) in examined {
            total += nbytes;
            if self.open(file)?.mode() == Mode::Buffered {
                cached += nbytes;
            }
        }
        Ok(cached > total / 2)
    }

    /// The files with most to read: bytes and index.
    fn largest(&self) -> Vec<(u64, usize)> {
        let mut files: Vec<(u64, usize)> = self
            .spans
            .iter()
            .enumerate()
            .map(|(file, spans)| (span_bytes(spans), file))
            .filter(|(nbytes, _)| *nbytes > 0)
            .collect();
        files.sort_unstable_by_key(|&(nbytes, file)| (Reverse(nbytes), file));
        files.truncate(MOST_EXAMINED);
        files
    }

    /// Says that a stripe of the file is to be read.
    pub fn expect_stripe(&self, file: usize) {
        self.states[file].stripes_left.fetch_add(1, Ordering::Relaxed);
    }

    /// The open file.
    pub fn open(&self, file: usize) -> Result<Arc<Source>> {
        let mut source = self.states[file].source.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(source) = source.as_ref() {
            return Ok(Arc::clone(source));
        }
        let opened = Arc::new(Source::open(&Wanted {
            plan: &self.plan.files[file],
            spans: &self.spans[file],
            mode: self.prescribed,
            cold_mode: self.cold_mode,
            opening: &self.opening,
        })?);
        *source = Some(Arc::clone(&opened));
        Ok(opened)
    }

    /// Counts a stripe as taken care of; the last one closes the file.
    pub fn close(&self, file: usize) {
        let state = &self.states[file];
        if state.stripes_left.fetch_sub(1, Ordering::AcqRel) == 1 {
            let source = state.source.lock().unwrap_or_else(PoisonError::into_inner).take();
            *state.mode.lock().unwrap_or_else(PoisonError::into_inner) = source.map(|source| source.mode());
        }
    }

    /// How each file was read; `None` where nothing was.
    pub fn modes(&self) -> impl Iterator<Item = Option<Mode>> {
        self.states.iter().map(|state| *state.mode.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
