//! A model as the commands that use one are given it: a model directory, or an adapter directory with its base model.

use super::adapter_settings::AdapterSettings;
use super::checkpoint_weights::{Packed, unpack_all};
use super::grown_rows::Grown;
use super::merge::{AdapterWeights, merge};
use super::weights::{self, FirstValues};
use super::{architecture, located, score_head};
use crate::data::tokenizer::Tokenizer;
use crate::error::JobError;
use crate::error::merge::MergeError;
use phalanx_device::Machine;
use phalanx_storage::foreign_file;
use phalanx_storage::hf::adapter::ADAPTER_CONFIG;
use phalanx_storage::hf::dtype::Dtype;
use phalanx_storage::hf::source::{TensorSource, read_json};
use phalanx_strategies::compile::{Compiled, Offload, Parallel, StepSpec};
use phalanx_strategies::model::{ModelConfig, Output, SCORE};
use phalanx_strategies::optimizer::{OptimizerSpec, Sgd};
use phalanx_strategies::passes::precision::Precision;
use phalanx_strategies::passes::recompute::Recompute;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Where a model's weights are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelSource {
    /// Directory of the model, or of the base model of the adapter.
    pub base: PathBuf,
    /// Directory of an adapter that is merged into it.
    pub adapter: Option<PathBuf>,
}

/// What the compiler needs to know for programs that train nothing, in f32 on one rank.
pub(crate) fn forward_spec() -> StepSpec {
    StepSpec {
        n_microbatches: 1,
        precision: Precision::F32,
        recompute: Recompute::None,
        lora: None,
        optimizer: OptimizerSpec::Sgd(Sgd::default()),
        max_grad_norm: None,
        offload: Offload::default(),
        parallel: Parallel::default(),
    }
}

const CONFIG: &str = "config.json";
const TOKENIZER: &str = "tokenizer.json";
const GENERATION_JSON: &str = "generation_config.json";

impl ModelSource {
    /// The model in a directory; the base model of an adapter is the one that the adapter names, or `base_model`.
    ///
    /// # Errors
    /// When `base_model` is given for a whole model, or the base model of an adapter is not there.
    pub fn find(dir: &Path, base_model: Option<&Path>) -> Result<ModelSource, JobError> {
        let dir = &*located::model(dir)?;
        if !is_there(&dir.join(ADAPTER_CONFIG))? {
            return match base_model {
                None => Ok(ModelSource { base: dir.to_owned(), adapter: None }),
                Some(_) => Err(MergeError::NoAdapter { dir: dir.to_owned() }.into()),
            };
        }
        let AdapterSettings { base_model: named, revision, .. } = AdapterSettings::read(dir)?;
        let (base, revision) = match base_model {
            Some(base) => (base.to_owned(), None),
            None => (PathBuf::from(named.unwrap_or_default()), revision),
        };
        // Without it, the error below names both.
        let base = located::model_at(&base, revision.as_deref()).unwrap_or(base);
        if !base.join(CONFIG).is_file() {
            return Err(MergeError::NoBase { dir: dir.to_owned(), base }.into());
        }
        Ok(ModelSource { base, adapter: Some(dir.to_owned()) })
    }

    /// The directory that was named.
    pub(crate) fn dir(&self) -> &Path {
        self.adapter.as_ref().unwrap_or(&self.base)
    }

    /// The model's configuration.
    pub(crate) fn config(&self) -> Result<Value, JobError> {
        let mut config = read_json(&self.base.join(CONFIG))?;
        if let Some(dir) = &self.adapter
            && AdapterSettings::read(dir)?.is_classifier
        {
            let base = self.base_model()?;
            score_head::set(&mut config, &base);
            config["pad_token_id"] = json!(self.tokenizer()?.padding(base.vocab_size).unwrap_or(0));
        }
        Ok(config)
    }

    /// The architecture; with the rows that an adapter's own embedding has, if the job that trained it added tokens.
    pub(crate) fn model(&self) -> Result<ModelConfig, JobError> {
        let mut model = self.base_model()?;
        if let Some(dir) = &self.adapter {
            let adapter = AdapterWeights::open(dir)?;
            model.vocab_size = model.vocab_size.max(adapter.vocabulary().unwrap_or_default());
            if adapter.is_classifier() {
                model.output = Output::Score;
            }
        }
        Ok(model)
    }

    fn base_model(&self) -> Result<ModelConfig, JobError> {
        let path = self.base.join(CONFIG);
        architecture::parse_model(&read_json(&path)?, &path.display().to_string())
    }

