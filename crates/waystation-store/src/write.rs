//! Writes of new objects: their names are claimed, blocks are uploaded as parts, and whole uploads are completed.
//!
//! A claim is a small object of the name, created on condition that there is none, so that of two jobs one fails
//! before it has uploaded anything, and a job never touches an object that it did not create. The upload takes the
//! place of the claim: stores complete uploads without a condition. An object of one part needs no claim, because the
//! request that puts it has the condition. Invariants: memory is bounded by the requests in flight; no request of a job
//! is in flight when its uploads are aborted, unless it outlives [`GRACE`].

use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{FuturesUnordered, iter};
use futures_util::{FutureExt, StreamExt, TryFutureExt};
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path as Key;
use object_store::{MultipartId, ObjectStoreExt, PutMode, PutOptions, PutPayload};
use waystation_format::checksum::BLOCK_BYTES;
use waystation_format::{Error, Kind, Result};
use waystation_io::arena::{Arena, Slab};
use waystation_io::job::in_parallel;
use waystation_io::mode::Mode;
use waystation_io::storage::NewFiles;
use waystation_io::write::{Blocks, DeviceCopy, Options, Piece, Plan, registered_device_copy};

use crate::client::Client;
use crate::errors::{late, told};
use crate::objects::{Put, is_refused_condition, put_unless};
use crate::read::TICK;
use crate::{ObjectStorage, process};

/// Requests in flight.
const DEPTH: usize = 16;
/// More threads gather and checksum no faster.
const MOST_THREADS: usize = 4;
/// Bytes of a part. Stores take no less than 5 MiB, but for the last of an object, …
const PART_BYTES: usize = 8 << 20;
const LEAST_PART_BYTES: usize = 5 << 20;
/// … and no more than so many of them.
const MOST_PARTS: u64 = 10_000;
/// How long a job that stops waits for its requests.
const GRACE: Duration = Duration::from_secs(10);
const NONCE_BYTES: usize = 16;

/// The new objects of one job.
pub struct NewObjects<'a> {
    storage: &'a ObjectStorage,
    client: &'a Client,
    uploads: &'a dyn MultipartStore,
    plan: &'a Plan,
    files: Vec<NewObject>,
    block_bytes: usize,
    depth: usize,
    threads: usize,
    devices: Option<Arc<dyn DeviceCopy>>,
}

/// One of them.
struct NewObject {
    key: Key,
    is_claimed: AtomicBool,
    /// Of those that have several parts.
    upload: Mutex<Option<MultipartId>>,
    parts: Vec<Mutex<Option<PartId>>>,
    /// Those that are not in the store yet.
    missing: AtomicUsize,
}

impl<'a> NewObjects<'a> {
    /// Claims the names, and begins the uploads.
    pub fn begin(storage: &'a ObjectStorage, plan: &'a Plan, options: &Options) -> Result<Self> {
        let client = storage.client()?;
        let largest = plan.files.iter().map(|file| file.file_bytes).max().unwrap_or(0);
        let block_bytes = part_bytes(options, largest);
        let wanted = options.depth.unwrap_or(DEPTH);
        let depth = options.staging_bytes.map_or(wanted, |bytes| wanted.min(bytes / block_bytes)).max(1);
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let files = plan.files.iter().map(|file| {
            let parts = usize::try_from(file.file_bytes.div_ceil(block_bytes as u64)).unwrap_or(usize::MAX);
            Ok(NewObject {
                key: storage.key(&file.path)?,
                is_claimed: AtomicBool::new(false),
                upload: Mutex::default(),
                parts: (0..parts).map(|_| Mutex::default()).collect(),
                missing: AtomicUsize::new(parts),
            })
        });
        let new = Self {
            storage,
            client,
            uploads: client.uploads(&storage.root)?,
            plan,
            files: files.collect::<Result<_>>()?,
            block_bytes,
            depth,
            threads: options.threads.unwrap_or(cores.min(MOST_THREADS)).clamp(1, depth),
            devices: plan.has_device_blocks.then(registered_device_copy).transpose()?,
        };
        let begun = nonce().and_then(|nonce| {
            // Once, and not for each file at the same time.
            new.each(0..new.files.len().min(1), |file| new.honours_conditions(file, &nonce).map_ok(drop))?;
            new.each(0..new.files.len(), |file| new.begin_one(file, &nonce))
        });
        if let Err(error) = begun {
            new.abort();
            return Err(error);
        }
        Ok(new)
    }

