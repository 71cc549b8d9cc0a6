//! The output of a run, its progress lines, and the checkpoint from which it resumes.

use std::path::{Path, PathBuf};

use serde_yaml_ng::Value;

use super::at::At;
use super::error::ConfigError;
use super::section::{choices, section};
use super::setting::{AT_LEAST_ONE, Setting, TOKENS};
use super::steps::Steps;
use super::yaml_1_1::truth;
use phalanx_storage::hub::name::{MAIN, RepoName};

section! {
    /// Output, checkpoints and the seed.
    pub struct OutputSection {
        /// Folder for checkpoints, the trained model and the files of the coordinator, or an object store at
        /// s3://bucket/prefix, gs://bucket/prefix or az://container/prefix. All machines of a job share it. In an object
        /// store are the checkpoints and what standbys of the coordinator need; each machine keeps its logs, its metrics and
        /// the trained model in ./outputs/bucket/prefix. The end of a job waits for a silent object store for 10 minutes.
        pub output_dir: PathBuf = PathBuf::from("./outputs");
        /// Location of checkpoints instead of the folder checkpoints in `output_dir`: another folder, or an object
        /// store at s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or file:///folder, with one prefix
        /// per job, which a second running job is refused; credentials, region and server come from the environment or AWS's
        /// shared files.
        pub checkpoint_dir: Option<PathBuf> = None;
        /// Seed of all random numbers; the same seed gives the same run.
        pub seed: u64 = 42;
        /// Steps between progress lines.
        pub logging_steps: u64 = 10 => AT_LEAST_ONE;
        /// Steps between checkpoints, or their share of all steps; 0 or none saves only at the end.
        pub save_steps: Option<Steps> = Some(SAVE_STEPS_DEFAULT);
        /// Checkpoints in each epoch, instead of `save_steps`; 0 or none: as `save_steps`.
        pub saves_per_epoch: Option<u64> = None;
        /// Number of newest checkpoints to keep; none keeps all.
        pub save_total_limit: Option<usize> = Some(3) => AT_LEAST_ONE;
        /// End the run after this many evaluations in a row without a lower eval_loss; needs `eval_steps` or `evals_per_epoch`,
        /// and keeps the best model as `load_best_model_at_end` does; 0 or none: never.
        pub early_stopping_patience: Option<u64> = None;
        /// Export the model with the lowest eval_loss instead of the last one. Its checkpoint is saved when it is found, and
        /// kept besides the newest.
        pub load_best_model_at_end: bool = false;
        /// The measurement that decides which model is the best.
        pub metric_for_best_model: BestMetric = BestMetric::EvalLoss;
        /// Whether more of it is better; a loss is better if it is lower.
        pub greater_is_better: bool = false;
        /// End the job when a checkpoint cannot be saved. By default training continues, the next save tries again, and
        /// only the save at the end of the run must succeed. An object store that does not answer is asked for 60 s. A
        /// last state that `checkpoint_dir` does not take is saved in the folder checkpoints in `output_dir`, and the job fails.
        pub checkpoint_required: bool = false;
        /// Upload the trained model to this model on the Hugging Face Hub at the end of the run, such as me/my-model: `phalanx train` and
        /// `phalanx coordinator` do so, programs that embed a job do not. The model is created at the start, so that a name or token that the Hub
        /// refuses ends the job before it trains.
        pub hub_model_id: Option<RepoName> = None;
        /// Create it so that only its owner sees it.
        pub hub_private_repo: bool = false;
        /// The branch to upload to, which is there.
        pub hub_revision: String = String::from(MAIN);
        /// Text that the trained model continues at the end of the run, as a sample.
        pub sample_prompt: Option<String> = None;
        /// Number of tokens in the sample.
        pub sample_tokens: usize = 200 => TOKENS;
        /// File for a trace of the third step of this run, for chrome://tracing or Perfetto: one track per rank and one
        /// span per instruction, with the names of `phalanx plan --trace`.
        pub trace: Option<PathBuf> = None;
        /// auto resumes from the newest valid checkpoint, if there is one, and refuses one of a run with another model, data,
        /// batch or learning rate; none and the empty value start from scratch; a path names a checkpoint, from which the run
        /// continues also with other keys, unless they change what a checkpoint holds (the model, its adapters, the optimizer).
        pub resume_from_checkpoint: Resume = Resume::Auto;
    }
}

/// What evaluations decide in a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BestRule {
    /// Evaluations without a better one after which the run ends.
    pub patience: Option<u64>,
    /// Whether the best model is saved, kept and exported instead of the last one.
    pub keeps_best: bool,
}

