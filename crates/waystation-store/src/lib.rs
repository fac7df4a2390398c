//! Object stores as a storage of the engine: S3, Google Cloud Storage, Azure Blob Storage, and files behind HTTP.
//!
//! Requests, signatures and retries are those of the `object_store` crate. What is here decides which requests are
//! made, how many at a time, and what becomes of their bytes. Design 7 explains it. Invariants: every request ends
//! within the deadline of its store; no credential reaches a message; a job touches no object but those that it
//! created; nothing of a store is used in a process that was forked from its own.

mod cache;
mod client;
mod connection;
mod errors;
mod objects;
mod pace;
mod process;
mod read;
mod write;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use waystation_format::{Error, Kind, Result};
use waystation_io::read::{Batch, Statistics};
use waystation_io::storage::{NewFiles, Storage, StoredFile};
use waystation_io::write::{Options, Plan};

use self::cache::Cache;
use self::client::Client;
use self::errors::told;
pub use self::objects::{Condition, Found, Listing, Version};
use self::process::PerProcess;
pub use self::process::{Waits, give_up_if};

/// Bytes of a request, or of its answer, that have the deadline for themselves.
const STEP_BYTES: usize = 1 << 20;

/// How a store is reached and used.
#[derive(Clone)]
pub struct Settings {
    /// Options of the store by the names that the `object_store` crate has for them, beside what the environment says.
    /// They may hold credentials.
    pub options: Vec<(String, String)>,
    /// Until when a request must have succeeded, with everything that is tried again.
    pub deadline: Duration,
    /// Whether to save to a store that cannot create an object on condition that there is none.
    pub allow_unconditional: bool,
    /// The query of every request to a server of HTTP: often a signature, and never shown.
    pub query: Option<String>,
    /// A directory of this machine in which what is read is kept, and how many bytes it may have.
    pub cache: Option<(PathBuf, u64)>,
}

impl Settings {
    /// Until when a request that moves so many bytes must have succeeded: each `STEP_BYTES` have the deadline, as what
    /// comes or goes slowly is on its way all the same.
    pub(crate) fn patience_for(&self, nbytes: usize) -> Duration {
        let steps = u32::try_from(nbytes.div_ceil(STEP_BYTES)).unwrap_or(u32::MAX).max(1);
        self.deadline.saturating_mul(steps)
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            options: Vec::new(),
            deadline: Duration::from_secs(120),
            allow_unconditional: false,
            query: None,
            cache: None,
        }
    }
}

/// Everything beneath one bucket, or one host.
#[derive(Clone)]
pub struct ObjectStorage {
    /// What all paths begin with: `s3://bucket`. `https+anything://host` is `https://host` with a query of its own.
    root: Arc<str>,
    settings: Arc<Settings>,
    client: Arc<PerProcess<Client>>,
    cache: Option<Arc<Cache>>,
    /// What tells the objects of this root from those that others have by the same names, elsewhere.
    place: Arc<str>,
}

impl ObjectStorage {
    /// The storage of everything that has the scheme and the bucket of `location`. Asks nobody yet.
    ///
    /// # Errors
    /// InvalidInput if it is no location of an object store.
    pub fn new(location: &str, settings: Settings) -> Result<Self> {
        let root: Arc<str> = client::root_of(location)?.into();
        Ok(Self::made(root, settings, PerProcess::new()))
    }

    /// A store in the memory of this process, for tests: `memory://name`.
    pub fn in_memory(name: &str) -> Self {
        Self::in_memory_with(name, Settings::default())
    }

    /// The same, with settings.
    pub fn in_memory_with(name: &str, settings: Settings) -> Self {
        Self::made(format!("memory://{name}").into(), settings, PerProcess::of(Client::in_memory()))
    }

    fn made(root: Arc<str>, settings: Settings, client: PerProcess<Client>) -> Self {
        let cache = settings.cache.clone().map(|(directory, limit)| Arc::new(Cache::new(directory, limit)));
        let place = cache.as_ref().map_or_else(String::new, |_| client::place_of(&root, &settings)).into();
        Self { root, settings: Arc::new(settings), client: Arc::new(client), cache, place }
    }

    /// Whether this is a server of HTTP, which sends files and does nothing else.
    fn is_http(&self) -> bool {
        client::is_http(&self.root)
    }

    /// Refuses what would change something behind HTTP.
    fn require_writable(&self) -> Result<()> {
        self.client()?.uploads(&self.root).map(drop)
    }

    /// The client of this process.
    fn client(&self) -> Result<&Client> {
        self.client.get(|| Client::new(&self.root, &self.settings))
    }

