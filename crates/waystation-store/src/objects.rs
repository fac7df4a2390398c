//! Small objects, whole: records, tables and listings, as Python asks for them.

use std::collections::HashSet;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use futures_util::future::join;
use futures_util::stream::iter;
use futures_util::{StreamExt, TryStreamExt};
use object_store::{
    GetOptions, GetResult, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutResult,
    UpdateVersion,
};
use tokio::time::{sleep, timeout};
use waystation_format::{Error, Kind, Result};

use crate::ObjectStorage;
use crate::client::Remover;
use crate::connection::on_condition;
use crate::errors::{is_beyond_the_end, is_silent, late, not_found, told};
use crate::process::wait_for;
use crate::read::pour;
use crate::write::nonce;

/// Requests for small objects in flight.
const AT_A_TIME: usize = 32;
/// How long a store that is about something else is given before it is asked again.
const AGAIN: Duration = Duration::from_millis(50);

/// What tells an object from its other versions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    /// The ETag. Of equal contents it may be equal.
    pub tag: Option<String>,
    /// The generation or version, where the store counts them.
    pub generation: Option<String>,
    /// The length of the object.
    pub nbytes: u64,
    /// When it was written, by the clock of the store; none for what was just written.
    pub modified: Option<SystemTime>,
}

impl Version {
    fn of(meta: &ObjectMeta) -> Self {
        let since = Duration::from_micros(u64::try_from(meta.last_modified.timestamp_micros()).unwrap_or(0));
        Self {
            tag: meta.e_tag.clone(),
            generation: meta.version.clone(),
            nbytes: meta.size,
            modified: Some(SystemTime::UNIX_EPOCH + since),
        }
    }

    fn written(result: PutResult, nbytes: usize) -> Self {
        Self { tag: result.e_tag, generation: result.version, nbytes: nbytes as u64, modified: None }
    }
}

/// What is at a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// An object.
    Object(Version),
    /// Objects lie beneath it.
    Directory,
}

/// What must be so when an object is put.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Condition {
    /// Nothing has its name.
    New,
    /// This version of it is there still.
    Unchanged(Version),
    /// Anything.
    Any,
}

/// What lies directly beneath a prefix.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listing {
    /// Objects, by name.
    pub objects: Vec<(String, Version)>,
    /// Prefixes of further objects, which stand for directories.
    pub directories: Vec<String>,
}

impl ObjectStorage {
    /// What is at a path; `None` if no object is.
    pub fn head(&self, path: &Path) -> Result<Option<Version>> {
        let (key, objects) = (self.object_key(path)?, &self.client()?.objects);
        let found = self.wait("look at the object", path, async { absent(objects.head(&key).await) })?;
        Ok(found.as_ref().map(Version::of))
    }

    /// What is at a path: an object, or what stands for a directory, because objects lie beneath it.
    pub fn status(&self, path: &Path) -> Result<Option<Found>> {
        let (key, objects) = (self.key(path)?, &self.client()?.objects);
        if self.is_http() {
            // Nothing can be listed there, and a signature may be one for GET alone.
            let found = self.wait("look at what is there", path, async {
                absent(beginning(objects, &key, 1).await.map(|(found, _)| found))
            })?;
            return Ok(found.map(|found| Found::Object(Version::of(&found.meta))));
        }
        if key.as_ref().is_empty() {
            let listed =
                self.wait("look at what is there", path, async { objects.list(None).try_next().await });
            return listed.map(|_| Some(Found::Directory)); // a bucket is one, also without objects
        }
        self.wait("look at what is there", path, async {
            let beneath = objects.list(Some(&key)).boxed().into_future();
            let (object, (first, _)) = join(objects.head(&key), beneath).await;
            // Whoever may read an object may be refused a listing.
            match (absent(object), first) {
                (Ok(Some(meta)), _) => Ok(Some(Found::Object(Version::of(&meta)))),
                (Ok(None), first) => Ok(first.transpose()?.map(|_| Found::Directory)),
                // The answer to the listing has a body, which says why.
                (Err(error), Some(Err(listing))) if is_silent(&error) => Err(listing),
                (Err(error), _) => Err(error),
            }
        })
    }

