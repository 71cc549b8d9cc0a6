//! Uploads the files of a folder as one commit of a model on the Hub.
//!
//! Protocol: the Hub's HTTP API (`api/repos/create`, `preupload`, `commit`), and git's large file storage (`objects/batch`) for the files
//! that the Hub wants there, with its transfers `basic` and `multipart`.
//!
//! Invariants:
//! - `PUSH-1` The commit comes last, so a branch never names a file whose bytes the Hub does not have.
//! - `PUSH-2` The token goes to the Hub only, not to the storage that the Hub names.
//! - `PUSH-3` Links are not followed: only files of the folder are uploaded.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use futures_util::stream;
use reqwest::header::{ACCEPT, CONTENT_LENGTH, CONTENT_TYPE, ETAG};
use reqwest::{Body, Response, StatusCode};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::answers::{Actions, Batch, Committed, Modes, Stored, Upload};
use super::connection::{Connection, Failure, SILENCE_MAX};
use super::error::HubError;
use super::fetch::{Hub, Progress, check_revision};
use super::hash::Hasher;
use super::listing::Hash;
use super::name::RepoName;
use crate::foreign_file;

/// The largest answer.
const ANSWER_BYTES_MAX: usize = 16 << 20;

/// Files that the Hub is asked about at a time; it refuses longer lists.
const FILES_AT_A_TIME: usize = 256;

/// Bytes of a file by which the Hub decides where it belongs.
const SAMPLE_BYTES: usize = 512;

/// Bytes of the files that are part of the commit itself.
const INLINE_BYTES_MAX: u64 = 256 << 20;

/// Bytes of a file that are read at a time.
const CHUNK_BYTES: usize = 1 << 20;

/// How often progress is told.
const TOLD_EVERY: Duration = Duration::from_millis(200);

const JSON: &str = "application/json";
const LFS_JSON: &str = "application/vnd.git-lfs+json";

/// What to upload, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Push {
    /// The model on the Hub.
    pub name: RepoName,
    /// The branch.
    pub revision: String,
    /// The folder.
    pub folder: PathBuf,
    /// What the commit is about, in a line.
    pub message: String,
}

/// A finished upload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pushed {
    /// The page of the commit, or the commit where the Hub names no page.
    pub commit: String,
    /// Files of the commit.
    pub n_files: usize,
    /// Their bytes.
    pub total_bytes: u64,
    /// Bytes of these that the Hub had.
    pub known_bytes: u64,
}

impl Hub {
    /// Creates a model on the Hub, unless it is there. A private one is seen by its owner only. `revision` is the branch that a later
    /// [`Hub::push`] names.
    ///
    /// # Errors
    /// When there is no token, its owner may not create the model, or no branch can have this name.
    pub fn create(&self, name: &RepoName, revision: &str, is_private: bool) -> Result<(), HubError> {
        self.check(name, revision)?;
        Connection::run(self, async |connection| Session { connection, name, revision }.create(is_private).await)
    }

    /// Uploads the files of a folder as one commit. What the Hub has already is not uploaded again, so an interrupted upload continues with
    /// the file at which it ended. `progress` is called at the beginning of each file and now and then.
    ///
    /// # Errors
    /// When the folder cannot be read, or the Hub does not take it. The branch then is as it was before.
    pub fn push(&self, push: &Push, progress: &mut dyn FnMut(Progress<'_>)) -> Result<Pushed, HubError> {
        self.check(&push.name, &push.revision)?;
        let files = local_files(&push.folder)?;
        Connection::run(self, async |connection| {
            let session = Session { connection, name: &push.name, revision: &push.revision };
            session.push(push, files, progress).await
        })
    }

    fn check(&self, name: &RepoName, revision: &str) -> Result<(), HubError> {
        check_revision(revision)?;
        match (self.is_offline(), &self.token) {
            (true, _) => Err(HubError::PushOffline { name: name.clone() }),
            (false, None) => Err(HubError::NoToken { name: name.clone() }),
            (false, Some(_)) => Ok(()),
        }
    }
}

/// A file to upload.
#[derive(Debug)]
struct LocalFile {
    /// Its path in the folder.
    path: PathBuf,
    /// The same with slashes, as the Hub knows it.
    name: String,
    file: Arc<File>,
    n_bytes: u64,
    place: Place,
}

/// Where the Hub wants a file.
#[derive(Debug, PartialEq, Eq)]
enum Place {
    /// In git, as part of the commit.
    Git,
    /// In large file storage, with this SHA-256.
    Storage(String),
    /// Nowhere: the repository's `.gitignore` names it.
    Nowhere,
}

impl LocalFile {
    fn io(&self, action: &'static str) -> impl Fn(io::Error) -> HubError {
        move |error| HubError::io(action, &self.path, &error)
    }

