//! What is known of a job whose coordinator does not answer: its record, its history and its measurements. A job that is over, or
//! was killed, is no fault of a network.

use crate::config::output::OutputSection;
use crate::control_place::ControlPlace;
use crate::coordinate::standby::is_renewed;
use crate::error::JobError;
use crate::train::metrics::Measured;
use crate::units::{short_duration, utc};
use phalanx_actors::events::{Event, What};
use phalanx_storage::foreign_file;
use phalanx_strategies::elastic::coordinator::Activity;
use phalanx_strategies::elastic::coordinator::status::Status;
use phalanx_strategies::elastic::identity::Step;
use phalanx_strategies::elastic::message::{Ending, Record};
use phalanx_strategies::elastic::timing::Timing;
use phalanx_strategies::mesh::Mesh;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The traces of a job that no coordinator answers for.
#[derive(Clone, Debug)]
pub(crate) struct Past {
    /// The coordinator's durable record.
    record: Record,
    /// How the job ended, if it has and was not resumed since.
    ending: Option<Ending>,
    /// Milliseconds since 1970 of its last event: of its end, if it has ended.
    last_event_ms: Option<u64>,
    /// Its last step.
    pub(crate) measured: Option<Measured>,
    /// The number of the last step that is known.
    step: u64,
}

impl Past {
    /// Reads what the job with this `output_dir` left; `None` if it left no record, or if a coordinator renews its lease, so that it
    /// only cannot be reached from here.
    pub(crate) fn of(output_dir: &Path, timing: &Timing) -> Option<Past> {
        let section = OutputSection { output_dir: output_dir.to_owned(), ..OutputSection::default() };
        let place = ControlPlace::of(output_dir, timing).ok()?;
        let store = place.store_as_it_is();
        let record = store.read_record().ok().filter(|record| *record != Record::default())?;
        let past = Past::from(record, &section.folder());
        // A store that does not answer tells nothing about the coordinator.
        (past.ending.is_some() || is_renewed(&*store, timing) == Some(false)).then_some(past)
    }

    /// What a job with this record left in its folder.
    pub(crate) fn from(record: Record, folder: &Path) -> Past {
        let (ended, last_event_ms) = history(&folder.join("events.jsonl"));
        let measured = Measured::latest(folder);
        let base = record.world_plan.as_ref().map_or(0, |world_plan| world_plan.base.step.0);
        let step = measured.as_ref().map_or(0, |measured| measured.last.step).max(base).max(record.checkpoint.step.0);
        Past { ending: record.ending.clone().or(ended), record, last_event_ms, measured, step }
    }

    /// Whether the job is over; otherwise it was killed.
    pub(crate) const fn is_over(&self) -> bool {
        self.ending.is_some()
    }

    /// What became of the job, in a word for programs.
    pub(crate) fn outcome(&self) -> &'static str {
        match &self.ending {
            Some(Ending::Failed(_)) => "failed",
            Some(Ending::Finished) if self.was_stopped() => "stopped",
            Some(Ending::Finished) => "finished",
            None => "killed",
        }
    }

    /// Whether a job that has ended well was stopped before its last step.
    fn was_stopped(&self) -> bool {
        self.record.requests.stop
            || self.measured.as_ref().is_some_and(|measured| self.step < measured.last.total_steps)
    }

    /// What became of the job, in a sentence.
    pub(crate) fn sentence(&self, now: SystemTime) -> String {
        let total = self.measured.as_ref().map_or(0, |measured| measured.last.total_steps);
        let when = self.last_event_ms.map_or(String::new(), |ms| {
            let then = UNIX_EPOCH + Duration::from_millis(ms);
            let ago = now.duration_since(then).unwrap_or_default();
            format!(" {} ago ({})", short_duration(ago), utc(ms))
        });
        let at = if total > 0 { format!("step {} of {total}", self.step) } else { format!("step {}", self.step) };
        match &self.ending {
            Some(Ending::Failed(why)) => format!("the job ended{when} at {at}: it has failed: {why}"),
            Some(Ending::Finished) if self.was_stopped() => {
                format!("the job ended{when}: it was stopped at {at}")
            }
            Some(Ending::Finished) => format!("the job ended{when}: it has finished at {at}"),
            None => {
                let last = if when.is_empty() { String::new() } else { format!("; its last event was{when}") };
                format!("the job is not running: it has not ended, but its coordinator is gone{last}")
            }
        }
    }

    /// What is durable, and how the job continues.
    pub(crate) fn durable(&self) -> String {
        match self.record.checkpoint.step.0 {
            0 => "no checkpoint was saved".into(),
            step => format!("the last checkpoint is of step {step}; `phalanx train` continues from it"),
        }
    }

    /// The job in the form of a status, without nodes.
    pub(crate) fn status(&self, now: SystemTime) -> Status {
        let record = &self.record;
        let mesh = record.world_plan.as_ref().map(|world_plan| world_plan.mesh);
        let now_ms = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64;
        Status {
            term: record.term,
            generation: record.generation,
            activity: if matches!(self.ending, Some(Ending::Finished)) { Activity::Finished } else { Activity::Failed },
            blocked: (!self.is_over()).then(|| self.sentence(now)),
            mesh,
            wanted: record.wanted.or(mesh).unwrap_or(Mesh::ONE),
            step: Step(self.step),
            requests: record.requests,
            n_saves: record.n_saves,
            n_unsaved: 0,
            unsaved: None,
            nodes: Vec::new(),
            timelines: Vec::new(),
            checkpoint: record.checkpoint,
            checkpoint_age_ms: self.last_event_ms.map_or(0, |ms| now_ms.saturating_sub(ms)),
            ending: self.ending.clone(),
            faults: Vec::new(),
        }
    }

    /// Milliseconds since 1970 of its last event.
    pub(crate) const fn last_event_ms(&self) -> Option<u64> {
        self.last_event_ms
    }
}

