//! A trained model as a directory that `transformers` loads: from a machine in memory or from a checkpoint.

use super::adapter_settings::{CLASSIFICATION, LANGUAGE};
use super::architecture::Architecture;
use super::checkpoint_weights::{CheckpointWeights, Packed};
use super::merge::{LowRank, is_stored_in_out};
use super::row_lengths::MAGNITUDE;
use super::run_files::{CONFIG_JSON, GENERATION_JSON, INPUTS_JSON, JOB_YAML};
use super::step_plan;
use super::weights::{self, Tensor};
use crate::config::JobConfig;
use crate::devices;
use crate::error::JobError;
use crate::error::export::ExportError;
use phalanx_device::{Backing, Machine};
use phalanx_storage::checkpoint::reader::Checkpoint;
use phalanx_storage::hf::adapter::{AdapterExport, export_adapter, peft_name};
use phalanx_storage::hf::dtype::Dtype;
use phalanx_storage::hf::export::{
    Export, ExportTensor, MAX_SHARD_BYTES_DEFAULT, Show, Values, dtype_of, export_model,
};
use phalanx_strategies::compile::{CompileError, Compiled, Offload, Parallel, StepSpec, compile_step};
use phalanx_strategies::model::{BatchShape, Head};
use phalanx_strategies::passes::lora::LoraSpec;
use phalanx_strategies::passes::precision::Precision;
use phalanx_strategies::passes::reference::is_copy;
use phalanx_strategies::program::Program;
use phalanx_strategies::target::Target;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;

/// The source of an export's weights.
pub(crate) struct ExportFrom<'a> {
    pub(crate) machine: &'a dyn Machine,
    pub(crate) compiled: &'a Compiled,
}

/// Writes a model directory, or an adapter directory if the run trained adapters. `extras` are those of a checkpoint.
pub(crate) fn export(dir: &Path, from: &ExportFrom<'_>, extras: &[(String, Vec<u8>)]) -> Result<(), JobError> {
    export_as(dir, from, extras, false, None)
}

/// `dtype` is that of the weights; otherwise those of a model have the type of its base model, and adapters are in f32.
fn export_as(
    dir: &Path,
    from: &ExportFrom<'_>,
    extras: &[(String, Vec<u8>)],
    merged: bool,
    dtype: Option<Dtype>,
) -> Result<(), JobError> {
    let mut tensors = weights::parameters(from.compiled);
    tensors.retain(|tensor| !is_copy(&tensor.name));
    let job = parse_job(extras)?;
    let is_adapter = |t: &Tensor| t.name.contains(".lora_");
    let tokenizer: Vec<(String, Vec<u8>)> = extras.iter().filter(|(n, _)| is_tokenizer_file(n)).cloned().collect();
    if !merged && tensors.iter().any(is_adapter) {
        // Whoever uses the adapter has to stop where it was trained to, not where the base model does.
        let generation = extras.iter().find(|(name, _)| name == GENERATION_JSON);
        let files: Vec<_> = tokenizer.into_iter().chain(generation.cloned()).collect();
        return export_lora(dir, from, &tensors, &job, &files, dtype.unwrap_or(Dtype::F32));
    }
    tensors.retain(|t| !is_adapter(t));
    let shown: Vec<Shown<'_>> = tensors.iter().map(|t| shown(from, t)).collect();
    let list: Vec<ExportTensor<'_>> =
        tensors.iter().zip(&shown).map(|(t, shown)| export_tensor(&t.name, t, shown)).collect();
    let config = json_extra(extras, CONFIG_JSON)?.ok_or(ExportError::Missing { file: CONFIG_JSON })?;
    let generation = json_extra(extras, GENERATION_JSON)?;
    export_model(
        dir,
        &Export {
            config: &config,
            generation_config: generation.as_ref(),
            tensors: &list,
            dtype: dtype.unwrap_or_else(|| dtype_of(&config)),
            files: &tokenizer,
            max_shard_bytes: MAX_SHARD_BYTES_DEFAULT,
        },
    )?;
    Ok(())
}

/// Passes the values of a tensor to a visitor.
pub(super) type Shown<'a> = Box<Show<'a>>;

pub(super) fn shown<'a>(from: &ExportFrom<'a>, tensor: &'a Tensor) -> Shown<'a> {
    let ExportFrom { machine, compiled } = *from;
    Box::new(move |see| weights::visit(machine, compiled, tensor, &mut *see))
}

fn export_tensor<'a>(name: &'a str, tensor: &'a Tensor, shown: &'a Shown<'_>) -> ExportTensor<'a> {
    ExportTensor { name, shape: &tensor.shape, values: Values::Shown(tensor.held.n_elements(), &**shown) }
}