    /// The first bytes of an object, fewer where it has fewer, and its version, by one request.
    pub fn beginning(&self, path: &Path, nbytes: u64) -> Result<(Bytes, Version)> {
        let (key, objects) = (self.object_key(path)?, &self.client()?.objects);
        self.wait("read the object", path, async {
            let (found, refusal) = beginning(objects, &key, nbytes).await?;
            match refusal {
                Some(error) if found.meta.size > nbytes => Err(error),
                _ => {
                    let version = Version::of(&found.meta);
                    Ok((found.bytes().await?, version))
                }
            }
        })
    }

    /// A whole object. Corrupt if it is longer than `limit_bytes`: it is not read then.
    pub fn get(&self, path: &Path, limit_bytes: u64) -> Result<(Vec<u8>, Version)> {
        self.get_all(&[(path.to_owned(), limit_bytes)])?.pop().ok_or_else(|| not_found(path))
    }

    /// Whole objects with their limits, several at a time; as `get`.
    pub fn get_all(&self, wanted: &[(PathBuf, u64)]) -> Result<Vec<(Vec<u8>, Version)>> {
        let objects = &self.client()?.objects;
        self.several(wanted, |(path, limit_bytes)| async move {
            let key = self.object_key(path)?;
            let request = objects.get_opts(&key, GetOptions::default());
            let found = self.in_time(0, "read the object", path, request).await?;
            let version = Version::of(&found.meta);
            if version.nbytes > *limit_bytes {
                let message = format!(
                    "the object has {} bytes, more than {limit_bytes}, which is the most it may",
                    version.nbytes
                );
                return Err(Error::new(Kind::Corrupt, message).with("path", path.display().to_string()));
            }
            let mut content = Vec::with_capacity(usize::try_from(version.nbytes).unwrap_or(0));
            pour(self, path, found, u64::MAX, |_, bytes| content.extend_from_slice(bytes)).await?;
            Ok((content, version))
        })
    }

    /// A range of one version of an object. Conflict if another one has its place.
    pub fn get_range(&self, path: &Path, range: Range<u64>, version: &Version) -> Result<Bytes> {
        let (key, objects) = (self.object_key(path)?, &self.client()?.objects);
        // A weak tag never meets a condition, and not every server of HTTP knows conditions.
        let if_match = version.tag.clone().filter(|tag| !tag.starts_with("W/"));
        let nbytes = usize::try_from(range.end.saturating_sub(range.start)).unwrap_or(usize::MAX);
        let options = GetOptions { range: Some(range.into()), if_match, ..GetOptions::default() };
        let request = async {
            let found = objects.get_opts(&key, options).await?;
            if found.meta.e_tag != version.tag {
                let source = "it has another tag".into();
                return Err(object_store::Error::Precondition { path: key.to_string(), source });
            }
            found.bytes().await
        };
        wait_for(self.in_time(nbytes, "read the object", path, request))
    }

    /// Puts a whole object, in one act. Conflict if the condition is not met.
    ///
    /// The content must be one that nobody else would put, as by a random number in it: where the answer to a request
    /// was lost, the object itself tells whether this call has put it, and equal contents have equal tags.
    pub fn put(&self, path: &Path, content: &[u8], condition: &Condition) -> Result<Version> {
        self.require_writable()?;
        let (key, objects) = (self.object_key(path)?, &self.client()?.objects);
        let mode = match condition {
            Condition::New => PutMode::Create,
            Condition::Any => PutMode::Overwrite,
            Condition::Unchanged(version) => PutMode::Update(UpdateVersion {
                e_tag: version.tag.clone(),
                version: version.generation.clone(),
            }),
        };
        let action = if *condition == Condition::Any { "write the object" } else { "commit the object" };
        let put = put_unless(&**objects, &key, content.to_vec().into(), mode);
        wait_for(self.in_time(content.len(), action, path, put)).map(|outcome| match outcome {
            Put::Written(version) => Ok(version),
            Put::Refused(error) => Err(told(&error, action, path)),
        })?
    }

