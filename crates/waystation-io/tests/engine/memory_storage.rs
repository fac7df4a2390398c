//! A storage in memory that behaves like an object store: an answer comes later, out of order, and with fewer bytes
//! than were asked for; a file appears whole, once the last of its parts was uploaded and the upload is completed.
//! It exists to prove the seam, and fails where a test says.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use waystation_io::job::in_parallel;
use waystation_io::mode::Mode;
use waystation_io::read::device::Scratch;
use waystation_io::read::layout::{Layout, Rules};
use waystation_io::read::plan::FilePlan;
use waystation_io::read::spans::portions;
use waystation_io::read::{self, Batch, check_length, conclude};
use waystation_io::storage::{NewFiles, Storage, StoredFile};
use waystation_io::write::{self, Blocks};
use waystation_io::{Error, Kind, Result};

/// Requests in flight.
const DEPTH: usize = 4;
/// Bytes of a request, and the most of an answer.
const UNIT_BYTES: usize = 512 << 10;
const ANSWER_BYTES: usize = 200_000;
/// Bytes of a part of an upload.
const PART_BYTES: usize = 512 << 10;
const UPLOADING_THREADS: usize = 3;
/// Nothing has to be aligned.
const RULES: Rules = Rules {
    offset_alignment: 1,
    memory_alignment: 1,
    least_bytes: 4096,
    most_parts: NonZeroUsize::new(64).unwrap(),
};

/// Parts of an upload by their offsets.
type Parts = BTreeMap<u64, Vec<u8>>;

#[derive(Debug, Default)]
struct State {
    objects: BTreeMap<PathBuf, Arc<Vec<u8>>>,
    /// Uploads that are neither completed nor aborted.
    uploads: BTreeMap<usize, (PathBuf, Parts)>,
    /// Where a read, an upload of a part, or the completion of an upload fails.
    failing_read: Option<(PathBuf, u64)>,
    failing_part: Option<(PathBuf, u64)>,
    failing_completion: Option<PathBuf>,
    /// Whether answers wait, and whether one does.
    is_gated: bool,
    is_waiting: bool,
}

/// The store.
#[derive(Debug, Default)]
pub struct MemoryStorage {
    state: Mutex<State>,
    changed: Condvar,
    next_upload: AtomicUsize,
}

impl MemoryStorage {
    pub fn put(&self, path: &Path, content: &[u8]) {
        self.state.lock().unwrap().objects.insert(path.to_owned(), Arc::new(content.to_vec()));
    }

    pub fn get(&self, path: &Path) -> Option<Vec<u8>> {
        self.state.lock().unwrap().objects.get(path).map(|content| content.to_vec())
    }

    /// Every object, and every upload that was left.
    pub fn names(&self) -> Vec<PathBuf> {
        let state = self.state.lock().unwrap();
        let uploads = state.uploads.values().map(|(path, _)| path.with_extension("upload"));
        state.objects.keys().cloned().chain(uploads).collect()
    }

    pub fn fail_read(&self, path: &Path, offset: u64) {
        self.state.lock().unwrap().failing_read = Some((path.to_owned(), offset));
    }

    pub fn fail_part(&self, path: &Path, offset: u64) {
        self.state.lock().unwrap().failing_part = Some((path.to_owned(), offset));
    }

    pub fn fail_completion(&self, path: &Path) {
        self.state.lock().unwrap().failing_completion = Some(path.to_owned());
    }

    /// Has answers wait until [`MemoryStorage::open_gate`].
    pub fn close_gate(&self) {
        self.state.lock().unwrap().is_gated = true;
    }

    pub fn open_gate(&self) {
        self.state.lock().unwrap().is_gated = false;
        self.changed.notify_all();
    }

    /// Waits until an answer waits.
    pub fn await_waiting(&self) {
        drop(self.changed.wait_while(self.state.lock().unwrap(), |state| !state.is_waiting).unwrap());
    }

    fn pass_gate(&self) {
        let mut state = self.state.lock().unwrap();
        state.is_waiting = state.is_gated;
        self.changed.notify_all();
        drop(self.changed.wait_while(state, |state| state.is_gated).unwrap());
    }

    fn object(&self, path: &Path) -> Result<Arc<Vec<u8>>> {
        let found = self.state.lock().unwrap().objects.get(path).cloned();
        found.ok_or_else(|| told(Kind::NotFound, "there is no such object", path))
    }

    /// Some bytes of a range of an object, at least one.
    fn get_range(&self, path: &Path, range: Range<u64>) -> Result<Vec<u8>> {
        let content = self.object(path)?;
        let fails = self
            .state
            .lock()
            .unwrap()
            .failing_read
            .as_ref()
            .is_some_and(|(failing, offset)| failing == path && range.contains(offset));
        if fails || range.end > content.len() as u64 {
            return Err(
                told(Kind::Unavailable, "the store failed", path).with("offset", range.start.to_string())
            );
        }
        let end = range.end.min(range.start + ANSWER_BYTES as u64);
        Ok(content[range.start as usize..end as usize].to_vec())
    }
}