    fn sample(&self) -> Result<Vec<u8>, HubError> {
        self.bytes(self.n_bytes.min(SAMPLE_BYTES as u64) as usize)
    }

    /// The first bytes.
    fn bytes(&self, n: usize) -> Result<Vec<u8>, HubError> {
        let mut bytes = vec![0; n];
        self.file.read_exact_at(&mut bytes, 0).map_err(self.io("read"))?;
        Ok(bytes)
    }

    /// Its SHA-256, if it belongs to large file storage.
    fn hash(&self) -> Option<&str> {
        match &self.place {
            Place::Storage(hash) => Some(hash),
            Place::Git | Place::Nowhere => None,
        }
    }

    fn hashed(&self) -> Result<String, HubError> {
        let (mut hasher, mut bytes) = (Hasher::new(&Hash::Sha256(String::new()), self.n_bytes), vec![0; CHUNK_BYTES]);
        let mut input = (&*self.file).take(self.n_bytes);
        loop {
            match input.read(&mut bytes).map_err(self.io("read"))? {
                0 => return Ok(hasher.hex()),
                n => hasher.update(&bytes[..n]),
            }
        }
    }
}

/// The regular files in a folder and its folders, in order of their names. Names that begin with a dot are left out.
fn local_files(folder: &Path) -> Result<Vec<LocalFile>, HubError> {
    let (mut files, mut folders) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(dir) = folders.pop() {
        let error = |error: io::Error| HubError::io("read", &dir, &error);
        for entry in fs::read_dir(&dir).map_err(error)? {
            let entry = entry.map_err(error)?;
            let (path, kind) = (entry.path(), entry.file_type().map_err(error)?);
            let name = path.strip_prefix(folder).expect("it is in the folder").to_str().map(str::to_owned);
            let name = name.ok_or_else(|| HubError::FileName { path: path.clone() })?;
            if entry.file_name().to_string_lossy().starts_with('.') {
                continue;
            }
            if kind.is_dir() {
                folders.push(path);
            } else if kind.is_file() {
                let opened = foreign_file::open(&path).map_err(|error| HubError::io("open", &path, &error))?;
                let n_bytes = opened.metadata().map_err(|error| HubError::io("read", &path, &error))?.len();
                files.push(LocalFile { path, name, file: Arc::new(opened), n_bytes, place: Place::Git });
            }
        }
    }
    files.sort_by(|a, b| a.name.cmp(&b.name));
    match files.is_empty() {
        true => Err(HubError::NothingToPush { folder: folder.to_owned() }),
        false => Ok(files),
    }
}

/// An upload that runs.
struct Session<'a> {
    connection: Connection,
    name: &'a RepoName,
    revision: &'a str,
}

