//! What the folder of a run stands for, where a command names neither a checkpoint nor a model.

use super::export::parse_job;
use super::run_files::JOB_YAML;
use super::saving::{STATE, TrainerState};
use crate::config::output::is_url;
use crate::control_place::checkpoint_places;
use crate::shell::quoted;
use phalanx_storage::checkpoint::catalog::{list, newest_committed};
use phalanx_storage::checkpoint::reader::Checkpoint;
use std::path::Path;
use std::time::SystemTime;

/// The best checkpoint of the run whose newest one this is, if its job keeps the best, else the newest; with a sentence if they differ.
pub(crate) fn best_instead_of(newest: Checkpoint) -> (Checkpoint, Option<String>) {
    let here = newest.id().clone();
    let Some((step, loss)) = kept_best(&newest).filter(|(step, _)| *step != here.step) else { return (newest, None) };
    let siblings = here.path.parent().and_then(|root| list(root).ok()).unwrap_or_default();
    let found = siblings.into_iter().find(|id| id.step == step && id.generation <= here.generation);
    match found.and_then(|id| Checkpoint::open(&id.path).ok()) {
        Some(best) => {
            let text = format!(
                "taking step {step}, which has the lowest eval_loss, {loss:.5}; for step {}, name {}",
                here.step,
                here.path.display()
            );
            (best, Some(text))
        }
        None => {
            let text =
                format!("taking the newest step, because the one with the lowest eval_loss, {step}, is not there");
            (newest, Some(text))
        }
    }
}

/// Step and loss of the best evaluation of a run that keeps its best checkpoint.
fn kept_best(checkpoint: &Checkpoint) -> Option<(u64, f64)> {
    let job = parse_job(&[(JOB_YAML.to_owned(), checkpoint.extra(JOB_YAML).ok()?)]).ok()?;
    let state: TrainerState = serde_json::from_slice(&checkpoint.extra(STATE).ok()?).ok()?;
    let loss = state.best.loss().filter(|_| job.output.best_rule().keeps_best)?;
    Some((state.best.step, loss))
}

/// A sentence if `model` is what a run wrote at an earlier end, and the run went on.
pub(crate) fn note_of_older_model(model: &Path) -> Option<String> {
    let run = model.parent().filter(|_| model.ends_with("model"))?;
    let modified = |path: &Path| -> Option<SystemTime> { path.metadata().ok()?.modified().ok() };
    let written = modified(model)?;
    let mut here = checkpoint_places(run).into_iter().filter(|place| !is_url(place));
    let newest = here.find_map(|place| newest_committed(&place).ok().flatten())?;
    let id = newest.id();
    (modified(&id.path)? > written).then(|| {
        format!(
            "{} was written before its run was saved at step {}; `phalanx export {} DIR` writes that model",
            model.display(),
            id.step,
            quoted(&id.path)
        )
    })
}
