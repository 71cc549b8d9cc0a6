//! State out of a checkpoint, and whether the checkpoint is of the run.

use super::{STATE, Saving, TrainerState};
use crate::error::JobError;
use crate::train::inputs::RunInputs;
use crate::train::reference_file;
use crate::train::restoring::{self, read};
use crate::train::run_files::{INPUTS_JSON, JOB_YAML};
use crate::train::same_run::changes;
use crate::train::weights;
use phalanx_device::Machine;
use phalanx_storage::checkpoint::catalog::list;
use phalanx_storage::checkpoint::error::CheckpointError;
use phalanx_storage::checkpoint::reader::Checkpoint;
use phalanx_strategies::compile::Compiled;
use std::path::Path;

impl Saving {
    /// Fills the state that a program's updates change from a checkpoint of this job.
    pub(crate) fn restore_updated(&self, path: &Path, machine: &mut dyn Machine, c: &Compiled) -> Result<(), JobError> {
        let checkpoint = Checkpoint::open_lazily(path)?;
        Ok(weights::updated_state(c).iter().try_for_each(|tensor| {
            self.progress_counter.tick();
            read(&checkpoint, tensor, machine, c)
        })?)
    }

    /// Fills the state that checkpoints of this run hold, in a machine that has the weights of the base model.
    ///
    /// # Errors
    /// When the checkpoint is of another run, or cannot be read.
    pub(crate) fn restore(
        &self,
        path: &Path,
        machine: &mut dyn Machine,
        c: &Compiled,
    ) -> Result<(TrainerState, Vec<String>), JobError> {
        // Each rank verifies what it reads; the whole checkpoint was verified when it was chosen.
        let checkpoint = Checkpoint::open_lazily(path)?;
        let mismatch = |reason: String| JobError::Mismatch { path: path.to_owned(), reason };
        let unfit = |reason: String| self.unfit(&checkpoint, reason);
        let parameters = weights::parameters(c).into_iter().filter(|tensor| self.contents.has(tensor));
        for tensor in parameters.chain(weights::optimizer_state(c)) {
            self.progress_counter.tick();
            let found = &checkpoint.tensor(&tensor.name).map_err(|e| unfit(e.to_string()))?.shape;
            if restoring::form(&checkpoint, &tensor, c)?.is_none() {
                let (name, ours) = (&tensor.name, &tensor.shape);
                return Err(unfit(format!("`{name}` has shape {found:?}, but this run needs {ours:?}")));
            }
            read(&checkpoint, &tensor, machine, c).map_err(|error| match error {
                CheckpointError::Request { .. } => mismatch(error.to_string()),
                error => error.into(),
            })?;
        }
        self.check_frozen(&checkpoint, machine, c)?;
        let state = checkpoint.extra(STATE)?;
        let state: TrainerState = serde_json::from_slice(&state).map_err(|e| mismatch(format!("{STATE}: {e}")))?;
        Ok((state, self.check_run(&checkpoint)?))
    }

    /// The log-probabilities of a reference in a checkpoint, if its run has computed them.
    ///
    /// # Errors
    /// When they are damaged.
    pub(crate) fn reference_of(&self, path: &Path) -> Result<Option<Vec<u8>>, JobError> {
        let checkpoint = Checkpoint::open_lazily(path)?;
        let is_there = checkpoint.extras().any(|name| name == reference_file::NAME);
        Ok(is_there.then(|| checkpoint.extra(reference_file::NAME)).transpose()?)
    }

    /// Why a checkpoint without the tensors of this run cannot be continued: the keys that have changed say it best.
    fn unfit(&self, checkpoint: &Checkpoint, reason: String) -> JobError {
        let reason = match self.check_run(checkpoint) {
            Err(of_another_run) => return of_another_run,
            Ok(changed) if changed.is_empty() => reason,
            Ok(changed) => format!(
                "{reason}; changed since it was saved: {}; to begin with its weights alone, export it, with --merge \
                 if it has adapters, and name the export as `base_model`",
                changed.join(", ")
            ),
        };
        JobError::Mismatch { path: checkpoint.id().path.clone(), reason }
    }

    /// The latest generation of all checkpoints that are there; a file in their place matters when one is saved.
    pub(crate) fn last_generation(&self) -> Result<u64, CheckpointError> {
        let earlier = if self.places.root.is_file() { Vec::new() } else { list(&self.places.root)? };
        Ok(earlier.iter().map(|id| id.generation).max().unwrap_or_default())
    }

    /// Returns the keys of the configuration that have changed since a checkpoint was saved, and what that means for its data.
    ///
    /// # Errors
    /// When the checkpoint is of another run, as far as this one has said what it is.
    pub(crate) fn check_run(&self, checkpoint: &Checkpoint) -> Result<Vec<String>, JobError> {
        let other_rows = self.check_inputs(checkpoint)?;
        let Some(now) = self.own_extra(JOB_YAML) else { return Ok(Vec::new()) };
        let then = checkpoint.extra(JOB_YAML).unwrap_or_default();
        let mut changes = changes(&then, now);
        if let Some(changed) = changes.of_another_run {
            let (path, has_state) = (checkpoint.id().path.clone(), !changes.other_state);
            return Err(JobError::AnotherRun { path, changed, has_state });
        }
        changes.notable.extend([other_rows, changes.place_in_data(checkpoint.id().step)].into_iter().flatten());
        Ok(changes.notable)
    }

    /// Refuses a checkpoint whose run has trained a weight that this run leaves as `base_model` has it. Early versions saved the
    /// weights of the base model too.
    fn check_frozen(&self, checkpoint: &Checkpoint, machine: &dyn Machine, c: &Compiled) -> Result<(), JobError> {
        for tensor in weights::parameters(c).iter().filter(|tensor| !self.contents.has(tensor)) {
            if checkpoint.tensor(&tensor.name).is_err() {
                continue;
            }
            self.progress_counter.tick();
            if !restoring::is_equal(checkpoint, tensor, machine, c)? {
                let reason = format!(
                    "its run trained `{}`, which this run leaves as `base_model` has it; export the checkpoint, with --merge \
                     if it has adapters, and name the export as `base_model`",
                    tensor.name
                );
                return Err(JobError::Mismatch { path: checkpoint.id().path.clone(), reason });
            }
        }
        Ok(())
    }

    /// Refuses a checkpoint of a run on other data or on another base model; tells if the data has another number of rows. Checkpoints
    /// of early versions have no digests.
    pub(super) fn check_inputs(&self, checkpoint: &Checkpoint) -> Result<Option<String>, JobError> {
        let mismatch = |reason: String| JobError::Mismatch { path: checkpoint.id().path.clone(), reason };
        let invalid = |error: serde_json::Error| mismatch(format!("{INPUTS_JSON}: {error}"));
        if !checkpoint.extras().any(|name| name == INPUTS_JSON) {
            return Ok(None);
        }
        let Some(now) = self.own_extra(INPUTS_JSON) else { return Ok(None) };
        let now: RunInputs = serde_json::from_slice(now).map_err(invalid)?;
        let then = checkpoint.extra(INPUTS_JSON)?;
        let difference = now.difference_from(&then).map_err(invalid)?;
        difference.map_or(Ok(now.other_rows(&then)), |difference| Err(mismatch(difference)))
    }

    pub(super) fn own_extra(&self, wanted: &str) -> Option<&[u8]> {
        self.extras.iter().find(|(name, _)| name == wanted).map(|(_, bytes)| bytes.as_slice())
    }
}
