//! Downloads repositories into the cache.
//!
//! Invariants:
//! - `FETCH-1` A file has its final name only when all its bytes have the hash that the listing gives it.
//! - `FETCH-2` No file is written outside the repository's folder in the cache, whatever a server answers.
//! - `FETCH-3` An interrupted download continues behind the bytes that it has.
//! - `FETCH-4` The token goes to the Hub only, not to the storage to which the Hub redirects.

use std::env;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use reqwest::header::{CONTENT_RANGE, RANGE};
use reqwest::{Response, StatusCode};

use super::cache::{HubCache, home, is_inside, path};
use super::connection::{Connection, Failure, SILENCE_MAX};
use super::error::HubError;
use super::hash::Hasher;
use super::listing::{Listing, RemoteFile, is_wanted};
use super::name::{Kind, RepoName};
use crate::foreign_file;

const ENDPOINT: &str = "https://huggingface.co";

/// The largest answer with a list of files.
const LISTING_BYTES_MAX: usize = 128 << 20;

/// A token file is a line.
const TOKEN_BYTES_MAX: u64 = 4096;

/// The Hub, or a server that speaks its protocol, and the cache that downloads go to.
#[derive(Debug, Clone)]
pub struct Hub {
    pub(super) endpoint: String,
    pub(super) token: Option<String>,
    cache: HubCache,
    /// Whether the network is not asked.
    offline: bool,
    /// The first pause before a request is repeated.
    pub(super) pause: Duration,
    /// How long a process that downloads the same file may write nothing until it is not waited for.
    patience: Duration,
}

/// What to download.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// What the repository holds.
    pub kind: Kind,
    /// Its name.
    pub name: RepoName,
    /// A branch, tag or commit.
    pub revision: String,
    /// All files, also those that Phalanx does not read.
    pub all: bool,
}

/// How far a download is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress<'a> {
    /// The file that is downloaded.
    pub file: &'a Path,
    /// Bytes of all files that are there.
    pub done_bytes: u64,
    /// Bytes of all files.
    pub total_bytes: u64,
}

/// A finished download.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fetched {
    /// The folder with the files.
    pub snapshot: PathBuf,
    /// Number of files.
    pub n_files: usize,
    /// Their bytes.
    pub total_bytes: u64,
    /// Files that are left out because nothing here reads them.
    pub n_left_out: usize,
}