    /// The name of an object, unlike those of all others wherever they are.
    fn name_of(&self, path: &Path) -> String {
        format!("{}\n{}", self.place, path.display())
    }

    /// The key of a path.
    fn key(&self, path: &Path) -> Result<object_store::path::Path> {
        let beneath = path.to_str().and_then(|path| path.strip_prefix(&*self.root));
        let key = beneath.filter(|key| key.is_empty() || key.starts_with('/')).ok_or_else(|| {
            Error::new(Kind::InvalidInput, format!("this does not lie in {}", self.root))
                .with("path", path.display().to_string())
        })?;
        object_store::path::Path::parse(key).map_err(|_| {
            let shown = path.to_string_lossy().escape_debug().to_string();
            let message = format!(
                "no object can have the name '{shown}': a part of it is empty, '.' or '..', or has a character that \
                 controls a terminal; choose another name"
            );
            Error::new(Kind::InvalidInput, message)
        })
    }

    /// The key of an object: a whole bucket is none, and requests for one would mean the bucket itself.
    fn object_key(&self, path: &Path) -> Result<object_store::path::Path> {
        let key = self.key(path)?;
        if key.as_ref().is_empty() && !self.is_http() {
            let message =
                "this is a whole bucket; give the location of something in it, like s3://bucket/name";
            return Err(Error::new(Kind::InvalidInput, message).with("path", path.display().to_string()));
        }
        Ok(key)
    }

    /// Waits for requests.
    ///
    /// # Errors
    /// Those of the requests; Unavailable if they do not end within the deadline.
    fn wait<T>(
        &self,
        action: &str,
        path: &Path,
        requests: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T> {
        process::wait_for(self.in_time(0, action, path, requests))
    }

    /// Requests that move so many bytes, which end in time; errors as those of `wait`.
    async fn in_time<T>(
        &self,
        nbytes: usize,
        action: &str,
        path: &Path,
        requests: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T> {
        let patience = self.settings.patience_for(nbytes);
        match tokio::time::timeout(patience, requests).await {
            Ok(outcome) => outcome.map_err(|error| told(&error, action, path)),
            Err(_) => Err(errors::late(patience, action, path)),
        }
    }
}

impl fmt::Debug for ObjectStorage {
    /// Without the settings, which may hold credentials.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("ObjectStorage").field("root", &self.root).finish_non_exhaustive()
    }
}

impl Storage for ObjectStorage {
    fn open(&self, path: &Path) -> Result<Box<dyn StoredFile>> {
        let version = self.head(path)?.ok_or_else(|| errors::not_found(path))?;
        Ok(Box::new(Object { storage: self.clone(), path: path.to_owned(), version }))
    }

    unsafe fn read(&self, batch: &Batch<'_>) -> Result<Statistics> {
        // SAFETY: as the caller promises.
        unsafe { read::read(self, batch) }
    }

    /// Nothing is known without a request; `begin` refuses names that are taken.
    fn check_new(&self, plan: &Plan) -> Result<()> {
        self.require_writable()?;
        plan.files.iter().try_for_each(|file| self.key(&file.path).map(drop))
    }

    fn begin<'a>(&'a self, plan: &'a Plan, options: &'a Options) -> Result<Box<dyn NewFiles + 'a>> {
        Ok(Box::new(write::NewObjects::begin(self, plan, options)?))
    }
}

/// One version of an object.
struct Object {
    storage: ObjectStorage,
    path: PathBuf,
    version: Version,
}

impl StoredFile for Object {
    fn nbytes(&self) -> u64 {
        self.version.nbytes
    }

    fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> Result<()> {
        let in_place = |error: Error| error.with("offset", offset.to_string());
        let end = offset.saturating_add(bytes.len() as u64);
        if end > self.version.nbytes {
            let message = format!("the object has {} bytes, and ends before the range", self.version.nbytes);
            return Err(in_place(
                Error::new(Kind::Corrupt, message).with("path", self.path.display().to_string()),
            ));
        }
        if bytes.is_empty() {
            return Ok(());
        }
        let found = self.storage.get_range(&self.path, offset..end, &self.version).map_err(in_place)?;
        if found.len() != bytes.len() {
            let message =
                format!("the store sent {} bytes where {} were asked for", found.len(), bytes.len());
            return Err(in_place(
                Error::new(Kind::Unavailable, message).with("path", self.path.display().to_string()),
            ));
        }
        bytes.copy_from_slice(&found);
        Ok(())
    }
}
