//! Saves of a run in progress. A checkpoint that cannot be saved does not end the run, unless the user requires it or the run
//! ends with it.

use super::{TrainData, Trainer};
use crate::error::JobError;
use crate::events::Event;
use crate::train::planted::Where;
use crate::train::saving::elsewhere::SavedElsewhere;
use crate::train::saving::{SaveOutcome, Saving, Stalled};
use phalanx_storage::checkpoint::error::CheckpointError;
use std::path::Path;

/// Where a trainer reports what happens.
pub(crate) type Emit<'a> = dyn FnMut(Event) + 'a;

impl Trainer<'_> {
    /// Prepares the copy of the state for the next save.
    pub(super) fn prepare_next_save(&self, data: &TrainData<'_>, saving: &mut Saving) {
        // The last save needs no copy.
        let next_save = data.save_steps.map(|n| self.state.step.next_multiple_of(n.max(1)));
        if next_save.is_some_and(|next| next < self.run.total_steps) {
            saving.prepare(&self.programs.train);
        }
    }

    /// Waits for the save of the best model so far while its store answers: a world that ended before could not save it again.
    pub(super) fn wait_for_best(
        &mut self,
        saving: &mut Saving,
        is_required: bool,
        emit: &mut Emit<'_>,
    ) -> Result<(), JobError> {
        match saving.wait_while_answered(&mut self.team, is_required)? {
            Ok(ended) => self.conclude(ended, is_required, emit),
            Err(Stalled { .. }) => Ok(()),
        }
    }

    /// Saves a checkpoint that is due or requested: beside training, or while nothing trains if the run `ends` with it.
    pub(super) fn save_due(
        &mut self,
        saving: &mut Saving,
        ends: bool,
        is_required: bool,
        emit: &mut Emit<'_>,
    ) -> Result<(), JobError> {
        if ends {
            return self.save_last(saving, is_required, emit);
        }
        let before = match saving.wait_while_answered(&mut self.team, is_required)? {
            Ok(before) => before,
            Err(Stalled { step }) => {
                let reason = format!("the save of step {step} still waits for its store");
                emit(Event::NotSaved { step: self.state.step, reason });
                return Ok(());
            }
        };
        self.conclude(before, is_required, emit)?;
        let compared = &mut self.verification.compared;
        compared.planted =
            self.planted.take(Where::Checkpoint, self.generation.0, self.state.step, self.team.mesh_rank.rank);
        saving.begin(&*self.machine, &self.programs.train, &self.state, compared, &self.team)
    }

    /// Saves the state with which a run ends. Nothing trains meanwhile, so the save needs no copy.
    fn save_last(&mut self, saving: &mut Saving, is_required: bool, emit: &mut Emit<'_>) -> Result<(), JobError> {
        if saving.is_failing() {
            // The store may not take this state either, and whoever stops the run may kill it before that is known.
            self.save_elsewhere(saving, emit)?;
        }
        let before = saving.wait(&mut self.team)?;
        self.conclude(before, is_required, emit)?;
        let outcome = self.save(saving)?;
        let is_corrupt = matches!(outcome.saved, Err(CheckpointError::Corrupt { .. }));
        if outcome.saved.is_ok() || self.team.sum(u64::from(is_corrupt))? == 0 {
            return self.conclude_last(outcome, saving, emit);
        }
        // A bit has flipped while it was written, in the state itself or on the way.
        self.verify_if_due(true, 1.0)?;
        let outcome = self.save(saving)?;
        self.conclude_last(outcome, saving, emit)
    }

    /// Reports how the save of a state that trains no more ended, on all ranks together. If the place of the checkpoints does not
    /// take it, a folder of this machine may.
    ///
    /// # Errors
    /// When it failed, or a peer is lost.
    pub(crate) fn conclude_last(
        &mut self,
        outcome: SaveOutcome,
        saving: &mut Saving,
        emit: &mut Emit<'_>,
    ) -> Result<(), JobError> {
        let step = outcome.step;
        let is_refused = matches!(
            outcome.saved,
            Err(CheckpointError::Io { .. }
                | CheckpointError::Unreachable { .. }
                | CheckpointError::InvalidLocation { .. })
        );
        if outcome.saved.is_ok() {
            saving.forget_elsewhere(&self.team);
            return self.conclude(Some(outcome), true, emit);
        }
        if self.team.sum(u64::from(is_refused))? == 0 {
            return self.conclude(Some(outcome), true, emit);
        }
        let failed_here = self.save_elsewhere(saving, emit)?;
        let (here, folder) = (saving.saved_elsewhere.clone(), saving.elsewhere().map(Path::to_owned));
        let source = match outcome.saved {
            Err(source) if is_refused => Box::new(source),
            saved => return saved.map(drop).map_err(JobError::from),
        };
        Err(match (here, folder, failed_here) {
            (Some(SavedElsewhere { step, path }), ..) => JobError::SavedElsewhere { step, path, source },
            (None, Some(path), Some(here)) => JobError::SavedNowhere { step, path, here, source },
            (None, ..) => (*source).into(),
        })
    }

    /// Saves the state in a folder of this machine, if checkpoints belong elsewhere, and tells it. Returns why that failed.
    fn save_elsewhere(&mut self, saving: &mut Saving, emit: &mut Emit<'_>) -> Result<Option<String>, JobError> {
        let compared = &self.verification.compared;
        let (machine, c) = (&*self.machine, &self.programs.train);
        let Some(outcome) = saving.save_elsewhere(machine, c, &self.state, compared, &mut self.team)? else {
            return Ok(None);
        };
        Ok(match outcome.saved {
            Ok(path) => {
                let (step, path) = (outcome.step, path.display());
                emit(Event::Note(format!(
                    "step {step} is saved in {path}, because its checkpoint cannot be saved where it belongs"
                )));
                None
            }
            Err(error) => Some(error.to_string()),
        })
    }

    /// Reports how a save ended, on all ranks together.
    ///
    /// # Errors
    /// When it failed and is required, or a peer is lost.
    pub(crate) fn conclude(
        &mut self,
        outcome: Option<SaveOutcome>,
        is_required: bool,
        emit: &mut Emit<'_>,
    ) -> Result<(), JobError> {
        let Some(SaveOutcome { step, saved, retained }) = outcome else { return Ok(()) };
        if let Err(error) = retained {
            emit(Event::Note(format!("older checkpoints remain, and the next save removes them: {error}")));
        }
        let saved = match saved {
            Err(error) if is_required => return Err(error.into()),
            saved => saved,
        };
        // The leader reports, but another rank may know why.
        let own = saved.as_ref().err().filter(|error| !matches!(error, CheckpointError::OthersFailed { .. }));
        let reasons = self.team.gather_texts(own.map(ToString::to_string).unwrap_or_default())?;
        emit(match saved {
            Ok(path) => Event::Saved { step, path },
            Err(error) => {
                let reason = reasons.into_iter().find(|reason| !reason.is_empty());
                Event::NotSaved { step, reason: reason.unwrap_or_else(|| error.to_string()) }
            }
        });
        Ok(())
    }

    /// Saves a checkpoint while nothing trains.
    pub(crate) fn save(&mut self, saving: &Saving) -> Result<SaveOutcome, JobError> {
        let compared = &self.verification.compared;
        saving.save(&*self.machine, &self.programs.train, &self.state, compared, &mut self.team)
    }
}
