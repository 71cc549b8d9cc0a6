//! Processes that meet through files of a folder.

use anyhow::{Context, Result, ensure};
use std::path::Path;
use std::time::{Duration, Instant};

/// Writes a file that no reader sees unfinished.
///
/// # Errors
/// When the folder cannot be written.
pub fn write(path: &Path, text: &str) -> Result<()> {
    let unfinished = path.with_extension("unfinished");
    std::fs::write(&unfinished, text).with_context(|| format!("writing {}", unfinished.display()))?;
    std::fs::rename(&unfinished, path).with_context(|| format!("writing {}", path.display()))
}

/// The contents of a file, once it is there.
///
/// # Errors
/// When it does not come in time.
pub fn read(path: &Path, patience: Duration) -> Result<String> {
    let begin = Instant::now();
    loop {
        if let Ok(text) = std::fs::read_to_string(path) {
            return Ok(text);
        }
        ensure!(begin.elapsed() < patience, "{} does not come", path.display());
        std::thread::sleep(Duration::from_millis(2));
    }
}
