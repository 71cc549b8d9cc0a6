//! `phalanx export`.

use super::{conclude, conclude_json, report_note};
use crate::config::JobConfig;
use crate::config::output::is_url;
use crate::console::Console;
use crate::error::JobError;
use crate::error::export::ExportError;
use crate::train::export::{ExportOptions, export_checkpoint};
use crate::train::model_source::ModelSource;
use crate::train::reexport::{reexport, to_gguf};
use crate::train::run_folder::{best_instead_of, note_of_older_model};
use crate::train::saving::places::newest_of_run;
use crate::train::subject::yaml_of_run;
use phalanx_storage::checkpoint::checkpoint_id::CheckpointId;
use phalanx_storage::checkpoint::reader::Checkpoint;
use phalanx_storage::gguf::Encoding;
use phalanx_storage::hf::adapter::ADAPTER_CONFIG;
use phalanx_storage::hf::dtype::Dtype;
use std::path::{Path, PathBuf};

pub(super) const HELP: &str = "Examples:
  phalanx export outputs my-model           newest or best checkpoint of a run
  phalanx export outputs my-model --merge   LoRA run, merged into a whole model
  phalanx export outputs/checkpoints/step-0000000100.g0000 my-model
  phalanx export outputs/model small --dtype bf16
  phalanx export outputs/model my.gguf --gguf q8_0      for llama.cpp
  phalanx export outputs/adapter my.gguf --merge --gguf q4_k_m";

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Checkpoint directory, output_dir of a run, model directory or adapter directory.
    checkpoint: PathBuf,
    /// Merge adapters into the base weights, and write the whole model.
    #[arg(long)]
    merge: bool,
    /// Type of the weights [default: that of the base model; f32 for adapters].
    #[arg(long, value_enum, conflicts_with = "gguf")]
    dtype: Option<WeightType>,
    /// Write a file for llama.cpp with matrices of this type; q4_k_m and q5_k_m are its mixtures of 4 or 5 bits with 6.
    #[arg(long, value_enum, value_name = "TYPE", ignore_case = true)]
    gguf: Option<GgufType>,
    /// Base model of an adapter, or of a run that did not train all weights [default: the one that it names].
    #[arg(long, alias = "base_model", value_name = "DIR")]
    base_model: Option<PathBuf>,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
    /// Directory or file to write; a directory must not exist, or be empty or an earlier export.
    dir: PathBuf,
}

/// Types of weights in a model directory.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum WeightType {
    F32,
    Bf16,
    F16,
}

/// Types of matrices in a file of llama.cpp.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum GgufType {
    F32,
    F16,
    Bf16,
    #[value(name = "q8_0")]
    Q8,
    #[value(name = "q4_k_m")]
    Q4Km,
    #[value(name = "q5_k_m")]
    Q5Km,
}

pub(super) fn run(args: &Args, console: &Console) -> Result<(), JobError> {
    let dtype = args.dtype.map(|dtype| match dtype {
        WeightType::F32 => Dtype::F32,
        WeightType::Bf16 => Dtype::BF16,
        WeightType::F16 => Dtype::F16,
    });
    let from = match is_model(&args.checkpoint) {
        true => {
            export_model(args, dtype)?;
            args.checkpoint.clone()
        }
        false if args.gguf.is_some() => {
            return Err(ExportError::GgufOfCheckpoint { path: args.checkpoint.clone() }.into());
        }
        false => {
            let (mut checkpoint, mut lines) = resolve(&args.checkpoint)?;
            if checkpoint != args.checkpoint {
                let (best, note) = best_instead_of(Checkpoint::open_lazily(&checkpoint)?);
                checkpoint = best.id().path.clone();
                lines.extend(note);
            }
            let notes = if args.json { console.err() } else { console.out() };
            lines.iter().for_each(|line| notes.say(line));
            export_checkpoint(
                &checkpoint,
                &args.dir,
                ExportOptions { merge: args.merge, dtype, base_model: args.base_model.as_deref() },
            )?;
            checkpoint
        }
    };
    if args.json {
        conclude_json(console, &serde_json::json!({"from": from, "to": args.dir}), true);
        return Ok(());
    }
    conclude(console, format_args!("{} → {}", from.display(), args.dir.display()));
    Ok(())
}

fn is_model(path: &Path) -> bool {
    !CheckpointId::is_at(path) && ["config.json", ADAPTER_CONFIG].iter().any(|name| path.join(name).is_file())
}

fn export_model(args: &Args, dtype: Option<Dtype>) -> Result<(), JobError> {
    let source = ModelSource::find(&args.checkpoint, args.base_model.as_deref())?;
    note_of_older_model(&args.checkpoint).iter().for_each(|note| report_note(note));
    if args.merge && was_trained_beside_packed(&args.checkpoint) {
        report_note(
            "the adapters were trained beside weights in 4 or 8 bits, and are added to the whole ones of the base model here; `phalanx export` \
             of the run or its checkpoint with --merge adds them to those of the training",
        );
    }
    let path = args.checkpoint.clone();
    match (&source.adapter, args.merge) {
        (Some(_), false) => return Err(ExportError::AdapterAlone { path }.into()),
        (None, true) => return Err(ExportError::WholeModel { path }.into()),
        _ => {}
    }
    let encoding = args.gguf.map(|kind| match kind {
        GgufType::F32 => Encoding::F32,
        GgufType::F16 => Encoding::F16,
        GgufType::Bf16 => Encoding::Bf16,
        GgufType::Q8 => Encoding::Q8_0,
        GgufType::Q4Km => Encoding::Q4Km,
        GgufType::Q5Km => Encoding::Q5Km,
    });
    match encoding {
        Some(encoding) => to_gguf(&source, &args.dir, encoding),
        None => reexport(&source, &args.dir, dtype),
    }
}

/// Whether the run that wrote an adapter, if it is beside it, stored the base model in fewer bits.
fn was_trained_beside_packed(adapter: &Path) -> bool {
    let yaml = yaml_of_run(adapter).ok().flatten();
    let job = yaml.and_then(|yaml| JobConfig::from_yaml_str(&yaml, &[]).ok());
    job.is_some_and(|job| job.adapter.packing().is_some())
}

/// The checkpoint at `path`, or the newest valid one of the run there, and a line for each newer one that is skipped.
pub(super) fn resolve(path: &std::path::Path) -> Result<(PathBuf, Vec<String>), JobError> {
    if CheckpointId::is_at(path) {
        return Ok((path.to_owned(), Vec::new()));
    }
    let (found, skipped) = newest_of_run(path)?;
    if let Some(checkpoint) = found {
        let lines = skipped.iter().map(|s| format!("skipped {}: {}", s.path.display(), s.reason)).collect();
        return Ok((checkpoint.id().path.clone(), lines));
    }
    let why = if path.exists() || is_url(path) { "" } else { ": it does not exist" };
    Err(JobError::NoCheckpoint { path: path.to_owned(), why: why.into() })
}