/// How a checkpoint is exported.
#[derive(Clone, Copy, Debug, Default)]
pub struct ExportOptions<'a> {
    /// Add adapters into the weights that they adapt, and write the whole model.
    pub merge: bool,
    /// Type of the weights; by default that of the base model, and f32 for adapters.
    pub dtype: Option<Dtype>,
    /// Directory of the base model, if not where the job had it. Only weights that the run did not train are read from it.
    pub base_model: Option<&'a Path>,
}

/// Writes the model of a checkpoint.
///
/// # Errors
/// When the checkpoint does not verify, the base model is needed and not there, or the directory cannot be written.
pub fn export_checkpoint(checkpoint: &Path, dir: &Path, options: ExportOptions<'_>) -> Result<(), JobError> {
    let ExportOptions { merge, dtype, base_model } = options;
    let opened = Checkpoint::open(checkpoint)?;
    let names: Vec<String> = opened.extras().map(str::to_owned).collect();
    let extras =
        names.into_iter().map(|name| opened.extra(&name).map(|bytes| (name, bytes))).collect::<Result<Vec<_>, _>>()?;
    let job = parse_job(&extras)?;
    let config = json_extra(&extras, CONFIG_JSON)?.ok_or(ExportError::Missing { file: CONFIG_JSON })?;
    let model = Architecture::parse(&config, CONFIG_JSON)?;
    let batch = BatchShape { n_rows: 1, seq_len: 2 };
    let forward =
        model.forward(batch, Head::Loss).map_err(|source| JobError::Model { path: CONFIG_JSON.into(), source })?;
    // One rank on the host exports the model, whatever mesh and device trained it.
    let device = devices::host();
    let trained = StepSpec {
        n_microbatches: 1,
        offload: Offload::default(),
        parallel: Parallel::default(),
        ..step_plan::step_spec(&job, &model, &*device)?
    };
    let packed = packed_tensors(&forward, &trained, device.target())?;
    let lora = trained.lora.clone().map(|lora| LoraSpec { packing: None, ..lora });
    let compiled = compile_step(forward, &StepSpec { lora, precision: Precision::F32, ..trained }, device.target())?;
    let mut machine = device.machine(&[&compiled], &Backing::default())?;
    let weights = CheckpointWeights { checkpoint: &opened, job: &job, model: &model, base_model };
    let lora = job.adapter.lora();
    match lora.is_some() && !merge {
        true => weights.load_trained(&mut *machine, &compiled, &packed)?,
        false => weights.load(&mut *machine, &compiled, &packed)?,
    }
    if merge {
        let lora = lora.ok_or(ExportError::NothingToMerge)?;
        merge_adapters(&mut *machine, &compiled, lora.scale());
    }
    export_as(dir, &ExportFrom { machine: &*machine, compiled: &compiled }, &extras, merge, dtype)
}

/// The tensors that a step holds packed because its job asks for it. Other ones that it rounds keep the bits of the base model.
pub(super) fn packed_tensors(forward: &Program, spec: &StepSpec, target: &dyn Target) -> Result<Packed, CompileError> {
    if spec.lora.as_ref().is_none_or(|lora| lora.packing.is_none()) {
        return Ok(Packed::new());
    }
    let c = compile_step(forward.clone(), spec, target)?;
    let params = c.program.params.iter().filter_map(|param| Some((param, param.packing?)));
    Ok(params.flat_map(|(param, packing)| param.parts.iter().map(move |part| (part.name.clone(), packing))).collect())
}

/// Merges the adapters of a program.
fn merge_adapters(machine: &mut dyn Machine, c: &Compiled, scale: f64) {
    let tensors = weights::parameters(c);
    let find = |name: &str| tensors.iter().find(|t| t.name == name);
    for b in tensors.iter().filter(|t| t.name.ends_with(".lora_B.weight")) {
        let module = b.name.trim_end_matches(".lora_B.weight");
        let (Some(a), Some(w)) = (find(&format!("{module}.lora_A.weight")), find(&format!("{module}.weight"))) else {
            continue;
        };
        let (a_values, b_values) = (weights::packed(machine, c, a), weights::packed(machine, c, b));
        let magnitude = find(&format!("{module}{MAGNITUDE}")).map(|m| weights::packed(machine, c, m));
        let low_rank = LowRank { a: &a_values, b: &b_values, scale, magnitude: magnitude.as_deref() };
        let mut weight = weights::packed(machine, c, w).into_owned();
        low_rank.add_to(&mut weight, b.shape[0], a.shape[1], is_stored_in_out(c, w));
        weights::unpack_from_whole(machine, c, w, &weight);
    }
}

/// Whether adapted weights are stored as `[in, out]`; a family stores all of its linear layers alike.
fn adapts_stored_in_out(c: &Compiled, tensors: &[Tensor]) -> bool {
    let adapted = |w: &&Tensor| {
        let module = w.name.strip_suffix(".weight");
        module.is_some_and(|module| tensors.iter().any(|t| t.name == format!("{module}.lora_A.weight")))
    };
    tensors.iter().find(adapted).is_some_and(|w| is_stored_in_out(c, w))
}

