//! Where the checkpoints of a run are: where it saves, where its last state goes if that place does not take it, and where it has saved
//! before its `checkpoint_dir` was changed.

use crate::config::output::{OutputSection, is_url};
use crate::control_place::{CHECKPOINTS, ControlPlace, checkpoint_places, listed_places};
use crate::error::JobError;
use phalanx_storage::checkpoint::catalog::{Skipped, latest_valid};
use phalanx_storage::checkpoint::error::CheckpointError;
use phalanx_storage::checkpoint::reader::Checkpoint;
use phalanx_storage::foreign_file;
use phalanx_strategies::elastic::timing::Timing;
use serde::Deserialize;
use std::path::{Path, PathBuf};

#[derive(Clone, Debug)]
pub(crate) struct Places {
    /// Where the run saves.
    pub(crate) root: PathBuf,
    /// The folder of this machine for the state with which a run ends; `None` if `root` is that folder.
    pub(crate) own: Option<PathBuf>,
    output_dir: PathBuf,
}

impl Places {
    pub(crate) fn of(output: &OutputSection) -> Places {
        let root = output.checkpoints();
        let own = Some(output.folder().join(FOLDER)).filter(|own| absolute(own) != absolute(&root));
        Places { root, own, output_dir: output.output_dir.clone() }
    }

    /// Where else the run may have saved, the likeliest place first.
    ///
    /// # Errors
    /// When the note of them exists and cannot be read.
    pub(crate) fn earlier(&self) -> Result<Vec<PathBuf>, JobError> {
        let noted = ControlPlace::of(&self.output_dir, &Timing::default())?.read(CHECKPOINTS)?;
        let mut places = noted.as_deref().map(listed_places).unwrap_or_default();
        // A run that saves in its `output_dir` leaves no note.
        let usual = self.output_dir.join(FOLDER);
        places.extend((is_url(&usual) || usual.is_dir()).then_some(usual));
        let mut seen = vec![absolute(&self.root)];
        places.retain(|place| {
            let place = absolute(place);
            let is_new = !seen.contains(&place);
            seen.push(place);
            is_new
        });
        Ok(places)
    }

    /// The step of the last checkpoint that the history of the run names, if it has a history.
    pub(crate) fn last_saved(&self) -> Option<u64> {
        let history = foreign_file::read(&self.output_dir.join("events.jsonl"), HISTORY_BYTES_MAX).ok()?;
        let mut lines = history.rsplit(|byte| *byte == b'\n');
        lines.find_map(|line| serde_json::from_slice(line).ok()).map(|Saved::Checkpoint { step }| step)
    }

    /// Notes where the run saves, and where the checkpoint is that it continues from, until it has saved.
    ///
    /// # Errors
    /// When the note cannot be written.
    pub(crate) fn note(&self, control: &ControlPlace, found: Option<&Path>) -> Result<(), JobError> {
        let before = found.and_then(Path::parent).map(absolute);
        let mut places = vec![absolute(&self.root)];
        places.extend(before.filter(|before| *before != places[0]));
        if places == [absolute(&self.output_dir.join(FOLDER))] {
            return control.remove(CHECKPOINTS);
        }
        control.write(CHECKPOINTS, &places.join("\n"))
    }
}

/// Bytes of a history; one of a million checkpoints has fewer.
const HISTORY_BYTES_MAX: u64 = 256 << 20;

/// The event of a checkpoint in the history of a run.
#[derive(Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum Saved {
    Checkpoint { step: u64 },
}

/// The folder of checkpoints in an `output_dir`.
const FOLDER: &str = "checkpoints";

/// A URL, or the absolute path of a folder.
fn absolute(dir: &Path) -> String {
    let path = if is_url(dir) { dir.to_owned() } else { std::path::absolute(dir).unwrap_or_else(|_| dir.to_owned()) };
    path.to_string_lossy().into_owned()
}

/// The newest valid checkpoint of the run in this folder, in whichever place it is, and newer ones that are skipped.
///
/// # Errors
/// When a place cannot be read.
pub(crate) fn newest_of_run(folder: &Path) -> Result<(Option<Checkpoint>, Vec<Skipped>), CheckpointError> {
    newest_in(checkpoint_places(folder))
}

/// The newest valid checkpoint of one run in these places. Later generations are newer: they may have gone back in steps.
///
/// # Errors
/// When a place cannot be read.
pub(crate) fn newest_in(
    places: impl IntoIterator<Item = PathBuf>,
) -> Result<(Option<Checkpoint>, Vec<Skipped>), CheckpointError> {
    let (mut newest, mut all_skipped): (Option<Checkpoint>, _) = (None, Vec::new());
    for place in places {
        let (found, skipped) = latest_valid(&place)?;
        all_skipped.extend(skipped);
        let age = |checkpoint: &Checkpoint| (checkpoint.id().generation, checkpoint.id().step);
        let is_newer = |found: &Checkpoint| newest.as_ref().is_none_or(|newest| age(found) > age(newest));
        newest = found.filter(is_newer).or(newest);
    }
    Ok((newest, all_skipped))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::slice::from_ref;

    fn output(dir: &Path, checkpoint_dir: Option<&Path>) -> OutputSection {
        let checkpoint_dir = checkpoint_dir.map(Path::to_owned);
        OutputSection { output_dir: dir.join("out"), checkpoint_dir, ..OutputSection::default() }
    }

    #[test]
    fn last_checkpoint_is_known_from_the_history_alone() {
        let dir = tempfile::tempdir().unwrap();
        let places = Places::of(&output(dir.path(), None));
        assert_eq!(places.last_saved(), None);
        std::fs::create_dir(&places.output_dir).unwrap();
        let events = r#"{"unix_ms":1,"term":1,"event":"checkpoint","generation":1,"step":3}
{"unix_ms":2,"term":1,"event":"checkpoint","generation":1,"step":6}
{"unix_ms":3,"term":2,"event":"leads","step":9}
{"torn"#;
        std::fs::write(places.output_dir.join("events.jsonl"), events).unwrap();

        assert_eq!(places.last_saved(), Some(6));
    }

    #[test]
    fn place_of_a_run_is_found_after_its_key_was_changed_or_removed_until_it_has_saved_in_the_new_one() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (dir.path().join("one"), dir.path().join("two"));
        let first = output(dir.path(), Some(&one));
        let control = ControlPlace::of(&first.output_dir, &Timing::default()).unwrap();
        std::fs::create_dir_all(dir.path().join("out/control")).unwrap();
        Places::of(&first).note(&control, None).unwrap();
        let moved = Places::of(&output(dir.path(), Some(&two)));

        assert_eq!(moved.earlier().unwrap(), from_ref(&one));
        assert_eq!(Places::of(&output(dir.path(), None)).earlier().unwrap(), from_ref(&one));
        assert!(Places::of(&first).earlier().unwrap().is_empty());
        moved.note(&control, Some(&one.join("step-0000000003.g0001"))).unwrap();
        assert_eq!(moved.earlier().unwrap(), from_ref(&one), "killed before it has saved");
        assert_eq!(checkpoint_places(&first.output_dir)[..2], [two.clone(), one]);
        moved.note(&control, Some(&two.join("step-0000000006.g0002"))).unwrap();
        assert!(moved.earlier().unwrap().is_empty());
    }
}
