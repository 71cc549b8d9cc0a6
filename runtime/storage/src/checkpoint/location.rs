//! The store that a path or a URL names.

use crate::checkpoint::bucket::Bucket;
use crate::checkpoint::disk::Disk;
use crate::checkpoint::error::CheckpointError;
use crate::checkpoint::store::Store;
use std::path::Path;
use std::sync::Arc;

/// The store of a path or URL. This call looks up credentials of object stores in the environment and in the other sources
/// of the vendors' clients.
///
/// # Errors
/// When a URL's object store is unknown or its settings are missing.
pub fn at(path: &Path) -> Result<Arc<dyn Store>, CheckpointError> {
    match path.to_str().filter(|_| is_url(path)) {
        Some(url) => Ok(Arc::new(Bucket::open(url)?)),
        None => Ok(Arc::new(Disk::default())),
    }
}

/// Whether this is a URL rather than a path.
pub fn is_url(path: &Path) -> bool {
    let scheme = path.to_str().and_then(|text| text.split_once("://"));
    scheme.is_some_and(|(scheme, _)| scheme.bytes().all(|c| c.is_ascii_alphanumeric()))
}