fn export_lora(
    dir: &Path,
    from: &ExportFrom<'_>,
    tensors: &[Tensor],
    job: &JobConfig,
    files: &[(String, Vec<u8>)],
    dtype: Dtype,
) -> Result<(), JobError> {
    let Some(lora) = job.adapter.lora() else {
        return Err(ExportError::UnknownAdapters.into());
    };
    // Beside adapters, modules that the configuration names are trained whole.
    let adapters: Vec<&Tensor> = tensors.iter().filter(|t| t.trainable).collect();
    let names: Vec<String> = adapters.iter().map(|t| peft_name(&t.name)).collect();
    let saved = saved_modules(&adapters);
    let modules = adapted_modules(tensors.iter().map(|t| t.name.as_str()));
    let shown: Vec<Shown<'_>> = adapters.iter().map(|t| shown(from, t)).collect();
    let list: Vec<ExportTensor<'_>> =
        adapters.iter().zip(&names).zip(&shown).map(|((t, name), shown)| export_tensor(name, t, shown)).collect();
    let base = job.model.base_model.as_ref().map_or(String::new(), |p| p.display().to_string());
    export_adapter(
        dir,
        &AdapterExport {
            base_model: &base,
            task: if job.reward.reward_model { CLASSIFICATION } else { LANGUAGE },
            rank: lora.rank,
            alpha: lora.alpha,
            dropout: lora.section.lora_dropout,
            use_rslora: lora.section.peft_use_rslora,
            use_dora: lora.section.peft_use_dora,
            target_modules: &modules,
            modules_to_save: &saved,
            fan_in_fan_out: adapts_stored_in_out(from.compiled, tensors),
            tensors: &list,
            dtype,
            files,
        },
    )?;
    Ok(())
}

/// Whole paths of the modules that were trained whole: PEFT takes a shorter name for every module whose path ends with it.
fn saved_modules(trained: &[&Tensor]) -> Vec<String> {
    let module = |t: &&Tensor| t.name.rsplit_once('.').map(|(module, _)| module.to_owned());
    let whole = trained.iter().filter(|t| !t.name.contains(".lora_"));
    whole.filter_map(module).collect::<BTreeSet<_>>().into_iter().collect()
}

/// Names of the adapted modules among the tensors of a model and its adapters: a last component of paths if all modules with it
/// are adapted, else the paths.
fn adapted_modules<'a>(tensors: impl Iterator<Item = &'a str> + Clone) -> Vec<String> {
    let adapted: BTreeSet<&str> = tensors.clone().filter_map(|name| Some(name.split_once(".lora_")?.0)).collect();
    let last = |path: &str| path.rsplit('.').next().unwrap_or(path).to_owned();
    let others = tensors.filter_map(|name| name.strip_suffix(".weight")).filter(|path| !adapted.contains(path));
    let left_out: BTreeSet<String> = others.filter(|path| !path.contains(".lora_")).map(last).collect();
    let named = |path: &&str| if left_out.contains(&last(path)) { (*path).to_owned() } else { last(path) };
    let names: BTreeSet<String> = adapted.iter().map(named).collect();
    names.into_iter().collect()
}

fn is_tokenizer_file(name: &str) -> bool {
    ![JOB_YAML, CONFIG_JSON, GENERATION_JSON, INPUTS_JSON, "trainer.json"].contains(&name)
}

fn json_extra(extras: &[(String, Vec<u8>)], name: &str) -> Result<Option<Value>, ExportError> {
    let Some((_, bytes)) = extras.iter().find(|(n, _)| n == name) else { return Ok(None) };
    serde_json::from_slice(bytes).map(Some).map_err(|source| ExportError::Json { file: name.into(), source })
}

pub(super) fn parse_job(extras: &[(String, Vec<u8>)]) -> Result<JobConfig, JobError> {
    let yaml = extras.iter().find(|(n, _)| n == JOB_YAML).map(|(_, bytes)| String::from_utf8_lossy(bytes));
    let yaml = yaml.ok_or(ExportError::Missing { file: JOB_YAML })?;
    Ok(JobConfig::from_yaml_str(&yaml, &[])?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// PEFT adapts every module that ends with a name, so a name must not stand for modules without an adapter.
    #[test]
    fn modules_are_named_by_their_paths_if_others_of_their_name_are_not_adapted() {
        let tensors = [
            "m.0.q_proj.weight",
            "m.0.q_proj.lora_A.weight",
            "m.0.q_proj.lora_B.weight",
            "m.1.q_proj.weight",
            "m.1.q_proj.lora_A.weight",
            "m.1.q_proj.lora_B.weight",
            "m.0.up_proj.weight",
            "m.1.up_proj.weight",
            "m.1.up_proj.lora_A.weight",
            "m.1.up_proj.lora_B.weight",
        ];

        assert_eq!(adapted_modules(tensors.into_iter()), ["m.1.up_proj", "q_proj"]);
    }
}
