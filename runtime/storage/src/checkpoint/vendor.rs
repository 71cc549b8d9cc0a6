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

/// What fits, for messages.
const FITS: &str =
    "checkpoints lie in a folder, or at s3://bucket/…, gs://bucket/…, az://container/… or file:///folder";
/// A store that does not answer for so long is an error: of the check before training, or of a save.
const PATIENCE: Duration = Duration::from_secs(60);
/// Tries of one request, with growing pauses.
const RETRIES_MAX: usize = 5;

/// The client for a URL. Keys, regions and endpoints come from where the vendor's own tools have them: the environment
/// (`AWS_*`, `GOOGLE_*`, `AZURE_*`), files that it names, or the machine's role. They stand in no file of a job.
///
/// # Errors
/// When the scheme is not known, a bucket is missing, or the client finds what it was given unusable.
pub(super) fn client(url: &str) -> Result<Arc<dyn ObjectStore>, CheckpointError> {
    let bad = |reason: String| CheckpointError::InvalidLocation { path: PathBuf::from(url), reason };
    let (scheme, rest) = url.split_once("://").ok_or_else(|| bad(FITS.into()))?;
    let bucket = rest.split('/').next().unwrap_or_default();
    match (scheme, bucket.is_empty()) {
        ("s3" | "s3a" | "gs" | "az" | "abfs" | "abfss", true) => return Err(bad("it names no bucket".into())),
        ("file", false) => return Err(bad("it has a host; a folder of this machine is file:///folder".into())),
        ("file", true) => {
            let files = LocalFileSystem::new().with_fsync(true).with_automatic_cleanup(true);
            return Ok(Arc::new(files));
        }
        _ => {}
    }
    // The HTTP client takes its cryptography from here; a second installation changes nothing.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let retry = RetryConfig { max_retries: RETRIES_MAX, retry_timeout: PATIENCE, ..RetryConfig::default() };
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
        _ => return Err(bad(FITS.into())),
    };
    built.map_err(|error| bad(one_line(&error)))
}