    /// Puts whole objects, several at a time, whatever has their names.
    pub fn put_all(&self, contents: &[(PathBuf, &[u8])]) -> Result<()> {
        self.require_writable()?;
        let objects = &self.client()?.objects;
        self.several(contents, |(path, content)| async move {
            let key = self.object_key(path)?;
            let put = objects.put(&key, content.to_vec().into());
            self.in_time(content.len(), "write the object", path, put).await.map(drop)
        })
        .map(drop)
    }

    /// Does something for each of several paths, some at a time. The first error ends it.
    fn several<'a, W, T, F: Future<Output = Result<T>>>(
        &self,
        wanted: &'a [(PathBuf, W)],
        call: impl Fn(&'a (PathBuf, W)) -> F,
    ) -> Result<Vec<T>> {
        wait_for(async { iter(wanted.iter().map(call)).buffered(AT_A_TIME).try_collect().await })
    }

    /// Puts a copy of an object, which the store makes, where nothing is.
    pub fn copy(&self, source: &Path, target: &Path) -> Result<()> {
        self.require_writable()?;
        let (from, to, objects) =
            (self.object_key(source)?, self.object_key(target)?, &self.client()?.objects);
        self.wait("copy the object", source, objects.copy(&from, &to))
    }

    /// What lies directly beneath a path, by name. Nothing, if nothing is there. What has the path itself as its
    /// name with a slash, as tools make of empty folders, is nothing.
    pub fn list(&self, directory: &Path) -> Result<Listing> {
        if self.is_http() {
            let message = "nothing can be listed behind HTTP; give the files, or an index that names them";
            return Err(Error::new(Kind::Unsupported, message).with("path", directory.display().to_string()));
        }
        let (prefix, objects) = (self.key(directory)?, &self.client()?.objects);
        let found = self.wait("list what is there", directory, objects.list_with_delimiter(Some(&prefix)))?;
        let name = |path: &object_store::path::Path| path.filename().map(str::to_owned);
        let mut listing = Listing {
            objects: found
                .objects
                .iter()
                .filter(|meta| meta.location != prefix)
                .filter_map(|meta| Some((name(&meta.location)?, Version::of(meta))))
                .collect(),
            directories: found.common_prefixes.iter().filter_map(name).collect(),
        };
        listing.objects.sort_unstable_by(|first, second| first.0.cmp(&second.0));
        listing.directories.sort_unstable();
        Ok(listing)
    }

    /// Removes an object; one that is gone already is no error.
    pub fn remove(&self, path: &Path) -> Result<()> {
        self.require_writable()?;
        let (key, objects) = (self.object_key(path)?, &self.client()?.objects);
        self.wait("remove the object", path, async { absent(objects.delete(&key).await) }).map(drop)
    }

    /// Removes an object on condition that it is a version; one that is gone already is no error. Conflict if it is
    /// another one; Unsupported where the store compares and removes in two acts, or not at all
    /// (`removes_versions`).
    pub fn remove_version(&self, path: &Path, version: &Version) -> Result<()> {
        self.require_writable()?;
        let (key, client) = (self.object_key(path)?, self.client()?);
        let remover = client.remover(&self.root, &self.settings)?;
        let removal = remover.and_then(|remover| Some((remover, demanded(remover, version)?)));
        let Some((remover, value)) = removal.filter(|_| client.honours_removals.get() == Some(&true)) else {
            let message = "this store does not remove an object on condition that it is unchanged";
            return Err(Error::new(Kind::Unsupported, message).with("path", path.display().to_string()));
        };
        self.wait("remove the object", path, async {
            let removed = on_condition(remover.header, value, remover.objects.delete(&key)).await;
            match absent(removed) {
                // Some stores say so of what is not there.
                Err(error) if is_refused_condition(&error) => {
                    match absent(client.objects.head(&key).await)? {
                        None => Ok(()),
                        Some(_) => Err(object_store::Error::Precondition {
                            path: key.to_string(),
                            source: Box::new(error),
                        }),
                    }
                }
                outcome => outcome.map(drop),
            }
        })
    }

