//! Arguments of the commands that use a trained model.

use crate::api::sampling::Sampling;
use crate::error::JobError;
use crate::train::model_source::ModelSource;
use std::path::PathBuf;

/// The model.
#[derive(Debug, clap::Args)]
pub(super) struct ModelArgs {
    /// Model directory, or directory of an adapter.
    pub(super) model: PathBuf,
    /// Base model of an adapter [default: the one that the adapter names].
    #[arg(long, alias = "base_model", value_name = "DIR")]
    base_model: Option<PathBuf>,
    /// Compute threads [default: one per core].
    #[arg(long)]
    pub(super) threads: Option<usize>,
}

impl ModelArgs {
    pub(super) fn source(&self) -> Result<ModelSource, JobError> {
        ModelSource::find(&self.model, self.base_model.as_deref())
    }
}

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
