//! A digest of a model directory's weights: directories with bit-identical weight files have the same digest.

use super::error::HfError;
use crate::foreign_file;
use std::path::Path;

/// First bytes of the BLAKE3 hash of all weight files of a directory, by name, in hexadecimal.
///
/// # Errors
/// When a file cannot be read, or the directory has no weight file.
pub fn weights_digest(dir: &Path) -> Result<String, HfError> {
    let io = |path: &Path| {
        let path = path.to_owned();
        move |error: std::io::Error| HfError::Io { action: "read", path, reason: error.to_string() }
    };
    let entries = std::fs::read_dir(dir).map_err(io(dir))?;
    let paths = entries.map(|entry| Ok(entry.map_err(io(dir))?.path()));
    let mut paths = paths.collect::<Result<Vec<_>, HfError>>()?;
    paths.retain(|path| path.extension().is_some_and(|e| e == "safetensors"));
    paths.sort();
    if paths.is_empty() {
        return Err(HfError::NoWeights { dir: dir.to_owned(), has_pickle: false });
    }
    let mut hasher = blake3::Hasher::new();
    for path in paths {
        hasher.update_reader(foreign_file::open(&path).map_err(io(&path))?).map_err(io(&path))?;
    }
    Ok(hasher.finalize().to_hex()[..32].to_owned())
}