    /// Has something done for each object, several at a time; all of it ends before the first error is told.
    fn each<F: Future<Output = Result<()>>>(
        &self,
        files: Range<usize>,
        call: impl Fn(usize) -> F,
    ) -> Result<()> {
        process::runtime()?.block_on(async {
            let calls = iter(files).map(|file| self.in_time(file, 0, call(file)));
            let outcomes: Vec<Result<()>> = calls.buffer_unordered(self.depth).collect().await;
            outcomes.into_iter().collect()
        })
    }

    /// Requests that send so many bytes, and end in time.
    async fn in_time<T>(
        &self,
        file: usize,
        nbytes: usize,
        requests: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let deadline = self.storage.settings.patience_for(nbytes);
        let outcome = tokio::time::timeout(deadline, requests).await;
        outcome.unwrap_or_else(|_| Err(late(deadline, "write the object", self.path(file))))
    }

    fn path(&self, file: usize) -> &Path {
        &self.plan.files[file].path
    }

    fn failed(&self, file: usize) -> impl Fn(object_store::Error) -> Error {
        move |error| told(&error, "write the object", self.path(file))
    }

    async fn begin_one(&self, file: usize, nonce: &str) -> Result<()> {
        let object = &self.files[file];
        if object.parts.len() == 1 && self.honours_conditions(file, nonce).await? {
            return Ok(()); // the one request that it takes claims its name as well
        }
        let begin_upload = async {
            if object.parts.len() > 1 {
                let upload = self.uploads.create_multipart(&object.key).await.map_err(self.failed(file))?;
                *lock(&object.upload) = Some(upload);
            }
            Ok(())
        };
        // Both at once: each is a journey to the store.
        let (claimed, begun) = tokio::join!(self.claim(file, nonce), begin_upload);
        claimed.and(begun)
    }

    async fn claim(&self, file: usize, nonce: &str) -> Result<()> {
        let object = &self.files[file];
        if !self.honours_conditions(file, nonce).await? {
            return self.claim_unconditionally(file).await;
        }
        match self.create(&object.key, nonce.to_owned().into()).await.map_err(self.failed(file))? {
            true => object.is_claimed.store(true, Ordering::Release),
            false => return Err(self.taken(file)),
        }
        Ok(())
    }

    /// Creates an object of one part.
    async fn create_whole(&self, file: usize, bytes: Bytes) -> Result<()> {
        let object = &self.files[file];
        object.is_claimed.store(true, Ordering::Release); // it may be there even if no answer comes
        if self.create(&object.key, bytes).await.map_err(self.failed(file))? {
            return Ok(());
        }
        object.is_claimed.store(false, Ordering::Release);
        Err(self.taken(file))
    }

    /// Creates an object; false if another one is there.
    async fn create(&self, key: &Key, content: Bytes) -> object_store::Result<bool> {
        let put = put_unless(&*self.client.objects, key, content, PutMode::Create).await?;
        Ok(matches!(put, Put::Written(_)))
    }

    fn taken(&self, file: usize) -> Error {
        let message = "something has the name of a new object; choose another name, or remove it";
        Error::new(Kind::Conflict, message).with("path", self.path(file).display().to_string())
    }

    /// Whether the store creates an object only if there is none: it is tried once.
    async fn honours_conditions(&self, file: usize, nonce: &str) -> Result<bool> {
        if let Some(&known) = self.client.honours_conditions.get() {
            return Ok(known);
        }
        let probe = Key::parse(format!("{}.waystation-probe-{nonce}", self.files[file].key));
        let probe = probe.map_err(|error| self.failed(file)(error.into()))?;
        let tried = async {
            self.create(&probe, nonce.to_owned().into()).await?;
            let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
            match self.client.objects.put_opts(&probe, PutPayload::from_static(b"again"), options).await {
                Err(error) if is_refused_condition(&error) => Ok(true),
                Ok(_) | Err(object_store::Error::NotImplemented { .. }) => Ok(false),
                Err(error) => Err(error),
            }
        };
        let outcome = tried.await;
        drop(self.client.objects.delete(&probe).await);
        let honoured = outcome.map_err(self.failed(file))?;
        Ok(*self.client.honours_conditions.get_or_init(|| honoured))
    }