fn told(kind: Kind, message: &'static str, path: &Path) -> Error {
    Error::new(kind, message).with("path", path.display().to_string())
}

// ---- reads -------------------------------------------------------------------------------------

/// What is asked of the store: the rest of a unit.
struct Request {
    file: usize,
    slot: usize,
    layout: Layout,
    filled: u64,
}

impl Request {
    /// Puts what the store has answered where it belongs.
    ///
    /// # Safety
    /// The memory of the parts must be writable and used by nobody else.
    unsafe fn fill(&mut self, bytes: &[u8]) {
        let begin = self.layout.unit().start + self.filled;
        for part in self.layout.parts() {
            let from = begin.max(part.begin);
            let to = (begin + bytes.len() as u64).min(part.begin + part.nbytes as u64);
            if from < to {
                let taken = &bytes[(from - begin) as usize..(to - begin) as usize];
                let target = part.address.wrapping_add((from - part.begin) as usize);
                // SAFETY: as the caller promises; the range lies in the part.
                unsafe { std::ptr::copy_nonoverlapping(taken.as_ptr(), target, taken.len()) };
            }
        }
        self.filled += bytes.len() as u64;
    }

    fn rest(&self) -> Range<u64> {
        self.layout.unit().start + self.filled..self.layout.unit().end
    }
}

impl MemoryStorage {
    /// Answers requests, the last first, until nobody asks any more.
    fn serve(
        &self,
        files: &[FilePlan],
        asked: &Receiver<Request>,
        answers: &Sender<(Request, Result<Vec<u8>>)>,
    ) {
        let mut pending = Vec::new();
        loop {
            if pending.is_empty() {
                let Ok(request) = asked.recv() else { return };
                pending.push(request);
            }
            pending.extend(asked.try_iter());
            self.pass_gate();
            if let Some(request) = pending.pop() {
                let answer = self.get_range(&files[request.file].file.path, request.rest());
                drop(answers.send((request, answer)));
            }
        }
    }
}

impl Storage for MemoryStorage {
    fn open(&self, path: &Path) -> Result<Box<dyn StoredFile>> {
        Ok(Box::new(Object { content: self.object(path)?, path: path.to_owned() }))
    }

    unsafe fn read(&self, batch: &Batch<'_>) -> Result<read::Statistics> {
        let files = &batch.plan.files;
        let spans = batch.spans();
        for (plan, _) in files.iter().zip(&spans).filter(|(_, spans)| !spans.is_empty()) {
            let found = self.object(&plan.file.path)?.len() as u64;
            check_length(&plan.file.path, found, plan.file.file_bytes, batch.options.may_be_longer)?;
        }
        let stripes = batch.stripes(&spans, DEPTH);
        let mut units = stripes.all().iter().flat_map(|stripe| {
            let spans = stripe.spans.iter();
            let units = spans.flat_map(|span| portions(span.clone(), UNIT_BYTES as u64));
            units.map(|unit| (stripe.file, unit))
        });
        let scratch = Scratch::new(DEPTH, UNIT_BYTES, batch.delivery.devices)?;
        let mut free: Vec<usize> = (0..DEPTH).collect();
        let mut outcome = Ok(());
        let mut bytes_read = 0;
        std::thread::scope(|scope| {
            let (ask, asked) = channel();
            let (answer, answers) = channel();
            scope.spawn(move || self.serve(files, &asked, &answer));
            loop {
                while let Some(&slot) = free.last()
                    && outcome.is_ok()
                    && !batch.should_stop()
                    && let Some((file, unit)) = units.next()
                {
                    free.pop();
                    let mut layout = Layout::default();
                    layout.divide(&files[file], unit, &RULES, NonZeroUsize::MAX, scratch.address(slot));
                    ask.send(Request { file, slot, layout, filled: 0 }).unwrap();
                }
                if free.len() == DEPTH {
                    return;
                }
                let (mut request, answer) = answers.recv().unwrap();
                // SAFETY: `read`'s caller vouches for destinations, and the slot is the request's.
                let filled = answer.map(|bytes| unsafe { request.fill(&bytes) });
                if filled.is_ok() && !request.rest().is_empty() && outcome.is_ok() {
                    ask.send(request).unwrap();
                    continue;
                }
                free.push(request.slot);
                let plan = &files[request.file];
                let landed = filled.and_then(|()| {
                    bytes_read += request.filled;
                    // SAFETY: every part is filled; the slot is left alone until the unit has landed.
                    unsafe { conclude(plan, &request.layout, batch.delivery) }?.land()
                });
                match landed {
                    Ok(nbytes) => batch.add_done(nbytes),
                    Err(error) if outcome.is_ok() => outcome = Err(error),
                    Err(_) => {}
                }
            }
        });
        outcome?;
        Ok(read::Statistics {
            bytes_read,
            bytes_needed: batch.plan.needed_bytes(),
            modes: vec![None; files.len()],
            first_touch: Duration::ZERO,
            gpu_direct_bytes: 0,
            gpu_direct_reason: None,
            cached_bytes: 0,
            cache_problem: None,
            repeated_requests: 0,
        })
    }

