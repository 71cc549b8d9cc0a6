//! One step of a run, measured instruction by instruction, as a file for a trace viewer. It has the names of the simulated
//! step (`phalanx plan --trace`), so that the two can be laid side by side.

use super::team::Team;
use crate::error::JobError;
use phalanx_device::Timings;
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::trace::Trace;
use phalanx_strategies::world::Rank;
use phalanx_strategies::world::chrome::{Track, document};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Steps before the traced one, which first-touch memory.
const STEPS_BEFORE: u64 = 2;

/// The step of a run that is measured, and what was measured of it on this rank.
#[derive(Debug)]
pub(crate) struct StepTrace {
    path: PathBuf,
    /// Counted from 0.
    pub(crate) step: u64,
    began: Duration,
    timings: Timings,
}

impl StepTrace {
    /// Of the third step of a run that begins at `first_step`, or the last of a shorter one.
    pub(crate) fn new(path: &Path, first_step: u64, total_steps: u64) -> StepTrace {
        let step = (first_step + STEPS_BEFORE).min(total_steps.saturating_sub(1));
        StepTrace { path: path.to_owned(), step, began: Duration::ZERO, timings: Timings::new() }
    }

    /// Notes when the step begins; its instructions are measured into the result.
    pub(crate) fn begin(&mut self) -> &mut Timings {
        // Ranks of one machine have one clock; one before 1970 shows their steps at 0.
        self.began = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.timings.clear();
        &mut self.timings
    }

    /// Where the times of the instructions behind those that were measured go.
    pub(crate) fn go_on(&mut self) -> &mut Timings {
        &mut self.timings
    }

    /// Puts the tracks of all ranks into one file, which the leader writes and says how that went.
    ///
    /// # Errors
    /// When the ranks cannot talk to each other.
    pub(crate) fn write(&self, c: &Compiled, team: &mut Team) -> Result<Option<String>, JobError> {
        let began = team.gather(self.began.as_micros() as u64)?;
        let first = Duration::from_micros(began.into_iter().min().unwrap_or(0));
        let spans = Trace::measured(&c.program, self.began.saturating_sub(first), &self.timings);
        let track = Track { rank: Rank(team.mesh_rank.rank as u32), spans: &spans };
        let tracks = team.gather_texts(track.to_string())?;
        let (step, path) = (self.step + 1, self.path.display());
        // The run is worth more than its trace.
        Ok(team.leads().then(|| match std::fs::write(&self.path, document(tracks)) {
            Ok(()) => format!("trace of step {step} in {path}"),
            Err(error) => format!("the trace of step {step} is lost: cannot write {path}: {error}"),
        }))
    }
}

/// Refuses a file that cannot be written, before there is anything to write; leaves none behind that was not there.
///
/// # Errors
/// [`JobError::Io`].
pub(crate) fn check_writable(path: &Path) -> Result<(), JobError> {
    let failed = |source| JobError::Io { action: "write", path: path.to_owned(), source };
    let was_there = path.exists();
    std::fs::OpenOptions::new().append(true).create(true).open(path).map_err(failed)?;
    if was_there { Ok(()) } else { std::fs::remove_file(path).map_err(failed) }
}
