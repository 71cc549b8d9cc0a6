//! `phalanx export`.

use crate::console::Console;
use crate::error::JobError;
use crate::train::export::export_checkpoint;
use phalanx_storage::checkpoint::catalog::{CheckpointId, latest_valid};
use std::path::PathBuf;

pub(super) const HELP: &str = "Examples:
  phalanx export outputs my-model           newest valid checkpoint of a run
  phalanx export outputs my-model --merge   LoRA run, merged into a whole model
  phalanx export outputs/checkpoints/step-0000000100.g0000 my-model";

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Checkpoint directory, or the output_dir of a run.
    checkpoint: PathBuf,
    /// Merge the adapters of a LoRA run into the base weights, and write the whole model.
    #[arg(long)]
    merge: bool,
    /// Directory to write; it must not exist, or be empty or an earlier export.
    dir: PathBuf,
}

pub(super) fn run(args: &Args, console: &Console) -> Result<(), JobError> {
    let (checkpoint, skipped) = resolve(&args.checkpoint)?;
    skipped.iter().for_each(|skipped| console.say(skipped));
    export_checkpoint(&checkpoint, &args.dir, args.merge)?;
    console.say(format_args!("{} → {}", checkpoint.display(), args.dir.display()));
    Ok(())
}

/// The checkpoint at `path`, or the newest valid one of the run there, and a line for each newer one that is skipped.
pub(super) fn resolve(path: &std::path::Path) -> Result<(PathBuf, Vec<String>), JobError> {
    if CheckpointId::from_dir(path).is_some() {
        return Ok((path.to_owned(), Vec::new()));
    }
    let mut lines = Vec::new();
    for root in [path.join("checkpoints"), path.to_owned()] {
        let (found, skipped) = latest_valid(&root)?;
        lines.extend(skipped.iter().map(|s| format!("skipped {}: {}", s.path.display(), s.reason)));
        if let Some(checkpoint) = found {
            return Ok((checkpoint.id().path.clone(), lines));
        }
    }
    Err(JobError::NoCheckpoint { path: path.to_owned(), why: String::new() })
}
