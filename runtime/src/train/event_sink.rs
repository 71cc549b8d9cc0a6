//! Outputs for the events of a rank: the leader also writes them to files and collects them in its report.

use super::export::{self, ExportFrom};
use super::saving::Saving;
use crate::error::JobError;
use crate::events::{Event, Report, StepMetrics};
use crate::train::metrics::MetricsFiles;
use crate::train::trainer::Trainer;
use std::path::{Path, PathBuf};

/// Passes on the events of a rank; the leader's also go into files and into its report.
pub(crate) struct EventSink<'a> {
    files: Option<MetricsFiles>,
    path: PathBuf,
    pub(crate) report: Report,
    on_event: &'a mut (dyn FnMut(&Event) + Send),
}

impl<'a> EventSink<'a> {
    pub(crate) fn new(
        output_dir: &Path,
        first_step: u64,
        leads: bool,
        resume: Option<PathBuf>,
        on_event: &'a mut (dyn FnMut(&Event) + Send),
    ) -> Result<EventSink<'a>, JobError> {
        let path = output_dir.join("metrics.jsonl");
        let files = leads.then(|| MetricsFiles::open(output_dir, first_step)).transpose();
        let files = files.map_err(|source| JobError::Io { action: "write", path: path.clone(), source })?;
        let report = Report { steps: first_step, finished: false, last: None, checkpoint: resume, model_dir: None };
        Ok(EventSink { files, path, report, on_event })
    }

    /// On the leader, emits a step of an earlier world, unless the files already contain it.
    pub(crate) fn make_up_for(&mut self, metrics: StepMetrics) -> Result<(), JobError> {
        match &self.files {
            Some(files) if files.last_step() < metrics.step => self.emit(Event::Step(metrics)),
            _ => Ok(()),
        }
    }

    pub(crate) fn emit(&mut self, event: Event) -> Result<(), JobError> {
        let written = match (&event, &mut self.files) {
            (Event::Step(m), Some(files)) => files.step(m),
            (Event::Eval(m), Some(files)) => files.eval(m),
            _ => Ok(()),
        };
        written.map_err(|source| JobError::Io { action: "write", path: self.path.clone(), source })?;
        match &event {
            Event::Step(m) => (self.report.steps, self.report.last) = (m.step, Some(m.clone())),
            Event::Saved { path, .. } => self.report.checkpoint = Some(path.clone()),
            _ => {}
        }
        (self.on_event)(&event);
        Ok(())
    }
}

/// Writes the trained model: from memory if one rank has all of it, otherwise from the last checkpoint.
pub(crate) fn export_model(
    dir: &Path,
    trainer: &Trainer<'_>,
    checkpoint: Option<&Path>,
    saving: &Saving,
) -> Result<(), JobError> {
    match checkpoint.filter(|_| trainer.n_ranks() > 1) {
        // With several ranks, only the checkpoint has the whole model.
        Some(checkpoint) => export::export_checkpoint(checkpoint, dir, false),
        None => {
            let (compiled, machine) = trainer.memory();
            export::export(dir, &ExportFrom { machine, compiled }, saving.extras())
        }
    }
}