    /// Whether the store removes an object only if it is a version: it is tried once, with an object of a random name
    /// beneath `directory`.
    pub fn removes_versions(&self, directory: &Path) -> Result<bool> {
        self.require_writable()?;
        let client = self.client()?;
        if let Some(&known) = client.honours_removals.get() {
            return Ok(known);
        }
        let honoured = match client.remover(&self.root, &self.settings)? {
            Some(remover) => self.try_removal(directory, remover)?,
            None => false,
        };
        Ok(*client.honours_removals.get_or_init(|| honoured))
    }

    fn try_removal(&self, directory: &Path, remover: &Remover) -> Result<bool> {
        let (nonce, objects) = (nonce()?, &self.client()?.objects);
        let path = directory.join(&nonce);
        let probe = self.object_key(&path)?;
        self.wait("remove an object", &path, async {
            let put = objects.put(&probe, nonce.clone().into_bytes().into()).await?;
            let version = Version::written(put, nonce.len());
            let other =
                |text: String| if remover.by_generation { "1".to_owned() } else { format!("\"{text}\"") };
            let tried = async {
                let refused =
                    on_condition(remover.header, other(nonce), remover.objects.delete(&probe)).await;
                match refused {
                    Err(error) if is_refused_condition(&error) => {}
                    Ok(()) => return Ok(false),
                    Err(error) => {
                        let kind = told(&error, "remove an object", &path).kind();
                        let is_unknown = matches!(kind, Kind::InvalidInput | Kind::Unsupported);
                        return if is_unknown { Ok(false) } else { Err(error) };
                    }
                }
                let Some(value) = demanded(remover, &version) else { return Ok(false) };
                on_condition(remover.header, value, remover.objects.delete(&probe)).await?;
                Ok(absent(objects.head(&probe).await)?.is_none())
            };
            let outcome = tried.await;
            if !matches!(outcome, Ok(true)) {
                drop(objects.delete(&probe).await);
            }
            outcome
        })
    }

    /// The bytes of all objects beneath a path, by one listing however deep they lie.
    pub fn bytes_beneath(&self, directory: &Path) -> Result<u64> {
        let (prefix, objects) = (self.key(directory)?, &self.client()?.objects);
        let action = "list what is there";
        let step = |_| late(self.settings.deadline, action, directory);
        wait_for(async {
            let (mut nbytes, mut seen) = (0, HashSet::new());
            let mut listed = objects.list(Some(&prefix));
            // A tree has no bound, so the deadline is that of each step.
            while let Some(meta) = timeout(self.settings.deadline, listed.try_next())
                .await
                .map_err(step)?
                .map_err(|error| told(&error, action, directory))?
            {
                nbytes += meta.size;
                once(&mut seen, meta.location, action, directory)?;
            }
            Ok(nbytes)
        })
    }

    /// Removes all that lies beneath a path, however many requests that takes; returns how many objects that were.
    /// What is gone already is no error.
    pub fn remove_all(&self, directory: &Path) -> Result<usize> {
        self.require_writable()?;
        let (prefix, objects) = (self.key(directory)?, &self.client()?.objects);
        let action = "remove what is there";
        let failed = |error: object_store::Error| told(&error, action, directory);
        // A tree has no bound, so the deadline is that of each step.
        let step = |_| late(self.settings.deadline, action, directory);
        wait_for(async {
            let (mut keys, mut seen) = (Vec::new(), HashSet::new());
            let mut listed = objects.list(Some(&prefix));
            while let Some(meta) =
                timeout(self.settings.deadline, listed.try_next()).await.map_err(step)?.map_err(failed)?
            {
                once(&mut seen, meta.location.clone(), action, directory)?;
                // Its name ends with a slash, so a removal would be one of what has the name without it.
                if meta.location != prefix {
                    keys.push(meta.location);
                }
            }
            let count = keys.len();
            let mut removed = objects.delete_stream(iter(keys.into_iter().map(Ok)).boxed());
            while let Some(outcome) = timeout(self.settings.deadline, removed.next()).await.map_err(step)? {
                absent(outcome).map_err(failed)?;
            }
            Ok(count)
        })
    }
}

