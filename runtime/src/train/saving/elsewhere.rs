//! A last state that the place of a run's checkpoints does not take, in a folder of this machine.

use super::{SaveOutcome, Saving, TrainerState};
use crate::error::JobError;
use crate::shell::quoted;
use crate::train::team::Team;
use crate::train::verification::Compared;
use phalanx_device::Machine;
use phalanx_storage::checkpoint::catalog::latest_after;
use phalanx_storage::checkpoint::location;
use phalanx_strategies::compile::Compiled;
use std::path::{Path, PathBuf};

/// A state that is saved in a folder of this machine, because the place of the checkpoints does not take it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SavedElsewhere {
    pub(crate) step: u64,
    pub(crate) path: PathBuf,
}

impl Saving {
    /// Saves in a folder of this machine, as [`Saving::save`], unless its state is there; `None` if there is no such folder. All
    /// ranks call it.
    ///
    /// # Errors
    /// As [`Saving::save`].
    pub(crate) fn save_elsewhere(
        &mut self,
        machine: &dyn Machine,
        c: &Compiled,
        state: &TrainerState,
        compared: &Compared,
        team: &mut Team,
    ) -> Result<Option<SaveOutcome>, JobError> {
        let Some(root) = self.places.own.clone() else { return Ok(None) };
        let has_state = self.saved_elsewhere.as_ref().is_some_and(|saved| saved.step == state.step);
        if team.sum(u64::from(has_state))? == team.n_ranks() as u64 {
            return Ok(None);
        }
        let outcome = self.save_at(&root, None, machine, c, state, compared, team)?;
        let saved = |path: &PathBuf| SavedElsewhere { step: state.step, path: path.clone() };
        self.saved_elsewhere = outcome.saved.as_ref().ok().map(saved);
        Ok(Some(outcome))
    }

    /// The folder of [`Saving::save_elsewhere`].
    pub(crate) fn elsewhere(&self) -> Option<&Path> {
        self.places.own.as_deref()
    }

    /// Removes what [`Saving::save_elsewhere`] has saved, because the place of the checkpoints has it now.
    pub(crate) fn forget_elsewhere(&mut self, team: &Team) {
        let saved = self.saved_elsewhere.take().filter(|_| team.leads());
        let removed =
            saved.map(|SavedElsewhere { path, .. }| location::at(&path).and_then(|store| store.remove(&path)));
        if let Some(Err(error)) = removed {
            tracing::warn!(%error, "a second copy of the last checkpoint remains");
        }
    }

    /// Tells of a checkpoint after this step in the folder of this machine, where the last save of a run may be.
    pub(super) fn newer_elsewhere(&self, step: u64) -> Option<String> {
        let folder = self.places.own.as_ref().filter(|folder| folder.is_dir())?;
        let (newer, _) = latest_after(folder, step, 0).ok()?;
        let (newer, root) = (newer?.id().path.display().to_string(), self.places.root.display());
        Some(format!(
            "{newer} is newer than all checkpoints in {root}; `--resume_from_checkpoint {}` continues from it",
            quoted(&newer)
        ))
    }
}
