//! `events.jsonl`: a line for every incident, with its cause and how long each phase of the recovery took.

use crate::train::JobError;
use phalanx_strategies::elastic::incident::{Phase, Timeline};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// An incident as a line of the file.
#[derive(Debug, Serialize)]
struct Line {
    /// Seconds since 1970 when members trained again.
    time: f64,
    generation: u64,
    /// Who and why, as a sentence.
    cause: String,
    /// What else happened before it was over.
    also: Vec<String>,
    /// Milliseconds by phase.
    phases_ms: BTreeMap<String, f64>,
    total_ms: f64,
}

/// The file. Appended to: a job that goes on keeps its history.
#[derive(Debug)]
pub(crate) struct IncidentLog {
    path: PathBuf,
    file: File,
}

impl IncidentLog {
    /// Opens the file in a job's folder.
    ///
    /// # Errors
    /// When it cannot be written.
    pub(crate) fn open(output_dir: &Path) -> Result<IncidentLog, JobError> {
        let path = output_dir.join("events.jsonl");
        let file = File::options().append(true).create(true).open(&path);
        let file = file.map_err(|source| JobError::Io { action: "write", path: path.clone(), source })?;
        Ok(IncidentLog { path, file })
    }

    /// Adds an incident.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub(crate) fn write(&mut self, timeline: &Timeline) -> Result<(), JobError> {
        let ms = |duration: std::time::Duration| (duration.as_secs_f64() * 1e6).round() / 1e3;
        let name = |phase: &Phase| format!("{phase:?}").to_lowercase();
        let line = Line {
            time: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64(),
            generation: timeline.generation.0,
            cause: timeline.cause.to_string(),
            also: timeline.also.iter().map(ToString::to_string).collect(),
            phases_ms: Phase::ALL.iter().zip(timeline.phases).map(|(phase, time)| (name(phase), ms(time))).collect(),
            total_ms: ms(timeline.total()),
        };
        let mut text = serde_json::to_vec(&line).unwrap_or_default();
        text.push(b'\n');
        self.file.write_all(&text).map_err(|source| JobError::Io { action: "write", path: self.path.clone(), source })
    }
}
