//! The weights of a checkpoint, in a program of one rank. A checkpoint leaves out the weights that its run left as `base_model` has them.

use super::architecture::Architecture;
use super::inputs::RunInputs;
use super::located;
use super::packed_weights::{read_unpacked, rounded};
use super::restoring::read;
use super::run_files::{CONFIG_JSON, INPUTS_JSON, cache_dir};
use super::weights::{self, FirstValues, Tensor, name_in};
use crate::config::JobConfig;
use crate::error::JobError;
use crate::error::export::ExportError;
use phalanx_device::Machine;
use phalanx_storage::checkpoint::reader::Checkpoint;
use phalanx_storage::hf::source::TensorSource;
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::program::{Packing, Param};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A checkpoint, and where the rest of its model is.
pub(super) struct CheckpointWeights<'a> {
    pub(super) checkpoint: &'a Checkpoint,
    /// The job that saved it.
    pub(super) job: &'a JobConfig,
    pub(super) model: &'a Architecture,
    /// The base model, if not where the job had it.
    pub(super) base_model: Option<&'a Path>,
}

impl CheckpointWeights<'_> {
    /// Fills the weights that the run trained. A program that holds tensors as f32 which the run held `packed` gets them unpacked.
    ///
    /// # Errors
    /// When the checkpoint cannot be read.
    pub(super) fn load_trained(
        &self,
        machine: &mut dyn Machine,
        c: &Compiled,
        packed: &Packed,
    ) -> Result<(), JobError> {
        for tensor in weights::parameters(c).iter().filter(|tensor| !self.is_missing(&tensor.name)) {
            let is_as_here = self.checkpoint.tensor(&tensor.name)?.shape == tensor.shape;
            match packed.get(&tensor.name).filter(|_| !is_as_here) {
                Some(packing) => read_unpacked(self.checkpoint, tensor, *packing, machine, c)?,
                None => read(self.checkpoint, tensor, machine, c)?,
            }
        }
        Ok(())
    }

    /// Fills all weights and constants.
    ///
    /// # Errors
    /// As [`Self::load_trained`]; when weights are needed of a base model that is not there, or is another one than that of the run.
    pub(super) fn load(&self, machine: &mut dyn Machine, c: &Compiled, packed: &Packed) -> Result<(), JobError> {
        weights::fill_constants(machine, c, self.model.known());
        self.load_trained(machine, c, packed)?;
        let mut missing = weights::parameters(c);
        missing.retain(|tensor| self.is_missing(&tensor.name));
        if missing.is_empty() {
            return Ok(());
        }
        let source = self.base()?;
        let prefix = self.model.known().map_or("", |model| model.family.prefix);
        unpack_all(&source, prefix, &missing, packed, machine, c)?;
        let is_whole = |param: &Param| {
            param.parts.iter().any(|part| self.is_missing(&part.name) && !packed.contains_key(&part.name))
        };
        let model = self.model.known();
        let first = FirstValues { model, params: &[], source: Some(source), grown: None, adapter: None, seed: 0 };
        Ok(weights::initialise(machine, c, &first, is_whole)?)
    }

    /// Whether a weight is left to the base model. Adapters never are.
    fn is_missing(&self, name: &str) -> bool {
        !name.contains(".lora_") && self.checkpoint.tensor(name).is_err()
    }

    /// The base model, which has the weights with which the run began.
    fn base(&self) -> Result<TensorSource, JobError> {
        let checkpoint = || self.checkpoint.id().path.clone();
        let found = match self.base_model {
            Some(named) => located::model(named).ok().filter(|dir| dir.join(CONFIG_JSON).is_file()),
            None => base_directory(self.job),
        };
        let Some(dir) = found else {
            let named = self.base_model.or(self.job.model.base_model.as_deref());
            let base = named.map(Path::to_owned).unwrap_or_default();
            return Err(ExportError::NoBase { checkpoint: checkpoint(), base }.into());
        };
        let source = TensorSource::open(&dir)?;
        let inputs = self.checkpoint.extra(INPUTS_JSON)?;
        match RunInputs::other_weight(&inputs, &dir, &source, &cache_dir(self.job))? {
            None => Ok(source),
            Some(tensor) => Err(ExportError::OtherBase { checkpoint: checkpoint(), base: dir, tensor }.into()),
        }
    }
}

/// The directory of a job's base model, if it is on this machine.
pub(super) fn base_directory(job: &JobConfig) -> Option<PathBuf> {
    let dir = located::model_of(job, job.model.base_model.as_deref()?).ok()?;
    dir.join(CONFIG_JSON).is_file().then_some(dir)
}

/// How a run held some tensors, by name.
pub(super) type Packed = BTreeMap<String, Packing>;

/// Fills those of the tensors that a run held packed with the weights that unpacking gave the run. `prefix` is that of the family's names.
pub(super) fn unpack_all(
    source: &TensorSource,
    prefix: &str,
    tensors: &[Tensor],
    packed: &Packed,
    machine: &mut dyn Machine,
    c: &Compiled,
) -> Result<(), JobError> {
    let held_packed = tensors.iter().filter_map(|tensor| Some((tensor, *packed.get(&tensor.name)?)));
    for (tensor, packing) in held_packed {
        unpack(source, name_in(source, &tensor.name, prefix), tensor, packing, machine, c)?;
    }
    Ok(())
}

/// Fills a tensor that the program holds as f32 with the weights that unpacking gave the run.
fn unpack(
    source: &TensorSource,
    name: &str,
    tensor: &Tensor,
    packing: Packing,
    machine: &mut dyn Machine,
    c: &Compiled,
) -> Result<(), JobError> {
    source.check_shape(name, &tensor.shape)?;
    let mut read = |index: usize, out: &mut [f32]| source.read_runs_into(name, vec![(index, 0..out.len())], out);
    let weights = rounded(packing, [tensor.shape[0], tensor.shape[1]], &mut read)?;
    weights::unpack_from_whole(machine, c, tensor, &weights);
    Ok(())
}
