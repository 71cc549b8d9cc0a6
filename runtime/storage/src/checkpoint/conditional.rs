//! Small objects that are replaced conditionally: the lease and the record of a job in the object store of its checkpoints.
//!
//! Each call is one request with a time limit. Its caller decides whether to repeat it, because only the caller can tell whether
//! a replacement without an answer has taken effect. After a request that the store refuses, the next one reads the
//! credentials anew.

use std::future::Future;
use std::io::{self, ErrorKind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use object_store::path::Path as Key;
use object_store::{Error, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload, UpdateVersion};
use tokio::runtime::{Builder, Runtime};

use super::error::{CheckpointError, one_line};
use super::patience::Failure;
use super::vendor;

/// The version of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectVersion {
    /// The entity tag.
    pub e_tag: Option<String>,
    /// The generation, in stores that count them.
    pub generation: Option<String>,
}

/// Objects below one URL.
#[derive(Debug)]
pub struct ConditionalObjects {
    url: String,
    prefix: Key,
    client: Mutex<Arc<dyn ObjectStore>>,
    has_stale_credentials: AtomicBool,
    /// Taken when dropped: an event loop may not wait for the end of another one.
    runtime: Option<Runtime>,
}

impl ConditionalObjects {
    /// The objects below `s3://bucket/…`, `gs://bucket/…` or `az://container/…`. Nothing is sent yet.
    ///
    /// # Errors
    /// When the URL has none of these forms, settings of its client are missing, or the system cannot start a thread.
    pub fn open(url: &str) -> Result<Self, CheckpointError> {
        let bad = |reason: String| CheckpointError::InvalidLocation { path: Path::new(url).to_owned(), reason };
        if url.starts_with("file:") {
            return Err(bad("name the folder by its path: it needs no object store".into()));
        }
        let client = vendor::client_of_requests(url)?;
        let rest = url.split_once("://").map_or("", |(_, rest)| rest);
        let prefix = rest.split_once('/').map_or("", |(_, prefix)| prefix);
        let prefix = Key::parse(prefix).map_err(|error| bad(one_line(&error)))?;
        let runtime = Builder::new_multi_thread().worker_threads(1).thread_name("lease").enable_all().build();
        let runtime = runtime.map_err(|error| CheckpointError::io("start a thread for", url, &error))?;
        let (client, has_stale_credentials) = (Mutex::new(client), AtomicBool::new(false));
        Ok(Self { url: url.to_owned(), prefix, client, has_stale_credentials, runtime: Some(runtime) })
    }

    /// The URL below which the objects are.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// An object and its version; `None` if there is none.
    ///
    /// # Errors
    /// When the store does not answer within `limit`, or refuses.
    pub fn read(&self, name: &str, limit: Duration) -> io::Result<Option<(Vec<u8>, ObjectVersion)>> {
        let key = self.prefix.clone().join(name);
        let found = self.ask(limit, |client| async move {
            let found = client.get(&key).await?;
            let version = ObjectVersion { e_tag: found.meta.e_tag.clone(), generation: found.meta.version.clone() };
            Ok((found.bytes().await?.to_vec(), version))
        });
        match found {
            Err(Error::NotFound { .. }) => Ok(None),
            found => found.map(Some).map_err(as_io),
        }
    }

    /// Replaces an object if it has the version `expected` (`None`: if there is no object) and returns its new version; `None`
    /// if it has another one.
    ///
    /// # Errors
    /// When the store does not answer within `limit`, or refuses. If it did not answer, the object may be replaced, even later.
    pub fn replace(
        &self,
        name: &str,
        expected: Option<&ObjectVersion>,
        bytes: &[u8],
        limit: Duration,
    ) -> io::Result<Option<ObjectVersion>> {
        let key = self.prefix.clone().join(name);
        let mode = expected.map_or(PutMode::Create, |version| {
            PutMode::Update(UpdateVersion { e_tag: version.e_tag.clone(), version: version.generation.clone() })
        });
        let payload = PutPayload::from(bytes.to_vec());
        let replaced = self.ask(limit, |client| async move {
            let put = client.put_opts(&key, payload, PutOptions::from(mode)).await?;
            Ok(ObjectVersion { e_tag: put.e_tag, generation: put.version })
        });
        match replaced {
            Err(Error::AlreadyExists { .. } | Error::Precondition { .. }) => Ok(None),
            replaced => replaced.map(Some).map_err(as_io),
        }
    }

    /// Performs one request on the thread of the clients. The calling thread may belong to another event loop.
    fn ask<T: Send + 'static, R: Future<Output = object_store::Result<T>> + Send + 'static>(
        &self,
        limit: Duration,
        request: impl FnOnce(Arc<dyn ObjectStore>) -> R,
    ) -> object_store::Result<T> {
        let asking = request(self.client()?);
        let (reply, answer) = channel();
        let runtime = self.runtime.as_ref().expect("it is taken when this is dropped");
        runtime.spawn(async move {
            let answered = tokio::time::timeout(limit, asking).await.unwrap_or_else(|_| {
                Err(Error::Generic { store: "object store", source: format!("no answer within {limit:?}").into() })
            });
            // The receiver waits.
            let _ = reply.send(answered);
        });
        let answer = answer.recv().expect("the request sends its answer, or the one of its time limit");
        if answer.as_ref().is_err_and(|error| Failure::of(error) == Failure::Credentials) {
            self.has_stale_credentials.store(true, Ordering::Release);
        }
        answer
    }

    fn client(&self) -> object_store::Result<Arc<dyn ObjectStore>> {
        // A client is replaced whole.
        let mut client = self.client.lock().unwrap_or_else(PoisonError::into_inner);
        if self.has_stale_credentials.swap(false, Ordering::AcqRel) {
            *client = vendor::client_of_requests(&self.url)
                .map_err(|error| Error::Generic { store: "object store", source: error.into() })?;
        }
        Ok(client.clone())
    }
}

impl Drop for ConditionalObjects {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

fn as_io(error: Error) -> io::Error {
    let kind = match Failure::of(&error) {
        Failure::Temporary => ErrorKind::TimedOut,
        Failure::Credentials => ErrorKind::PermissionDenied,
        Failure::Answer => ErrorKind::Other,
    };
    io::Error::new(kind, one_line(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folder_behind_a_url_is_refused_because_it_has_no_conditional_replacement() {
        let refused = ConditionalObjects::open("file:///folder/control").unwrap_err().to_string();

        assert!(refused.contains("by its path"), "{refused}");
    }

    #[test]
    fn location_that_names_no_store_is_refused() {
        for url in ["ftp://host/x", "s3:///x", "runs/one"] {
            assert!(ConditionalObjects::open(url).is_err(), "{url}");
        }
    }
}
