//! Checkpoints in an object store: S3, Google Cloud Storage, Azure Blob Storage, or a folder behind the same interface.
//!
//! An object appears whole and durable or not at all, so there are no temporary names and nothing to sync. Creating
//! `CLAIM` in a directory replaces making the directory: it fails if `CLAIM` exists, so the writer that creates it owns
//! the directory. `CLAIM` is created first and removed last, `COMMIT` created last and removed first. A later world that creates
//! `COMMIT` as a seal keeps the owner from creating it.
//!
//! This file bridges synchronous code and the asynchronous clients, whose runtime is one thread. It sends parts of large
//! objects while the next parts are hashed. Requests are repeated with `patience`. An upload that a crash interrupts
//! leaves parts that no listing shows but that are billed; a bucket rule that aborts incomplete uploads removes them.

use std::collections::BTreeMap;
use std::future::Future;
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use object_store::path::Path as Key;
use object_store::{
    Error, GetOptions, GetRange, ListResult, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload,
    WriteMultipart,
};
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;

use super::commit::{COMMIT_BYTES_MAX, Seal};
use super::error::{CheckpointError, one_line};
use super::patience::Patience;
use super::store::{NewFile, Store, StoredFile};
use super::vendor::{self, Clients};
use crate::certificates::{UNTRUSTED, WAY_OUT, with_causes};

/// The object whose creation claims a directory.
const CLAIM: &str = "CLAIM";
/// Larger objects are sent in parts of this size.
const PART_BYTES: usize = 8 << 20;
/// Parts in flight at a time, each held in memory.
const PARTS_MAX: usize = 4;
/// Objects deleted at a time.
const DELETIONS_MAX: usize = 32;
/// An operation without an answer for longer than this is not waited for by those who can do something else. A part of a
/// large object takes less.
const STALLED_AFTER: Duration = Duration::from_secs(2);

/// An object store as a [`Store`]; clones share its client.
#[derive(Clone, Debug)]
pub struct Bucket {
    clients: Arc<Mutex<Clients>>,
    /// The URL whose clients read the credentials anew, unless the clients were given.
    url: Option<String>,
    runtime: Arc<Runtime>,
    /// Prefix of the URLs of all its objects: `s3://bucket`.
    base: String,
    operations: Arc<Operations>,
}

/// When the operations that run began.
#[derive(Debug, Default)]
struct Operations {
    begun: Mutex<BTreeMap<u64, Instant>>,
    n_begun: AtomicU64,
}

/// An operation that runs until this is dropped.
struct Running<'a> {
    operations: &'a Operations,
    number: u64,
}

impl Operations {
    fn begin(&self) -> Running<'_> {
        let number = self.n_begun.fetch_add(1, Ordering::Relaxed);
        locked(&self.begun).insert(number, Instant::now());
        Running { operations: self, number }
    }

    fn longest(&self) -> Duration {
        locked(&self.begun).values().map(Instant::elapsed).max().unwrap_or_default()
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        locked(&self.operations.begun).remove(&self.number);
    }
}

