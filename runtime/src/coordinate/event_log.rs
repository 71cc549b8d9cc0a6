//! `events.jsonl`: the history of a job, for users and programs.

use crate::error::JobError;
use phalanx_actors::events::Event;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Writes one line for each event of the job; incidents have their phases.
pub(crate) struct EventLog {
    path: PathBuf,
    file: fs::File,
}

impl EventLog {
    /// Opens the file in a job's folder. Lines are appended, so a resumed job keeps its history.
    ///
    /// # Errors
    /// When the file cannot be written.
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