/// The first bytes of an object; all of them, and the refusal, where no part of it can be had: of an object without
/// bytes, and from a server without ranges.
async fn beginning(
    objects: &Arc<dyn ObjectStore>,
    key: &object_store::path::Path,
    nbytes: u64,
) -> object_store::Result<(GetResult, Option<object_store::Error>)> {
    let options = GetOptions { range: Some((0..nbytes).into()), ..GetOptions::default() };
    match objects.get_opts(key, options).await {
        Err(error)
            if is_beyond_the_end(&error) || matches!(error, object_store::Error::NotSupported { .. }) =>
        {
            Ok((objects.get_opts(key, GetOptions::default()).await?, Some(error)))
        }
        found => Ok((found?, None)),
    }
}

/// Corrupt where a listing names an object again: it may never end.
fn once(
    seen: &mut HashSet<object_store::path::Path>,
    key: object_store::path::Path,
    action: &str,
    directory: &Path,
) -> Result<()> {
    if seen.insert(key) {
        return Ok(());
    }
    let message = format!(
        "could not {action}: the store's listing names one object twice, so it may never end; this is a defect of the \
         store"
    );
    Err(Error::new(Kind::Corrupt, message).with("path", directory.display().to_string()))
}

/// What a removal of a version has to say of it; `None` where that is not known.
fn demanded(remover: &Remover, version: &Version) -> Option<String> {
    let known = if remover.by_generation { &version.generation } else { &version.tag };
    known.clone().filter(|tag| !tag.starts_with("W/")) // a weak tag meets no condition
}

/// `None` where something is not there.
fn absent<T>(outcome: object_store::Result<T>) -> object_store::Result<Option<T>> {
    match outcome {
        Err(object_store::Error::NotFound { .. }) => Ok(None),
        outcome => outcome.map(Some),
    }
}

/// What became of an object that was put on a condition.
pub enum Put {
    /// It is there.
    Written(Version),
    /// Another one is there, or none that could be replaced.
    Refused(object_store::Error),
}

/// Puts an object on a condition.
///
/// A refused condition is looked into, because whoever took it for another writer's success would remove what he has
/// written himself. A request that was repeated finds the object that it put at first. Where a new name was refused and
/// nothing has it, the store was about something else at that place, such as the removal of what lies beside it, and is
/// asked again: the caller bounds the time.
/// An error tells that it is not known what is there.
pub async fn put_unless(
    objects: &dyn ObjectStore,
    key: &object_store::path::Path,
    content: Bytes,
    mode: PutMode,
) -> object_store::Result<Put> {
    loop {
        let options = PutOptions { mode: mode.clone(), ..PutOptions::default() };
        let refusal = match objects.put_opts(key, content.clone().into(), options).await {
            Ok(result) => return Ok(Put::Written(Version::written(result, content.len()))),
            Err(error) if is_refused_condition(&error) => error,
            Err(error) => return Err(error),
        };
        match (look(objects, key, &content).await?, &mode) {
            (Present::Same(meta), _) => return Ok(Put::Written(Version::of(&meta))),
            (Present::Nothing, PutMode::Create) | (_, PutMode::Overwrite) => sleep(AGAIN).await,
            _ => return Ok(Put::Refused(refusal)),
        }
    }
}

enum Present {
    Same(ObjectMeta),
    Other,
    Nothing,
}

/// Whether the object of a name has this content. Bytes of the same number are read twice before they count as others.
async fn look(
    objects: &dyn ObjectStore,
    key: &object_store::path::Path,
    content: &Bytes,
) -> object_store::Result<Present> {
    for _ in 0..2 {
        let Some(found) = absent(objects.get_opts(key, GetOptions::default()).await)? else {
            return Ok(Present::Nothing);
        };
        if found.meta.size != content.len() as u64 {
            return Ok(Present::Other);
        }
        let meta = found.meta.clone();
        if found.bytes().await? == content {
            return Ok(Present::Same(meta));
        }
    }
    Ok(Present::Other)
}

/// Whether a store has refused a request because of its condition.
pub fn is_refused_condition(error: &object_store::Error) -> bool {
    matches!(error, object_store::Error::AlreadyExists { .. } | object_store::Error::Precondition { .. })
}
