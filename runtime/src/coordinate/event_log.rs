//! `events.jsonl`: what happens to a job, for people and programs that come later.

use crate::error::JobError;
use phalanx_actors::events::Event;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

/// A line for everything that happens to the job; incidents have their phases.
pub(crate) struct EventLog {
    path: PathBuf,
    file: fs::File,
}

impl EventLog {
    /// Opens the file in a job's folder. Appended to: a job that goes on keeps its history.
    ///
    /// # Errors
    /// When it cannot be written.
    pub(crate) fn open(output_dir: &Path) -> Result<EventLog, JobError> {
        let path = output_dir.join("events.jsonl");
        let file = fs::File::options().append(true).create(true).open(&path);
        let file = file.map_err(|source| JobError::Io { action: "write", path: path.clone(), source })?;
        Ok(EventLog { path, file })
    }

    /// Adds a line.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub(crate) fn write(&mut self, event: &Event) -> Result<(), JobError> {
        let mut line = serde_json::to_vec(event).unwrap_or_default();
        line.push(b'\n');
        self.file.write_all(&line).map_err(|source| JobError::Io { action: "write", path: self.path.clone(), source })
    }
}