impl Hub {
    /// The Hub of `HF_ENDPOINT`, or the public one, with the token and the cache of this user; only the cache, if
    /// `HF_HUB_OFFLINE` or `TRANSFORMERS_OFFLINE` is set.
    pub fn of_user() -> Self {
        let var = |name: &str| env::var(name).ok().filter(|value| !value.is_empty());
        let hub =
            Self::at(&var("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.to_owned()), token_of_user(), HubCache::of_user());
        Self { offline: is_offline(var), ..hub }
    }

    /// A server that speaks the Hub's protocol.
    pub fn at(endpoint: &str, token: Option<String>, cache: HubCache) -> Self {
        let endpoint = endpoint.trim_end_matches('/').to_owned();
        Self { endpoint, token, cache, offline: false, pause: Duration::from_secs(1), patience: SILENCE_MAX }
    }

    /// The cache that downloads go to.
    pub fn cache(&self) -> &HubCache {
        &self.cache
    }

    /// Whether only the cache is asked.
    pub fn is_offline(&self) -> bool {
        self.offline
    }

    /// Repeats failed requests sooner, for tests.
    pub fn with_pause(self, pause: Duration) -> Self {
        Self { pause, patience: 60 * pause, ..self }
    }

    /// Downloads what is not in the cache yet. `progress` is called at the beginning of each file and now and then.
    ///
    /// # Errors
    /// When the repository or a file cannot be had, or a file is not what the listing says. What was downloaded stays.
    pub fn fetch(&self, request: &Request, progress: &mut dyn FnMut(Progress<'_>)) -> Result<Fetched, HubError> {
        if self.offline {
            return self.cached(request);
        }
        Connection::run(self, async |connection| self.fetch_with(connection, request, progress).await)
    }

    /// What the cache has.
    fn cached(&self, request: &Request) -> Result<Fetched, HubError> {
        let Request { kind, name, revision, .. } = request;
        let Some(snapshot) = self.cache.snapshot(*kind, name, revision) else {
            let (name, revision, cache) = (name.clone(), revision.clone(), self.cache.root().to_owned());
            return Err(HubError::Offline { kind: *kind, name, revision, cache });
        };
        let mut found = Fetched { snapshot: snapshot.clone(), n_files: 0, total_bytes: 0, n_left_out: 0 };
        let mut folders = vec![snapshot];
        while let Some(folder) = folders.pop() {
            let io = |error: io::Error| HubError::io("read", &folder, &error);
            for entry in fs::read_dir(&folder).map_err(io)? {
                let path = entry.map_err(io)?.path();
                let metadata = fs::metadata(&path).map_err(|error| HubError::io("read", &path, &error))?;
                if metadata.is_dir() {
                    folders.push(path);
                } else {
                    found.n_files += 1;
                    found.total_bytes += metadata.len();
                }
            }
        }
        Ok(found)
    }

    async fn fetch_with(
        &self,
        connection: Connection,
        request: &Request,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<Fetched, HubError> {
        check_revision(&request.revision)?;
        let session = Session { hub: self, request, connection };
        let listing = session.listing().await?;
        let n_listed = listing.files.len();
        let wanted = |file: &RemoteFile| request.all || is_wanted(request.kind, &file.path);
        let files: Vec<RemoteFile> = listing.files.into_iter().filter(wanted).collect();
        let total_bytes = files.iter().try_fold(0u64, |sum, file| sum.checked_add(file.n_bytes));
        let total_bytes =
            total_bytes.ok_or_else(|| HubError::Listing { reason: "its sizes have no sum".to_owned() })?;
        let folder = self.cache.repository(request.kind, &request.name);
        let snapshot = folder.join("snapshots").join(&listing.commit);
        make_folder(&snapshot)?;
        let mut before = 0;
        for file in &files {
            let mut told = |done: u64| progress(Progress { file: &file.path, done_bytes: before + done, total_bytes });
            session.file(&listing.commit, file, &folder, &mut told).await?;
            link(&folder, &snapshot, file)?;
            before += file.n_bytes;
        }
        // Last, so that a branch never names a snapshot that lacks files.
        if request.revision != listing.commit {
            write_ref(&folder, &request.revision, &listing.commit)?;
        }
        Ok(Fetched { snapshot, n_files: files.len(), total_bytes, n_left_out: n_listed - files.len() })
    }
}

/// A download that runs.
struct Session<'a> {
    hub: &'a Hub,
    request: &'a Request,
    connection: Connection,
}

impl Session<'_> {
    async fn listing(&self) -> Result<Listing, HubError> {
        let Request { kind, name, revision, .. } = self.request;
        let revision = revision.replace('/', "%2F");
        let url = format!("{}/api/{}/{name}/revision/{revision}?blobs=true", self.hub.endpoint, kind.plural());
        Listing::read(&self.connection.repeated(async || self.read_listing(&url).await).await?)
    }

    async fn read_listing(&self, url: &str) -> Result<Vec<u8>, Failure> {
        let response = self.get(url, 0).await?;
        let too_large = || HubError::Listing { reason: format!("it is larger than {} MiB", LISTING_BYTES_MAX >> 20) };
        self.connection.body(response, LISTING_BYTES_MAX, too_large).await
    }

    /// A request for what follows the first `have` bytes.
    async fn get(&self, url: &str, have: u64) -> Result<Response, Failure> {
        let mut request = self.connection.get(url);
        if have > 0 {
            request = request.header(RANGE, format!("bytes={have}-"));
        }
        let refused = |status| {
            let Request { kind, name, revision, .. } = self.request.clone();
            HubError::Refused { kind, name, revision, status, has_token: self.hub.token.is_some() }
        };
        self.connection.send(request, refused).await
    }

    /// Downloads a file, unless its blob is there.
    async fn file(
        &self,
        commit: &str,
        file: &RemoteFile,
        folder: &Path,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), HubError> {
        let blobs = folder.join("blobs");
        make_folder(&blobs)?;
        let blob = blobs.join(file.hash.hex());
        progress(0);
        if blob.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.len() == file.n_bytes) {
            return Ok(());
        }
        let mut part = Part::open(&blob, file, self.hub.patience)?;
        if blob.metadata().is_ok_and(|metadata| metadata.len() == file.n_bytes) {
            // Another process has finished it while this one waited for the lock.
            return Ok(());
        }
        let segment = match self.request.kind {
            Kind::Model => String::new(),
            Kind::Dataset => "datasets/".to_owned(),
        };
        let path = file.path.components().map(|part| escaped(&part.as_os_str().to_string_lossy()));
        let path = path.collect::<Vec<_>>().join("/");
        let url = format!("{}/{segment}{}/resolve/{commit}/{path}", self.hub.endpoint, self.request.name);
        let mut attempt = 0;
        while part.n_bytes < file.n_bytes {
            let before = part.n_bytes;
            if let Err(failure) = self.read_into(&url, &mut part, progress).await {
                if part.n_bytes > before {
                    attempt = 0;
                }
                self.connection.pause_or_fail(failure, &mut attempt).await?;
            }
        }
        part.finish(&blob)
    }

    async fn read_into(&self, url: &str, part: &mut Part<'_>, progress: &mut dyn FnMut(u64)) -> Result<(), Failure> {
        let mut response = self.get(url, part.n_bytes).await?;
        if part.n_bytes > 0 && !continues(&response, part.n_bytes) {
            part.restart()?;
        }
        while let Some(bytes) = response.chunk().await.map_err(|error| self.connection.passing(error))? {
            part.append(&bytes)?;
            progress(part.n_bytes);
        }
        match part.n_bytes < part.file.n_bytes {
            true => Err(Failure::Passing(self.connection.network(io::Error::from(io::ErrorKind::UnexpectedEof)))),
            false => Ok(()),
        }
    }
}

/// Whether an answer begins behind the first `have` bytes.
fn continues(response: &Response, have: u64) -> bool {
    let range = response.headers().get(CONTENT_RANGE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let start = range.strip_prefix("bytes ").and_then(|range| range.split('-').next());
    response.status() == StatusCode::PARTIAL_CONTENT && start.and_then(|start| start.parse().ok()) == Some(have)
}

/// The first bytes of a file.
struct Part<'a> {
    file: &'a RemoteFile,
    path: PathBuf,
    output: File,
    hasher: Hasher,
    n_bytes: u64,
}

impl<'a> Part<'a> {
    /// Opens what an earlier attempt has left, once no other process writes it. A process that makes no progress is not waited
    /// for: the bytes then go to a file of this process, and its hash decides as ever (FETCH-1).
    fn open(blob: &Path, file: &'a RemoteFile, patience: Duration) -> Result<Self, HubError> {
        let mut path = blob.with_extension("incomplete");
        let mut output = foreign_file::open_lock(&path).map_err(|error| HubError::io("lock", &path, &error))?;
        let n_written = || Ok(path.metadata().ok().map(|metadata| metadata.len()));
        let tell =
            || tracing::warn!(path = %path.display(), "waiting for another process that downloads the same file");
        let taken = foreign_file::wait_for_lock(&output, patience, n_written, tell);
        match taken {
            Ok(true) => {}
            Ok(false) => {
                tracing::warn!(path = %path.display(), "the process that downloads this file makes no progress; downloading it here, too");
                path = blob.with_extension(format!("incomplete-{}", std::process::id()));
                output = foreign_file::open_lock(&path).map_err(|error| HubError::io("create", &path, &error))?;
            }
            // Without locks, two processes may write the same bytes; the hash is checked.
            Err(error) => tracing::warn!(path = %path.display(), %error, "the file system has no locks"),
        }
        let mut part = Self { file, path, output, hasher: Hasher::new(&file.hash, file.n_bytes), n_bytes: 0 };
        let mut bytes = vec![0; 1 << 20];
        loop {
            let n = part.output.read(&mut bytes).map_err(|error| HubError::io("read", &part.path, &error))?;
            part.n_bytes += n as u64;
            if part.n_bytes > file.n_bytes {
                part.restart()?;
                return Ok(part);
            }
            if n == 0 {
                return Ok(part);
            }
            part.hasher.update(&bytes[..n]);
        }
    }