    fn check_new(&self, plan: &write::Plan) -> Result<()> {
        let taken = plan.files.iter().find(|file| self.object(&file.path).is_ok());
        taken.map_or(Ok(()), |file| Err(told(Kind::Conflict, "the object exists already", &file.path)))
    }

    fn begin<'a>(&'a self, plan: &'a write::Plan, _: &'a write::Options) -> Result<Box<dyn NewFiles + 'a>> {
        let begin = |file: &write::FilePlan| {
            let id = self.next_upload.fetch_add(1, Ordering::Relaxed);
            self.state.lock().unwrap().uploads.insert(id, (file.path.clone(), Parts::new()));
            id
        };
        let ids = plan.files.iter().map(begin).collect();
        Ok(Box::new(Uploads { storage: self, plan, ids, completed: Mutex::default() }))
    }
}

struct Object {
    content: Arc<Vec<u8>>,
    path: PathBuf,
}

impl StoredFile for Object {
    fn nbytes(&self) -> u64 {
        self.content.len() as u64
    }

    fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> Result<()> {
        let range = offset as usize..offset as usize + bytes.len();
        let found = self.content.get(range).ok_or_else(|| {
            told(Kind::Corrupt, "the object ends before the range", &self.path)
                .with("offset", offset.to_string())
        })?;
        bytes.copy_from_slice(found);
        Ok(())
    }
}

// ---- writes ------------------------------------------------------------------------------------

/// An upload for each file of a job.
struct Uploads<'a> {
    storage: &'a MemoryStorage,
    plan: &'a write::Plan,
    ids: Vec<usize>,
    completed: Mutex<Vec<PathBuf>>,
}

impl Uploads<'_> {
    /// # Safety
    /// As for [`NewFiles::write`].
    unsafe fn upload(&self, blocks: &Blocks<'_>) -> Result<()> {
        while !blocks.should_stop()
            && let Some(piece) = blocks.next_piece()
        {
            let mut bytes = vec![0; piece.nbytes];
            // SAFETY: as the caller promises.
            unsafe { blocks.gather(&piece, &mut bytes, false) }?;
            self.storage.pass_gate();
            let path = &self.plan.files[piece.file].path;
            let mut state = self.storage.state.lock().unwrap();
            if state.failing_part.as_ref().is_some_and(|at| *at == (path.clone(), piece.offset)) {
                return Err(told(Kind::Unavailable, "the store failed", path)
                    .with("offset", piece.offset.to_string()));
            }
            let (_, parts) = state.uploads.get_mut(&self.ids[piece.file]).unwrap();
            assert!(parts.insert(piece.offset, bytes).is_none());
            drop(state);
            blocks.mark_written(&piece);
        }
        Ok(())
    }
}

impl NewFiles for Uploads<'_> {
    fn block_bytes(&self) -> usize {
        PART_BYTES
    }

    unsafe fn write(&self, blocks: &Blocks<'_>) -> Result<()> {
        in_parallel(UPLOADING_THREADS, "upload", &|| {
            // SAFETY: as the caller promises.
            unsafe { self.upload(blocks) }.map_err(|error| blocks.fail(error)).or(Ok(()))
        })
    }

    fn finish(&self) -> Result<()> {
        for (id, file) in self.ids.iter().zip(&self.plan.files) {
            let mut state = self.storage.state.lock().unwrap();
            if state.failing_completion.as_ref() == Some(&file.path) {
                return Err(told(Kind::Unavailable, "the store failed", &file.path));
            }
            if state.objects.contains_key(&file.path) {
                return Err(told(Kind::Conflict, "the object exists already", &file.path));
            }
            let (path, parts) = state.uploads.remove(id).unwrap();
            let content: Vec<u8> = parts.into_values().flatten().collect();
            assert_eq!(content.len() as u64, file.file_bytes);
            state.objects.insert(path.clone(), Arc::new(content));
            self.completed.lock().unwrap().push(path);
        }
        Ok(())
    }

    fn abort(&self) {
        let mut state = self.storage.state.lock().unwrap();
        for id in &self.ids {
            state.uploads.remove(id);
        }
        for path in self.completed.lock().unwrap().drain(..) {
            state.objects.remove(&path);
        }
    }

    fn mode(&self) -> Option<Mode> {
        None
    }
}