impl BestRule {
    /// Whether evaluations decide anything.
    pub(crate) const fn is_on(self) -> bool {
        self.keeps_best || self.patience.is_some()
    }
}

choices! {
    /// The measurement that decides which model is the best.
    pub enum BestMetric {
        /// The mean loss over the evaluation data.
        EvalLoss = "eval_loss" | "loss" | "eval_perplexity" | "perplexity";
    }
}

/// Steps between checkpoints if the file does not say.
const SAVE_STEPS_DEFAULT: Steps = Steps::Count(500);

impl Setting for RepoName {
    fn fits() -> String {
        "the name of a model on the Hub, such as me/my-model".into()
    }
    fn read(value: &Value, at: &At<'_>) -> Result<Self, ConfigError> {
        value.as_str().and_then(RepoName::parse).ok_or_else(|| at.mismatch(value, Self::fits()))
    }
    fn write(&self) -> Value {
        Value::String(self.as_str().to_owned())
    }
}

impl OutputSection {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        let by_steps = self.save_steps != Some(SAVE_STEPS_DEFAULT) && self.save_steps.is_some();
        if by_steps && self.saves_per_epoch.is_some_and(|n| n > 0) {
            return Err(ConfigError::Conflict {
                first: "saves_per_epoch".into(),
                second: "save_steps".into(),
                why: "both say when to save; keep one".into(),
            });
        }
        if self.greater_is_better {
            return Err(ConfigError::Conflict {
                first: "greater_is_better".into(),
                second: "metric_for_best_model".into(),
                why: "a lower loss is better; remove the first".into(),
            });
        }
        Ok(())
    }

    /// What evaluations decide.
    pub fn best_rule(&self) -> BestRule {
        let patience = self.early_stopping_patience.filter(|n| *n > 0);
        BestRule { patience, keeps_best: self.load_best_model_at_end || patience.is_some() }
    }

    /// Whether the output is in an object store.
    pub fn is_remote(&self) -> bool {
        is_url(&self.output_dir)
    }

    /// The folder of this machine for everything that is not in the object store of the job: `output_dir`, unless it is a URL.
    pub fn folder(&self) -> PathBuf {
        folder_of(&self.output_dir)
    }

    /// The folder or URL of the checkpoints.
    pub fn checkpoints(&self) -> PathBuf {
        self.checkpoint_dir.clone().unwrap_or_else(|| self.output_dir.join("checkpoints"))
    }
}

/// Whether a location is a URL rather than a path.
pub(crate) fn is_url(location: &Path) -> bool {
    location.to_str().is_some_and(|text| text.contains("://"))
}

/// The folder of this machine for the run with this `output_dir`.
pub(crate) fn folder_of(output_dir: &Path) -> PathBuf {
    match output_dir.to_str().and_then(|text| text.split_once("://")) {
        Some((_, rest)) => Path::new("outputs").join(rest),
        None => output_dir.to_owned(),
    }
}

/// The checkpoint from which a run resumes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resume {
    /// The newest valid checkpoint of the job, or the start if there is none.
    Auto,
    /// None: start from scratch.
    Never,
    /// The checkpoint at this path or URL; its absence is an error.
    Path(PathBuf),
}

impl Setting for Resume {
    fn fits() -> String {
        "auto, none or the path of a checkpoint".into()
    }
    // As in Axolotl's files, where the empty key means that nothing is resumed.
    fn empty() -> Option<Self> {
        Some(Self::Never)
    }
    fn read(value: &Value, at: &At<'_>) -> Result<Self, ConfigError> {
        match value {
            _ if truth(value).is_some() => Ok(if truth(value) == Some(true) { Self::Auto } else { Self::Never }),
            Value::String(word) if word == "auto" => Ok(Self::Auto),
            Value::String(word) if word == "none" => Ok(Self::Never),
            Value::String(path) if !path.is_empty() => PathBuf::read(value, at).map(Self::Path),
            other => Err(at.mismatch(other, Self::fits())),
        }
    }
    fn write(&self) -> Value {
        match self {
            Self::Auto => Value::String("auto".into()),
            Self::Never => Value::String("none".into()),
            Self::Path(path) => path.write(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_in_an_object_store_has_its_checkpoints_there_and_a_folder_on_each_machine() {
        let of = |dir: &str| OutputSection { output_dir: dir.into(), ..OutputSection::default() };
        let (here, there) = (of("runs/one"), of("s3://bucket/runs/one"));

        assert_eq!((here.is_remote(), here.folder()), (false, "runs/one".into()));
        assert_eq!((there.is_remote(), there.folder()), (true, "outputs/bucket/runs/one".into()));
        assert_eq!(there.checkpoints(), Path::new("s3://bucket/runs/one/checkpoints"));
    }
}
