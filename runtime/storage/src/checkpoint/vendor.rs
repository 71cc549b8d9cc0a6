//! Clients of object stores, by the scheme of a URL.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::local::LocalFileSystem;
use object_store::{BackoffConfig, ObjectStore, RetryConfig};

use super::credentials::with_shared_files;
use super::error::{CheckpointError, one_line};
use super::patience::Patience;

/// Supported locations, for error messages.
const SUPPORTED: &str = "expected a folder, s3://bucket/…, gs://bucket/…, az://container/… or file:///folder";
/// Retries of a request by a client, with growing pauses; callers repeat the request for longer.
const RETRIES_MAX: usize = 5;

/// The clients for one URL.
#[derive(Clone, Debug)]
pub(super) struct Clients {
    /// For requests that callers repeat.
    pub(super) objects: Arc<dyn ObjectStore>,
    /// For large objects. Only a client can repeat a part under its number, so this one is patient by itself.
    pub(super) uploads: Arc<dyn ObjectStore>,
    /// How long callers repeat requests.
    pub(super) patience: Patience,
}

/// The clients for a URL, which read the credentials anew.
///
/// # Errors
/// As [`client`].
pub(super) fn clients(url: &str) -> Result<Clients, CheckpointError> {
    let patience = if url.starts_with("file:") { Patience::NONE } else { Patience::STORE };
    let brief =
        RetryConfig { max_retries: RETRIES_MAX, retry_timeout: Patience::STORE.total, ..RetryConfig::default() };
    let backoff = BackoffConfig { max_backoff: Patience::STORE.pause_max, ..BackoffConfig::default() };
    let patient = RetryConfig { max_retries: usize::MAX, retry_timeout: Patience::STORE.total, backoff };
    Ok(Clients { objects: client(url, brief)?, uploads: client(url, patient)?, patience })
}

/// A client whose requests are not repeated, for callers with time limits.
///
/// # Errors
/// As [`client`].
pub(super) fn client_of_requests(url: &str) -> Result<Arc<dyn ObjectStore>, CheckpointError> {
    client(url, RetryConfig { max_retries: 0, retry_timeout: Duration::ZERO, ..RetryConfig::default() })
}

/// The client for a URL. Keys, regions and endpoints come from the sources of the vendor's own tools: the environment
/// (`AWS_*`, `GOOGLE_*`, `AZURE_*`), files that it names, the shared files of AWS's tools, or the machine's role. No file of a
/// job contains them.
///
/// # Errors
/// When the scheme is unknown, the bucket is missing, or the client rejects its settings.
fn client(url: &str, retry: RetryConfig) -> Result<Arc<dyn ObjectStore>, CheckpointError> {
    let bad = |reason: String| CheckpointError::InvalidLocation { path: PathBuf::from(url), reason };
    let (scheme, rest) = url.split_once("://").ok_or_else(|| bad(SUPPORTED.into()))?;
    let bucket = rest.split('/').next().unwrap_or_default();
    match (scheme, bucket.is_empty()) {
        ("s3" | "s3a" | "gs" | "az" | "abfs" | "abfss", true) => return Err(bad("it names no bucket".into())),
        ("file", false) => return Err(bad("it has a host; write a local folder as file:///folder".into())),
        ("file", true) => {
            let files = LocalFileSystem::new().with_fsync(true).with_automatic_cleanup(true);
            return Ok(Arc::new(files));
        }
        _ => {}
    }
    // The HTTP client takes its cryptography from here; a second installation changes nothing.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let built: object_store::Result<Arc<dyn ObjectStore>> = match scheme {
        "s3" | "s3a" => {
            let builder = with_shared_files(AmazonS3Builder::from_env()).map_err(bad)?.with_url(url).with_retry(retry);
            builder.build().map(|client| Arc::new(client) as _)
        }
        "gs" => {
            let builder = GoogleCloudStorageBuilder::from_env().with_url(url).with_retry(retry);
            builder.build().map(|client| Arc::new(client) as _)
        }
        "az" | "abfs" | "abfss" => {
            let builder = MicrosoftAzureBuilder::from_env().with_url(url).with_retry(retry);
            builder.build().map(|client| Arc::new(client) as _)
        }
        _ => return Err(bad(SUPPORTED.into())),
    };
    built.map_err(|error| bad(one_line(&error)))
}
