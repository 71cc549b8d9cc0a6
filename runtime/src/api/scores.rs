//! Scores of texts from a reward model.

use super::generate::Generator;
use crate::config::precision::DeviceChoice;
use crate::data::tokenizer::Tokenizer;
use crate::devices;
use crate::error::JobError;
use crate::error::generate::GenerateError;
use crate::train::model_source::ModelSource;
use phalanx_device::Device;
use phalanx_strategies::model::Output;
use std::path::Path;
use std::sync::Arc;

/// A model of scores with its weights in memory.
#[derive(Debug)]
pub struct Scorer {
    model: Generator,
    /// The id that fills rows, which is no part of a text's end.
    pad_id: Option<u32>,
    label: String,
}

impl Scorer {
    fn load_on(device: &dyn Device, source: &ModelSource, max_len: usize) -> Result<Scorer, JobError> {
        let found = source.model()?;
        if found.output != Output::Score {
            return Err(GenerateError::NoScores { dir: source.dir().to_owned() }.into());
        }
        let model = Generator::load_any(device, source, max_len)?;
        let config = source.config()?;
        let pad_id = config["pad_token_id"].as_u64().and_then(|id| u32::try_from(id).ok());
        let label = config["id2label"]["0"].as_str().unwrap_or("LABEL_0").to_owned();
        Ok(Scorer { model, pad_id, label })
    }

    /// The model's tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        self.model.tokenizer()
    }

    /// Most tokens of a text.
    pub const fn max_len(&self) -> usize {
        self.model.max_len()
    }

    /// The name of the score in `config.json`.
    pub(crate) fn label(&self) -> &str {
        &self.label
    }

    /// Refuses tokens that have no score.
    pub(crate) fn check(&self, ids: &[u32]) -> Result<(), JobError> {
        Ok(self.model.check(ids)?)
    }

    /// The score of a text: that of its last token other than padding, as in training and in transformers.
    ///
    /// # Errors
    /// When `ids` is empty or longer than [`Scorer::max_len`], or a token has no embedding.
    pub fn score(&mut self, ids: &[u32]) -> Result<f32, JobError> {
        self.check(ids)?;
        // So that it does not depend on earlier texts, not even in its last bits.
        self.model.forget();
        let last = ids.iter().rposition(|id| Some(*id) != self.pad_id).unwrap_or(0);
        Ok(self.model.logits(&ids[..=last])?[0])
    }
}

/// Loads a reward model, or an adapter with its base model, on the device thread and runs `work` with it there.
///
/// # Errors
/// When this machine has no such device, the model gives no scores, or `work` fails.
pub fn with_scorer_on<R: Send>(
    device: DeviceChoice,
    source: &ModelSource,
    max_len: usize,
    n_threads: Option<usize>,
    work: impl FnOnce(&mut Scorer) -> Result<R, JobError> + Send,
) -> Result<R, JobError> {
    let device = devices::of(device)?;
    let n_threads = n_threads.unwrap_or_else(|| device.available_threads());
    device.on_device_thread(n_threads, || work(&mut Scorer::load_on(&*device, source, max_len)?))?
}

/// As [`with_scorer_on`], of a directory, on the best device of this machine.
///
/// # Errors
/// As [`with_scorer_on`].
pub fn with_scorer<R: Send>(
    dir: &Path,
    max_len: usize,
    work: impl FnOnce(&mut Scorer) -> Result<R, JobError> + Send,
) -> Result<R, JobError> {
    with_scorer_on(DeviceChoice::Auto, &ModelSource::find(dir, None)?, max_len, None, work)
}
