//! What a run reports while it runs, and how it ended.

use phalanx_strategies::mesh::Mesh;
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// An event of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Event {
    /// Data is being tokenised.
    Preparing {
        /// The file.
        path: PathBuf,
        /// Bytes processed so far.
        done_bytes: u64,
        /// Bytes of the file.
        total_bytes: u64,
    },
    /// The log-probabilities of a frozen reference are being computed.
    Reference {
        /// Samples so far.
        done: usize,
        /// All samples.
        total: usize,
    },
    /// The first step is about to run.
    Started(Started),
    /// A step was completed.
    Step(StepMetrics),
    /// The validation rows were evaluated.
    Eval(EvalMetrics),
    /// A checkpoint is durable.
    Saved {
        /// Completed steps in the checkpoint.
        step: u64,
        /// Its directory.
        path: PathBuf,
    },
    /// A checkpoint could not be saved; training continues, and the next save tries again.
    NotSaved {
        /// Completed steps in the state that was not saved.
        step: u64,
        /// Why.
        reason: String,
    },
    /// A message for the user.
    Note(String),
}

/// The properties of a run at its start.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Started {
    /// How the ranks are arranged.
    pub mesh: Mesh,
    /// First step that will run, counted from 0.
    pub first_step: u64,
    /// Steps of the whole run.
    pub total_steps: u64,
    /// Elements of the trained parameters.
    pub n_trainable: usize,
    /// Elements of all parameters.
    pub n_params: usize,
    /// Rows of training and validation data; of a stream, the rows that the run trains on.
    pub n_rows: (usize, usize),
    /// Bytes of the buffers that each rank allocated, by rank.
    pub buffer_bytes: Vec<u64>,
    /// Compute threads of each rank.
    pub n_threads: usize,
    /// Checkpoint from which the run resumes.
    pub resumed_from: Option<PathBuf>,
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Completed steps.
    pub steps: u64,
    /// Whether all steps of the run are completed. A run that was stopped earlier is no error; it resumes from `checkpoint`.
    pub finished: bool,
    /// Metrics of the last step of this run.
    pub last: Option<StepMetrics>,
    /// The last checkpoint.
    pub checkpoint: Option<PathBuf>,
    /// The exported model, if the run finished.
    pub model_dir: Option<PathBuf>,
}

/// Measurements of one step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// Step, counted from 1.
    pub step: u64,
    /// Steps of the whole run; 0 in files of earlier versions.
    #[serde(default)]
    pub total_steps: u64,
    /// Mean negative log-likelihood of the predicted tokens, nats; of an objective over pairs, its mean over pairs.
    #[serde(deserialize_with = "number")]
    pub loss: f64,
    /// L2 norm of the gradient before clipping.
    #[serde(deserialize_with = "number")]
    pub grad_norm: f64,
    /// Learning rate.
    pub lr: f64,
    /// Tokens per second, padding included.
    pub tokens_per_s: f64,
    /// Duration of the step, milliseconds.
    pub step_ms: f64,
    /// Passes over the data so far.
    pub epoch: f64,
    /// Tokens that contribute to the loss of this step.
    pub predicted_tokens: u64,
    /// Model FLOP utilization: arithmetic of the model over the peak of the machine, percent. The peak is measured before the first
    /// step; a step that is faster is the new peak.
    pub mfu_pct: f64,
    /// Resident memory in bytes: of the rank's process, or of all processes of the run in merged metrics.
    pub memory_bytes: u64,
    /// Share of the step spent waiting for data, percent.
    pub data_wait_pct: f64,
    /// What the objective reports beside its loss, by TRL's names.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "numbers")]
    pub scalars: BTreeMap<String, f64>,
    /// Loss scale of fp16 runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    /// Share of the step spent in collectives, percent; `None` for a single rank.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub collective_pct: Option<f64>,
    /// Share of the step spent on the comparison of copies after the previous step, percent; `None` without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verify_pct: Option<f64>,
    /// Consecutive steps up to this one whose gradient was exactly 0; absent if this one's was not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stalled_steps: Option<u64>,
    /// The slowest rank: the one that spent the least time in collectives.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slowest_rank: Option<u32>,
}

/// Measurements of one evaluation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvalMetrics {
    /// Step after which the evaluation ran.
    pub step: u64,
    /// Mean negative log-likelihood over the validation rows, nats.
    #[serde(deserialize_with = "number")]
    pub eval_loss: f64,
    /// `exp(eval_loss)` of a likelihood.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval_perplexity: Option<f64>,
    /// What the objective reports beside its loss, by TRL's names.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "numbers")]
    pub scalars: BTreeMap<String, f64>,
    /// Duration, milliseconds.
    pub eval_ms: f64,
}

/// JSON has no NaN or infinity; a loss or gradient that overflowed is written as null.
fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

/// As [`number`], of several by name.
fn numbers<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, f64>, D::Error> {
    let all = BTreeMap::<String, Option<f64>>::deserialize(deserializer)?;
    Ok(all.into_iter().map(|(name, number)| (name, number.unwrap_or(f64::NAN))).collect())
}