/// No panic leaves data under these locks half-changed, so poisoning is ignored.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Bucket {
    /// The object store at `s3://bucket/…`, `gs://bucket/…`, `az://container/…` or `file:///…`. Nothing is sent yet.
    ///
    /// # Errors
    /// When the URL has none of these forms, or settings of its client are missing in the environment.
    pub fn open(url: &str) -> Result<Self, CheckpointError> {
        let clients = vendor::clients(url)?;
        let after_scheme = url.find("://").map_or(0, |at| at + 3);
        let base_len = url[after_scheme..].find('/').map_or(url.len(), |at| after_scheme + at);
        let bucket = Self::of(clients, &url[..base_len])?;
        bucket.key(Path::new(url))?;
        Ok(Self { url: Some(url.to_owned()), ..bucket })
    }

    /// Wraps any object store, whose requests are not repeated; the URLs of its objects begin with `base`.
    ///
    /// # Errors
    /// When the system cannot start a thread.
    pub fn new(objects: Arc<dyn ObjectStore>, base: &str) -> Result<Self, CheckpointError> {
        Self::of(Clients { uploads: objects.clone(), objects, patience: Patience::NONE }, base)
    }

    fn of(clients: Clients, base: &str) -> Result<Self, CheckpointError> {
        let runtime = Builder::new_multi_thread().worker_threads(1).thread_name("objects").enable_all().build();
        let runtime = runtime.map_err(|error| CheckpointError::io("start a thread for", base, &error))?;
        let (clients, runtime) = (Arc::new(Mutex::new(clients)), Arc::new(runtime));
        Ok(Self { clients, url: None, runtime, base: base.to_owned(), operations: Arc::default() })
    }

    /// The key in the bucket for a URL.
    fn key(&self, url: &Path) -> Result<Key, CheckpointError> {
        let bad = |reason: String| CheckpointError::InvalidLocation { path: url.to_owned(), reason };
        let rest = url.to_str().and_then(|text| text.strip_prefix(&self.base));
        Key::parse(rest.ok_or_else(|| bad(format!("it is not in {}", self.base)))?).map_err(|e| bad(one_line(&e)))
    }

    /// Performs a request, and repeats it while the store does not answer. The request must be safe to repeat.
    fn ask<T, R: Future<Output = object_store::Result<T>>>(
        &self,
        request: impl Fn(Clients) -> R,
    ) -> object_store::Result<T> {
        let _running = self.operations.begin();
        let clients = || locked(&self.clients).clone();
        let repeated = clients().patience.repeat(|| request(clients()), || self.renew_credentials());
        self.runtime.block_on(repeated)
    }

    /// As [`Bucket::ask`], for callers to whom all failures are alike.
    fn run<T, R: Future<Output = object_store::Result<T>>>(&self, request: impl Fn(Clients) -> R) -> io::Result<T> {
        self.ask(request).map_err(|error| as_io(&error))
    }

    /// Performs a request that cannot be repeated.
    fn run_once<T>(&self, request: impl Future<Output = object_store::Result<T>>) -> io::Result<T> {
        let _running = self.operations.begin();
        self.runtime.block_on(request).map_err(|error| as_io(&error))
    }

    fn renew_credentials(&self) {
        let Some(url) = &self.url else { return };
        match vendor::clients(url) {
            Ok(clients) => *locked(&self.clients) = clients,
            Err(error) => tracing::warn!(%error, "the credentials cannot be read again"),
        }
    }

    fn put(&self, key: &Key, content: &[u8]) -> object_store::Result<()> {
        let payload = PutPayload::from(content.to_vec());
        self.ask(|clients| {
            let (key, payload) = (key.clone(), payload.clone());
            async move { clients.objects.put_opts(&key, payload, PutOptions::from(PutMode::Create)).await.map(drop) }
        })
    }

    /// Creates an object that must not exist. A request that is repeated because its answer was lost gets "already exists":
    /// the object is then read and compared.
    fn create_object(&self, key: &Key, content: &[u8]) -> io::Result<()> {
        match self.put(key, content) {
            Err(Error::AlreadyExists { .. }) => {
                let found = self.run(|clients| async move { clients.objects.get(key).await?.bytes().await })?;
                if found == content { Ok(()) } else { Err(io::ErrorKind::AlreadyExists.into()) }
            }
            done => done.map_err(|error| as_io(&error)),
        }
    }

    fn delete_all(&self, keys: Vec<Key>) -> io::Result<()> {
        for keys in keys.chunks(DELETIONS_MAX) {
            self.run(|clients| async move {
                let mut deletions = JoinSet::new();
                for key in keys {
                    let (objects, key) = (clients.objects.clone(), key.clone());
                    deletions.spawn(async move { objects.delete(&key).await });
                }
                while let Some(deleted) = deletions.join_next().await {
                    match deleted? {
                        Err(Error::NotFound { .. }) => {}
                        deleted => deleted?,
                    }
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    fn list_at(&self, dir: &Key) -> object_store::Result<ListResult> {
        self.ask(|clients| async move { clients.objects.list_with_delimiter(Some(dir)).await })
    }

    fn remove_dir(&self, dir: &Key) -> io::Result<()> {
        let found = self.list_at(dir).map_err(|error| as_io(&error))?;
        let named = |name: &str| dir.clone().join(name);
        let (commit, claim) = (named("COMMIT"), named(CLAIM));
        let sizes: BTreeMap<Key, u64> =
            found.objects.into_iter().map(|object| (object.location, object.size)).collect();
        let others: Vec<Key> = sizes.keys().filter(|key| **key != commit && **key != claim).cloned().collect();
        if !self.is_sealed(&commit, sizes.get(&commit).copied())? {
            self.delete_all(vec![commit])?;
        } else if sizes.len() == 1 {
            return Ok(());
        }
        self.delete_all(others)?;
        self.delete_all(vec![claim])
    }

    /// Whether a marker of this size is a seal. Nobody removes a seal, because the writer of its directory may only be suspended.
    fn is_sealed(&self, commit: &Key, n_bytes: Option<u64>) -> io::Result<bool> {
        match n_bytes {
            Some(1..=COMMIT_BYTES_MAX) => {
                let found = self.run(|clients| async move { clients.objects.get(commit).await?.bytes().await });
                match found {
                    Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
                    found => Ok(Seal::decode(&found?).is_some()),
                }
            }
            _ => Ok(false),
        }
    }
}

impl Store for Bucket {
    fn claim(&self, dir: &Path) -> Result<bool, CheckpointError> {
        // Unique content, by which a client that repeats its request recognises its own claim.
        let claimed = self.create_object(&self.key(&dir.join(CLAIM))?, &unique());
        match claimed {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            claimed => claimed.map(|()| true).map_err(|error| CheckpointError::io("create", dir, &error)),
        }
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn NewFile>> {
        let key = self.key(path).map_err(io::Error::other)?;
        Ok(Box::new(NewObject { bucket: self.clone(), key, head: Vec::new(), upload: None }))
    }

    fn sync_dir(&self, _: &Path) -> Result<(), CheckpointError> {
        Ok(())
    }

    fn open(&self, path: &Path) -> Result<Option<Arc<dyn StoredFile>>, CheckpointError> {
        let key = self.key(path)?;
        let key = &key;
        match self.ask(|clients| async move { clients.objects.head(key).await }) {
            Err(Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(CheckpointError::io("read", path, &as_io(&error))),
            Ok(meta) => {
                let identity = meta.e_tag.clone().unwrap_or_else(|| meta.last_modified.to_string());
                Ok(Some(Arc::new(FoundObject { bucket: self.clone(), meta, identity })))
            }
        }
    }

    fn list(&self, root: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
        let found = self.list_at(&self.key(root)?);
        // This is the first access to a store; missing credentials are the most frequent failure.
        let found = found.map_err(|error| {
            let reason = match with_causes(&error) {
                text if text.contains(UNTRUSTED) => format!("{UNTRUSTED}; {WAY_OUT}"),
                _ => format!(
                    "{}; credentials come from the environment, AWS_*, GOOGLE_* or AZURE_*, or from AWS's shared files",
                    one_line(&error)
                ),
            };
            CheckpointError::Unreachable { action: "read", path: root.to_owned(), reason }
        })?;
        Ok(found.common_prefixes.iter().filter_map(|key| Some(root.join(key.filename()?))).collect())
    }

    fn remove(&self, dir: &Path) -> Result<(), CheckpointError> {
        let key = self.key(dir)?;
        self.remove_dir(&key).map_err(|error| CheckpointError::io("remove", dir, &error))
    }

    /// Creates the marker, as the writer would.
    fn seal(&self, dir: &Path, generation: u64) -> Result<(), CheckpointError> {
        let commit = dir.join("COMMIT");
        match self.create_object(&self.key(&commit)?, Seal { generation }.encode().as_bytes()) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            sealed => sealed.map_err(|error| CheckpointError::io("write", commit, &error)),
        }
    }

    /// Does nothing: an interrupted removal leaves a directory without a marker, which retention finds again.
    fn sweep(&self, _: &Path) -> Result<(), CheckpointError> {
        Ok(())
    }

    fn is_stalled(&self) -> bool {
        self.operations.longest() > STALLED_AFTER
    }
}

/// An object being written: buffered, or sent in parts once it exceeds one part.
struct NewObject {
    bucket: Bucket,
    key: Key,
    head: Vec<u8>,
    upload: Option<WriteMultipart>,
}

impl Write for NewObject {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let bucket = self.bucket.clone();
        // Tasks of this runtime send the parts.
        let _entered = bucket.runtime.enter();
        match &mut self.upload {
            None if self.head.len() + bytes.len() <= PART_BYTES => self.head.extend_from_slice(bytes),
            None => {
                let key = &self.key;
                let upload = bucket.run(|clients| async move { clients.uploads.put_multipart(key).await })?;
                let upload = self.upload.insert(WriteMultipart::new_with_chunk_size(upload, PART_BYTES));
                upload.write(&std::mem::take(&mut self.head));
                upload.write(bytes);
            }
            Some(upload) => {
                bucket.run_once(upload.wait_for_capacity(PARTS_MAX))?;
                upload.write(bytes);
            }
        }
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl NewFile for NewObject {
    fn finish(self: Box<Self>) -> io::Result<()> {
        match self.upload {
            None => self.bucket.create_object(&self.key, &self.head),
            Some(upload) => self.bucket.run_once(upload.finish()).map(drop),
        }
    }
}

#[derive(Debug)]
struct FoundObject {
    bucket: Bucket,
    meta: ObjectMeta,
    identity: String,
}

impl StoredFile for FoundObject {
    fn n_bytes(&self) -> u64 {
        self.meta.size
    }
    fn identity(&self) -> &str {
        &self.identity
    }
    fn read_exact_at(&self, out: &mut [u8], start: u64) -> io::Result<()> {
        if out.is_empty() {
            return Ok(());
        }
        let options = GetOptions {
            range: Some(GetRange::Bounded(start..start + out.len() as u64)),
            if_match: self.meta.e_tag.clone(),
            ..GetOptions::default()
        };
        let found = self.bucket.run(|clients| {
            let options = options.clone();
            async move { clients.objects.get_opts(&self.meta.location, options).await?.bytes().await }
        })?;
        if found.len() != out.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        out.copy_from_slice(&found);
        Ok(())
    }
}

/// Unique bytes: the standard library seeds each hasher at random.
fn unique() -> [u8; 16] {
    let half = || RandomState::new().hash_one(std::process::id()).to_le_bytes();
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&half());
    bytes[8..].copy_from_slice(&half());
    bytes
}

/// Errors that do not tell whether the object exists or matches become `NotConnected`.
fn as_io(error: &Error) -> io::Error {
    let kind = match error {
        Error::NotFound { .. } => io::ErrorKind::NotFound,
        Error::AlreadyExists { .. } => io::ErrorKind::AlreadyExists,
        Error::Precondition { .. } => io::ErrorKind::InvalidData,
        _ => io::ErrorKind::NotConnected,
    };
    io::Error::new(kind, one_line(error))
}
