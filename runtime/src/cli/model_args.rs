//! Arguments of the commands that use a trained model.

use super::report_note;
use crate::api::sampling::Sampling;
use crate::config::output::{folder_of, is_url};
use crate::error::JobError;
use crate::error::generate::GenerateError;
use crate::train::model_source::ModelSource;
use crate::train::run_files::CONFIG_JSON;
use crate::train::run_folder::note_of_older_model;
use phalanx_storage::checkpoint::checkpoint_id::CheckpointId;
use phalanx_storage::hf::adapter::ADAPTER_CONFIG;
use std::path::{Path, PathBuf};

/// The model.
#[derive(Debug, clap::Args)]
pub(super) struct ModelArgs {
    /// Model directory, directory of an adapter, or output_dir of a run that has written one; also the URL of a run.
    pub(super) model: PathBuf,
    /// Base model of an adapter [default: the one that the adapter names].
    #[arg(long, alias = "base_model", value_name = "DIR")]
    base_model: Option<PathBuf>,
    /// Compute threads, at most 1024 [default: one per core].
    #[arg(long, value_parser = n_threads)]
    pub(super) threads: Option<usize>,
}

impl ModelArgs {
    /// The model; the directory of a run stands for the model that the run has written.
    pub(super) fn source(&self) -> Result<ModelSource, JobError> {
        let model = model_of(&self.model)?;
        note_of_older_model(&model).iter().for_each(|note| report_note(note));
        ModelSource::find(&model, self.base_model.as_deref())
    }
}

/// A number of threads, within the limits of the key `threads` of a job.
fn n_threads(text: &str) -> Result<usize, String> {
    let n_threads = text.parse().ok().filter(|n| (1..=1024).contains(n));
    n_threads.ok_or_else(|| "must be a whole number from 1 to 1024".into())
}

/// The directory of the model that is meant by a path.
fn model_of(path: &Path) -> Result<PathBuf, JobError> {
    let is_model = |dir: &Path| [CONFIG_JSON, ADAPTER_CONFIG].iter().any(|name| dir.join(name).exists());
    // A run may have its checkpoints elsewhere.
    let is_run = |dir: &Path| RUN.iter().any(|name| dir.join(name).exists());
    let written = folder_of(path).join(MODEL_DIR);
    let checkpoint = || CheckpointId::is_at(path).then(|| path.to_owned());
    let parent = || path.parent().filter(|parent| path.ends_with(MODEL_DIR) && is_run(parent)).map(Path::to_owned);
    match path {
        path if is_model(path) => Ok(path.to_owned()),
        path if is_run(path) && is_model(&written) => Ok(written),
        path if is_in_store(path) && is_model(&written) => Ok(written),
        path if is_in_store(path) => Err(GenerateError::NoModelHere { run: path.to_owned(), dir: written }.into()),
        path if is_run(path) => Err(GenerateError::NoModelYet { run: path.to_owned() }.into()),
        _ => match checkpoint().or_else(parent) {
            Some(run) => Err(GenerateError::NoModelYet { run }.into()),
            None => Ok(path.to_owned()),
        },
    }
}

/// Whether a path is the URL of an object store; there are models at other ones.
fn is_in_store(path: &Path) -> bool {
    is_url(path) && !path.to_str().is_some_and(|text| text.starts_with("http"))
}

/// A directory with one of these names is that of a run.
const RUN: [&str; 2] = ["checkpoints", "metrics.jsonl"];
const MODEL_DIR: &str = "model";

/// How tokens are chosen.
#[derive(Debug, clap::Args)]
pub(super) struct SamplingArgs {
    /// Sampling temperature; 0 always takes the most likely token.
    #[arg(long)]
    temperature: Option<f32>,
    /// Sample from this many of the most likely tokens; 0 means all.
    #[arg(long, alias = "top_k")]
    top_k: Option<usize>,
    /// Sample from the most likely tokens with this total probability.
    #[arg(long, alias = "top_p")]
    top_p: Option<f32>,
    /// Make tokens that the text has already less likely; 1 changes nothing.
    #[arg(long, alias = "repetition_penalty")]
    repetition_penalty: Option<f32>,
    /// Seed of the sampling; the same seed gives the same text.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Text that ends the continuation; may be repeated.
    #[arg(long, value_name = "TEXT")]
    pub(super) stop: Vec<String>,
}

impl SamplingArgs {
    /// The arguments, and `otherwise` for those that are not given.
    pub(super) fn or(&self, otherwise: Sampling) -> Sampling {
        Sampling {
            temperature: self.temperature.unwrap_or(otherwise.temperature),
            top_k: self.top_k.unwrap_or(otherwise.top_k),
            top_p: self.top_p.unwrap_or(otherwise.top_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(otherwise.repetition_penalty),
            seed: self.seed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run_stands_for_its_model_and_names_the_export_if_it_has_none() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("my run");
        let checkpoint = run.join("checkpoints/step-0000000003.g0001");
        std::fs::create_dir_all(&checkpoint).unwrap();

        for path in [&run, &run.join("model"), &checkpoint] {
            let error = model_of(path).unwrap_err();
            assert!(error.is_input() && error.to_string().contains("phalanx export '"), "{error}");
        }
        std::fs::create_dir(run.join("model")).unwrap();
        std::fs::write(run.join("model/config.json"), "{}").unwrap();
        assert_eq!(model_of(&run).unwrap(), run.join("model"));
        std::fs::rename(run.join("checkpoints"), dir.path().join("elsewhere")).unwrap();
        std::fs::write(run.join("metrics.jsonl"), "").unwrap();
        assert_eq!(model_of(&run).unwrap(), run.join("model"));
        std::fs::remove_dir_all(run.join("model")).unwrap();
        assert!(model_of(&run.join("model")).unwrap_err().to_string().contains("phalanx export"));
        let elsewhere = model_of(Path::new("s3://bucket/run")).unwrap_err();
        assert!(elsewhere.is_input() && elsewhere.to_string().contains("outputs/bucket/run/model"), "{elsewhere}");
        assert_eq!(model_of(Path::new("https://host/m")).unwrap(), Path::new("https://host/m"));
        assert_eq!(model_of(Path::new("owner/name")).unwrap(), Path::new("owner/name"));
    }
}
