//! One step of a run, measured instruction by instruction, as a file for a trace viewer. It uses the names of the simulated
//! step (`phalanx plan --trace`), so that the two can be compared.

use super::team::Team;
use crate::error::JobError;
use phalanx_device::Timings;
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::trace::Trace;
use phalanx_strategies::world::Rank;
use phalanx_strategies::world::chrome::{Track, document};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Steps before the traced one, which touch memory for the first time.
const STEPS_BEFORE: u64 = 2;

/// The traced step of a run, and its measurements on this rank.
#[derive(Debug)]
pub(crate) struct StepTrace {
    path: PathBuf,
    /// Counted from 0.
    pub(crate) step: u64,
    began: Duration,
    timings: Timings,
}

impl StepTrace {
    /// Traces the third step of a run that begins at `first_step`, or the last step of a shorter run.
    pub(crate) fn new(path: &Path, first_step: u64, total_steps: u64) -> StepTrace {
        let step = (first_step + STEPS_BEFORE).min(total_steps.saturating_sub(1));
        StepTrace { path: path.to_owned(), step, began: Duration::ZERO, timings: Timings::new() }
    }

    /// Records when the step begins; returns the buffer for its timings.
    pub(crate) fn begin(&mut self) -> &mut Timings {
        // Ranks of one machine share one clock; if it is before 1970, their steps begin at 0.
        self.began = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.timings.clear();
        &mut self.timings
    }

    /// The buffer for timings of further instructions.
    pub(crate) fn go_on(&mut self) -> &mut Timings {
        &mut self.timings
    }

    /// Collects the tracks of all ranks in one file. On the leader, which writes it, returns a note about the result.
    ///
    /// # Errors
    /// When the exchange between ranks fails.
    pub(crate) fn write(&self, c: &Compiled, team: &mut Team) -> Result<Option<String>, JobError> {
        let began = team.gather(self.began.as_micros() as u64)?;
        let first = Duration::from_micros(began.into_iter().min().unwrap_or(0));
        let spans = Trace::measured(&c.program, self.began.saturating_sub(first), &self.timings);
        let track = Track { rank: Rank(team.mesh_rank.rank as u32), spans: &spans };
        let tracks = team.gather_texts(track.to_string())?;
        let (step, path) = (self.step + 1, self.path.display());
        // A failed trace must not stop the run.
        Ok(team.leads().then(|| match std::fs::write(&self.path, document(tracks)) {
            Ok(()) => format!("trace of step {step} in {path}"),
            Err(error) => format!("the trace of step {step} is lost: cannot write {path}: {error}"),
        }))
    }
}

/// Refuses a file that cannot be written before there is anything to write; leaves no new file behind.
///
/// # Errors
/// [`JobError::Io`].
pub(crate) fn check_writable(path: &Path) -> Result<(), JobError> {
    let failed = |source| JobError::Io { action: "write", path: path.to_owned(), source };
    let found = std::fs::metadata(path);
    let was_there = found.is_ok();
    if found.is_ok_and(|found| found.file_type().is_fifo()) {
        // It would wait until somebody reads it.
        return Err(failed(std::io::Error::new(std::io::ErrorKind::InvalidInput, "it is a pipe")));
    }
    std::fs::OpenOptions::new().append(true).create(true).open(path).map_err(failed)?;
    if was_there { Ok(()) } else { std::fs::remove_file(path).map_err(failed) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pipe_for_a_trace_is_refused_before_the_run() {
        let dir = tempfile::tempdir().unwrap();
        let (pipe, file) = (dir.path().join("pipe"), dir.path().join("trace.json"));
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());

        let refused = check_writable(&pipe).unwrap_err().to_string();
        check_writable(&file).unwrap();

        assert!(refused.contains("it is a pipe"), "{refused}");
        assert!(!file.exists(), "it is written at the end");
    }
}
