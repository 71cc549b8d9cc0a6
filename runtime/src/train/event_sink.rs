//! Outputs for the events of a rank: the leader also writes them to files and collects them in its report.

use super::export::{self, ExportFrom, ExportOptions};
use super::saving::Saving;
use super::stalled::{self, Stalled};
use crate::error::JobError;
use crate::events::{Event, Report, StepMetrics};
use crate::train::metrics::MetricsFiles;
use crate::train::trainer::Trainer;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A fault of this rank that does not stop it, such as a full disk for its measurements, as a sentence; shared with its status
/// reports.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fault(Arc<Mutex<Option<String>>>);

impl Fault {
    /// The fault, if there is one now.
    pub(crate) fn now(&self) -> Option<String> {
        self.lock().clone()
    }

    /// Sets the fault; returns whether one has begun or ended.
    fn set(&self, fault: Option<String>) -> bool {
        let changes = self.lock().is_some() != fault.is_some();
        *self.lock() = fault;
        changes
    }

    fn lock(&self) -> MutexGuard<'_, Option<String>> {
        // Every change is one assignment.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Passes on the events of a rank; the leader's also go into files and into its report.
pub(crate) struct EventSink<'a> {
    files: Option<MetricsFiles>,
    fault: Fault,
    stalled: Stalled,
    pub(crate) report: Report,
    on_event: &'a mut (dyn FnMut(&Event) + Send),
}

impl<'a> EventSink<'a> {
    /// The leader of the world that saves so writes files in `output_dir`.
    pub(crate) fn new(
        output_dir: &Path,
        first_step: u64,
        leads: bool,
        saving: &Saving,
        resume: Option<PathBuf>,
        fault: Fault,
        on_event: &'a mut (dyn FnMut(&Event) + Send),
    ) -> EventSink<'a> {
        let files = leads.then(|| MetricsFiles::open(output_dir, first_step, saving.fence_of_files().cloned()));
        let report = Report { steps: first_step, finished: false, last: None, checkpoint: resume, model_dir: None };
        EventSink { files, fault, stalled: Stalled::default(), report, on_event }
    }

    /// On the leader, emits a step of an earlier world, unless the files already contain it.
    pub(crate) fn make_up_for(&mut self, metrics: StepMetrics) {
        if self.files.as_ref().is_some_and(|files| files.last_step() < metrics.step) {
            self.emit(Event::Step(metrics));
        }
    }

    /// On the leader, whether the files have this step and no evaluation after it.
    pub(crate) fn lacks_evaluation(&self, step: u64) -> bool {
        self.files.as_ref().is_some_and(|files| files.last_step() == step && files.last_evaluation() < step)
    }

    pub(crate) fn emit(&mut self, mut event: Event) {
        let stalled = if let Event::Step(m) = &mut event { self.stalled.see(m) } else { None };
        match (&event, &mut self.files) {
            (Event::Step(m), Some(files)) => files.step(m),
            (Event::Eval(m), Some(files)) => files.eval(m),
            _ => {}
        }
        self.note_fault();
        match &event {
            Event::Step(m) => (self.report.steps, self.report.last) = (m.step, Some(m.clone())),
            Event::Saved { path, .. } => self.report.checkpoint = Some(path.clone()),
            _ => {}
        }
        (self.on_event)(&event);
        if let Some(warning) = stalled.filter(|_| self.files.is_some()) {
            (self.on_event)(&Event::Note(warning));
        }
    }

    /// Tells once that measurements cannot be written, and once that they are again.
    fn note_fault(&mut self) {
        let Some(files) = &self.files else { return };
        let (fault, n_dropped) = (files.fault(), files.n_dropped());
        if !self.fault.set(fault.clone()) {
            return;
        }
        let text = match (fault, n_dropped) {
            (Some(fault), _) => format!("{fault}; training continues"),
            (None, 0) => "all measurements are written again".to_owned(),
            (None, n) => format!("measurements are written again; {n} are missing"),
        };
        (self.on_event)(&Event::Note(text));
    }

    /// Writes the trained model to the folder `model` in `folder`: the best one if the run keeps it, else the last one, from
    /// memory if one rank has all of it, otherwise from its checkpoint.
    ///
    /// # Errors
    /// When the folder cannot be written, or the checkpoint cannot be read.
    pub(crate) fn export(
        &mut self,
        folder: &Path,
        trainer: &Trainer<'_>,
        saving: &Saving,
    ) -> Result<PathBuf, JobError> {
        let dir = folder.join("model");
        if let Some(warning) = stalled::skipped(trainer.n_steps_and_updates()) {
            self.emit(Event::Note(warning));
        }
        if let Some(step) = trainer.better_step() {
            match saving.path_of(step, saving.generation()) {
                Ok(path) => {
                    export::export_checkpoint(&path, &dir, ExportOptions::default())?;
                    let text = format!("the model is that of step {step}, which has the lowest eval_loss");
                    self.emit(Event::Note(text));
                    return Ok(dir);
                }
                // It could not be saved, which was reported then.
                Err(error) => {
                    self.emit(Event::Note(format!(
                        "the model is that of the last step, because the best one is not there: {error}"
                    )));
                }
            }
        }
        match self.report.checkpoint.as_deref().filter(|_| trainer.n_ranks() > 1) {
            // With several ranks, only the checkpoint has the whole model.
            Some(checkpoint) => export::export_checkpoint(checkpoint, &dir, ExportOptions::default())?,
            None => {
                let (compiled, machine) = trainer.memory();
                export::export(&dir, &ExportFrom { machine, compiled }, saving.extras())?;
            }
        }
        Ok(dir)
    }
}