    fn restart(&mut self) -> Result<(), HubError> {
        let emptied = self.output.set_len(0).and_then(|()| self.output.seek(SeekFrom::Start(0)));
        emptied.map_err(|error| HubError::io("write", &self.path, &error))?;
        (self.hasher, self.n_bytes) = (Hasher::new(&self.file.hash, self.file.n_bytes), 0);
        Ok(())
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), HubError> {
        let n_bytes = self.n_bytes + bytes.len() as u64;
        if n_bytes > self.file.n_bytes {
            return Err(self.damaged());
        }
        self.output.write_all(bytes).map_err(|error| HubError::io("write", &self.path, &error))?;
        self.hasher.update(bytes);
        self.n_bytes = n_bytes;
        Ok(())
    }

    /// FETCH-1
    fn finish(mut self, blob: &Path) -> Result<(), HubError> {
        let hasher = std::mem::replace(&mut self.hasher, Hasher::new(&self.file.hash, 0));
        if hasher.hex() != self.file.hash.hex() {
            return Err(self.damaged());
        }
        let stored = self.output.sync_all().and_then(|()| fs::rename(&self.path, blob));
        stored.map_err(|error| HubError::io("write", blob, &error))
    }

    /// The error for other bytes than those of the listing, which are not kept.
    fn damaged(&self) -> HubError {
        // Best effort: bytes that are kept have the wrong hash again.
        let _ = fs::remove_file(&self.path);
        HubError::Damaged { file: self.file.path.clone() }
    }
}

/// The link to a blob in a snapshot, as the Hub's own client makes it.
fn link(folder: &Path, snapshot: &Path, file: &RemoteFile) -> Result<(), HubError> {
    let place = snapshot.join(&file.path);
    let depth = file.path.components().count() + 1;
    let target: PathBuf = (0..depth).map(|_| "..").collect::<PathBuf>().join("blobs").join(file.hash.hex());
    debug_assert!(folder.join("blobs").is_dir());
    if fs::read_link(&place).is_ok_and(|found| found == target) {
        return Ok(());
    }
    let error = |error: io::Error| HubError::io("create", &place, &error);
    make_folder(place.parent().unwrap_or(snapshot))?;
    match fs::remove_file(&place) {
        Err(found) if found.kind() != io::ErrorKind::NotFound => return Err(error(found)),
        _ => {}
    }
    symlink(&target, &place).map_err(error)
}

/// Refuses what is no part of an address or of a path.
pub(super) fn check_revision(revision: &str) -> Result<(), HubError> {
    match is_inside(Path::new(revision)) && !revision.contains(['?', '#', '%', '\\', '\0']) {
        true => Ok(()),
        false => Err(HubError::Revision { revision: revision.to_owned() }),
    }
}

fn write_ref(folder: &Path, revision: &str, commit: &str) -> Result<(), HubError> {
    let path = folder.join("refs").join(revision);
    make_folder(path.parent().unwrap_or(folder))?;
    let temporary = folder.join(format!("ref-{}", std::process::id()));
    let written = fs::write(&temporary, commit).and_then(|()| fs::rename(&temporary, &path));
    written.map_err(|error| HubError::io("write", &path, &error))
}

fn make_folder(path: &Path) -> Result<(), HubError> {
    fs::create_dir_all(path).map_err(|error| HubError::io("create the folder", path, &error))
}

/// A part of a path in an address.
fn escaped(part: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    part.bytes()
        .map(|byte| if is_plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

/// Whether a variable forbids the network, with the words of the Hub's own client.
fn is_offline(var: impl Fn(&str) -> Option<String>) -> bool {
    let value = var("HF_HUB_OFFLINE").or_else(|| var("TRANSFORMERS_OFFLINE"));
    value.is_some_and(|value| ["1", "ON", "YES", "TRUE"].contains(&value.to_uppercase().as_str()))
}

/// The token in the environment or in the file where the Hub's own client keeps it.
fn token_of_user() -> Option<String> {
    let var = |name: &str| env::var_os(name).filter(|value| !value.is_empty());
    let text = |name: &str| var(name).and_then(|value| value.into_string().ok());
    let file = path(&var, "HF_TOKEN_PATH").unwrap_or_else(|| home(&var).join("token"));
    let of_file = || match foreign_file::read_text(&file, TOKEN_BYTES_MAX) {
        Ok(token) => Some(token),
        Err(error) => {
            if foreign_file::is_there(&file).unwrap_or(true) {
                tracing::warn!(%error, path = %file.display(), "cannot read the token of the Hub; requests go without it");
            }
            None
        }
    };
    let token = text("HF_TOKEN").or_else(|| text("HUGGING_FACE_HUB_TOKEN")).or_else(of_file)?;
    Some(token.trim().to_owned()).filter(|token| !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_graphic()))
}

#[cfg(test)]
#[path = "fetch_tests.rs"]
mod tests;
