//! Which checkpoint a run resumes from.

use super::{STATE, Saving, TrainerState};
use crate::config::elastic::VerifySteps;
use crate::config::output::{OutputSection, Resume, is_url};
use crate::error::JobError;
use crate::events::Report;
use crate::train::run_files::JOB_YAML;
use crate::train::same_run::changes;
use phalanx_storage::checkpoint::catalog::{Skipped, latest_compared, latest_valid, list, newest_committed};
use phalanx_storage::checkpoint::checkpoint_id::CheckpointId;
use phalanx_storage::checkpoint::error::{CheckpointError, ReadFailure};
use phalanx_storage::checkpoint::given_up::Beginning;
use phalanx_storage::checkpoint::reader::Checkpoint;
use std::path::{Path, PathBuf};

/// A run that ended before its last step because its evaluations were no better.
#[derive(Debug)]
pub(crate) struct EarlyEnd {
    pub(crate) report: Report,
    /// A sentence.
    pub(crate) note: String,
}

impl Saving {
    /// The checkpoint to resume from, with a sentence about each checkpoint that was skipped: the newest one that was saved
    /// after a comparison of copies, unless the run compares none.
    ///
    /// # Errors
    /// When the newest checkpoint cannot be read, or checkpoints exist and all are damaged: a run begins at its first step
    /// only if no checkpoint was ever committed, or if told so.
    pub(crate) fn find(&self, resume: &Resume, steps: VerifySteps) -> Result<(Option<PathBuf>, Vec<String>), JobError> {
        match resume {
            Resume::Never => Ok((None, self.left_behind(None))),
            Resume::Auto => self.find_own(steps),
            Resume::Path(path) => Ok((Some(path.clone()), self.left_behind(CheckpointId::from_dir(path).as_ref()))),
        }
    }

    /// The newest checkpoint of this run, where it saves or, before it has saved there, where it has saved before.
    fn find_own(&self, steps: VerifySteps) -> Result<(Option<PathBuf>, Vec<String>), JobError> {
        let root = &self.places.root;
        let (found, mut warnings) = self.find_newest(root, steps)?;
        if found.is_none() {
            for place in self.places.earlier()? {
                if !is_url(&place) && !place.is_dir() {
                    let (root, place) = (root.display(), place.display());
                    warnings.push(format!(
                        "{root} has no checkpoint yet, and {place}, where this run has saved before, is not there"
                    ));
                    continue;
                }
                let (found, more) = self.find_newest(&place, steps)?;
                warnings.extend(more);
                if let Some(path) = found {
                    warnings.push(format!(
                        "{} has no checkpoint yet; resuming from {}",
                        root.display(),
                        path.display()
                    ));
                    return Ok((Some(path), warnings));
                }
            }
        }
        // Not where checkpoints count as given up: the run has begun again before.
        if found.is_none()
            && warnings.is_empty()
            && let Some(step) = self.places.last_saved()
        {
            warnings.push(format!(
                "{} has no checkpoint, although this run has saved step {step}, and begins again: if a disk is not mounted there, \
                 stop now, mount it and start again",
                root.display()
            ));
        }
        let step = found.as_deref().and_then(CheckpointId::from_dir).map_or(0, |found| found.step);
        warnings.extend(self.newer_elsewhere(step));
        Ok((found, warnings))
    }

    /// The newest checkpoint below `root`, and sentences.
    fn find_newest(&self, root: &Path, steps: VerifySteps) -> Result<(Option<PathBuf>, Vec<String>), JobError> {
        // A run that compares no copies has no reason to prefer one checkpoint.
        let find = if steps == VerifySteps::Every(0) { latest_valid } else { latest_compared };
        let (found, skipped) = find(root).map_err(|source| match source.read_failure() {
            ReadFailure::Unreadable => JobError::UnreadableCheckpoint { source },
            ReadFailure::Damaged | ReadFailure::Unfinished => source.into(),
        })?;
        let is_damage = |s: &&Skipped| s.reason.read_failure() == ReadFailure::Damaged;
        let mut damaged = skipped.iter().filter(is_damage);
        if let (None, Some(newest)) = (&found, damaged.next()) {
            let (path, n, source) = (root.to_owned(), 1 + damaged.count(), Box::new(newest.reason.clone()));
            return Err(JobError::NoIntactCheckpoint { path, n, source });
        }
        let (given_up, skipped): (Vec<_>, Vec<_>) =
            skipped.into_iter().partition(|s| s.reason == CheckpointError::GivenUp);
        let warn = |s: Skipped| format!("skipped checkpoint {}: {}", s.path.display(), s.reason);
        let mut warnings: Vec<String> = skipped.into_iter().map(warn).collect();
        warnings.extend(given_up.first().map(|newest| {
            let (n, path) = (given_up.len(), newest.path.display());
            format!("{n} checkpoints of a run that was given up do not count, the newest of them {path}")
        }));
        let is_unsure = |c: &&Checkpoint| steps != VerifySteps::Every(0) && !c.contents().compared;
        warnings.extend(found.as_ref().filter(is_unsure).map(|c| {
            let path = c.id().path.display();
            format!("no checkpoint was saved after a comparison of copies; resuming from the newest one, {path}")
        }));
        Ok((found.map(|c| c.id().path.clone()), warnings))
    }

    /// A sentence about the checkpoints that a run gives up which begins here.
    fn left_behind(&self, from: Option<&CheckpointId>) -> Vec<String> {
        let listed = if self.places.root.is_file() { Vec::new() } else { list(&self.places.root).unwrap_or_default() };
        let beginning = Beginning::new(u64::MAX, from, &self.places.root);
        let mut newer = listed.iter().filter(|id| beginning.gives_up(id));
        let Some(newest) = newer.next() else { return Vec::new() };
        let (n, path) = (1 + newer.count(), newest.path.display());
        vec![format!(
            "this run does not continue from the newest checkpoint, {path}; once it has saved, {n} checkpoints count as given up"
        )]
    }

    /// The end of the run of the newest checkpoint, if that run is this one, evaluations have ended it early, and its model is here.
    ///
    /// # Errors
    /// When the directory of checkpoints cannot be read.
    pub(crate) fn early_end(&self, output: &OutputSection) -> Result<Option<EarlyEnd>, JobError> {
        let (rule, model_dir) = (output.best_rule(), output.folder().join("model"));
        if !model_dir.is_dir() || rule.patience.is_none() || self.resume != Resume::Auto || self.places.root.is_file() {
            return Ok(None);
        }
        let Some(checkpoint) = newest_committed(&self.places.root)? else { return Ok(None) };
        let state = checkpoint.extra(STATE).ok().and_then(|state| serde_json::from_slice::<TrainerState>(&state).ok());
        let Some(state) = state.filter(|state| state.best.has_ended(state.step, rule)) else { return Ok(None) };
        let then = checkpoint.extra(JOB_YAML).unwrap_or_default();
        let changes = changes(&then, self.own_extra(JOB_YAML).unwrap_or_default());
        // It is refused with the reason when a rank restores it.
        if changes.of_another_run.is_some() || self.check_inputs(&checkpoint).is_err() {
            return Ok(None);
        }
        let (step, n_worse) = (state.step, state.best.n_worse);
        Ok(Some(EarlyEnd {
            report: Report { steps: step, finished: true, last: None, checkpoint: None, model_dir: Some(model_dir) },
            note: format!(
                "the run ended early after step {step}, because {n_worse} evaluations were no better than the best one; raise \
                 `early_stopping_patience` to continue, or begin again with `--resume_from_checkpoint none`"
            ),
        }))
    }
}
