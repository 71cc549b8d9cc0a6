//! What a run reports while it goes on, and how it ended.

use phalanx_strategies::mesh::Mesh;
use serde::{Deserialize, Deserializer, Serialize};
use std::path::PathBuf;

/// What happens in a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Event {
    /// Data is being tokenised.
    Preparing {
        /// The file.
        path: PathBuf,
        /// Bytes that are done.
        done_bytes: u64,
        /// Bytes of the file.
        total_bytes: u64,
    },
    /// The first step is about to run.
    Started(Started),
    /// A step was completed.
    Step(StepMetrics),
    /// The validation rows were evaluated.
    Eval(EvalMetrics),
    /// A checkpoint is durable.
    Saved {
        /// Steps that it contains.
        step: u64,
        /// Its directory.
        path: PathBuf,
    },
    /// Something a person should know.
    Note(String),
}

/// What a run is, as it starts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Started {
    /// How the ranks are arranged.
    pub mesh: Mesh,
    /// First step that will run, counted from 0.
    pub first_step: u64,
    /// Steps of the whole run.
    pub total_steps: u64,
    /// Trained and all elements of parameters.
    pub n_trainable: usize,
    /// Elements of all parameters.
    pub n_params: usize,
    /// Rows of training and validation data.
    pub n_rows: (usize, usize),
    /// Bytes of all buffers that each rank allocated, by rank.
    pub buffer_bytes: Vec<u64>,
    /// Threads of each rank that compute.
    pub n_threads: usize,
    /// Checkpoint from which the run goes on.
    pub resumed_from: Option<PathBuf>,
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Steps that are completed.
    pub steps: u64,
    /// Whether all steps of the run are.
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
    /// Mean negative log-likelihood of the predicted tokens, nats.
    #[serde(deserialize_with = "number")]
    pub loss: f64,
    /// L2 norm of the gradient before clipping.
    #[serde(deserialize_with = "number")]
    pub grad_norm: f64,
    /// Learning rate.
    pub lr: f64,
    /// Tokens processed a second, padding included.
    pub tokens_per_s: f64,
    /// Duration of the step, milliseconds.
    pub step_ms: f64,
    /// Passes over the data so far.
    pub epoch: f64,
    /// Tokens whose prediction counted in this step.
    pub predicted_tokens: u64,
    /// Arithmetic of the model over what the machine can do at its measured best, percent.
    pub mfu_pct: f64,
    /// Resident memory of the process, bytes; where a person sees it, of all processes of the run.
    pub memory_bytes: u64,
    /// Share of the step spent waiting for data, percent.
    pub data_wait_pct: f64,
    /// Loss scale of fp16 runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    /// Share of the step spent in collectives, percent; of one rank none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub collective_pct: Option<f64>,
    /// The slowest rank: the one that spent the least time in collectives.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slowest_rank: Option<u32>,
}

/// Measurements of one evaluation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvalMetrics {
    /// Step after which it ran.
    pub step: u64,
    /// Mean negative log-likelihood over the validation rows, nats.
    #[serde(deserialize_with = "number")]
    pub eval_loss: f64,
    /// `exp(eval_loss)`.
    #[serde(deserialize_with = "number")]
    pub eval_perplexity: f64,
    /// Duration, milliseconds.
    pub eval_ms: f64,
}

/// JSON has no number for what is not finite; a loss or gradient that overflowed is written as null.
fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(deserializer)?.unwrap_or(f64::NAN))
}