    /// The recommended settings of generation, those of an adapter if it has some; null if there are none.
    pub(crate) fn generation_config(&self) -> Result<Value, JobError> {
        for dir in self.adapter.iter().chain([&self.base]) {
            let path = dir.join(GENERATION_JSON);
            if is_there(&path)? {
                return Ok(read_json(&path)?);
            }
        }
        Ok(Value::Null)
    }

    /// The directory whose tokenizer belongs to the model: that of the adapter if it has one.
    pub(crate) fn tokenizer_dir(&self) -> &Path {
        // One that cannot be read is reported when it is.
        let has_one = |dir: &&Path| is_there(&dir.join(TOKENIZER)).unwrap_or(true);
        self.adapter.as_deref().filter(has_one).unwrap_or(&self.base)
    }

    /// The tokenizer.
    pub(crate) fn tokenizer(&self) -> Result<Tokenizer, JobError> {
        Ok(Tokenizer::from_dir(self.tokenizer_dir())?)
    }

    /// Names of the tensors that need no more than bf16: those that are stored so, unless an adapter is added to them.
    ///
    /// # Errors
    /// When the files of the model cannot be read.
    pub(crate) fn tensors_in_bf16(&self) -> Result<BTreeSet<String>, JobError> {
        if self.adapter.is_some() {
            return Ok(BTreeSet::new());
        }
        let source = TensorSource::open(&self.base)?;
        let is_bf16 = |name: &&str| source.dtype(name) == Ok(Dtype::BF16);
        Ok(source.names().filter(is_bf16).map(str::to_owned).collect())
    }

    /// Fills the weights of a program without adapters.
    ///
    /// # Errors
    /// When a tensor is missing or does not fit, or the adapter cannot be merged.
    pub(crate) fn load(&self, machine: &mut dyn Machine, c: &Compiled, model: &ModelConfig) -> Result<(), JobError> {
        self.load_beside(machine, c, model, &Packed::new())
    }

    /// As [`Self::load`], with the adapter beside weights that are `packed`, as the run had them that trained it.
    pub(crate) fn load_beside(
        &self,
        machine: &mut dyn Machine,
        c: &Compiled,
        model: &ModelConfig,
        packed: &Packed,
    ) -> Result<(), JobError> {
        let source = Some(TensorSource::open(&self.base)?);
        if let (Output::Score, None, Some(source)) = (model.output, &self.adapter, &source) {
            source.check_shape(SCORE, &[1, model.hidden_size])?;
        }
        let grown = Grown { from: self.base_model()?.vocab_size, to: model.vocab_size, mean: true };
        let grown = (grown.to > grown.from).then_some(grown);
        let first = FirstValues { model: Some(model), params: &[], source, grown, adapter: None, seed: 0 };
        weights::initialise(machine, c, &first, |_| true)?;
        if let Some(source) = first.source.filter(|_| !packed.is_empty()) {
            unpack_all(&source, model.family.prefix, &weights::parameters(c), packed, machine, c)?;
        }
        if let Some(dir) = &self.adapter {
            merge(machine, c, &AdapterWeights::open(dir)?)?;
        }
        Ok(())
    }
}

/// Whether a file is there, also if it cannot be read.
fn is_there(path: &Path) -> Result<bool, JobError> {
    foreign_file::is_there(path).map_err(|source| JobError::Io { action: "read", path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base_model_of_an_adapter_is_the_named_one_or_the_given_one() {
        let dir = tempfile::tempdir().unwrap();
        let [base, other, adapter] = ["base", "other", "adapter"].map(|name| dir.path().join(name));
        for dir in [&base, &other, &adapter] {
            std::fs::create_dir(dir).unwrap();
        }
        std::fs::write(base.join(CONFIG), "{}").unwrap();
        std::fs::write(other.join(CONFIG), "{}").unwrap();
        let config = serde_json::json!({ "peft_type": "LORA", "base_model_name_or_path": base });
        std::fs::write(adapter.join(ADAPTER_CONFIG), config.to_string()).unwrap();

        let named = ModelSource::find(&adapter, None).unwrap();
        let given = ModelSource::find(&adapter, Some(&other)).unwrap();

        assert_eq!((&named.base, named.adapter.as_deref()), (&base, Some(adapter.as_path())));
        assert_eq!(given.base, other);
        assert!(ModelSource::find(&adapter, Some(dir.path())).unwrap_err().to_string().contains("--base_model"));
        assert!(ModelSource::find(&base, Some(&other)).unwrap_err().to_string().contains("no adapter"));
    }
}
