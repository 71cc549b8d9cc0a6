//! `phalanx export`.

use super::say;
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

pub(super) fn run(args: &Args) -> Result<(), JobError> {
    let checkpoint = resolve(&args.checkpoint)?;
    export_checkpoint(&checkpoint, &args.dir, args.merge)?;
    say(format_args!("{} → {}", checkpoint.display(), args.dir.display()));
    Ok(())
}

/// The checkpoint directory itself, or the newest valid checkpoint of an output directory.
pub(super) fn resolve(path: &std::path::Path) -> Result<PathBuf, JobError> {
    if CheckpointId::from_dir(path).is_some() {
        return Ok(path.to_owned());
    }
    for root in [path.join("checkpoints"), path.to_owned()] {
        let (found, skipped) = latest_valid(&root)?;
        for s in &skipped {
            say(format_args!("skipped {}: {}", s.path.display(), s.reason));
        }
        if let Some(checkpoint) = found {
            return Ok(checkpoint.id().path.clone());
        }
    }
    Err(JobError::NoCheckpoint { path: path.to_owned(), why: String::new() })
}