    async fn claim_unconditionally(&self, file: usize) -> Result<()> {
        if !self.storage.settings.allow_unconditional {
            let message = "this store does not create an object on condition that there is none, so two saves \
                           could overwrite each other; use another store, or say that one program alone saves here by \
                           the option 'allow_unconditional'";
            return Err(Error::new(Kind::Unsupported, message).with("path", &*self.storage.root));
        }
        let object = &self.files[file];
        match self.client.objects.head(&object.key).await {
            Ok(_) => Err(self.taken(file)),
            Err(object_store::Error::NotFound { .. }) => {
                object.is_claimed.store(true, Ordering::Release);
                Ok(())
            }
            Err(error) => Err(self.failed(file)(error)),
        }
    }

    // ---- blocks ----------------------------------------------------------------------------------

    /// Gathers blocks, and keeps up to `depth` of them under way.
    ///
    /// # Safety
    /// As for [`NewFiles::write`].
    async unsafe fn upload(&self, blocks: &Blocks<'_>, depth: usize) -> Result<()> {
        let mut in_flight = FuturesUnordered::new();
        let mut tick = tokio::time::interval(TICK);
        let outcome = loop {
            if blocks.should_stop() {
                break Ok(());
            }
            // Whoever waits for the bytes of a piece looks at no request meanwhile.
            let ended = if in_flight.len() < depth
                && (in_flight.is_empty() || blocks.is_ready())
                && let Some(piece) = blocks.next_piece()
            {
                // SAFETY: as the caller promises.
                match unsafe { self.gather(blocks, &piece) } {
                    Ok(bytes) => in_flight.push(self.put(blocks, piece, bytes)),
                    Err(error) => break Err(error),
                }
                in_flight.next().now_or_never() // sets it off before the next one is gathered
            } else {
                tokio::select! {
                    ended = in_flight.next() => Some(ended),
                    _ = tick.tick() => None,
                }
            };
            match ended {
                Some(Some(Err(error))) => break Err(error),
                Some(None) => break Ok(()),
                Some(Some(Ok(()))) | None => {}
            }
        };
        // What is still on its way to the store could arrive there after it was removed.
        drop(tokio::time::timeout(GRACE, in_flight.collect::<Vec<_>>()).await);
        outcome
    }

    /// # Safety
    /// As for [`NewFiles::write`].
    unsafe fn gather(&self, blocks: &Blocks<'_>, piece: &Piece) -> Result<Bytes> {
        let slab = Arena::global().allocate(piece.nbytes)?;
        let address = slab.address().as_ptr();
        if let Some(devices) = &self.devices {
            // SAFETY: the slab is ours until the copies have been waited for; sources are as the caller promises.
            unsafe { blocks.start_device_copies(&**devices, piece, address as usize) }?.wait()?;
        }
        // SAFETY: the slab is at least as long, initialised by the system, and nobody else's.
        let bytes = unsafe { std::slice::from_raw_parts_mut(address, piece.nbytes) };
        // SAFETY: the slab is not among the sources, which are as the caller promises.
        unsafe { blocks.gather(piece, bytes, false) }?;
        Ok(Bytes::from_owner(Block { slab, nbytes: piece.nbytes }))
    }

    async fn put(&self, blocks: &Blocks<'_>, piece: Piece, bytes: Bytes) -> Result<()> {
        blocks.wait_for_store(piece.nbytes);
        let in_place = |error: Error| error.with("offset", piece.offset.to_string());
        self.in_time(piece.file, piece.nbytes, self.put_part(&piece, bytes)).await.map_err(in_place)?;
        blocks.mark_written(&piece);
        // A store may take its time to join parts, so that is done while others are uploaded.
        if self.files[piece.file].missing.fetch_sub(1, Ordering::AcqRel) == 1 {
            blocks.check_file(piece.file)?;
            self.in_time(piece.file, 0, self.finish_one(piece.file)).await?;
        }
        Ok(())
    }