/// The ending after which nobody led the job again, and the time of the last event.
fn history(path: &Path) -> (Option<Ending>, Option<u64>) {
    let (mut ending, mut last) = (None, None);
    let Ok(file) = foreign_file::open(path) else { return (None, None) };
    for line in BufReader::new(file).lines().map_while(Result::ok) {
        let Ok(event) = serde_json::from_str::<Event>(&line) else { continue };
        match event.what {
            What::Ended { ending: how } => (ending, last) = (Some(how), Some(event.unix_ms)),
            // Nodes confirm the end after it.
            What::NodesNotified if ending.is_some() => {}
            What::Leads => (ending, last) = (None, Some(event.unix_ms)),
            _ => last = Some(event.unix_ms),
        }
    }
    (ending, last)
}

/// The traces of a job that does not answer for the reason `error`, or else that error.
///
/// # Errors
/// The error, if the job left nothing, or its coordinator lives.
pub(crate) fn instead_of(error: JobError, output_dir: &Path, timing: &Timing) -> Result<Past, JobError> {
    use crate::error::control_plane::ControlPlaneError::{DamagedEntry, NoAnswer, Trust};
    match error {
        // Only the user who runs a job may ask its coordinator.
        JobError::ControlPlane(NoAnswer { .. } | DamagedEntry { .. } | Trust(_)) => {
            Past::of(output_dir, timing).ok_or(error)
        }
        error => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_strategies::elastic::checkpoint::Checkpoint;
    use phalanx_strategies::elastic::identity::{Generation, Term};
    use phalanx_strategies::elastic::message::Requests;

    /// A folder with these events, a second apart.
    fn folder(events: &[What]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let line = |(i, what): (usize, &What)| {
            Event { unix_ms: 1000 * (i as u64 + 1), term: Term(1), what: what.clone() }.to_line() + "\n"
        };
        let text: String = events.iter().enumerate().map(line).collect();
        std::fs::write(dir.path().join("events.jsonl"), text).unwrap();
        dir
    }

    fn measured(dir: &tempfile::TempDir, step: u64) {
        let line = format!(
            r#"{{"step":{step},"total_steps":9,"loss":1.5,"grad_norm":1.0,"lr":1.0,"tokens_per_s":7.0,"step_ms":250.0,"epoch":0.0,
            "predicted_tokens":1,"mfu_pct":0.0,"memory_bytes":1,"data_wait_pct":0.0}}"#
        );
        std::fs::write(dir.path().join("metrics.jsonl"), line.replace('\n', "") + "\n").unwrap();
    }

    fn ended(ending: Ending) -> What {
        What::Ended { ending }
    }

    fn sentence(past: &Past) -> String {
        past.sentence(UNIX_EPOCH + Duration::from_secs(62))
    }

    #[test]
    fn end_of_a_job_is_told_with_its_time_and_step() {
        let dir = folder(&[What::Leads, ended(Ending::Finished), What::NodesNotified]);
        measured(&dir, 9);

        let past = Past::from(Record { ending: Some(Ending::Finished), ..Record::default() }, dir.path());

        let time = "1m 00s ago (1970-01-01 00:00:02 UTC)";
        assert_eq!(sentence(&past), format!("the job ended {time}: it has finished at step 9 of 9"));
        assert_eq!((past.is_over(), past.status(SystemTime::now()).step), (true, Step(9)));
    }

    #[test]
    fn job_that_was_stopped_or_has_failed_is_told_from_a_finished_one() {
        let dir = folder(&[What::Leads, ended(Ending::Finished)]);
        measured(&dir, 4);
        let stopped = Past::from(Record::default(), dir.path());
        let requests = Requests { stop: true, ..Requests::default() };
        let asked = Past::from(Record { requests, ..Record::default() }, folder(&[ended(Ending::Finished)]).path());
        let failed = Past::from(Record::default(), folder(&[ended(Ending::Failed("a disk is full".into()))]).path());

        assert!(sentence(&stopped).ends_with("it was stopped at step 4 of 9"), "{}", sentence(&stopped));
        assert!(sentence(&asked).ends_with("it was stopped at step 0"), "{}", sentence(&asked));
        assert!(sentence(&failed).ends_with("it has failed: a disk is full"), "{}", sentence(&failed));
        assert_eq!(failed.status(SystemTime::now()).activity, Activity::Failed);
    }

    #[test]
    fn job_that_was_killed_or_resumed_after_its_end_has_not_ended() {
        let checkpoint = Checkpoint { generation: Generation(2), step: Step(30) };
        let dir = folder(&[What::Leads, ended(Ending::Finished), What::Leads, What::Checkpoint(checkpoint)]);

        let past = Past::from(Record { checkpoint, ..Record::default() }, dir.path());

        assert!(!past.is_over());
        assert!(sentence(&past).starts_with("the job is not running: "), "{}", sentence(&past));
        assert!(sentence(&past).ends_with("58s ago (1970-01-01 00:00:04 UTC)"), "{}", sentence(&past));
        assert!(past.durable().contains("step 30"), "{}", past.durable());
    }
}
