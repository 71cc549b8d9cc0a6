//! What a run leaves behind, how often it reports, and from where it goes on.

use std::path::PathBuf;

use serde_yaml_ng::Value;

use super::error::ConfigError;
use super::section::section;
use super::setting::{AT_LEAST_ONE, Setting};
use super::source::At;

section! {
    /// Output, checkpoints and the seed.
    pub struct OutputSection {
        /// Where checkpoints and the trained model go.
        pub output_dir: PathBuf = PathBuf::from("./outputs");
        /// Where checkpoints go instead of the folder checkpoints in `output_dir`: another folder, or an object store at
        /// s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or file:///folder, one prefix for each job; its keys
        /// come from the environment.
        pub checkpoint_dir: Option<PathBuf> = None;
        /// From this number everything random is derived; the same seed gives the same run.
        pub seed: u64 = 42;
        /// Steps between lines of progress.
        pub logging_steps: u64 = 10 => AT_LEAST_ONE;
        /// Steps between checkpoints; none saves only at the end.
        pub save_steps: Option<u64> = Some(500) => AT_LEAST_ONE;
        /// Checkpoints that are kept, the newest; none keeps all.
        pub save_total_limit: Option<usize> = Some(3) => AT_LEAST_ONE;
        /// When training is done, the model continues this text and the result is shown.
        pub sample_prompt: Option<String> = None;
        /// Tokens of that continuation.
        pub sample_tokens: usize = 200 => AT_LEAST_ONE;
        /// The third step of this run is measured instruction by instruction and written here, for chrome://tracing or
        /// Perfetto: a track for each rank, with the names of `phalanx plan --trace`.
        pub trace: Option<PathBuf> = None;
        /// auto goes on from the newest valid checkpoint of this job if there is one, none starts anew, a path names one.
        pub resume_from_checkpoint: Resume = Resume::Auto;
    }
}

impl OutputSection {
    /// The folder or URL below which the checkpoints lie.
    pub fn checkpoints(&self) -> PathBuf {
        self.checkpoint_dir.clone().unwrap_or_else(|| self.output_dir.join("checkpoints"))
    }
}

/// From where a run goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resume {
    /// From the newest valid checkpoint of the job, or from the start where there is none.
    Auto,
    /// From the start.
    Never,
    /// From the checkpoint at this path or URL; its absence is an error.
    Path(PathBuf),
}

impl Setting for Resume {
    fn fits() -> String {
        "auto, none or the path of a checkpoint".into()
    }
    fn read(value: &Value, at: &At<'_>) -> Result<Self, ConfigError> {
        match value {
            Value::Bool(true) => Ok(Self::Auto),
            Value::Bool(false) => Ok(Self::Never),
            Value::String(word) if word == "auto" => Ok(Self::Auto),
            Value::String(word) if word == "none" => Ok(Self::Never),
            Value::String(path) if !path.is_empty() => Ok(Self::Path(path.into())),
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