    async fn put_part(&self, piece: &Piece, bytes: Bytes) -> Result<()> {
        let object = &self.files[piece.file];
        let failed = self.failed(piece.file);
        let Some(upload) = lock(&object.upload).clone() else {
            if !object.is_claimed.load(Ordering::Acquire) {
                return self.create_whole(piece.file, bytes).await;
            }
            return self.client.objects.put(&object.key, bytes.into()).await.map(drop).map_err(failed);
        };
        let index = (piece.offset / self.block_bytes as u64) as usize;
        let part = self.uploads.put_part(&object.key, &upload, index, bytes.into()).await.map_err(failed)?;
        *lock(&object.parts[index]) = Some(part);
        Ok(())
    }

    // ---- the end -----------------------------------------------------------------------------------

    /// Completes an object whose parts are all in the store; does nothing the second time.
    async fn finish_one(&self, file: usize) -> Result<()> {
        let object = &self.files[file];
        let failed = self.failed(file);
        if object.parts.is_empty() {
            return self.client.objects.put(&object.key, PutPayload::new()).await.map(drop).map_err(failed);
        }
        let Some(upload) = lock(&object.upload).clone() else { return Ok(()) };
        let parts: Option<Vec<PartId>> = object.parts.iter().map(|part| lock(part).take()).collect();
        let parts = parts.ok_or_else(|| {
            Error::new(Kind::Internal, "an object was finished before its blocks; please report this")
                .with("path", self.path(file).display().to_string())
        })?;
        if let Err(error) = self.uploads.complete_multipart(&object.key, &upload, parts).await {
            // A request that was repeated finds no upload any more. The claim is shorter than an object in parts.
            let found = self.client.objects.head(&object.key).await;
            if !found.is_ok_and(|found| found.size == self.plan.files[file].file_bytes) {
                return Err(failed(error));
            }
        }
        *lock(&object.upload) = None;
        Ok(())
    }

    async fn abort_one(&self, file: usize) -> Result<()> {
        let object = &self.files[file];
        let upload = lock(&object.upload).take();
        if let Some(upload) = upload {
            // The failure that led here is the one that is told.
            drop(self.uploads.abort_multipart(&object.key, &upload).await);
        }
        if object.is_claimed.swap(false, Ordering::AcqRel) {
            drop(self.client.objects.delete(&object.key).await);
        }
        Ok(())
    }
}

impl NewFiles for NewObjects<'_> {
    fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    unsafe fn write(&self, blocks: &Blocks<'_>) -> Result<()> {
        let runtime = process::runtime()?;
        in_parallel(self.threads, "waystation-write", &|| {
            // SAFETY: as the caller promises.
            let uploading = unsafe { self.upload(blocks, self.depth.div_ceil(self.threads)) };
            runtime.block_on(uploading).map_err(|error| blocks.fail(error)).or(Ok(()))
        })
    }

    fn finish(&self) -> Result<()> {
        self.each(0..self.files.len(), |file| self.finish_one(file))
    }

    fn abort(&self) {
        drop(self.each(0..self.files.len(), |file| self.abort_one(file)));
    }

    fn mode(&self) -> Option<Mode> {
        None
    }
}

/// A gathered block; its memory goes back to the arena once no request can be repeated any more.
struct Block {
    slab: Slab,
    nbytes: usize,
}

impl AsRef<[u8]> for Block {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the slab is at least as long and filled, and nobody writes to it any more.
        unsafe { std::slice::from_raw_parts(self.slab.address().as_ptr(), self.nbytes) }
    }
}

/// The length of parts with which the largest object has no more than stores take.
fn part_bytes(options: &Options, largest: u64) -> usize {
    let wanted = options.block_bytes.unwrap_or(PART_BYTES);
    let bounded = options.staging_bytes.map_or(wanted, |bytes| wanted.min(bytes));
    let needed = usize::try_from(largest.div_ceil(MOST_PARTS)).unwrap_or(usize::MAX / 2);
    bounded.max(LEAST_PART_BYTES).max(needed).next_multiple_of(BLOCK_BYTES)
}

/// What tells the claims of one job from those of all others.
pub fn nonce() -> Result<String> {
    let mut bytes = [0; NONCE_BYTES];
    let mut filled = 0;
    while filled < NONCE_BYTES {
        filled += rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty())
            .map_err(|error| {
                Error::new(Kind::Unavailable, format!("the system gave no random bytes: {error}"))
            })?;
    }
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // What a thread that panicked left behind is plain data.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
