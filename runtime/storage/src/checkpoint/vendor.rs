//! Clients of object stores, by the scheme of a URL.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::local::LocalFileSystem;
use object_store::{ObjectStore, RetryConfig};

use super::bucket::one_line;
use super::error::CheckpointError;

/// Supported locations, for error messages.
const SUPPORTED: &str = "expected a folder, s3://bucket/…, gs://bucket/…, az://container/… or file:///folder";
/// The check before training, or a save, fails when a store does not answer for this long.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// Retries of one request, with growing pauses.
const RETRIES_MAX: usize = 5;

/// The client for a URL. Keys, regions and endpoints come from the sources of the vendor's own tools: the environment
/// (`AWS_*`, `GOOGLE_*`, `AZURE_*`), files that it names, or the machine's role. No file of a job contains them.
///
/// # Errors
/// When the scheme is unknown, the bucket is missing, or the client rejects its settings.
pub(super) fn client(url: &str) -> Result<Arc<dyn ObjectStore>, CheckpointError> {
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
    let retry = RetryConfig { max_retries: RETRIES_MAX, retry_timeout: ANSWER_TIMEOUT, ..RetryConfig::default() };
    let built: object_store::Result<Arc<dyn ObjectStore>> = match scheme {
        "s3" | "s3a" => {
            let builder = AmazonS3Builder::from_env().with_url(url).with_retry(retry);
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