impl Session<'_> {
    async fn create(&self, is_private: bool) -> Result<(), HubError> {
        let (owner, name) = match self.name.as_str().split_once('/') {
            Some((owner, name)) => (Value::from(owner), name),
            None => (Value::Null, self.name.as_str()),
        };
        let mut wanted = json!({ "name": name, "organization": owner });
        if is_private {
            wanted["private"] = true.into();
        }
        let url = format!("{}/api/repos/create", self.connection.endpoint());
        let created = self.connection.repeated(async || {
            let request = self.connection.post(&url).header(CONTENT_TYPE, JSON);
            // Conflict: it is there.
            self.connection.send_or(StatusCode::CONFLICT, request.body(wanted.to_string()), self.refused()).await
        });
        match created.await {
            Ok(_) => Ok(()),
            // Whoever may write to a model that is there need not be allowed to create one.
            Err(HubError::NotWritable { .. }) if self.exists().await? => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn exists(&self) -> Result<bool, HubError> {
        let url = format!("{}/api/models/{}", self.connection.endpoint(), self.name);
        let sent = async || self.connection.send(self.connection.get(&url), self.refused()).await;
        match self.connection.repeated(sent).await {
            Ok(_) => Ok(true),
            Err(HubError::NotWritable { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    async fn push(
        &self,
        push: &Push,
        mut files: Vec<LocalFile>,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<Pushed, HubError> {
        let total_bytes: u64 = files.iter().map(|file| file.n_bytes).sum();
        for some in files.chunks_mut(FILES_AT_A_TIME) {
            self.assign(some).await?;
        }
        files.retain(|file| file.place != Place::Nowhere);
        let (mut done, mut known) = (0, 0);
        for some in files.chunks(FILES_AT_A_TIME) {
            let large: Vec<&LocalFile> = some.iter().filter(|file| file.hash().is_some()).collect();
            let stored = if large.is_empty() { Vec::new() } else { self.batch(&large).await? };
            for file in some {
                let mut told =
                    |sent: u64| progress(Progress { file: &file.path, done_bytes: done + sent, total_bytes });
                told(0);
                let of_file = |stored: &&Stored| file.hash() == Some(stored.oid.as_str());
                match stored.iter().find(of_file).map(|stored| stored.actions.as_ref()) {
                    Some(Some(actions)) => self.upload(file, actions, &mut told).await?,
                    Some(None) => known += file.n_bytes,
                    None if file.hash().is_some() => return Err(self.answer("it says nothing about a file")),
                    None => {}
                }
                done += file.n_bytes;
            }
        }
        let committed = self.commit(&files, &push.message).await?;
        let commit = committed.url.or(committed.oid).unwrap_or_default();
        Ok(Pushed { commit, n_files: files.len(), total_bytes: done, known_bytes: known })
    }

    /// Asks where files belong, and hashes those for large file storage.
    async fn assign(&self, files: &mut [LocalFile]) -> Result<(), HubError> {
        let about = |file: &LocalFile| {
            Ok(json!({ "path": file.name, "sample": STANDARD.encode(file.sample()?), "size": file.n_bytes }))
        };
        let asked: Vec<Value> = files.iter().map(about).collect::<Result<_, HubError>>()?;
        let url = self.api("preupload");
        let modes: Modes = self.ask(&url, JSON, &json!({ "files": asked }).to_string()).await?;
        for file in files {
            let mode = modes.files.iter().find(|mode| mode.path == file.name);
            let mode = mode.ok_or_else(|| self.answer("it says nothing about a file"))?;
            // Object stores take no empty files.
            file.place = match (mode.should_ignore, mode.upload_mode.as_str()) {
                (true, _) => Place::Nowhere,
                (false, "lfs") if file.n_bytes > 0 => Place::Storage(file.hashed()?),
                (false, _) => Place::Git,
            };
        }
        Ok(())
    }

    /// Asks the large file storage what it has of these files, and where the others go.
    async fn batch(&self, files: &[&LocalFile]) -> Result<Vec<Stored>, HubError> {
        let objects: Vec<Value> =
            files.iter().map(|file| json!({ "oid": file.hash(), "size": file.n_bytes })).collect();
        let wanted = json!({
            "operation": "upload",
            "transfers": ["basic", "multipart"],
            "objects": objects,
            "hash_algo": "sha256",
            "ref": { "name": self.revision },
        });
        let url = format!("{}/{}.git/info/lfs/objects/batch", self.connection.endpoint(), self.name);
        let batch: Batch = self.ask(&url, LFS_JSON, &wanted.to_string()).await?;
        match batch.objects.iter().find_map(|object| object.error.as_ref()) {
            Some(error) => Err(self.answer(&format!("{} (code {})", error.message, error.code))),
            None => Ok(batch.objects),
        }
    }

    async fn upload(&self, file: &LocalFile, actions: &Actions, told: &mut dyn FnMut(u64)) -> Result<(), HubError> {
        let Some(upload) = &actions.upload else { return Ok(()) };
        match upload.parts().map_err(|reason| self.answer(reason))? {
            None => {
                let _response = self.put(file, 0..file.n_bytes, &upload.href, Some(upload), told).await?;
            }
            Some((chunk_bytes, urls)) if file.n_bytes.div_ceil(chunk_bytes) == urls.len() as u64 => {
                let mut parts = Vec::new();
                for (url, first) in urls.iter().zip((0..file.n_bytes).step_by(chunk_bytes as usize)) {
                    let range = first..file.n_bytes.min(first + chunk_bytes);
                    let response = self.put(file, range, url, None, &mut |sent| told(first + sent)).await?;
                    let etag = response.headers().get(ETAG).and_then(|etag| etag.to_str().ok());
                    let etag = etag.ok_or_else(|| self.answer("a part of a file has no ETag"))?.to_owned();
                    parts.push(json!({ "partNumber": parts.len() + 1, "etag": etag }));
                }
                let whole = json!({ "oid": file.hash(), "parts": parts }).to_string();
                self.post(&upload.href, &whole).await?;
            }
            Some(_) => return Err(self.answer("its parts are not those of the file")),
        }
        match &actions.verify {
            Some(verify) => {
                let stored = json!({ "oid": file.hash(), "size": file.n_bytes }).to_string();
                self.post(&verify.href, &stored).await
            }
            None => Ok(()),
        }
    }

    /// Uploads a part of a file; tells how many of its bytes were sent.
    async fn put(
        &self,
        file: &LocalFile,
        range: std::ops::Range<u64>,
        url: &str,
        headers: Option<&Upload>,
        told: &mut dyn FnMut(u64),
    ) -> Result<Response, HubError> {
        self.check(url)?;
        let mut n = 0;
        loop {
            let sent = Arc::new(AtomicU64::new(0));
            let mut request = self.connection.put(url);
            for (name, value) in headers.iter().flat_map(|upload| upload.own_headers()) {
                request = request.header(name, value);
            }
            let request = request.header(CONTENT_LENGTH, range.end - range.start).body(body_of(
                file.file.clone(),
                range.clone(),
                sent.clone(),
            ));
            let sending = self.connection.send(request, self.refused_by_storage());
            match self.watched(sending, &sent, told).await {
                Ok(response) => return Ok(response),
                Err(failure) => self.connection.pause_or_fail(failure, &mut n).await?,
            }
        }
    }

    /// Waits for an upload that is not silent, and tells how far it is.
    async fn watched(
        &self,
        sending: impl Future<Output = Result<Response, Failure>>,
        sent: &AtomicU64,
        told: &mut dyn FnMut(u64),
    ) -> Result<Response, Failure> {
        let mut sending = std::pin::pin!(sending);
        let mut last = (Instant::now(), 0);
        loop {
            tokio::select! {
                answer = &mut sending => return answer,
                () = tokio::time::sleep(TOLD_EVERY) => {}
            }
            let now = sent.load(Relaxed);
            told(now);
            if now != last.1 {
                last = (Instant::now(), now);
            }
            if last.0.elapsed() > SILENCE_MAX {
                return Err(Failure::Passing(self.connection.network(io::Error::from(io::ErrorKind::TimedOut))));
            }
        }
    }

    /// The commit of all files. If it is repeated after a lost answer, the Hub finds nothing new in it.
    async fn commit(&self, files: &[LocalFile], message: &str) -> Result<Committed, HubError> {
        let inline: u64 = files.iter().filter(|file| file.hash().is_none()).map(|file| file.n_bytes).sum();
        if inline > INLINE_BYTES_MAX {
            return Err(self.answer("it wants large files in git itself"));
        }
        let mut lines = json!({ "key": "header", "value": { "summary": message, "description": "" } }).to_string();
        for file in files {
            let line = match file.hash() {
                Some(hash) => json!({ "key": "lfsFile", "value": {
                    "path": file.name, "algo": "sha256", "oid": hash, "size": file.n_bytes,
                } }),
                None => json!({ "key": "file", "value": {
                    "content": STANDARD.encode(file.bytes(file.n_bytes as usize)?), "path": file.name, "encoding": "base64",
                } }),
            };
            lines += "\n";
            lines += &line.to_string();
        }
        lines += "\n";
        self.ask(&self.api("commit"), "application/x-ndjson", &lines).await
    }

    /// The answer of the Hub to a request.
    async fn ask<T: DeserializeOwned>(&self, url: &str, kind: &str, wanted: &str) -> Result<T, HubError> {
        let json = self.connection.repeated(async || {
            let request = self.connection.post(url).header(CONTENT_TYPE, kind).header(ACCEPT, kind);
            let response = self.connection.send(request.body(wanted.to_owned()), self.refused()).await?;
            self.connection.body(response, ANSWER_BYTES_MAX, || self.answer("it is too long")).await
        });
        serde_json::from_slice(&json.await?).map_err(|error| self.answer(&error.to_string()))
    }

    /// A request to an address that the Hub has named. Only the Hub itself gets the token (PUSH-2).
    async fn post(&self, url: &str, json: &str) -> Result<(), HubError> {
        self.check(url)?;
        let is_of_hub = url.strip_prefix(self.connection.endpoint()).is_some_and(|rest| rest.starts_with('/'));
        let request = || {
            let request = match is_of_hub {
                true => self.connection.post(url),
                false => self.connection.post_elsewhere(url),
            };
            request.header(CONTENT_TYPE, LFS_JSON).header(ACCEPT, LFS_JSON).body(json.to_owned())
        };
        self.connection.repeated(async || self.connection.send(request(), self.refused()).await).await.map(drop)
    }

    /// Refuses addresses at which others could read what is sent.
    fn check(&self, url: &str) -> Result<(), HubError> {
        let is_plain = url.starts_with("http://") && !self.connection.endpoint().starts_with("https://");
        match is_plain || url.starts_with("https://") {
            true => Ok(()),
            false => Err(self.answer("an address for files is not safe")),
        }
    }

    fn api(&self, what: &str) -> String {
        let revision = self.revision.replace('/', "%2F");
        format!("{}/api/models/{}/{what}/{revision}", self.connection.endpoint(), self.name)
    }

    fn refused(&self) -> impl Fn(u16) -> HubError {
        |status| HubError::NotWritable { name: self.name.clone(), revision: self.revision.to_owned(), status }
    }

    fn refused_by_storage(&self) -> impl Fn(u16) -> HubError {
        |status| self.answer(&format!("its storage refuses a file with status {status}"))
    }

    fn answer(&self, reason: &str) -> HubError {
        HubError::Answer { reason: reason.to_owned() }
    }
}

/// The bytes of a part of a file, as they are sent.
fn body_of(file: Arc<File>, range: std::ops::Range<u64>, sent: Arc<AtomicU64>) -> Body {
    let first = range.start;
    Body::wrap_stream(stream::unfold(first, move |at| {
        let (file, sent, end) = (file.clone(), sent.clone(), range.end);
        async move {
            if at >= end {
                return None;
            }
            let mut bytes = vec![0; CHUNK_BYTES.min((end - at) as usize)];
            let read = file.read_exact_at(&mut bytes, at);
            let next = at + bytes.len() as u64;
            sent.store(next - first, Relaxed);
            Some((read.map(|()| bytes), next))
        }
    }))
}

#[cfg(test)]
#[path = "push_tests.rs"]
mod tests;
